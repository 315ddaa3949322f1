// The strided copy on the GPU: a thread moves a few words, in the order of the chunk side, and as many threads are
// started as that takes. Of the shapes measured on an H200 (warp per row, block per page, bulk copies through shared
// memory, narrower grids that loop, more and fewer words in flight) this one was the fastest at every row size.

#ifndef JAXKV_CUDA_MOVE_CUH_
#define JAXKV_CUDA_MOVE_CUH_

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda_launch.cuh"
#include "cuda_turn.cuh"
#include "transfer.h"

namespace jaxkv {

// An item is kWords words of one run, as far apart as there are items in it: neighbouring threads touch neighbouring
// words, and an address is worked out once for all of them. A thread moves kItems items, a grid apart. Addresses,
// loads and stores are three passes, so that every load is on its way before the first store waits for one.
template <Direction direction, typename Word, bool kOneRun, int kWords, int kItems>
__global__ void __launch_bounds__(kThreads) MoveKernel(const __grid_constant__ Launch launch) {
  const Word* source[kItems];
  Word* target[kItems];
  uint32_t first_word[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    source[i] = nullptr;
    target[i] = nullptr;
    const uint32_t index = (i * gridDim.x + blockIdx.x) * kThreads + threadIdx.x;
    if (index < launch.total) {
      uint32_t dim = 0, head = 0, token;
      uint32_t rest = launch.items.Split(index, first_word[i]);
      if (!kOneRun) {
        rest = launch.dims.Split(rest, dim);
        rest = launch.heads.Split(rest, head);
      }
      const uint32_t plane = launch.tokens.Split(rest, token);
      token += launch.first_token;
      Ends ends = Find<direction>(launch, plane, token);
      if (!kOneRun) {
        if (ends.pool != nullptr) ends.pool += head * launch.pool_side.head + dim * launch.pool_side.dim;
        if (ends.chunk != nullptr) ends.chunk += head * launch.chunk_side.head + dim * launch.chunk_side.dim;
      }
      source[i] = reinterpret_cast<const Word*>(direction == Direction::kGather ? ends.pool : ends.chunk);
      target[i] = reinterpret_cast<Word*>(direction == Direction::kGather ? ends.chunk : ends.pool);
    }
  }
  // Each byte is touched once: streaming hints keep it from displacing what the model has in L2. Items of several
  // words are narrow ones, whose neighbours share a sector: there the hints cost more than they give.
  Word value[kItems][kWords];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t word = first_word[i] + w * launch.items.divisor;
      value[i][w] = Word{};
      if (target[i] != nullptr && source[i] != nullptr && (kWords == 1 || word < launch.words)) {
        value[i][w] = kWords == 1 ? __ldcs(source[i] + word) : source[i][word];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t word = first_word[i] + w * launch.items.divisor;
      if (target[i] != nullptr && (kWords == 1 || word < launch.words)) {
        if (kWords == 1) {
          __stcs(target[i] + word, value[i][w]);
        } else {
          target[i][word] = value[i][w];
        }
      }
    }
  }
}

template <Direction direction, typename Word, int kWords, int kItems>
void Start(cudaStream_t stream, Launch& launch, int64_t runs, bool one_run) {
  const int64_t items = (launch.words + kWords - 1) / kWords;
  launch.items = Divider::By(items);
  launch.total = static_cast<uint32_t>(runs * items);
  const int64_t per_block = kThreads * kItems;
  const auto blocks = static_cast<unsigned>((launch.total + per_block - 1) / per_block);
  if (one_run) {
    MoveKernel<direction, Word, true, kWords, kItems><<<blocks, kThreads, 0, stream>>>(launch);
  } else {
    MoveKernel<direction, Word, false, kWords, kItems><<<blocks, kThreads, 0, stream>>>(launch);
  }
}

// Wide words: two a thread, apart. Narrow ones: four of one run a thread, where a run has that many.
template <Direction direction, typename Word>
void StartWords(cudaStream_t stream, Launch& launch, int64_t runs, bool one_run) {
  if (sizeof(Word) < 8 && launch.words >= 4) {
    Start<direction, Word, 4, 1>(stream, launch, runs, one_run);
  } else {
    Start<direction, Word, 1, 2>(stream, launch, runs, one_run);
  }
}

// Moves `num_tokens` tokens, in as few launches as planes, chunks and 31-bit word counts allow. `pool` and `chunk`
// give the address of a leaf by its number; the leaves of chunk c follow those of chunk c - 1.
template <Direction direction, typename PoolLeaf, typename ChunkLeaf>
ffi::Error MoveAll(cudaStream_t stream, const Transfer& transfer, const int32_t* slots, int64_t num_tokens,
                   int64_t leaves_per_chunk, PoolLeaf pool, ChunkLeaf chunk) {
  if (num_tokens == 0) return ffi::Error::Success();  // an empty grid is an error
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
        launch.pool[last - first] = pool(plane.pool_leaf) + plane.pool_offset + move.pool_start;
        launch.chunk_plane[last - first] =
            reinterpret_cast<int64_t>(chunk_base) + plane.chunk_offset + move.chunk_start;
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
          launch.chunk[c] =
              one_chunk ? nullptr : chunk((first_chunk + c) * leaves_per_chunk + planes[first].chunk_leaf);
          chunk_bases |= reinterpret_cast<uintptr_t>(launch.chunk[c]);
        }
        const int word_bytes = WordBytes(move, bases | chunk_bases);
        const int64_t words_per_run = move.table < 0 ? move.run / word_bytes : 1;
        const int64_t words_per_token = move.heads * move.dims * words_per_run * (last - first);
        const bool reaches_end = first_chunk + chunks == transfer.num_chunks;
        tokens = reaches_end ? num_tokens - token : (first_chunk + chunks) * transfer.rows - token;
        tokens = std::min(tokens, std::max<int64_t>(((int64_t{1} << 31) - 1) / words_per_token, 1));

        // Tokens and rows are counted from the first chunk of the launch.
        const int64_t origin = first_chunk * transfer.rows;
        launch.slots = slots + origin;
        launch.first_token = static_cast<uint32_t>(token - origin);
        launch.num_rows = static_cast<uint32_t>(transfer.num_rows() - origin);
        launch.rows = Divider::By(std::max<int64_t>(transfer.rows, 1));
        launch.words = static_cast<uint32_t>(move.run / word_bytes);
        launch.tokens = Divider::By(tokens);
        if (move.table >= 0) {
          StartTurn(stream, launch, move, transfer.turn, transfer.deltas.From(origin), tokens * (last - first),
                    word_bytes);
          continue;
        }
        const int64_t runs = tokens * (last - first) * move.heads * move.dims;
        const bool one_run = move.heads * move.dims == 1;
        switch (word_bytes) {
          case 16: StartWords<direction, uint4>(stream, launch, runs, one_run); break;
          case 8: StartWords<direction, uint2>(stream, launch, runs, one_run); break;
          case 4: StartWords<direction, uint32_t>(stream, launch, runs, one_run); break;
          case 2: StartWords<direction, uint16_t>(stream, launch, runs, one_run); break;
          default: StartWords<direction, uint8_t>(stream, launch, runs, one_run);
        }
      }
    }
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("jaxkv: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace jaxkv

#endif  // JAXKV_CUDA_MOVE_CUH_
