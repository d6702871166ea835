// For instruction sets without products of bfloat16 pairs: the names of bf16_avx512-inl.h without a body. The kernels
// call them only where `kHasBf16` is true; a call elsewhere does not link.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasBf16 = false;

F load_words(const uint32_t* p);
F broadcast_pair(const void* p);
F dot_pairs(F acc, F a, F b);
F pairs_of(F first, F second);
void store_pairs(uint32_t* p, F first, F second);
void store_bf16_fast(uint16_t* p, F x);
void pair_neighbours(float* x);
void load_pairs(const uint16_t* first, const uint16_t* second, F& a, F& b);
int place_of_pair(int i);
void interleave(uint32_t* p, const uint16_t* first, const uint16_t* second);

}  // namespace HW_ISA
}  // namespace headwise
