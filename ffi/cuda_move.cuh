// The strided copy on the GPU: one thread per word of the chunk side, a big grid, a few words in flight.
// Of five shapes measured on an H200 (warp per row, block per page, bulk copies through shared memory, narrow
// grids) this one reached the device-to-device copy's rate at every row size.

#ifndef JAXKV_CUDA_MOVE_CUH_
#define JAXKV_CUDA_MOVE_CUH_

#include <cuda_runtime.h>

#include <algorithm>

#include "transfer.h"

namespace jaxkv {

enum class Direction { kGather, kScatter };

// Division of a 31-bit number by a constant known at launch, as one multiplication (Granlund and Montgomery 1994).
struct Divider {
  uint32_t divisor, magic, shift;

  static Divider By(int64_t value) {
    Divider d{static_cast<uint32_t>(value), 0, 0};
    while ((uint64_t{1} << d.shift) < d.divisor) ++d.shift;
    d.magic = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << d.shift) - d.divisor) / d.divisor + 1);
    return d;
  }
  // Splits n into quotient (returned) and remainder.
  __device__ __forceinline__ uint32_t Split(uint32_t n, uint32_t& remainder) const {
    const uint32_t quotient = (__umulhi(n, magic) + n) >> shift;
    remainder = n - quotient * divisor;
    return quotient;
  }
};

// Everything one launch needs, by value in the kernel's parameters (4 KiB at most on every supported toolkit):
// no pointer table in device memory, so nothing to copy there and nothing that could go stale.
constexpr int kMaxPlanes = 128;
constexpr int kMaxChunks = 120;
struct Launch {
  char* pool[kMaxPlanes];          // address of each plane in the pool
  int64_t chunk_plane[kMaxPlanes]; // offset of each plane in its chunk; with one chunk, its address
  char* chunk[kMaxChunks];         // address of each chunk's leaf; with one chunk, null
  const int32_t* slots;
  Side pool_side, chunk_side;
  Divider words, dims, heads, tokens, page_size, rows;
  uint32_t total;                  // words to move
  uint32_t num_slots, num_rows, first_token;
};
static_assert(sizeof(Launch) <= 4096, "kernel parameters are limited to 4 KiB");

constexpr int kThreads = 256;
constexpr int kWordsInFlight = 4;

template <Direction direction, typename Word, bool kOneRun>
__global__ void __launch_bounds__(kThreads) MoveKernel(const __grid_constant__ Launch launch) {
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < launch.total; first += step * kWordsInFlight) {
    Word value[kWordsInFlight];
    Word* target[kWordsInFlight];
#pragma unroll
    for (int i = 0; i < kWordsInFlight; ++i) {
      const uint32_t index = first + i * step;
      target[i] = nullptr;
      if (index >= launch.total) continue;
      uint32_t word, dim = 0, head = 0, token;
      uint32_t rest = launch.words.Split(index, word);
      if (!kOneRun) {
        rest = launch.dims.Split(rest, dim);
        rest = launch.heads.Split(rest, head);
      }
      const uint32_t plane = launch.tokens.Split(rest, token);
      token += launch.first_token;
      const uint32_t slot = __ldg(launch.slots + token);
      const bool served = slot < launch.num_slots;  // a negative slot is a large unsigned one
      const bool has_row = direction == Direction::kGather || token < launch.num_rows;
      if (!served && direction == Direction::kScatter) continue;
      int64_t in_run = static_cast<int64_t>(word) * sizeof(Word);
      char *in_pool = nullptr, *in_chunk = nullptr;
      if (served) {
        uint32_t offset;
        const uint32_t page = launch.page_size.Split(slot, offset);
        in_pool = launch.pool[plane] + TokenOffset(launch.pool_side, page, offset) + in_run;
        if (!kOneRun) in_pool += head * launch.pool_side.head + dim * launch.pool_side.dim;
      }
      if (has_row) {
        uint32_t row, offset;
        const uint32_t chunk = launch.rows.Split(token, row);
        const uint32_t page = launch.page_size.Split(row, offset);
        in_chunk = launch.chunk[chunk] + launch.chunk_plane[plane] + TokenOffset(launch.chunk_side, page, offset) + in_run;
        if (!kOneRun) in_chunk += head * launch.chunk_side.head + dim * launch.chunk_side.dim;
      }
      char* source = direction == Direction::kGather ? in_pool : in_chunk;
      target[i] = reinterpret_cast<Word*>(direction == Direction::kGather ? in_chunk : in_pool);
      // Each byte is touched once: streaming hints keep it from displacing what the model has in L2.
      value[i] = source == nullptr ? Word{} : __ldcs(reinterpret_cast<const Word*>(source));
    }
#pragma unroll
    for (int i = 0; i < kWordsInFlight; ++i) {
      if (target[i] != nullptr) __stcs(target[i], value[i]);
    }
  }
}

template <Direction direction, typename Word>
void Start(cudaStream_t stream, const Launch& launch, bool one_run, int blocks) {
  if (one_run) {
    MoveKernel<direction, Word, true><<<blocks, kThreads, 0, stream>>>(launch);
  } else {
    MoveKernel<direction, Word, false><<<blocks, kThreads, 0, stream>>>(launch);
  }
}

