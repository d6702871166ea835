// The softmax of decode, products in integer arithmetic, and products with the values of a tile.
#pragma once

#include "kernels/decode/decode_scores-inl.h"

namespace headwise {
namespace HW_ISA {

// Computes sums[row][columns] = sums * rescale + weights V, for X pairs of vectors of columns.
template <class Read, int R, int X, class Lines>
static inline void value_columns(const float* HW_RESTRICT weights, int n, const typename Read::T* HW_RESTRICT value,
                                 int64_t stride, Lines& prefetcher, const float* unit, const float* rescale,
                                 float* HW_RESTRICT sums, int64_t padded_V) {
  F acc[R][2 * X];
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    HW_UNROLL
    for (int x = 0; x < 2 * X; ++x) acc[r][x] = zero();
  }
  if constexpr (Read::kPairs) {
    for (int j = 0; j < n; j += 2) {  // the weight beyond the last key is 0
      const auto* first = value + j * stride;
      const auto* second = j + 1 < n ? first + stride : first;
      HW_UNROLL
      for (int x = 0; x < X; ++x) {
        F a, b;
        Read::load_values(first + x * 2 * W, second + x * 2 * W, a, b);
        prefetcher.step(2 * x);
        prefetcher.step(2 * x + 1);
        HW_UNROLL
        for (int r = 0; r < R; ++r) {
          const F w = set1(weights[r * Read::kTile + j]);
          acc[r][2 * x] = Read::times(acc[r][2 * x], w, w, a, a);
          acc[r][2 * x + 1] = Read::times(acc[r][2 * x + 1], w, w, b, b);
        }
      }
    }
  } else {
    for (int j = 0; j < n; ++j) {
      HW_UNROLL
      for (int x = 0; x < X; ++x) {
        F a, b;
        Read::load2(value + j * stride + x * 2 * W, a, b);
        prefetcher.step(x);
        HW_UNROLL
        for (int r = 0; r < R; ++r) {
          const F w = set1(weights[r * Read::kTile + j]);
          acc[r][2 * x] = fma(w, a, acc[r][2 * x]);
          acc[r][2 * x + 1] = fma(w, b, acc[r][2 * x + 1]);
        }
      }
    }
  }
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    const F factor = set1(rescale[r]);
    HW_UNROLL
    for (int x = 0; x < 2 * X; ++x) {
      float* to = sums + r * padded_V + x * W;
      F sum = Read::floats_of(acc[r][x]);
      if constexpr (Read::kWords) sum = mul(sum, set1(unit[r]));
      store(to, fma(load(to), factor, sum));
    }
  }
}

// The online softmax along the keys of R rows. The rows are interleaved, so that the CPU computes one during the
// latency of another.
template <int R, int Tile>
static inline void softmax_rows(float* HW_RESTRICT x, int n, float c, float* HW_RESTRICT row_max,
                                float* HW_RESTRICT row_sum, float* HW_RESTRICT rescale) {
  const int padded = static_cast<int>(round_up(n, W));
  F peak[R], sum[R];
  for (int r = 0; r < R; ++r) {
    for (int j = n; j < padded; ++j) x[r * Tile + j] = -kInf;
    peak[r] = load(x + r * Tile);
    sum[r] = zero();
  }
  for (int j = W; j < padded; j += W) {
    HW_UNROLL
    for (int r = 0; r < R; ++r) peak[r] = max(peak[r], load(x + r * Tile + j));
  }
  const F scale = set1(c);
  float shift[W] = {0};  // a lane for each row
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    const float tile_max = reduce_max(peak[r]), now = tile_max > row_max[r] ? tile_max : row_max[r];
    shift[r] = now == -kInf ? 0.0f : now;  // there was no key so far: x is -inf and its weight 0
    rescale[r] = row_max[r];
    row_max[r] = now;
  }
  store(rescale, exp2<6>(mul(sub(load(rescale), load(shift)), scale)));
  for (int j = 0; j < padded; j += W) {
    HW_UNROLL
    for (int r = 0; r < R; ++r) {
      const F w = exp2<6>(mul(sub(load(x + r * Tile + j), set1(shift[r])), scale));
      sum[r] = add(sum[r], w);
      store(x + r * Tile + j, w);
    }
  }
  HW_UNROLL
  for (int r = 0; r < R; ++r) row_sum[r] = row_sum[r] * rescale[r] + reduce_add(sum[r]);
}

