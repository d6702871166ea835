// Dot products of bytes: USDOT, of Armv8.6's integer matrix instructions. Instruction sets without them include
// vnni_none-inl.h. An `I` holds 16 bytes, or 4 integers of 32 bits. A product takes 128 + x for one factor and x for
// the other, as on x86, where one factor is unsigned.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasVnni = true;
constexpr int kBytes = 16;  // of a vector
constexpr int kFours = 1;   // of keys in a vector of scores

using I = int32x4_t;
HW_INLINE I of_bytes(int8x16_t x) { return vreinterpretq_s32_s8(x); }
HW_INLINE int8x16_t bytes_of(I x) { return vreinterpretq_s8_s32(x); }

HW_INLINE I set_int(int32_t x) { return vdupq_n_s32(x); }
// The first n bytes; zeros behind them.
HW_INLINE I load_bytes(const int8_t* p, int64_t n) {
  if (n >= kBytes) return of_bytes(vld1q_s8(p));
  int8_t first[kBytes] = {0};
  if (n > 0) memcpy(first, p, static_cast<size_t>(n));
  return of_bytes(vld1q_s8(first));
}
HW_INLINE I load_all(const int8_t* p) { return of_bytes(vld1q_s8(p)); }
HW_INLINE I add_int(I a, I b) { return vaddq_s32(a, b); }
HW_INLINE I add_128(I bytes) { return veorq_s32(bytes, vdupq_n_s32(static_cast<int32_t>(0x80808080u))); }
// The four bytes at p, in every lane.
HW_INLINE I broadcast_bytes(const int8_t* p) {
  int32_t x;
  memcpy(&x, p, sizeof(x));
  return vdupq_n_s32(x);
}
// acc[i] + the sum over the four bytes of lane i of (128 + x) * digit.
HW_INLINE I dot_bytes(I acc, I x_plus_128, I digits) {
  return vusdotq_s32(acc, vreinterpretq_u8_s32(x_plus_128), bytes_of(digits));
}
HW_INLINE F floats_of(I x) { return vcvtq_f32_s32(x); }
// Transposes four rows of fours of bytes: lane r of x[i] is the four i of row r.
HW_INLINE void transpose_four(I* x) {
  F r[W];
  HW_UNROLL
  for (int i = 0; i < W; ++i) r[i] = vreinterpretq_f32_s32(x[i]);
  transpose(r);
  HW_UNROLL
  for (int i = 0; i < W; ++i) x[i] = vreinterpretq_s32_f32(r[i]);
}
// For vectors of several times 16 bytes this sums their parts.
HW_INLINE I sum_fours(const I* x) { return x[0]; }
// Interleaves four rows of 16 bytes: a lane holds the four bytes of a column. Lane i of vector m is column 4 m + i.
// Makes `Count` of the four vectors, from `First` on.
template <int First, int Count>
HW_INLINE void interleave_bytes(const I* row, I* out) {
  HW_UNROLL
  for (int i = 0; i < Count; ++i) {
    const int half = (First + i) / 2;
    const int16x8_t ab = vreinterpretq_s16_s8(vzipq_s8(bytes_of(row[0]), bytes_of(row[1])).val[half]);
    const int16x8_t cd = vreinterpretq_s16_s8(vzipq_s8(bytes_of(row[2]), bytes_of(row[3])).val[half]);
    out[i] = vreinterpretq_s32_s16(vzipq_s16(ab, cd).val[(First + i) % 2]);
  }
}
HW_INLINE int place_of_column(int c) { return c; }
// Rounds W floats below 127.5 * 256^(Digits - 1) in magnitude to integers and stores their digits in base 256, from
// -128 to 127: for each four floats first the lowest digits, then the next ones, then filler. Subtracts 128 times the
// sum of the digits from `bias`.
template <int Digits>
HW_INLINE void store_digits(int8_t* p, I& bias, F x) {
  static const uint8_t order[kBytes] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 255, 255, 255, 255};
  const I middle = vdupq_n_s32(Digits == 2 ? 0x8080 : 0x808080);
  const I digits = veorq_s32(vaddq_s32(vcvtnq_s32_f32(x), middle), middle);
  const int8x16_t by_digit = vqtbl1q_s8(bytes_of(digits), vld1q_u8(order));
  vst1q_s8(p, by_digit);
  bias = vsubq_s32(bias, dot_bytes(set_int(0), add_128(set_int(0)), of_bytes(by_digit)));
}
// The sums by digit: one lane each.
HW_INLINE void sum_by_digit(int32_t* p, I x) { vst1q_s32(p, x); }

}  // namespace HW_ISA
}  // namespace headwise
