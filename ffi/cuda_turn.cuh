// Keys turned on their way into the pool, on the GPU: float32 arithmetic, one rounding, one pass over memory.

#ifndef JAXKV_CUDA_TURN_CUH_
#define JAXKV_CUDA_TURN_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda_launch.cuh"

namespace jaxkv {

struct Bfloat16 {
  using Storage = __nv_bfloat16;
  static __device__ __forceinline__ float Decode(Storage x) { return __bfloat162float(x); }
  static __device__ __forceinline__ Storage Encode(float x) { return __float2bfloat16_rn(x); }
};
struct Half {
  using Storage = __half;
  static __device__ __forceinline__ float Decode(Storage x) { return __half2float(x); }
  static __device__ __forceinline__ Storage Encode(float x) { return __float2half_rn(x); }
};
struct Single {
  using Storage = float;
  static __device__ __forceinline__ float Decode(Storage x) { return x; }
  static __device__ __forceinline__ Storage Encode(float x) { return x; }
};
// Finite stays finite, at the largest value; what is not finite stays so (in e4m3fn as its NaN).
template <__nv_fp8_interpretation_t kind>
struct Float8 {
  using Storage = __nv_fp8_storage_t;
  static __device__ __forceinline__ float Decode(Storage x) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, kind)));
  }
  static __device__ __forceinline__ Storage Encode(float x) {
    return __nv_cvt_float_to_fp8(x, isfinite(x) ? __NV_SATFINITE : __NV_NOSAT, kind);
  }
};

// What the turning kernel is told beside `Launch`.
struct TurnLaunch {
  const float *cos, *sin;  // [tokens, pairs]
  const int32_t* moved;    // [tokens]
  Divider head_groups, vectors;
  uint32_t heads, pairs;
  int64_t distance;  // elements from a pair's first to its second
};

static_assert(sizeof(Launch) + sizeof(TurnLaunch) <= 4096, "kernel parameters are limited to 4 KiB");

template <typename Storage, int kElements>
struct alignas(sizeof(Storage) * kElements) Vector {
  Storage at[kElements];
};

constexpr int kHeads = 4;  // a thread turns the same pairs of this many heads, which share their angles

// Half pairing takes kElements pairs a thread, from one vector of first elements and one of second ones; interleaved
// pairing kElements / 2 pairs from one vector, or one pair where kElements is 1.
template <typename Float, int kElements, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) TurnKernel(const __grid_constant__ Launch launch,
                                                       const __grid_constant__ TurnLaunch turn) {
  using Storage = typename Float::Storage;
  constexpr bool kOneVector = kInterleaved && kElements > 1;
  constexpr int kPairs = kOneVector ? kElements / 2 : kElements;
  using Elements = Vector<Storage, kElements>;
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= launch.total) return;
  uint32_t vector, group, token;
  uint32_t rest = turn.vectors.Split(index, vector);
  rest = turn.head_groups.Split(rest, group);
  const uint32_t plane = launch.tokens.Split(rest, token);
  token += launch.first_token;
  const Ends ends = Find<Direction::kScatter>(launch, plane, token);
  if (ends.pool == nullptr) return;

  const uint32_t pair = vector * kPairs;
  const int64_t pool_step = kInterleaved ? 2 * launch.pool_side.dim : launch.pool_side.dim;
  const int64_t chunk_step = kInterleaved ? 2 * launch.chunk_side.dim : launch.chunk_side.dim;
  const int64_t pool_distance = turn.distance * launch.pool_side.dim;
  const int64_t chunk_distance = turn.distance * launch.chunk_side.dim;
  Elements first[kHeads], second[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const uint32_t head = group * kHeads + h;
    first[h] = second[h] = Elements{};
    if (head < turn.heads && ends.chunk != nullptr) {
      const char* source = ends.chunk + head * launch.chunk_side.head + pair * chunk_step;
      first[h] = *reinterpret_cast<const Elements*>(source);
      if (!kOneVector) second[h] = *reinterpret_cast<const Elements*>(source + chunk_distance);
    }
  }
  if (ends.chunk != nullptr && __ldg(turn.moved + token) != 0) {
    const float* cos = turn.cos + static_cast<int64_t>(token) * turn.pairs + pair;
    const float* sin = turn.sin + static_cast<int64_t>(token) * turn.pairs + pair;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float c = __ldg(cos + i), s = __ldg(sin + i);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        Storage& x = kOneVector ? first[h].at[2 * i % kElements] : first[h].at[i];
        Storage& y = kOneVector ? first[h].at[(2 * i + 1) % kElements] : second[h].at[i];
        const float a = Float::Decode(x), b = Float::Decode(y);
        x = Float::Encode(a * c - b * s);
        y = Float::Encode(b * c + a * s);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const uint32_t head = group * kHeads + h;
    if (head >= turn.heads) continue;
    char* target = ends.pool + head * launch.pool_side.head + pair * pool_step;
    *reinterpret_cast<Elements*>(target) = first[h];
    if (!kOneVector) *reinterpret_cast<Elements*>(target + pool_distance) = second[h];
  }
}

