// The vector layer over AVX2, FMA and F16C. Every vec_*-inl.h has the same names.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "simd/inline.h"

namespace headwise {
namespace HW_ISA {

constexpr int W = 8;  // float lanes of a vector
// vectors of query rows in a micro-kernel: 3 x 4 accumulators, 3 of Q, 1 broadcast of 16 registers
constexpr int kVectors = 3;
constexpr int kUnroll = 4;  // keys (or columns of V) in a micro-kernel

using F = __m256;
using M = __m256;

HW_INLINE F zero() { return _mm256_setzero_ps(); }
HW_INLINE F set1(float x) { return _mm256_set1_ps(x); }
HW_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
HW_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
HW_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
HW_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
HW_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
HW_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
HW_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
// b where either is NaN.
HW_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
// x - floor(x).
HW_INLINE F fraction(F x) { return _mm256_sub_ps(x, _mm256_floor_ps(x)); }
HW_INLINE F abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
HW_INLINE F with_sign(F magnitude, F sign) {
  return _mm256_or_ps(_mm256_and_ps(_mm256_set1_ps(-0.0f), sign), magnitude);
}
HW_INLINE M equal(F x, F y) { return _mm256_cmp_ps(x, y, _CMP_EQ_OQ); }
// True where not x < y: NaN gives true.
HW_INLINE M not_less(F x, F y) { return _mm256_cmp_ps(x, y, _CMP_NLT_UQ); }
HW_INLINE F select(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
// True in the lanes whose word has this bit.
HW_INLINE M lanes_of_bit(const uint32_t* words, int bit) {
  const __m256i one = _mm256_set1_epi32(static_cast<int>(1u << bit));
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(x, one), one));
}
// W words of 32 bits, for random numbers.
using U = __m256i;
HW_INLINE U words_at(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
HW_INLINE U set_words(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
HW_INLINE U exclusive_or(U a, U b) { return _mm256_xor_si256(a, b); }
HW_INLINE M below(U x, U bound) {  // a comparison of signed words, moved by 2^31
  const U sign = set_words(0x80000000u);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(exclusive_or(bound, sign), exclusive_or(x, sign)));
}
// The halves of the products with m.
HW_INLINE void multiply_wide(U x, U m, U& low, U& high) {
  const U even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
// x * 2^floor(t); 0 below 2^-126 and for t = -inf, whatever x.
HW_INLINE F scale2(F x, F t) {
  const __m256i n = _mm256_cvtps_epi32(_mm256_floor_ps(t));
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(not_less(t, _mm256_set1_ps(-126.0f)), _mm256_mul_ps(x, _mm256_castsi256_ps(bits)));
}
HW_INLINE float reduce_add(F x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
HW_INLINE float reduce_max(F x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

HW_INLINE F load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
HW_INLINE F load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
HW_INLINE F load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HW_INLINE void store_f16(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
// Round to nearest even; NaN stays NaN.
HW_INLINE void store_bf16(uint16_t* p, F x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  up = _mm256_srli_epi32(up, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(up, up), 0x88);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// Two vectors of bfloat16 at once: the elements with even and with odd index.
HW_INLINE void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// The greatest exponent so far in each lane, for W floats or 2 W numbers of 16 bits at once; `mask` has the bits of the
// exponent set.
using Peak = __m256i;
HW_INLINE Peak no_peak() { return _mm256_setzero_si256(); }
HW_INLINE Peak join_peak(Peak peak, const float* p, uint32_t mask) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_max_epu32(peak, _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(mask))));
}
HW_INLINE Peak join_peak(Peak peak, const uint16_t* p, uint32_t mask) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_max_epu16(peak, _mm256_and_si256(x, _mm256_set1_epi16(static_cast<short>(mask))));
}
// True if no exponent was that of NaN and Inf; `wide` for floats.
HW_INLINE bool is_finite(Peak peak, uint32_t mask, bool wide) {
  const __m256i hit = wide ? _mm256_cmpeq_epi32(peak, _mm256_set1_epi32(static_cast<int>(mask)))
                           : _mm256_cmpeq_epi16(peak, _mm256_set1_epi16(static_cast<short>(mask)));
  return _mm256_movemask_epi8(hit) == 0;
}

// Eight vectors to the vector of their sums, lane i the sum of x[i]; a fixed tree.
HW_INLINE F reduce_each(const F* x) {
  const F a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const F b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
// Declared without a body, because it is called only for vectors of 16 lanes.
F sums_of_four(const F* x);
F join_fours_by_vector(const F* fours);

// Transposes W rows of W floats.
HW_INLINE void transpose(F* r) {
  F a[8], b[8];
  HW_UNROLL
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  HW_UNROLL
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
  HW_UNROLL
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x31);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
