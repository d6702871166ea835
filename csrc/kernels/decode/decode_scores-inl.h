// The scores of decode in float arithmetic: products of few rows with the keys of a tile.
#pragma once

#include "kernels/decode/prefetch-inl.h"
#include "kernels/tile/key_tiles-inl.h"

namespace headwise {
namespace HW_ISA {

// Whether R rows are computed in passes of four, because the sums and operands of more do not fit into the registers.
template <int R>
constexpr bool kInFours = R == 8 && W == 8;

struct DecodeScratch {
  float* query;   // [row][D up to a step], in the reader's order
  float* sums;    // [row][V up to a step], in the reader's order
  float* scores;  // [row][key of the tile], then weights; products of words with the lowest digits behind them
  char *key_copy, *value_copy;
  float* line;  // a row as floats
  QueryRows* rows;
  float row_max[kDecodeRows], row_sum[kDecodeRows], rescale[W] = {0};
  // In integer arithmetic: the digits of queries and weights, their biases, and the units of their last digits.
  int8_t *query_digits, *weight_digits;
  int32_t query_bias[kDecodeRows * 4] = {0}, weight_bias[kDecodeRows * 4];
  float query_unit[kDecodeRows] = {0}, weight_unit[kDecodeRows];

  DecodeScratch(Arena& arena, const Call& p) {
    const int64_t padded_D = round_up(p.D, kMaxStep), padded_V = round_up(p.V, kMaxStep);
    query = arena.take<float>(kDecodeRows * padded_D);
    sums = arena.take<float>(kDecodeRows * padded_V);
    scores = arena.take<float>((kHasWords ? 2 : 1) * kDecodeRows * kInt8Tile);
    key_copy = arena.take<char>(kInt8Tile * padded_D * 4);
    value_copy = arena.take<char>(kInt8Tile * padded_V * 4);
    line = arena.take<float>(max(padded_D, padded_V));
    rows = arena.take<QueryRows>(1);
    query_digits = arena.take<int8_t>(kHasVnni ? kDecodeRows * padded_D * kQueryBytes<3> : 0);
    weight_digits = arena.take<int8_t>(kHasVnni ? kDecodeRows * kInt8Tile * kDigitBytes : 0);
  }
};

// Scores of U keys and R rows, from `row` on, U R = W sums: side by side in `out`, row by row. If there are only n < U
// keys, the last one is read in the place of each that is missing.
template <class Read, int R, bool Whole, class Lines>
static inline void key_dots(const float* HW_RESTRICT query, int row, int64_t padded_D,
                            const typename Read::T* HW_RESTRICT key, int64_t stride, int n, Lines& prefetcher,
                            float* HW_RESTRICT out) {
  constexpr int U = W / R;
  F acc[W];
  HW_UNROLL
  for (int i = 0; i < W; ++i) acc[i] = zero();
  for (int64_t d = 0; d < padded_D; d += 2 * W) {
    const auto load_key = [&](int u, F& a, F& b) HW_LAMBDA {
      Read::load_key(key + (Whole ? u : min(u, n - 1)) * stride + d, a, b);
      prefetcher.step(u);
    };
    const auto load_query = [&](int r, F& a, F& b)
                                HW_LAMBDA { load_query_once<Read>(query, (row + r) * padded_D + d, a, b); };
    // The fewer of rows and keys stay in registers.
    constexpr int N = R <= U ? R : U;
    F a[N], b[N], c, e;
    HW_UNROLL
    for (int i = 0; i < N; ++i) R <= U ? load_query(i, a[i], b[i]) : load_key(i, a[i], b[i]);
    HW_UNROLL
    for (int i = 0; i < W / N; ++i) {
      R <= U ? load_key(i, c, e) : load_query(i, c, e);
      HW_UNROLL
      for (int k = 0; k < N; ++k) {
        F& sum = acc[R <= U ? k * U + i : i * U + k];
        sum = R <= U ? Read::times(sum, a[k], b[k], c, e) : Read::times(sum, c, e, a[k], b[k]);
      }
    }
  }
  store(out, Read::total_each(acc));
}

// Q K^T of R rows, from `row` on, and the keys from <= j < n in float arithmetic.
template <class Read, int R, class Lines>
HW_INLINE void key_scores(const DecodeScratch& s, int row, int from, int64_t padded_D, const typename Read::T* k,
                          int64_t stride, int n, Lines& prefetcher) {
  constexpr int U = W / R;
  float* scores = s.scores + row * Read::kTile;
  float out[W];
  for (int j = from; j < n; j += U) {
    if (j + U <= n) {
      key_dots<Read, R, true>(s.query, row, padded_D, k + j * stride, stride, U, prefetcher, out);
    } else {
      key_dots<Read, R, false>(s.query, row, padded_D, k + j * stride, stride, n - j, prefetcher, out);
    }
    for (int r = 0; r < R; ++r) memcpy(scores + r * Read::kTile + j, out + r * U, U * sizeof(float));
  }
}

// The same for four rows of `Steps` vectors, which stay in registers. Each key is multiplied completely, so that keys
// are read in the order of memory. The sums have the bits of `key_dots`.
template <class Read, int Steps, class Lines>
HW_INLINE void key_scores_in_order(const DecodeScratch& s, int row, const typename Read::T* k, int64_t stride, int n,
                                   Lines& prefetcher) {
  constexpr int R = 4;
  F query[R][Steps], unused;
  HW_UNROLL
  for (int i = 0; i < R * Steps; ++i) {
    Read::load_query(s.query, (row * Steps + i) * 2 * W, query[i / Steps][i % Steps], unused);
  }
  int j = 0;
  for (; j + 4 <= n; j += 4) {
    F fours[4];
    HW_UNROLL
    for (int u = 0; u < 4; ++u) {
      const auto* key = k + (j + u) * stride;
      F acc[R];
      HW_UNROLL
      for (int r = 0; r < R; ++r) acc[r] = zero();
      HW_UNROLL
      for (int d = 0; d < Steps; ++d) {
        F x;
        Read::load_key(key + d * 2 * W, x, unused);
        prefetcher.step(u * Steps + d);
        HW_UNROLL
        for (int r = 0; r < R; ++r) acc[r] = Read::times(acc[r], query[r][d], unused, x, unused);
      }
      fours[u] = sums_of_four(acc);
    }
    float by_row[W];
    store(by_row, join_fours_by_vector(fours));
    for (int r = 0; r < R; ++r) {
      memcpy(s.scores + (row + r) * Read::kTile + j, by_row + r * 4, 4 * sizeof(float));
    }
  }
  if (j < n) key_scores<Read, R>(s, row, j, Steps * 2 * W, k, stride, n, prefetcher);
}

// The same of one row, for readers that give two vectors a step. Behind the n-th key there are further scores.
template <class Read, int Steps, class Lines>
HW_INLINE void row_scores_in_order(const DecodeScratch& s, const typename Read::T* k, int64_t stride, int n,
                                   Lines& prefetcher) {
  F query[Steps][2];
  HW_UNROLL
  for (int i = 0; i < Steps; ++i) Read::load_query(s.query, i * 2 * W, query[i][0], query[i][1]);
  const auto keys = [&](int j, auto whole) HW_LAMBDA {
    F acc[W];
    HW_UNROLL
    for (int u = 0; u < W; ++u) {
      const auto* key = k + (j + (decltype(whole)::value ? u : min(u, n - 1 - j))) * stride;
      acc[u] = zero();
      HW_UNROLL
      for (int d = 0; d < Steps; ++d) {
        F a, b;
        Read::load_key(key + d * 2 * W, a, b);
        prefetcher.step();
        acc[u] = Read::times(acc[u], query[d][0], query[d][1], a, b);
      }
    }
    store(s.scores + j, reduce_each(acc));
  };
  int j = 0;
  for (; j + W <= n; j += W) keys(j, Constant<1>{});
  if (j < n) keys(j, Constant<0>{});
}

// Forwards every second step, so that two passes over a tile together prefetch the next one. The compiler knows the
// step numbers, so that no step has a branch.
template <class Lines>
class EverySecond {
 public:
  HW_MEMBER explicit EverySecond(Lines& lines) : lines_(lines) {}
  HW_MEMBER void step(int i) {
    if (i % 2 == 0) lines_.step();
  }

