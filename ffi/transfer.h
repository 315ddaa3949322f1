// The address arithmetic that every handler shares, and the attributes it comes from.
//
// A transfer copies tokens between the paged arrays of a pool and the rows of chunks. Both sides are strided;
// the pool side is indirect on the token (its slot). Python (jaxkv/ops/transfer.py) works out the strides, here
// nothing is decided but the width of the words. All offsets are 64-bit: a pool passes 2^31 elements early.

#ifndef JAXKV_TRANSFER_H_
#define JAXKV_TRANSFER_H_

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

#ifdef __CUDACC__
#define JAXKV_INLINE __host__ __device__ __forceinline__
#else
#define JAXKV_INLINE inline
#endif

namespace jaxkv {

namespace ffi = xla::ffi;

// Byte strides of one side of a move. Python's `Side`.
struct Side {
  int64_t page, token, head, dim;
};

// Planes that share their strides. Python's `Move`; a token of a plane is heads * dims runs of `run` bytes.
struct Move {
  int64_t first_plane, num_planes;
  Side pool, chunk;
  int64_t heads, dims, run;
};
static_assert(sizeof(Move) == 13 * sizeof(int64_t), "Move mirrors the attribute, value by value");

// Where one (layer, kv) plane starts: a leaf and a byte offset into it, on both sides.
struct Plane {
  int64_t pool_leaf, pool_offset, chunk_leaf, chunk_offset;
};
static_assert(sizeof(Plane) == 4 * sizeof(int64_t), "Plane mirrors the attribute, value by value");

// The attributes of a custom call, decoded.
struct Transfer {
  const Plane* planes;
  const Move* moves;
  int64_t num_moves;
  int64_t page_size, num_slots;
  int64_t rows, num_chunks;  // tokens of a chunk, chunks in the call

  // Tokens that have a row in some chunk; tokens past them (a scatter's) are zeroed.
  int64_t num_rows() const { return rows * num_chunks; }
};

// Byte offset of a token within its plane, on either side.
JAXKV_INLINE int64_t TokenOffset(const Side& side, int64_t page, int64_t token_in_page) {
  return page * side.page + token_in_page * side.token;
}

inline Transfer DecodeTransfer(ffi::Span<const int64_t> planes, ffi::Span<const int64_t> moves, int64_t page_size,
                               int64_t num_slots, int64_t rows, int64_t num_chunks) {
  return Transfer{reinterpret_cast<const Plane*>(planes.begin()),
                  reinterpret_cast<const Move*>(moves.begin()),
                  static_cast<int64_t>(moves.size() / (sizeof(Move) / sizeof(int64_t))),
                  page_size,
                  num_slots,
                  rows,
                  num_chunks};
}

// The widest word, in bytes, that divides every length and address step of a move: 16, 8, 4, 2 or 1.
inline int WordBytes(const Move& move, uintptr_t bases) {
  const uint64_t bits = bases | move.run | move.pool.page | move.pool.token | move.pool.head | move.pool.dim |
                        move.chunk.page | move.chunk.token | move.chunk.head | move.chunk.dim | 16;
  return static_cast<int>(bits & -bits);
}

}  // namespace jaxkv

#endif  // JAXKV_TRANSFER_H_
