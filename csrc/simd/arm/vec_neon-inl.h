// The vector layer over NEON, which every 64-bit Arm CPU has. Every vec_*-inl.h has the same names.
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "simd/inline.h"

namespace headwise {
namespace HW_ISA {

constexpr int W = 4;  // float lanes of a vector
// vectors of query rows in a micro-kernel: 4 x 4 accumulators, 4 of Q, 1 broadcast of 32 registers
constexpr int kVectors = 4;
constexpr int kUnroll = 4;  // keys (or columns of V) in a micro-kernel

using F = float32x4_t;
using M = uint32x4_t;

HW_INLINE F zero() { return vdupq_n_f32(0.0f); }
HW_INLINE F set1(float x) { return vdupq_n_f32(x); }
HW_INLINE F load(const float* p) { return vld1q_f32(p); }
HW_INLINE void store(float* p, F x) { vst1q_f32(p, x); }
HW_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
HW_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
HW_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
HW_INLINE F div(F a, F b) { return vdivq_f32(a, b); }
HW_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
// b where either is NaN.
HW_INLINE F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
// x - floor(x).
HW_INLINE F fraction(F x) { return vsubq_f32(x, vrndmq_f32(x)); }
HW_INLINE F abs(F x) { return vabsq_f32(x); }
HW_INLINE F with_sign(F magnitude, F sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude); }
HW_INLINE M equal(F x, F y) { return vceqq_f32(x, y); }
// True where not x < y: NaN gives true.
HW_INLINE M not_less(F x, F y) { return vmvnq_u32(vcltq_f32(x, y)); }
HW_INLINE F select(M m, F yes, F no) { return vbslq_f32(m, yes, no); }
// True in the lanes whose word has this bit.
HW_INLINE M lanes_of_bit(const uint32_t* words, int bit) { return vtstq_u32(vld1q_u32(words), vdupq_n_u32(1u << bit)); }
// W words of 32 bits, for random numbers.
using U = uint32x4_t;
HW_INLINE U words_at(const uint32_t* p) { return vld1q_u32(p); }
HW_INLINE U set_words(uint32_t x) { return vdupq_n_u32(x); }
HW_INLINE U exclusive_or(U a, U b) { return veorq_u32(a, b); }
HW_INLINE M below(U x, U bound) { return vcltq_u32(x, bound); }
// The halves of the products with m.
HW_INLINE void multiply_wide(U x, U m, U& low, U& high) {
  const U first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(m)));
  const U last = vreinterpretq_u32_u64(vmull_high_u32(x, m));
  low = vuzp1q_u32(first, last);
  high = vuzp2q_u32(first, last);
}
// x * 2^floor(t); 0 below 2^-126 and for t = -inf, whatever x.
HW_INLINE F scale2(F x, F t) {
  const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtmq_s32_f32(t), vdupq_n_s32(127)), 23);
  const F scaled = vmulq_f32(x, vreinterpretq_f32_s32(bits));
  return vreinterpretq_f32_u32(vandq_u32(not_less(t, set1(-126.0f)), vreinterpretq_u32_f32(scaled)));
}
HW_INLINE float reduce_add(F x) {
  const F halves = vaddq_f32(x, vextq_f32(x, x, 2));
  return vgetq_lane_f32(halves, 0) + vgetq_lane_f32(halves, 1);
}
HW_INLINE float reduce_max(F x) {
  const F halves = max(x, vextq_f32(x, x, 2));
  return vgetq_lane_f32(max(halves, vextq_f32(halves, halves, 1)), 0);
}

HW_INLINE F load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
HW_INLINE F load_i8(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof(four));
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
HW_INLINE F load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
HW_INLINE void store_f16(uint16_t* p, F x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
// Round to nearest even; NaN stays NaN.
HW_INLINE void store_bf16(uint16_t* p, F x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t lsb = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(bits, vaddq_u32(lsb, vdupq_n_u32(0x7fff)));
  vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, vdupq_n_u32(0x7fc00000)), 16));
}

// Two vectors of bfloat16 at once: the elements with even and with odd index.
HW_INLINE void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const uint32x4_t x = vreinterpretq_u32_u16(vld1q_u16(p));
  even = vreinterpretq_f32_u32(vshlq_n_u32(x, 16));
  odd = vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u)));
}

// The greatest exponent so far in each lane, for W floats or 2 W numbers of 16 bits at once; `mask` has the bits of the
// exponent set.
using Peak = uint32x4_t;
HW_INLINE Peak no_peak() { return vdupq_n_u32(0); }
HW_INLINE Peak join_peak(Peak peak, const float* p, uint32_t mask) {
  return vmaxq_u32(peak, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(p)), vdupq_n_u32(mask)));
}
HW_INLINE Peak join_peak(Peak peak, const uint16_t* p, uint32_t mask) {
  const uint16x8_t x = vandq_u16(vld1q_u16(p), vdupq_n_u16(static_cast<uint16_t>(mask)));
  return vreinterpretq_u32_u16(vmaxq_u16(vreinterpretq_u16_u32(peak), x));
}
// True if no exponent was that of NaN and Inf; `wide` for floats.
HW_INLINE bool is_finite(Peak peak, uint32_t mask, bool wide) {
  return wide ? vmaxvq_u32(peak) != mask : vmaxvq_u16(vreinterpretq_u16_u32(peak)) != mask;
}

// Four vectors to the vector of their sums, lane i the sum of x[i]; a fixed tree.
HW_INLINE F reduce_each(const F* x) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }
// Declared without a body, because it is called only for vectors of 16 lanes.
F sums_of_four(const F* x);
F join_fours_by_vector(const F* fours);

// Transposes W rows of W floats.
HW_INLINE void transpose(F* r) {
  const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
  HW_UNROLL
  for (int i = 0; i < 2; ++i) {
    r[i] = vcombine_f32(vget_low_f32(a.val[i]), vget_low_f32(b.val[i]));
    r[i + 2] = vcombine_f32(vget_high_f32(a.val[i]), vget_high_f32(b.val[i]));
  }
}

}  // namespace HW_ISA
}  // namespace headwise
