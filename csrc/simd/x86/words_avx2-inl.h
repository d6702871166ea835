// Products of words of 16 bits, as which int8 numbers are multiplied without conversion to floats. A vector of floats
// holds 2 W words, or W integers of 32 bits.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasWords = true;

HW_INLINE __m256i ints_of(F x) { return _mm256_castps_si256(x); }
// 2 W int8 numbers as words.
HW_INLINE F load_words(const int8_t* p) {
  return _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// acc[i] + the sum of the products of two words each. The addition is inline assembly, because GCC would add products
// to each other, for which the registers do not suffice.
HW_INLINE F dot_words(F acc, F a, F b) {
  const __m256i products = _mm256_madd_epi16(ints_of(a), ints_of(b));
#if defined(__GNUC__)
  asm volatile("vpaddd %1, %0, %0" : "+x"(acc) : "x"(products));
  return acc;
#else
  return _mm256_castsi256_ps(_mm256_add_epi32(ints_of(acc), products));
#endif
}
// The sums of `dot_words` as floats.
HW_INLINE F floats_of_words(F sums) { return _mm256_cvtepi32_ps(ints_of(sums)); }
// Eight vectors of sums to the vector of their totals, lane i that of x[i]; only the last addition is in floats.
HW_INLINE F total_of_words(const F* x) {
  __m256i two[4];
  HW_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m256i a = ints_of(x[2 * i]), b = ints_of(x[2 * i + 1]);
    two[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  }
  F four[2];
  HW_UNROLL
  for (int i = 0; i < 2; ++i) {
    const __m256i a = two[2 * i], b = two[2 * i + 1];
    four[i] = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31));
}
// Pairs of two rows of 2 W numbers; `place_of_word` gives the lane of the two results that has element i.
HW_INLINE void load_word_pairs(const int8_t* first, const int8_t* second, F& a, F& b) {
  const __m256i x = ints_of(load_words(first)), y = ints_of(load_words(second));
  a = _mm256_castsi256_ps(_mm256_unpacklo_epi16(x, y));
  b = _mm256_castsi256_ps(_mm256_unpackhi_epi16(x, y));
}
HW_INLINE int place_of_word(int i) { return i % 8 / 4 * W + i / 8 * 4 + i % 4; }
// Stores W whole floats as words.
HW_INLINE void store_words(uint16_t* p, F x) {
  const __m256i ints = _mm256_cvtps_epi32(x);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(ints, ints), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(words));
}
// Pairs of neighbours among W floats, rounded to words: lane 2 i holds the pair of x[2 i] and x[2 i + 1].
HW_INLINE F pair_words(F x) {
  const __m256i ints = _mm256_cvtps_epi32(x);
  const __m256i odd = _mm256_slli_epi32(_mm256_srli_epi64(ints, 32), 16);
  return _mm256_castsi256_ps(_mm256_blend_epi16(ints, odd, 0xaa));
}

}  // namespace HW_ISA
}  // namespace headwise
