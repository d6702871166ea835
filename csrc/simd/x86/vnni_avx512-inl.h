// Dot products of bytes: AVX512_VNNI. Instruction sets without them include vnni_none-inl.h. An `I` holds 64 bytes, or
// 16 integers of 32 bits. A product takes 128 + x for one factor and x for the other, because one factor of VPDPBUSD is
// unsigned.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasVnni = true;
constexpr int kBytes = 64;  // of a vector
constexpr int kFours = 4;   // of keys in a vector of scores

using I = __m512i;
HW_INLINE I set_int(int32_t x) { return _mm512_set1_epi32(x); }
// The first n bytes; zeros behind them.
HW_INLINE I load_bytes(const int8_t* p, int64_t n) {
  return _mm512_maskz_loadu_epi8(_cvtu64_mask64(n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1), p);
}
HW_INLINE I load_all(const int8_t* p) { return _mm512_loadu_si512(p); }
HW_INLINE I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
HW_INLINE I add_128(I bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80))); }
// The four bytes at p, in every lane.
HW_INLINE I broadcast_bytes(const int8_t* p) {
  int32_t x;
  memcpy(&x, p, sizeof(x));
  return _mm512_set1_epi32(x);
}
// Returns acc[i] + the sum over the four bytes of lane i of (128 + x) * digit. It is inline assembly, because with the
// intrinsic GCC 12 copies the accumulators, which takes twice the time.
HW_INLINE I dot_bytes(I acc, I x_plus_128, I digits) {
#if defined(__GNUC__)
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(x_plus_128), "v"(digits));
  return acc;
#else
  return _mm512_dpbusd_epi32(acc, x_plus_128, digits);
#endif
}
HW_INLINE F floats_of(I x) { return _mm512_cvtepi32_ps(x); }
// Transposes four rows of fours of bytes within every 16 bytes: lane 4 c + r of x[i] is the four 4 c + i of row r.
HW_INLINE void transpose_four(I* x) {
  const I a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
  const I c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi64(a, c);
  x[1] = _mm512_unpackhi_epi64(a, c);
  x[2] = _mm512_unpacklo_epi64(b, d);
  x[3] = _mm512_unpackhi_epi64(b, d);
}
// Lane 4 i + r: the sum of the lanes r, 4 + r, 8 + r and 12 + r of x[i].
HW_INLINE I sum_fours(const I* x) {
  const I a = _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x44), _mm512_shuffle_i32x4(x[0], x[1], 0xee));
  const I b = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2], x[3], 0x44), _mm512_shuffle_i32x4(x[2], x[3], 0xee));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}
// Interleaves four rows of 64 bytes: a lane holds the four bytes of a column. Lane 4 q + i of vector m is column
// 16 q + 4 m + i. Makes `Count` of the four vectors, from `First` on.
template <int First, int Count>
HW_INLINE void interleave_bytes(const I* row, I* out) {
  HW_UNROLL
  for (int i = 0; i < Count; ++i) {
    const bool low = First + i < 2;
    const I ab = low ? _mm512_unpacklo_epi8(row[0], row[1]) : _mm512_unpackhi_epi8(row[0], row[1]);
    const I cd = low ? _mm512_unpacklo_epi8(row[2], row[3]) : _mm512_unpackhi_epi8(row[2], row[3]);
    out[i] = (First + i) % 2 == 0 ? _mm512_unpacklo_epi16(ab, cd) : _mm512_unpackhi_epi16(ab, cd);
  }
}
HW_INLINE int place_of_column(int c) { return c % 16 / 4 * 16 + c / 16 * 4 + c % 4; }
// Rounds W floats below 127.5 * 256^(Digits - 1) in magnitude to integers and stores their digits in base 256, from
// -128 to 127: for each four floats first the lowest digits, then the next ones, then filler. Subtracts 128 times the
// sum of the digits from `bias`.
template <int Digits>
HW_INLINE void store_digits(int8_t* p, I& bias, F x) {
  const I middle = _mm512_set1_epi32(Digits == 2 ? 0x8080 : 0x808080);
  const I digits = _mm512_xor_si512(_mm512_add_epi32(_mm512_cvtps_epi32(x), middle), middle);
  const I by_digit = _mm512_shuffle_epi8(
      digits, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1)));
  _mm512_storeu_si512(p, by_digit);
  bias = _mm512_sub_epi32(bias, dot_bytes(_mm512_setzero_si512(), add_128(_mm512_setzero_si512()), by_digit));
}
// The sums of the lanes i, 4 + i, 8 + i and 12 + i, for i from 0 to 3.
HW_INLINE void sum_by_digit(int32_t* p, I x) {
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), sum);
}

}  // namespace HW_ISA
}  // namespace headwise
