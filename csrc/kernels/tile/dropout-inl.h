// Dropout of the weights of a tile: each is zeroed or scaled up, as the counter-based generator decides for its
// position.
#pragma once

#include "kernels/mask/query_rows-inl.h"
#include "simd/philox.h"

namespace headwise {
namespace HW_ISA {

// The factor of a weight that is kept.
HW_INLINE float kept_factor(const Call& p) { return p.dropout < 1.0f ? 1.0f / (1.0f - p.dropout) : 0.0f; }

// Row r's plane, b * H + h.
HW_INLINE int64_t dropout_plane(const Call& p, int64_t b, const QueryRows& rows, int r) {
  return b * (p.seed.heads == 0 ? p.H : p.seed.heads) + p.seed.head + rows.h[r];
}

// x[row][key]: a row at a time.
template <int RowStep>
static inline void drop_rows(const Call& p, int64_t b, const QueryRows& rows, int64_t j0, int n, float* x) {
  const uint32_t threshold = dropout_threshold(p.dropout);
  const float up = kept_factor(p);
  for (int r = 0; r < rows.n; ++r) {
    const int64_t plane = dropout_plane(p, b, rows, r);
    Philox words = {};
    for (int j = 0; j < n; ++j) {
      const int64_t key = p.seed.key + j0 + j;
      if (j == 0 || key % 4 == 0) words = dropout_words(p.seed.value, plane, p.seed.query + rows.t[r], key / 4);
      x[int64_t{r} * RowStep + j] *= words.word[key % 4] < threshold ? 0.0f : up;
    }
  }
}

// `philox` for a vector of counters: word[0] to word[3] in, the random words out.
HW_INLINE void philox_lanes(uint64_t seed, U* word) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  const U m0 = set_words(kPhiloxFirst), m1 = set_words(kPhiloxSecond);
  HW_UNROLL
  for (int round = 0; round < 10; ++round) {
    U low0, high0, low1, high1;
    multiply_wide(word[0], m0, low0, high0);
    multiply_wide(word[2], m1, low1, high1);
    word[0] = exclusive_or(exclusive_or(high1, word[1]), set_words(k0));
    word[1] = low1;
    word[2] = exclusive_or(exclusive_or(high0, word[3]), set_words(k1));
    word[3] = low0;
    k0 += kPhiloxStep0;
    k1 += kPhiloxStep1;
  }
}

// x[key][row]: W rows at once, four keys at a time. The copies of the last row behind it get arbitrary factors.
template <int KeyStep>
static inline void drop_columns(const Call& p, int64_t b, const QueryRows& rows, int64_t j0, int n, float* x) {
  const U threshold = set_words(dropout_threshold(p.dropout));
  const F up = set1(kept_factor(p));
  for (int first = 0; first < rows.n; first += W) {
    uint32_t query[W], low[W], high[W];
    for (int i = 0; i < W; ++i) {
      const uint64_t plane = static_cast<uint64_t>(dropout_plane(p, b, rows, first + i));
      query[i] = static_cast<uint32_t>(p.seed.query + rows.t[first + i]);
      low[i] = static_cast<uint32_t>(plane);
      high[i] = static_cast<uint32_t>(plane >> 32);
    }
    for (int j = 0; j < n;) {
      const int64_t key = p.seed.key + j0 + j;
      U word[4] = {set_words(static_cast<uint32_t>(key / 4)), words_at(query), words_at(low), words_at(high)};
      philox_lanes(p.seed.value, word);
      for (int64_t w = key % 4; w < 4 && j < n; ++w, ++j) {
        float* to = x + int64_t{j} * KeyStep + first;
        store(to, mul(load(to), select(below(word[w], threshold), zero(), up)));
      }
    }
  }
}

template <int RowStep, int KeyStep>
static void drop_tile(const Call& p, int64_t b, const QueryRows& rows, int64_t j0, int n, float* x) {
  if constexpr (RowStep == 1) {
    drop_columns<KeyStep>(p, b, rows, j0, n, x);
  } else {
    drop_rows<RowStep>(p, b, rows, j0, n, x);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