template <Direction direction>
void StartWords(cudaStream_t stream, const Launch& launch, bool one_run, int word_bytes, int max_blocks) {
  const int64_t per_block = kThreads * kWordsInFlight;
  const int blocks = static_cast<int>(std::min<int64_t>(max_blocks, (launch.total + per_block - 1) / per_block));
  switch (word_bytes) {
    case 16: return Start<direction, uint4>(stream, launch, one_run, blocks);
    case 8: return Start<direction, uint2>(stream, launch, one_run, blocks);
    case 4: return Start<direction, uint32_t>(stream, launch, one_run, blocks);
    case 2: return Start<direction, uint16_t>(stream, launch, one_run, blocks);
    default: return Start<direction, uint8_t>(stream, launch, one_run, blocks);
  }
}

// Moves `num_tokens` tokens, in as few launches as planes, chunks and 31-bit word counts allow. `pool` and `chunk`
// give the address of a leaf by its number; the leaves of chunk c follow those of chunk c - 1.
template <Direction direction, typename PoolLeaf, typename ChunkLeaf>
ffi::Error MoveAll(cudaStream_t stream, const Transfer& transfer, const int32_t* slots, int64_t num_tokens,
                   int64_t leaves_per_chunk, PoolLeaf pool, ChunkLeaf chunk) {
  if (num_tokens == 0) return ffi::Error::Success();  // an empty grid is an error
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int max_blocks = multiprocessors * 128;  // a narrow grid (2 blocks each) measured 10 to 15 % slower
  const bool one_chunk = transfer.num_chunks == 1;

  for (int64_t m = 0; m < transfer.num_moves; ++m) {
    const Move& move = transfer.moves[m];
    // With several chunks a launch covers the planes of one leaf, since a chunk is then an address for each leaf.
    for (int64_t first = 0, last; first < move.num_planes; first = last) {
      const Plane* planes = transfer.planes + move.first_plane;
      uintptr_t bases = 0;
      Launch launch;
      for (last = first; last < move.num_planes && last - first < kMaxPlanes; ++last) {
        const Plane& plane = planes[last];
        if (!one_chunk && plane.chunk_leaf != planes[first].chunk_leaf) break;
        char* chunk_base = one_chunk ? chunk(plane.chunk_leaf) : nullptr;
        launch.pool[last - first] = pool(plane.pool_leaf) + plane.pool_offset;
        launch.chunk_plane[last - first] = reinterpret_cast<int64_t>(chunk_base) + plane.chunk_offset;
        bases |= reinterpret_cast<uintptr_t>(launch.pool[last - first]) | launch.chunk_plane[last - first];
      }
      launch.slots = slots;
      launch.pool_side = move.pool;
      launch.chunk_side = move.chunk;
      launch.dims = Divider::By(move.dims);
      launch.heads = Divider::By(move.heads);
      launch.page_size = Divider::By(transfer.page_size);
      launch.num_slots = static_cast<uint32_t>(transfer.num_slots);

      for (int64_t token = 0, tokens; token < num_tokens; token += tokens) {
        // The chunks that this launch reaches; the tokens to be zeroed, past the last row, come with the last ones.
        const int64_t first_chunk = std::min(token, transfer.num_rows()) / std::max<int64_t>(transfer.rows, 1);
        const int64_t chunks = std::min<int64_t>(transfer.num_chunks - first_chunk, kMaxChunks);
        uintptr_t chunk_bases = 0;
        for (int64_t c = 0; c < chunks; ++c) {
          launch.chunk[c] = one_chunk ? nullptr : chunk((first_chunk + c) * leaves_per_chunk + planes[first].chunk_leaf);
          chunk_bases |= reinterpret_cast<uintptr_t>(launch.chunk[c]);
        }
        const int word_bytes = WordBytes(move, bases | chunk_bases);
        const int64_t words_per_token = move.heads * move.dims * (move.run / word_bytes) * (last - first);
        const bool reaches_end = first_chunk + chunks == transfer.num_chunks;
        tokens = reaches_end ? num_tokens - token : (first_chunk + chunks) * transfer.rows - token;
        tokens = std::min(tokens, std::max<int64_t>(((int64_t{1} << 31) - 1) / words_per_token, 1));

        // Tokens and rows are counted from the first chunk of the launch.
        const int64_t origin = first_chunk * transfer.rows;
        launch.slots = slots + origin;
        launch.first_token = static_cast<uint32_t>(token - origin);
        launch.num_rows = static_cast<uint32_t>(transfer.num_rows() - origin);
        launch.rows = Divider::By(std::max<int64_t>(transfer.rows, 1));
        launch.words = Divider::By(move.run / word_bytes);
        launch.tokens = Divider::By(tokens);
        launch.total = static_cast<uint32_t>(tokens * words_per_token);
        StartWords<direction>(stream, launch, move.heads * move.dims == 1, word_bytes, max_blocks);
      }
    }
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("jaxkv: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace jaxkv

#endif  // JAXKV_CUDA_MOVE_CUH_
