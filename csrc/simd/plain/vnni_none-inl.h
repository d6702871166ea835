// For instruction sets without dot products of bytes: the names of vnni_avx512-inl.h without a body. The kernels call
// them only where `kHasVnni` is true; a call elsewhere does not link.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasVnni = false;
constexpr int kBytes = 2 * W;
constexpr int kFours = 1;

struct I {};
I set_int(int32_t x);
I load_bytes(const int8_t* p, int64_t n);
I load_all(const int8_t* p);
I add_int(I a, I b);
I add_128(I bytes);
I broadcast_bytes(const int8_t* p);
I dot_bytes(I acc, I x_plus_128, I digits);
F floats_of(I x);
void transpose_four(I* x);
I sum_fours(const I* x);
template <int First, int Count>
void interleave_bytes(const I* row, I* out);
int place_of_column(int c);
template <int Digits>
void store_digits(int8_t* p, I& bias, F x);
void sum_by_digit(int32_t* p, I x);

}  // namespace HW_ISA
}  // namespace headwise