// Returns rows of keys or values that can be read `step` elements at a time to the end of `width`: in place or in a
// copy.
static inline KeyRows decode_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                                  const BadKeys& bad, char* copy, int64_t step) {
  const bool drops = bad.any && !is_code(x.dtype), packed = row_elements(x.dtype, 8) != 8;
  const bool masked_loads = x.dtype == Dtype::i8 && step > 2 * W;  // `load_bytes` reads no element behind the row
  if (x.stride[3] == 1 && (width % step == 0 || masked_loads) && !drops && !packed)
    return {at(x, b, kv_head, j0), x.stride[2]};
  const int64_t padded = round_up(width, step);
  for (int j = 0; j < n; ++j) {
    const char* row = at(x, b, kv_head, j0 + j);
    const int64_t copied = drops && bad.is[j] ? 0 : width;
    if (x.dtype == Dtype::f32) {
      copy_floats(reinterpret_cast<float*>(copy) + j * padded, row, x.dtype, x.stride[3], copied, padded);
    } else if (is_code(x.dtype)) {
      copy_codes(reinterpret_cast<int8_t*>(copy) + j * padded, row, x, copied, padded);
    } else {
      copy_halves(reinterpret_cast<uint16_t*>(copy) + j * padded, row, x.stride[3], copied, padded);
    }
  }
  return {copy, padded};
}

// `width`: of a row of codes.
template <class Read>
static inline NextRows next_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j, int64_t width) {
  const auto* rows = reinterpret_cast<const int8_t*>(at(x, b, kv_head, j));
  return {offset(rows, lead<Read>(x.stride[2], row_elements(x.dtype, width))), x.stride[2]};
}

// Q K^T of R rows in integer arithmetic, times the keys' scales. Prefetches the rows of `next`.
template <class Read, int R>
static inline void decode_products_int8(const DecodeScratch& s, int64_t padded_D, int64_t D, const KeyRows& key, int n,
                                        const float* scales, NextRows next) {
  constexpr int Some = kQueriesAtOnce<R>, N = Read::kDigits;
  const auto* k = reinterpret_cast<const int8_t*>(key.data);
  const auto some = [&](auto products, int j, int keys) {
    const NextRows next_keys = {NextRows::at(next, j), next.stride};
    for (int r = 0; r < R; r += Some) {
      products(s.query_digits + r * padded_D * kQueryBytes<N>, s.query_bias + r * 4, s.query_unit + r, D,
               k + j * key.stride, key.stride, keys, scales + j, next_keys, s.scores + r * Read::kTile + j);
    }
  };
  const int whole = n / W * W;
  if (whole > 0) some(products_int8<N, Some, Read::kTile, Read::kIntoL2, true>, 0, whole);
  if (whole < n) some(products_int8<N, Some, Read::kTile, Read::kIntoL2, false>, whole, n - whole);
}

// Whether the scores of R rows and n keys are all finite.
template <int Tile>
HW_INLINE bool scores_are_finite(const float* x, int R, int n) {
  bool good = true;
  for (int r = 0; r < R; ++r) {
    const float* row = x + r * Tile;
    good &= floats_are_finite(row, n / W * W);
    for (int i = n / W * W; i < n; ++i) good &= row[i] - row[i] == 0.0f;
  }
  return good;
}