template <typename Float, int kElements>
void StartTurnOf(cudaStream_t stream, Launch& launch, TurnLaunch& turn, bool interleaved, int64_t rows) {
  const int64_t vectors = turn.pairs / (interleaved && kElements > 1 ? kElements / 2 : kElements);
  const int64_t groups = (turn.heads + kHeads - 1) / kHeads;
  turn.vectors = Divider::By(vectors);
  turn.head_groups = Divider::By(groups);
  launch.total = static_cast<uint32_t>(rows * groups * vectors);
  const auto blocks = static_cast<unsigned>((launch.total + kThreads - 1) / kThreads);
  if (interleaved) {
    TurnKernel<Float, kElements, true><<<blocks, kThreads, 0, stream>>>(launch, turn);
  } else {
    TurnKernel<Float, kElements, false><<<blocks, kThreads, 0, stream>>>(launch, turn);
  }
}

template <typename Float>
void StartTurnAs(cudaStream_t stream, Launch& launch, TurnLaunch& turn, const Move& move, int64_t stride, int64_t rows,
                 int word_bytes) {
  constexpr int64_t kSize = sizeof(typename Float::Storage);
  constexpr int kElements = 16 / kSize;
  const bool interleaved = stride == 2;
  const int64_t pairs_at_once = interleaved ? kElements / 2 : kElements;
  // Whole vectors need contiguous elements, second ones as aligned as first ones, and no rest.
  const bool wide = word_bytes == 16 && move.pool.dim == kSize && move.chunk.dim == kSize &&
                    turn.pairs % pairs_at_once == 0 && (interleaved || turn.distance % kElements == 0);
  if (wide) {
    StartTurnOf<Float, kElements>(stream, launch, turn, interleaved, rows);
  } else {
    StartTurnOf<Float, 1>(stream, launch, turn, interleaved, rows);
  }
}

// Turns `rows` (token, plane) rows of a move. `word_bytes` divides every step but that along `dim`.
inline void StartTurn(cudaStream_t stream, Launch& launch, const Move& move, const Turn& turn, const Deltas& deltas,
                      int64_t rows, int word_bytes) {
  TurnLaunch own{};
  own.cos = deltas.CosOf(move.table);
  own.sin = deltas.SinOf(move.table);
  own.moved = deltas.MovedOf(move.table);
  own.heads = static_cast<uint32_t>(move.heads);
  own.pairs = static_cast<uint32_t>(turn.pairs);
  own.distance = turn.distance;
  switch (turn.format) {
    case Format::kBf16: return StartTurnAs<Bfloat16>(stream, launch, own, move, turn.stride, rows, word_bytes);
    case Format::kF16: return StartTurnAs<Half>(stream, launch, own, move, turn.stride, rows, word_bytes);
    case Format::kF32: return StartTurnAs<Single>(stream, launch, own, move, turn.stride, rows, word_bytes);
    case Format::kE4M3FN:
      return StartTurnAs<Float8<__NV_E4M3>>(stream, launch, own, move, turn.stride, rows, word_bytes);
    case Format::kE5M2: return StartTurnAs<Float8<__NV_E5M2>>(stream, launch, own, move, turn.stride, rows, word_bytes);
  }
}

}  // namespace jaxkv

#endif  // JAXKV_CUDA_TURN_CUH_
