// Keys turned on their way into the pool, on the CPU: float32 arithmetic, one rounding.

#ifndef JAXKV_CPU_TURN_H_
#define JAXKV_CPU_TURN_H_

#include <algorithm>
#include <cmath>
#include <cstring>

#include "transfer.h"

namespace jaxkv {

// A binary float format of at most 16 bits as IEEE 754 has it, but that e4m3fn has no infinity and a single NaN.
template <typename Bits, int kExponent, int kMantissa, bool kInfinity>
struct SmallFloat {
  using Storage = Bits;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kMagnitude = (1u << (kExponent + kMantissa)) - 1;
  static constexpr uint32_t kInfinityBits = ((1u << kExponent) - 1) << kMantissa;
  static constexpr uint32_t kLargest = kInfinity ? kInfinityBits - 1 : kMagnitude - 1;

  static float Decode(Bits bits) {
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t exponent = magnitude >> kMantissa, mantissa = magnitude & ((1u << kMantissa) - 1);
    float value;
    if (magnitude > kLargest) {
      value = kInfinity && magnitude == kInfinityBits ? INFINITY : NAN;
    } else if (exponent == 0) {
      value = std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissa);
    } else {
      const uint32_t single = (exponent - kBias + 127) << 23 | mantissa << (23 - kMantissa);
      std::memcpy(&value, &single, sizeof value);
    }
    return (bits >> (kExponent + kMantissa)) & 1 ? -value : value;
  }

  // To nearest, ties to even. Formats of 8 bits saturate: finite stays finite.
  static Bits Encode(float value) {
    uint32_t single;
    std::memcpy(&single, &value, sizeof single);
    const uint32_t sign = (single >> 31) << (kExponent + kMantissa);
    const uint32_t exponent = single >> 23 & 0xFF, mantissa = single & 0x7FFFFF;
    if (exponent == 0xFF) {
      const uint32_t quiet = kInfinityBits | 1u << (kMantissa - 1);
      return static_cast<Bits>(sign | (!kInfinity ? kMagnitude : mantissa == 0 ? kInfinityBits : quiet));
    }
    const uint32_t full = mantissa | (exponent == 0 ? 0 : 1u << 23);
    const int target = (exponent == 0 ? 1 : static_cast<int>(exponent)) - 127 + kBias;
    const int drop = 23 - kMantissa + (target < 1 ? 1 - target : 0);
    if (drop > 24) return static_cast<Bits>(sign);  // below half of the smallest
    const uint64_t scaled = full + (target > 1 ? static_cast<uint64_t>(target - 1) << 23 : 0);
    const uint64_t rounded = (scaled + (uint64_t{1} << (drop - 1)) - 1 + (scaled >> drop & 1)) >> drop;
    const uint64_t over = sizeof(Bits) == 1 ? kLargest : kInfinityBits;
    return static_cast<Bits>(sign | std::min<uint64_t>(rounded, over));
  }
};

struct Single {
  using Storage = float;
  static float Decode(float value) { return value; }
  static float Encode(float value) { return value; }
};
using Bfloat16 = SmallFloat<uint16_t, 8, 7, true>;
using Half = SmallFloat<uint16_t, 5, 10, true>;
using E5M2 = SmallFloat<uint8_t, 5, 2, true>;
using E4M3FN = SmallFloat<uint8_t, 4, 3, false>;

// One token of one plane: every pair of every head from the chunk to the pool, or zero bytes where `chunk` is null.
template <typename Float>
void TurnToken(const Move& move, const Turn& turn, const Deltas& deltas, int64_t token, char* pool, const char* chunk) {
  using Storage = typename Float::Storage;
  if (chunk == nullptr) {
    for (int64_t head = 0; head < move.heads; ++head) {
      for (int64_t pair = 0; pair < turn.pairs; ++pair) {
        char* target = pool + head * move.pool.head + pair * turn.stride * move.pool.dim;
        std::memset(target, 0, sizeof(Storage));
        std::memset(target + turn.distance * move.pool.dim, 0, sizeof(Storage));
      }
    }
    return;
  }
  const float* cos = deltas.CosOf(move.table) + token * deltas.pairs;
  const float* sin = deltas.SinOf(move.table) + token * deltas.pairs;
  const bool moved = deltas.MovedOf(move.table)[token] != 0;
  for (int64_t head = 0; head < move.heads; ++head) {
    for (int64_t pair = 0; pair < turn.pairs; ++pair) {
      const int64_t first = pair * turn.stride, second = first + turn.distance;
      const char* source = chunk + head * move.chunk.head;
      char* target = pool + head * move.pool.head;
      Storage x, y;
      std::memcpy(&x, source + first * move.chunk.dim, sizeof x);
      std::memcpy(&y, source + second * move.chunk.dim, sizeof y);
      if (moved) {
        const float a = Float::Decode(x), b = Float::Decode(y);
        x = Float::Encode(a * cos[pair] - b * sin[pair]);
        y = Float::Encode(b * cos[pair] + a * sin[pair]);
      }
      std::memcpy(target + first * move.pool.dim, &x, sizeof x);
      std::memcpy(target + second * move.pool.dim, &y, sizeof y);
    }
  }
}

using TurnRow = void (*)(const Move&, const Turn&, const Deltas&, int64_t token, char* pool, const char* chunk);

inline TurnRow TurnRowOf(Format format) {
  switch (format) {
    case Format::kBf16: return TurnToken<Bfloat16>;
    case Format::kF16: return TurnToken<Half>;
    case Format::kF32: return TurnToken<Single>;
    case Format::kE4M3FN: return TurnToken<E4M3FN>;
    default: return TurnToken<E5M2>;
  }
}

}  // namespace jaxkv

#endif  // JAXKV_CPU_TURN_H_
