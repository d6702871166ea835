// For instruction sets that do not multiply int8 numbers as words: the names of words_avx2-inl.h without a body. The
// kernels call them only where `kHasWords` is true; a call elsewhere does not link.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasWords = false;

F load_words(const int8_t* p);
F dot_words(F acc, F a, F b);
F floats_of_words(F sums);
F total_of_words(const F* x);
void load_word_pairs(const int8_t* first, const int8_t* second, F& a, F& b);
int place_of_word(int i);
void store_words(uint16_t* p, F x);
F pair_words(F x);

}  // namespace HW_ISA
}  // namespace headwise
