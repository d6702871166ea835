// The vector layer over AVX-512 F, BW, VL and DQ. Every vec_*-inl.h has the same names.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "simd/inline.h"

namespace headwise {
namespace HW_ISA {

constexpr int W = 16;  // float lanes of a vector
// vectors of query rows in a micro-kernel: 3 x 8 accumulators, 3 of Q, 1 broadcast of 32 registers
constexpr int kVectors = 3;
constexpr int kUnroll = 8;  // keys (or columns of V) in a micro-kernel

using F = __m512;
using M = __mmask16;

HW_INLINE F zero() { return _mm512_setzero_ps(); }
HW_INLINE F set1(float x) { return _mm512_set1_ps(x); }
HW_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
HW_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
HW_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
HW_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
HW_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
HW_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
HW_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// b where either is NaN.
HW_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
// x - floor(x).
HW_INLINE F fraction(F x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
HW_INLINE F abs(F x) { return _mm512_abs_ps(x); }
HW_INLINE F with_sign(F magnitude, F sign) {
  const __m512i bit = _mm512_set1_epi32(INT32_MIN);
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign), _mm512_castps_si512(magnitude), 0xCA));
}
HW_INLINE M equal(F x, F y) { return _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ); }
// True where not x < y: NaN gives true.
HW_INLINE M not_less(F x, F y) { return _mm512_cmp_ps_mask(x, y, _CMP_NLT_UQ); }
HW_INLINE F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
// True in the lanes whose word has this bit.
HW_INLINE M lanes_of_bit(const uint32_t* words, int bit) {
  return _mm512_test_epi32_mask(_mm512_loadu_si512(words), _mm512_set1_epi32(static_cast<int>(1u << bit)));
}
// x * 2^floor(t); 0 below 2^-126 (by FlushDenormals) and for t = -inf, whatever x.
HW_INLINE F scale2(F x, F t) { return _mm512_scalef_ps(x, t); }
HW_INLINE float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
HW_INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

HW_INLINE F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
HW_INLINE F load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
HW_INLINE F load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HW_INLINE void store_f16(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
// Round to nearest even; NaN stays NaN.
HW_INLINE void store_bf16(uint16_t* p, F x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}

// Two vectors of bfloat16 at once: the elements with even and with odd index.
HW_INLINE void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const __m512i x = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// W words of 32 bits, for random numbers.
using U = __m512i;
HW_INLINE U words_at(const uint32_t* p) { return _mm512_loadu_si512(p); }
HW_INLINE U set_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
HW_INLINE U exclusive_or(U a, U b) { return _mm512_xor_si512(a, b); }
HW_INLINE M below(U x, U bound) { return _mm512_cmplt_epu32_mask(x, bound); }
// The halves of the products with m.
HW_INLINE void multiply_wide(U x, U m, U& low, U& high) {
  const U even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
  low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

// The greatest exponent so far in each lane, for W floats or 2 W numbers of 16 bits at once; `mask` has the bits of the
// exponent set.
using Peak = __m512i;
HW_INLINE Peak no_peak() { return _mm512_setzero_si512(); }
HW_INLINE Peak join_peak(Peak peak, const float* p, uint32_t mask) {
  return _mm512_max_epu32(peak, _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(mask))));
}
HW_INLINE Peak join_peak(Peak peak, const uint16_t* p, uint32_t mask) {
  return _mm512_max_epu16(peak, _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(static_cast<short>(mask))));
}
// True if no exponent was that of NaN and Inf; `wide` for floats.
HW_INLINE bool is_finite(Peak peak, uint32_t mask, bool wide) {
  return wide ? _mm512_cmpeq_epi32_mask(peak, _mm512_set1_epi32(static_cast<int>(mask))) == 0
              : _mm512_cmpeq_epi16_mask(peak, _mm512_set1_epi16(static_cast<short>(mask))) == 0;
}

// Four vectors, summed within each 128 bits: lane 4 q + i is the sum of part q of x[i].
HW_INLINE F sums_of_four(const F* x) {
  // x0 x0 x1 x1 in each 128 bits: a half of each as it is, and the other two halves by one shuffle.
  const F a = _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, x[0], x[1]), _mm512_shuffle_ps(x[0], x[1], 0x4e));
  const F b = _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, x[2], x[3]), _mm512_shuffle_ps(x[2], x[3], 0x4e));
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
// The sums of sixteen vectors from four such sums: lane 4 i + j is vector j of the i-th four.
HW_INLINE F join_fours(const F* fours) {
  const F ab0 = _mm512_shuffle_f32x4(fours[0], fours[1], 0x88), ab1 = _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd);
  const F cd0 = _mm512_shuffle_f32x4(fours[2], fours[3], 0x88), cd1 = _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd);
  const F ab = _mm512_add_ps(ab0, ab1), cd = _mm512_add_ps(cd0, cd1);
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}
// The same with lane 4 j + i.
HW_INLINE F join_fours_by_vector(const F* fours) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_ps(order, join_fours(fours));
}
// Sixteen vectors to the vector of their sums, lane i the sum of x[i]; a fixed tree.
HW_INLINE F reduce_each(const F* x) {
  F fours[4];
  HW_UNROLL
  for (int i = 0; i < 4; ++i) fours[i] = sums_of_four(x + 4 * i);
  return join_fours(fours);
}

// Transposes W rows of W floats.
HW_INLINE void transpose(F* r) {
  F a[16], b[16];
  HW_UNROLL
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  HW_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512d x0 = _mm512_castps_pd(a[4 * i]), x1 = _mm512_castps_pd(a[4 * i + 1]);
    const __m512d x2 = _mm512_castps_pd(a[4 * i + 2]), x3 = _mm512_castps_pd(a[4 * i + 3]);
    b[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x0, x2));
    b[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x0, x2));
    b[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(x1, x3));
    b[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(x1, x3));
  }
  HW_UNROLL
  for (int i = 0; i < 4; ++i) {  // b[4 q + i] holds, per 128 bits c, column 4 c + i of rows 4 q .. 4 q + 3
    const F x = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x44), y = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xee);
    const F z = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x44), w = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xee);
    r[i] = _mm512_shuffle_f32x4(x, z, 0x88);
    r[4 + i] = _mm512_shuffle_f32x4(x, z, 0xdd);
    r[8 + i] = _mm512_shuffle_f32x4(y, w, 0x88);
    r[12 + i] = _mm512_shuffle_f32x4(y, w, 0xdd);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
