// The thin layer in plain C++17: four lanes that any compiler can make of what its machine has.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "inline.h"

namespace headwise {
namespace HW_ISA {

constexpr int W = 4;         // float lanes of a vector
constexpr int kVectors = 2;  // of query rows in a micro-kernel: 2 x 4 accumulators, 2 of Q, 1 broadcast of 16 registers
constexpr int kUnroll = 4;   // keys (or columns of V) in a micro-kernel

struct F {
  float x[W];
};
struct M {
  bool x[W];
};

template <class Op>
HW_INLINE F each(Op op) {
  F out;
  HW_UNROLL
  for (int i = 0; i < W; ++i) out.x[i] = op(i);
  return out;
}

HW_INLINE F set1(float x) {
  return each([&](int) { return x; });
}
HW_INLINE F zero() { return set1(0.0f); }
HW_INLINE F load(const float* p) {
  F out;
  memcpy(out.x, p, sizeof(out.x));
  return out;
}
HW_INLINE void store(float* p, F x) { memcpy(p, x.x, sizeof(x.x)); }
HW_INLINE F add(F a, F b) {
  return each([&](int i) { return a.x[i] + b.x[i]; });
}
HW_INLINE F sub(F a, F b) {
  return each([&](int i) { return a.x[i] - b.x[i]; });
}
HW_INLINE F mul(F a, F b) {
  return each([&](int i) { return a.x[i] * b.x[i]; });
}
HW_INLINE F div(F a, F b) {
  return each([&](int i) { return a.x[i] / b.x[i]; });
}
HW_INLINE F fma(F a, F b, F c) {
  return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
}
HW_INLINE float floor_of(float x) {  // |x| < 2^22: the sum drops the fraction
  const float near = (x + 12582912.0f) - 12582912.0f;
  return near > x ? near - 1.0f : near;
}
// b where either is NaN.
HW_INLINE F max(F a, F b) {
  return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
// x - floor(x).
HW_INLINE F fraction(F x) {
  return each([&](int i) { return x.x[i] - floor_of(x.x[i]); });
}
HW_INLINE F abs(F x) {
  return each([&](int i) { return fabsf(x.x[i]); });
}
HW_INLINE F with_sign(F magnitude, F sign) {
  return each([&](int i) { return copysignf(magnitude.x[i], sign.x[i]); });
}
// True where x < y is not so: NaN gives true.
HW_INLINE M not_less(F x, F y) {
  M out;
  HW_UNROLL
  for (int i = 0; i < W; ++i) out.x[i] = !(x.x[i] < y.x[i]);
  return out;
}
HW_INLINE F select(M m, F yes, F no) {
  return each([&](int i) { return m.x[i] ? yes.x[i] : no.x[i]; });
}
// x * 2^floor(t); 0 below 2^-126 and for t = -inf, whatever x.
HW_INLINE F scale2(F x, F t) {
  return each([&](int i) {
    if (t.x[i] < -126.0f) return 0.0f;
    const float whole = t.x[i] < 127.0f ? floor_of(t.x[i]) : 127.0f;  // NaN comes from x
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23;
    float factor;
    memcpy(&factor, &bits, sizeof(factor));
    return x.x[i] * factor;
  });
}
HW_INLINE float reduce_add(F x) { return (x.x[0] + x.x[2]) + (x.x[1] + x.x[3]); }
HW_INLINE float reduce_max(F x) {
  const float a = x.x[0] > x.x[2] ? x.x[0] : x.x[2], b = x.x[1] > x.x[3] ? x.x[1] : x.x[3];
  return a > b ? a : b;
}

HW_INLINE float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
HW_INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
HW_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // Inf, NaN
  if (rest >= 0x400) return from_bits(sign | ((rest << 13) + 0x38000000));
  return from_bits(sign | to_bits(static_cast<float>(rest) * 5.9604644775390625e-8f));  // subnormal: rest * 2^-24
}
HW_INLINE uint16_t float_to_half(float x) {  // round to nearest even
  const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to Inf
  if (rest < 0x38800000) {  // subnormal: adding 0.5 leaves the wanted bits at the end
    return static_cast<uint16_t>(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13));
}
HW_INLINE uint16_t float_to_bf16(float x) {
  const uint32_t bits = to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

HW_INLINE F load_bf16(const uint16_t* p) {
  return each([&](int i) { return from_bits(static_cast<uint32_t>(p[i]) << 16); });
}
HW_INLINE F load_f16(const uint16_t* p) {
  return each([&](int i) { return half_to_float(p[i]); });
}
HW_INLINE void store_f16(uint16_t* p, F x) {
  for (int i = 0; i < W; ++i) p[i] = float_to_half(x.x[i]);
}
HW_INLINE void store_bf16(uint16_t* p, F x) {
  for (int i = 0; i < W; ++i) p[i] = float_to_bf16(x.x[i]);
}
// Two vectors of bfloat16 at once: the elements of even and of odd place.
HW_INLINE void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  even = each([&](int i) { return from_bits(static_cast<uint32_t>(p[2 * i]) << 16); });
  odd = each([&](int i) { return from_bits(static_cast<uint32_t>(p[2 * i + 1]) << 16); });
}

// The greatest exponent met so far: W floats, or 2 W numbers of 16 bits, at once; `mask` is all its bits.
using Peak = uint32_t;
HW_INLINE Peak no_peak() { return 0; }
HW_INLINE Peak see(Peak peak, const float* p, uint32_t mask) {
  for (int i = 0; i < W; ++i) peak = peak > (to_bits(p[i]) & mask) ? peak : to_bits(p[i]) & mask;
  return peak;
}
HW_INLINE Peak see(Peak peak, const uint16_t* p, uint32_t mask) {
  for (int i = 0; i < 2 * W; ++i) peak = peak > (p[i] & mask) ? peak : p[i] & mask;
  return peak;
}
// Whether none was the exponent of NaN and Inf.
HW_INLINE bool is_finite(Peak peak, uint32_t mask, bool) { return peak != mask; }

// Four vectors to the vector of their sums, lane i the sum of x[i]; a fixed tree.
HW_INLINE F reduce_each(const F* x) {
  return each([&](int i) { return reduce_add(x[i]); });
}

// W rows of W floats, turned.
HW_INLINE void transpose(F* r) {
  for (int i = 0; i < W; ++i) {
    for (int j = i + 1; j < W; ++j) {
      const float held = r[i].x[j];
      r[i].x[j] = r[j].x[i];
      r[j].x[i] = held;
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
