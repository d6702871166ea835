// The vector layer in plain C++17: four lanes, which compilers turn into the vectors of the machine.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "simd/inline.h"

namespace headwise {
namespace HW_ISA {

constexpr int W = 4;  // float lanes of a vector
// vectors of query rows in a micro-kernel: 2 x 4 accumulators, 2 of Q, 1 broadcast of 16 registers
constexpr int kVectors = 2;
constexpr int kUnroll = 4;  // keys (or columns of V) in a micro-kernel

#if defined(__GNUC__)  // vector extensions of GCC and Clang
typedef float F __attribute__((vector_size(16)));
typedef int32_t M __attribute__((vector_size(16)));
HW_INLINE F set1(float x) { return F{x, x, x, x}; }
HW_INLINE M equal(F x, F y) { return x == y; }
HW_INLINE M not_less(F x, F y) { return ~(x < y); }  // NaN gives true
HW_INLINE F select(M m, F yes, F no) { return m ? yes : no; }
HW_INLINE M whole(F x) { return __builtin_convertvector(x, M); }
HW_INLINE F as_floats(M x) { return (F)x; }
#else
template <class T>
struct Lanes {
  T x[W];
  T& operator[](int i) { return x[i]; }
  const T& operator[](int i) const { return x[i]; }
};
using F = Lanes<float>;
using M = Lanes<int32_t>;  // of a mask: 0 or -1
template <class To, class Op>
HW_INLINE To each_of(Op op) {
  To out;
  for (int i = 0; i < W; ++i) out[i] = op(i);
  return out;
}
// clang-format off
HW_INLINE F operator+(F a, F b) { return each_of<F>([&](int i) { return a[i] + b[i]; }); }
HW_INLINE F operator-(F a, F b) { return each_of<F>([&](int i) { return a[i] - b[i]; }); }
HW_INLINE F operator*(F a, F b) { return each_of<F>([&](int i) { return a[i] * b[i]; }); }
HW_INLINE F operator/(F a, F b) { return each_of<F>([&](int i) { return a[i] / b[i]; }); }
HW_INLINE M operator+(M a, M b) { return each_of<M>([&](int i) { return a[i] + b[i]; }); }
HW_INLINE M operator<<(M a, int n) { return each_of<M>([&](int i) { return a[i] << n; }); }
HW_INLINE F set1(float x) { return each_of<F>([&](int) { return x; }); }
HW_INLINE M equal(F x, F y) { return each_of<M>([&](int i) { return x[i] == y[i] ? -1 : 0; }); }
HW_INLINE M not_less(F x, F y) { return each_of<M>([&](int i) { return x[i] < y[i] ? 0 : -1; }); }
HW_INLINE F select(M m, F yes, F no) { return each_of<F>([&](int i) { return m[i] != 0 ? yes[i] : no[i]; }); }
HW_INLINE M whole(F x) { return each_of<M>([&](int i) { return static_cast<int32_t>(x[i]); }); }
HW_INLINE F as_floats(M x) { F out; memcpy(&out, &x, sizeof(out)); return out; }
// clang-format on
#endif

template <class Op>
HW_INLINE F each(Op op) {
  F out = set1(0.0f);
  HW_UNROLL
  for (int i = 0; i < W; ++i) out[i] = op(i);
  return out;
}

HW_INLINE F zero() { return set1(0.0f); }
// True in the lanes whose word has this bit.
HW_INLINE M lanes_of_bit(const uint32_t* words, int bit) {
  M out = {0, 0, 0, 0};
  for (int i = 0; i < W; ++i) out[i] = words[i] >> bit & 1 ? -1 : 0;
  return out;
}
// W words of 32 bits, for random numbers.
struct U {
  uint32_t x[W];
};
HW_INLINE U words_at(const uint32_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
HW_INLINE U set_words(uint32_t x) { return {{x, x, x, x}}; }
HW_INLINE U exclusive_or(U a, U b) {
  for (int i = 0; i < W; ++i) a.x[i] ^= b.x[i];
  return a;
}
HW_INLINE M below(U x, U bound) {
  M out = {0, 0, 0, 0};
  for (int i = 0; i < W; ++i) out[i] = x.x[i] < bound.x[i] ? -1 : 0;
  return out;
}
// The halves of the products with m.
HW_INLINE void multiply_wide(U x, U m, U& low, U& high) {
  for (int i = 0; i < W; ++i) {
    const uint64_t product = uint64_t{x.x[i]} * m.x[i];
    low.x[i] = static_cast<uint32_t>(product);
    high.x[i] = static_cast<uint32_t>(product >> 32);
  }
}
HW_INLINE F load(const float* p) {
  F out;
  memcpy(&out, p, sizeof(out));
  return out;
}
HW_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof(x)); }
HW_INLINE F add(F a, F b) { return a + b; }
HW_INLINE F sub(F a, F b) { return a - b; }
HW_INLINE F mul(F a, F b) { return a * b; }
HW_INLINE F div(F a, F b) { return a / b; }
HW_INLINE F fma(F a, F b, F c) { return a * b + c; }
// b where either is NaN.
HW_INLINE F max(F a, F b) { return select(not_less(b, a), b, a); }
// floor(x) for |x| < 2^22: the sum drops the fraction.
HW_INLINE F floor_of(F x) {
  const F near = (x + set1(12582912.0f)) - set1(12582912.0f);
  return select(not_less(x, near), near, near - set1(1.0f));
}
// x - floor(x).
HW_INLINE F fraction(F x) { return x - floor_of(x); }
HW_INLINE F abs(F x) {
  return each([&](int i) { return fabsf(x[i]); });
}
HW_INLINE F with_sign(F magnitude, F sign) {
  return each([&](int i) { return copysignf(magnitude[i], sign[i]); });
}
// x * 2^floor(t); 0 below 2^-126 and for t = -inf, whatever x. t is about 0 at most, or NaN, and then x is NaN.
HW_INLINE F scale2(F x, F t) {
  const F lowest = set1(-126.0f), highest = set1(126.0f);
  const M keep = not_less(t, lowest);
  const F inside = select(not_less(t, highest), highest, select(keep, t, lowest));  // a number, for the conversion
  const M bias = {127, 127, 127, 127};
  return select(keep, x * as_floats((whole(floor_of(inside)) + bias) << 23), zero());
}
HW_INLINE float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
HW_INLINE float reduce_max(F x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
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
  if (rest < 0x38800000) {  // subnormal: adding 0.5 shifts its bits to the end
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
HW_INLINE F load_i8(const int8_t* p) {
  return each([&](int i) { return static_cast<float>(p[i]); });
}
HW_INLINE F load_f16(const uint16_t* p) {
  return each([&](int i) { return half_to_float(p[i]); });
}
HW_INLINE void store_f16(uint16_t* p, F x) {
  for (int i = 0; i < W; ++i) p[i] = float_to_half(x[i]);
}
HW_INLINE void store_bf16(uint16_t* p, F x) {
  for (int i = 0; i < W; ++i) p[i] = float_to_bf16(x[i]);
}
// Two vectors of bfloat16 at once: the elements with even and with odd index.
HW_INLINE void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  even = each([&](int i) { return from_bits(static_cast<uint32_t>(p[2 * i]) << 16); });
  odd = each([&](int i) { return from_bits(static_cast<uint32_t>(p[2 * i + 1]) << 16); });
}

// The greatest exponent so far, for W floats or 2 W numbers of 16 bits at once; `mask` has the bits of the exponent
// set.
using Peak = uint32_t;
HW_INLINE Peak no_peak() { return 0; }
HW_INLINE Peak join_peak(Peak peak, const float* p, uint32_t mask) {
  for (int i = 0; i < W; ++i) peak = peak > (to_bits(p[i]) & mask) ? peak : to_bits(p[i]) & mask;
  return peak;
}
HW_INLINE Peak join_peak(Peak peak, const uint16_t* p, uint32_t mask) {
  for (int i = 0; i < 2 * W; ++i) peak = peak > (p[i] & mask) ? peak : p[i] & mask;
  return peak;
}
// True if no exponent was that of NaN and Inf.
HW_INLINE bool is_finite(Peak peak, uint32_t mask, bool) { return peak != mask; }

// Four vectors to the vector of their sums, lane i the sum of x[i]; a fixed tree.
HW_INLINE F reduce_each(const F* x) {
  return each([&](int i) { return reduce_add(x[i]); });
}
// Declared without a body, because it is called only for vectors of 16 lanes.
F sums_of_four(const F* x);
F join_fours_by_vector(const F* fours);

// Transposes W rows of W floats.
HW_INLINE void transpose(F* r) {
  for (int i = 0; i < W; ++i) {
    for (int j = i + 1; j < W; ++j) {
      const float upper = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = upper;
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
