// Codes of 4 and 3 bits by their definition, written a second time: levels of packed rows, and what a token may become.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "fuzz/drawn_tensor.h"
#include "fuzz/fake_torch.h"

namespace fuzz {

// The levels of a packed row of n codes, whose bytes begin at `row`.
std::vector<double> levels_of(const double* row, int bits, int64_t n);

// The levels of all rows of a tensor, each of `width` codes.
std::vector<double> levels_of(const DrawnTensor& t, int bits, int64_t width);

// Any rotation (n, n), or its inverse, in the form that the kernel reads, each row padded to a multiple of 16.
fake::Tensor rotation_of(int64_t n, bool inverse = false);

// Returns an empty text, or in which way the packed row and the scale are no code of the token.
std::string compare_token(const std::vector<float>& token, const double* row, double scale, int bits);

}  // namespace fuzz
