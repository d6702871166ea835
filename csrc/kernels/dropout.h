// Dropout of the weights of a tile: zeroed or scaled up, as the counter-based generator decides for their places.
#pragma once

#include "kernels/query_rows.h"
#include "simd/philox.h"

namespace headwise {
namespace HW_ISA {

template <int RowStep, int KeyStep>
static void drop_tile(const Problem& p, int64_t b, const QueryRows& rows, int64_t j0, int n, float* x) {
  const uint32_t threshold = dropout_threshold(p.dropout);
  const float up = p.dropout < 1.0f ? 1.0f / (1.0f - p.dropout) : 0.0f;
  for (int r = 0; r < rows.n; ++r) {
    const int64_t plane = b * (p.seed.heads == 0 ? p.H : p.seed.heads) + p.seed.head + rows.h[r];
    Philox words = {};
    for (int j = 0; j < n; ++j) {
      const int64_t key = p.seed.key + j0 + j;
      if (j == 0 || key % 4 == 0) words = dropout_words(p.seed.value, plane, p.seed.query + rows.t[r], key / 4);
      float& weight = x[int64_t{r} * RowStep + int64_t{j} * KeyStep];
      weight *= words.word[key % 4] < threshold ? 0.0f : up;
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
