// Products of bfloat16 pairs: AVX512_BF16. Instruction sets without them include bf16_none-inl.h.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasBf16 = true;

// W pairs, one a lane.
HW_INLINE F load_words(const uint32_t* p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
// The pair at p, in every lane.
HW_INLINE F broadcast_pair(const void* p) {
  uint32_t pair;
  memcpy(&pair, p, sizeof(pair));
  return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair)));
}
// acc + the products of W pairs, added up in float32.
HW_INLINE F dot_pairs(F acc, F a, F b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
// W pairs (the first vector in the low half) of two vectors of floats >= 0, rounded half up.
HW_INLINE F pairs_of(F first, F second) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_add_epi32(_mm512_castps_si512(first), half);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
  // Bytes are shuffled where a shift would do, because on Intel's CPUs shifts take the only port that multiplies
  // besides AMX.
  const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(high, 0x3333333333333333, low, upper));
}
HW_INLINE void store_pairs(uint32_t* p, F first, F second) {
  _mm512_storeu_si512(p, _mm512_castps_si512(pairs_of(first, second)));
}
// Rounds to nearest even, as the instruction does: denormals become 0.
HW_INLINE void store_bf16_fast(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
// Pairs of neighbours among W floats >= 0, rounded half up: lane 2 i holds the pair of x[2 i] and x[2 i + 1].
HW_INLINE void pair_neighbours(float* x) {
  const __m512i up = _mm512_add_epi32(_mm512_loadu_si512(x), _mm512_set1_epi32(0x8000));
  const __m512i low = _mm512_srli_epi32(up, 16), high = _mm512_srli_epi64(up, 32);
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  _mm512_storeu_si512(x, _mm512_ternarylogic_epi32(mask, high, low, 0xEA));  // (mask & high) | low
}
// Pairs of two rows of 2 W bfloat16; `place_of_pair` gives the lane of the two results that has element i.
HW_INLINE void load_pairs(const uint16_t* first, const uint16_t* second, F& a, F& b) {
  const __m512i x = _mm512_loadu_si512(first), y = _mm512_loadu_si512(second);
  a = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y));
  b = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y));
}
HW_INLINE int place_of_pair(int i) { return i % 8 / 4 * 16 + i / 8 * 4 + i % 4; }
// W pairs of two rows of bfloat16, in order.
HW_INLINE void interleave(uint32_t* p, const uint16_t* first, const uint16_t* second) {
  const __m512i lo = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  const __m512i hi = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
  _mm512_storeu_si512(p, _mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
}

}  // namespace HW_ISA
}  // namespace headwise
