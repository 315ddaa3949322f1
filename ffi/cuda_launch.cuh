// What a kernel of a move is told, and how it finds a token on both sides.

#ifndef JAXKV_CUDA_LAUNCH_CUH_
#define JAXKV_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

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
  Divider items, dims, heads, tokens, page_size, rows;
  uint32_t words;                  // of one run
  uint32_t total;                  // items to move
  uint32_t num_slots, num_rows, first_token;
};
static_assert(sizeof(Launch) <= 4096, "kernel parameters are limited to 4 KiB");

constexpr int kThreads = 256;

// A token of a plane on both sides: null in the pool where its slot is not served, null in the chunks where it has
// no row (a scatter zeroes it).
struct Ends {
  char *pool, *chunk;
};
template <Direction direction>
__device__ __forceinline__ Ends Find(const Launch& launch, uint32_t plane, uint32_t token) {
  Ends ends{nullptr, nullptr};
  uint32_t offset;
  const uint32_t slot = __ldg(launch.slots + token);
  if (slot < launch.num_slots) {  // a negative slot is a large unsigned one
    const uint32_t page = launch.page_size.Split(slot, offset);
    ends.pool = launch.pool[plane] + TokenOffset(launch.pool_side, page, offset);
  }
  if (direction == Direction::kGather || token < launch.num_rows) {
    uint32_t row;
    const uint32_t chunk = launch.rows.Split(token, row);
    const uint32_t page = launch.page_size.Split(row, offset);
    ends.chunk = launch.chunk[chunk] + launch.chunk_plane[plane] + TokenOffset(launch.chunk_side, page, offset);
  }
  return ends;
}

}  // namespace jaxkv

#endif  // JAXKV_CUDA_LAUNCH_CUH_