 private:
  Lines& lines_;
};

// Q K^T of all rows, four rows at a time, in the order of memory if their queries fit into the registers.
template <class Read, int R, class Lines>
HW_INLINE void scores_in_fours(const DecodeScratch& s, int64_t padded_D, const typename Read::T* k, int64_t stride,
                               int n, Lines& prefetcher) {
  const auto four = [&](int row, auto& lines) HW_LAMBDA {
    if constexpr (Read::kPairs && W == 16) {
      if (padded_D == 4 * W) return key_scores_in_order<Read, 2>(s, row, k, stride, n, lines);
      if (padded_D == 6 * W) return key_scores_in_order<Read, 3>(s, row, k, stride, n, lines);
      if (padded_D == 8 * W) return key_scores_in_order<Read, 4>(s, row, k, stride, n, lines);
    }
    key_scores<Read, 4>(s, row, 0, padded_D, k, stride, n, lines);
  };
  if constexpr (R == 4) return four(0, prefetcher);
  EverySecond first(prefetcher), second(prefetcher);
  four(0, first);
  four(4, second);
}

template <class Read, int R>
static inline void decode_products(const DecodeScratch& s, int64_t padded_D, const KeyRows& key, int n,
                                   Prefetcher<Read>& prefetcher) {
  const auto* k = reinterpret_cast<const typename Read::T*>(key.data);
  prefetcher.in_registers([&](auto& lines) HW_LAMBDA {
    if constexpr (kInOrder<Read> && R == 1 && !Read::kPairs) {
      if (padded_D == 4 * W) return row_scores_in_order<Read, 2>(s, k, key.stride, n, lines);
      if (padded_D == 8 * W) return row_scores_in_order<Read, 4>(s, k, key.stride, n, lines);
    }
    if constexpr ((kInOrder<Read> && R >= 4) || kInFours<R>) {
      scores_in_fours<Read, R>(s, padded_D, k, key.stride, n, lines);
    } else {
      key_scores<Read, R>(s, 0, 0, padded_D, k, key.stride, n, lines);
    }
  });
}

struct NoPrefetch {
  HW_MEMBER void step(int = 0) {}
};

// From products of words to scores: adds those with the lowest digits, and multiplies by units and scales of keys.
template <class Read, int R>
static inline void finish_words(const DecodeScratch& s, int64_t padded_D, const KeyRows& key, int n,
                                const float* HW_RESTRICT scales) {
  constexpr int T = Read::kTile;
  if constexpr (Read::kDigits == 3) {
    constexpr int Some = R < 4 ? R : 4;
    const auto* k = reinterpret_cast<const typename Read::T*>(key.data);
    NoPrefetch none;
    for (int r = 0; r < R; r += Some) {
      key_scores<Read, Some>(s, kDecodeRows + r, 0, padded_D, k, key.stride, n, none);
    }
  }
  for (int r = 0; r < R; ++r) {
    const F unit = set1(s.query_unit[r]);
    for (int j = 0; j < n; j += W) {
      float* at = s.scores + r * T + j;
      F x = load(at);
      if constexpr (Read::kDigits == 3) x = fma(x, set1(256.0f), load(at + kDecodeRows * T));
      store(at, mul(mul(x, unit), load(scales + j)));
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
