// For instruction sets without tiles of products: the names of amx-inl.h without a body. The kernels call them only
// where `kHasAmx` is true; a call elsewhere does not link.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasAmx = false;

class TileUnit {};

template <int Tile>
void tile_zero();
template <int Tile>
void tile_load(const void* p, int64_t bytes);
template <int Tile>
void tile_load_once(const void* p, int64_t bytes);
template <int Tile>
void tile_store(void* p, int64_t bytes);
template <int Sum, int First, int Second>
void tile_times();
template <int Sum, int First, int Second>
void tile_times_bytes();
F load_halves(const uint16_t* p, int64_t n);
void exchange_halves(F& first, F& second);
void columns_of_sums(const float* x, F* column);
void split_weights(F weights, uint32_t* to, int64_t pitch);
template <int Places>
void split_digits(F x, uint32_t* to, int64_t pitch);
template <int Digits>
void store_each_digit(int8_t* to, int64_t pitch, F x);
F floats_of_ints(F x);
template <int N>
void interleave_words(F* x);
template <int N>
void store_parts(uint32_t* to, int64_t pitch, F x);
F round_two(F first, F second);
void store_two_rows(uint16_t* first, uint16_t* second, F two);
F pairs_of_two(F two);

}  // namespace HW_ISA
}  // namespace headwise
