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

// Planes that share their strides. Python's `Move`; a token of a plane is heads * dims runs of `run` bytes, the first
// of them at the given starts. Where `table` is not negative, dims counts pairs, run is one element, and each pair is
// turned by the angles of that delta table.
struct Move {
  int64_t first_plane, num_planes;
  Side pool, chunk;
  int64_t pool_start, chunk_start;
  int64_t heads, dims, run;
  int64_t table;
};
static_assert(sizeof(Move) == 16 * sizeof(int64_t), "Move mirrors the attribute, value by value");

// Formats of keys that can be turned, as Python numbers them.
enum class Format : int64_t { kBf16, kF16, kF32, kE4M3FN, kE5M2 };

// How keys are turned. Python's `Turn`; pair i is elements i * stride and i * stride + distance.
struct Turn {
  int64_t pairs, stride, distance;
  Format format;
  int64_t num_tables;  // 0: nothing turns
};
static_assert(sizeof(Turn) == 5 * sizeof(int64_t), "Turn mirrors the attribute, value by value");

// The delta tables of a call: cos and sin of each token's turn, and whether it turns at all (a token that does not
// keeps its bits, which times one plus times zero would not give NaN, infinity and -0).
struct Deltas {
  const float *cos = nullptr, *sin = nullptr;  // [tables, tokens, pairs]
  const int32_t* moved = nullptr;              // [tables, tokens]
  int64_t tokens = 0, pairs = 0;

  Deltas From(int64_t token) const { return {cos + token * pairs, sin + token * pairs, moved + token, tokens, pairs}; }
  const float* CosOf(int64_t table) const { return cos + table * tokens * pairs; }
  const float* SinOf(int64_t table) const { return sin + table * tokens * pairs; }
  const int32_t* MovedOf(int64_t table) const { return moved + table * tokens; }
};

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
  Turn turn;
  Deltas deltas;

  // Tokens that have a row in some chunk; tokens past them (a scatter's) are zeroed.
  int64_t num_rows() const { return rows * num_chunks; }
};

// Byte offset of a token within its plane, on either side.
JAXKV_INLINE int64_t TokenOffset(const Side& side, int64_t page, int64_t token_in_page) {
  return page * side.page + token_in_page * side.token;
}

inline Transfer DecodeTransfer(ffi::Span<const int64_t> planes, ffi::Span<const int64_t> moves, int64_t page_size,
                               int64_t num_slots, int64_t rows, int64_t num_chunks,
                               ffi::Span<const int64_t> turn = {}) {
  return Transfer{reinterpret_cast<const Plane*>(planes.begin()),
                  reinterpret_cast<const Move*>(moves.begin()),
                  static_cast<int64_t>(moves.size() / (sizeof(Move) / sizeof(int64_t))),
                  page_size,
                  num_slots,
                  rows,
                  num_chunks,
                  turn.size() == 0 ? Turn{} : *reinterpret_cast<const Turn*>(turn.begin()),
                  Deltas{}};
}

// How many operands the delta tables take, after the slots; and the tables themselves.
inline int64_t NumDeltaOperands(const Transfer& transfer) { return transfer.turn.num_tables > 0 ? 3 : 0; }
inline void DecodeDeltas(Transfer& transfer, ffi::RemainingArgs operands) {
  if (transfer.turn.num_tables == 0) return;
  transfer.deltas = {static_cast<const float*>(operands.get<ffi::AnyBuffer>(0)->untyped_data()),
                     static_cast<const float*>(operands.get<ffi::AnyBuffer>(1)->untyped_data()),
                     static_cast<const int32_t*>(operands.get<ffi::AnyBuffer>(2)->untyped_data()),
                     transfer.num_rows(), transfer.turn.pairs};
}

// The widest word, in bytes, that divides every length and address step of a move: 16, 8, 4, 2 or 1. A move that
// turns keys goes element by element along `dim`, in vectors of its own choice.
inline int WordBytes(const Move& move, uintptr_t bases) {
  uint64_t bits = bases | move.pool.page | move.pool.token | move.pool.head | move.chunk.page | move.chunk.token |
                  move.chunk.head | move.pool_start | move.chunk_start | 16;
  if (move.table < 0) bits |= move.run | move.pool.dim | move.chunk.dim;
  return static_cast<int>(bits & -bits);
}

}  // namespace jaxkv

#endif  // JAXKV_TRANSFER_H_
