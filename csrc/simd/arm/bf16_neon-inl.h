// Products of bfloat16 pairs: BFDOT, of Armv8.6 and of many CPUs before. An instruction set without them includes
// bf16_none-inl.h.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasBf16 = true;

// W pairs, one a lane.
HW_INLINE F load_words(const uint32_t* p) { return vreinterpretq_f32_u32(vld1q_u32(p)); }
// The pair at p, in every lane.
HW_INLINE F broadcast_pair(const void* p) {
  uint32_t pair;
  memcpy(&pair, p, sizeof(pair));
  return vreinterpretq_f32_u32(vdupq_n_u32(pair));
}
// acc + the products of W pairs, added up in float32.
HW_INLINE F dot_pairs(F acc, F a, F b) {
  return vbfdotq_f32(acc, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
}
// The high halves of `second` above those of `first`, each rounded half up.
HW_INLINE uint32x4_t join_halves(uint32x4_t first, uint32x4_t second) { return vsriq_n_u32(second, first, 16); }
// W pairs (the first vector in the low half) of two vectors of floats >= 0, rounded half up.
HW_INLINE F pairs_of(F first, F second) {
  const uint32x4_t half = vdupq_n_u32(0x8000);
  const uint32x4_t low = vaddq_u32(vreinterpretq_u32_f32(first), half);
  return vreinterpretq_f32_u32(join_halves(low, vaddq_u32(vreinterpretq_u32_f32(second), half)));
}
HW_INLINE void store_pairs(uint32_t* p, F first, F second) {
  vst1q_u32(p, vreinterpretq_u32_f32(pairs_of(first, second)));
}
// Rounds to nearest even.
HW_INLINE void store_bf16_fast(uint16_t* p, F x) { vst1_u16(p, vreinterpret_u16_bf16(vcvt_bf16_f32(x))); }
// Pairs of neighbours among W floats >= 0, rounded half up: lane 2 i holds the pair of x[2 i] and x[2 i + 1].
HW_INLINE void pair_neighbours(float* x) {
  const uint32x4_t up = vaddq_u32(vreinterpretq_u32_f32(vld1q_f32(x)), vdupq_n_u32(0x8000));
  vst1q_f32(x, vreinterpretq_f32_u32(join_halves(up, vrev64q_u32(up))));
}
// Pairs of two rows of 2 W bfloat16; `place_of_pair` gives the lane of the two results that has element i.
HW_INLINE void load_pairs(const uint16_t* first, const uint16_t* second, F& a, F& b) {
  const uint16x8x2_t pairs = vzipq_u16(vld1q_u16(first), vld1q_u16(second));
  a = vreinterpretq_f32_u16(pairs.val[0]);
  b = vreinterpretq_f32_u16(pairs.val[1]);
}
HW_INLINE int place_of_pair(int i) { return i; }
// W pairs of two rows of bfloat16, in order.
HW_INLINE void interleave(uint32_t* p, const uint16_t* first, const uint16_t* second) {
  vst1q_u32(p, vorrq_u32(vmovl_u16(vld1_u16(first)), vshll_n_u16(vld1_u16(second), 16)));
}

}  // namespace HW_ISA
}  // namespace headwise