// sums = sums * rescale + weights V, all columns, in integer arithmetic. Prefetches the rows of `next`.
template <class Read, int R>
static inline void decode_values_int8(DecodeScratch& s, int n, const KeyRows& value, int64_t V, int64_t padded_V,
                                      NextRows next) {
  constexpr int N = Read::kWeightDigits, T = Read::kTile;
  constexpr bool L2 = Read::kIntoL2;
  const auto* v = reinterpret_cast<const int8_t*>(value.data);
  for (int r = 0; r < R; ++r) {
    s.weight_unit[r] = quantize_weights<N>(s.weight_digits + r * Read::kTile * kDigitBytes, s.weight_bias + r * 4,
                                           s.scores + r * Read::kTile, n);
  }
  for (int64_t d = 0; d < padded_V; d += kBytes) {
    const auto some = [&](auto values) {
      const NextRows row = {next.rows + d, next.stride};
      values(s.weight_digits, s.weight_bias, s.weight_unit, n, v + d, value.stride, V - d, row, s.rescale, s.sums + d,
             padded_V);
    };
    if constexpr (R <= 2) {
      some(values_int8<N, R, 0, 4, T, L2>);
    } else if constexpr (R == 4) {
      some(values_int8<N, R, 0, 2, T, L2>);
      some(values_int8<N, R, 2, 2, T, L2>);
    } else {
      some(values_int8<N, R, 0, 1, T, L2>);
      some(values_int8<N, R, 1, 1, T, L2>);
      some(values_int8<N, R, 2, 1, T, L2>);
      some(values_int8<N, R, 3, 1, T, L2>);
    }
  }
}

// The same of R rows, from `row` on, in float arithmetic.
template <class Read, int R, class Lines>
HW_INLINE void value_sums(const DecodeScratch& s, int row, int n, const typename Read::T* v, int64_t stride,
                          int64_t padded_V, Lines& prefetcher) {
  constexpr int X = W < 16 ? (R == 1 ? 4 : R == 2 ? 2 : 1) : R <= 2 ? 4 : 8 / R;  // 8 accumulators, or 16
  const float *weights = s.scores + row * Read::kTile, *unit = s.weight_unit + row, *rescale = s.rescale + row;
  float* sums = s.sums + row * padded_V;
  int64_t d = 0;
  for (; d + 2 * W * X <= padded_V; d += 2 * W * X) {
    value_columns<Read, R, X>(weights, n, v + d, stride, prefetcher, unit, rescale, sums + d, padded_V);
  }
  if constexpr (X == 4) {
    for (; d + 4 * W <= padded_V; d += 4 * W) {
      value_columns<Read, R, 2>(weights, n, v + d, stride, prefetcher, unit, rescale, sums + d, padded_V);
    }
  }
  for (; d < padded_V; d += 2 * W) {
    value_columns<Read, R, 1>(weights, n, v + d, stride, prefetcher, unit, rescale, sums + d, padded_V);
  }
}

template <class Read, int R>
static inline void decode_values(const DecodeScratch& s, int n, const KeyRows& value, int64_t padded_V,
                                 Prefetcher<Read>& prefetcher) {
  const auto* v = reinterpret_cast<const typename Read::T*>(value.data);
  prefetcher.in_registers([&](auto& lines) HW_LAMBDA {
    if constexpr (kInOrder<Read> && R == 4 && W == 16) {
      // the sums of two rows fit into the registers, so that values are read in the order of memory
      if (padded_V == 8 * W) {
        EverySecond first(lines), second(lines);
        value_sums<Read, 2>(s, 0, n, v, value.stride, padded_V, first);
        return value_sums<Read, 2>(s, 2, n, v, value.stride, padded_V, second);
      }
    }
    if constexpr (kInFours<R>) {
      EverySecond first(lines), second(lines);
      value_sums<Read, 4>(s, 0, n, v, value.stride, padded_V, first);
      return value_sums<Read, 4>(s, 4, n, v, value.stride, padded_V, second);
    }
    value_sums<Read, R>(s, 0, n, v, value.stride, padded_V, lines);
  });
}

}  // namespace HW_ISA
}  // namespace headwise
