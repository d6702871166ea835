// Decode, and every call of few rows: lanes run along the head dim, and each key and value is read once, in place, for
// all rows. Memory bandwidth sets the speed, so NaN and Inf are not looked for in advance: they show in the scores or
// the sums, and then the item is computed again from clean copies.
#pragma once

#include "kernels/decode_amx.h"
#include "kernels/dropout.h"
#include "kernels/epilogue.h"
#include "kernels/tile_scores.h"

namespace headwise {
namespace HW_ISA {

constexpr int kDecodeRows = W < 16 ? 4 : 8;  // the most rows: W sums and their operands fit into the registers

struct DecodeScratch {
  float* query;   // [row][D up to a step], in the reader's order
  float* sums;    // [row][V up to a step], in the reader's order
  float* scores;  // [row][key of the tile], then weights
  char *key_copy, *value_copy;
  float* line;  // a row as floats
  QueryRows* rows;
  uint32_t* weight_tiles;  // where products are in tiles
  float row_max[kDecodeRows], row_sum[kDecodeRows], rescale[W] = {0};
  // In integer arithmetic: the digits of queries and weights, their biases, and the units of their last digits.
  int8_t *query_digits, *weight_digits;
  int32_t query_bias[kDecodeRows * 4] = {0}, weight_bias[kDecodeRows * 4];
  float query_unit[kDecodeRows] = {0}, weight_unit[kDecodeRows];

  DecodeScratch(Arena& arena, const Problem& p) {
    const int64_t padded_D = round_up(p.D, kMaxStep), padded_V = round_up(p.V, kMaxStep);
    query = arena.take<float>(kDecodeRows * padded_D);
    sums = arena.take<float>(kDecodeRows * padded_V);
    scores = arena.take<float>(kDecodeRows * kInt8Tile);
    key_copy = arena.take<char>(kInt8Tile * padded_D * 4), value_copy = arena.take<char>(kInt8Tile * padded_V * 4);
    line = arena.take<float>(max(padded_D, padded_V));
    rows = arena.take<QueryRows>(1);
    weight_tiles = arena.take<uint32_t>(kHasAmx ? weight_words(kHalfTile) : 0);
    query_digits = reinterpret_cast<int8_t*>(query);
    weight_digits = arena.take<int8_t>(kHasVnni ? kDecodeRows * kInt8Tile * kDigitBytes : 0);
  }
};

// Scores of U keys and R rows, U R = W sums: side by side in `out`, row by row.
template <class Read, int R>
static inline void key_dots(const float* HW_RESTRICT query, int64_t padded_D, const typename Read::T* HW_RESTRICT key,
                            int64_t stride, Ahead<Read>& ahead, float* HW_RESTRICT out) {
  constexpr int U = W / R;
  F acc[W];
  HW_UNROLL
  for (int i = 0; i < W; ++i) acc[i] = zero();
  for (int64_t d = 0; d < padded_D; d += 2 * W) {
    F qa[R], qb[R];
    if constexpr (R <= U) {  // kept in registers for all keys
      HW_UNROLL
      for (int r = 0; r < R; ++r) Read::load_query(query, r * padded_D + d, qa[r], qb[r]);
    }
    HW_UNROLL
    for (int u = 0; u < U; ++u) {
      F a, b;
      Read::load_key(key + u * stride + d, a, b);
      ahead.step();
      HW_UNROLL
      for (int r = 0; r < R; ++r) {
        if constexpr (R > U) Read::load_query(query, r * padded_D + d, qa[r], qb[r]);
        acc[r * U + u] = Read::times(acc[r * U + u], qa[r], qb[r], a, b);
      }
    }
  }
  store(out, reduce_each(acc));
}

// sums[row][columns] = sums * rescale + weights V, for X pairs of vectors of columns.
template <class Read, int R, int X>
static inline void value_columns(const float* HW_RESTRICT weights, int n, const typename Read::T* HW_RESTRICT value,
                                 int64_t stride, Ahead<Read>& ahead, const float* rescale, float* HW_RESTRICT sums,
                                 int64_t padded_V) {
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
        load_pairs(first + x * 2 * W, second + x * 2 * W, a, b);
        ahead.step(), ahead.step();
        HW_UNROLL
        for (int r = 0; r < R; ++r) {
          const F w = set1(weights[r * Read::kTile + j]);
          acc[r][2 * x] = dot_pairs(acc[r][2 * x], w, a);
          acc[r][2 * x + 1] = dot_pairs(acc[r][2 * x + 1], w, b);
        }
      }
    }
  } else {
    for (int j = 0; j < n; ++j) {
      HW_UNROLL
      for (int x = 0; x < X; ++x) {
        F a, b;
        Read::load2(value + j * stride + x * 2 * W, a, b);
        ahead.step();
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
      store(to, fma(load(to), factor, acc[r][x]));
    }
  }
}

// The online softmax along the keys of R rows. The rows are interleaved, so that one fills the latency of another.
template <int R, int Tile>
static inline void softmax_rows(float* HW_RESTRICT x, int n, float c, float* HW_RESTRICT row_max,
                                float* HW_RESTRICT row_sum, float* HW_RESTRICT rescale) {
  const int padded = static_cast<int>(round_up(n, W));
  F peak[R], sum[R];
  for (int r = 0; r < R; ++r) {
    for (int j = n; j < padded; ++j) x[r * Tile + j] = -kInf;
    peak[r] = load(x + r * Tile), sum[r] = zero();
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
    shift[r] = now == -kInf ? 0.0f : now;  // no key so far: x is -inf, its weight 0
    rescale[r] = row_max[r], row_max[r] = now;
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

// Rows of keys or values that can be read `step` elements at a time to the end of `width`: in place or a copy.
static inline KeyRows decode_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                                  const BadKeys& bad, char* copy, int64_t step) {
  const bool drops = bad.any && x.dtype != Dtype::i8;
  const bool masked_loads = x.dtype == Dtype::i8 && step > 2 * W;  // `load_bytes` reads no element behind the row
  if (x.stride[3] == 1 && (width % step == 0 || masked_loads) && !drops) return {at(x, b, kv_head, j0), x.stride[2]};
  const int64_t padded = round_up(width, step);
  for (int j = 0; j < n; ++j) {
    const char* row = at(x, b, kv_head, j0 + j);
    const int64_t copied = drops && bad.is[j] ? 0 : width;
    if (x.dtype == Dtype::f32) {
      copy_floats(reinterpret_cast<float*>(copy) + j * padded, row, x.dtype, x.stride[3], copied, padded);
    } else if (x.dtype == Dtype::i8) {
      copy_bytes(reinterpret_cast<int8_t*>(copy) + j * padded, row, x.stride[3], copied, padded);
    } else {
      copy_halves(reinterpret_cast<uint16_t*>(copy) + j * padded, row, x.stride[3], copied, padded);
    }
  }
  return {copy, padded};
}

static inline NextRows next_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j) {
  return {reinterpret_cast<const int8_t*>(at(x, b, kv_head, j)), x.stride[2]};
}

// Prefetches the first keys of an item; later ones are prefetched while the tile before them is computed.
static inline void prefetch_first(const Problem& p, int64_t b, int64_t kv_head, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j) {
    const NextRows row = next_rows(p.key, b, kv_head, j);
    for (int64_t d = 0; d < p.D; d += kBytes) prefetch_here(row.rows + d);
  }
}

// Q K^T of R rows and n keys in float arithmetic.
template <class Read, int R>
static inline void decode_products(const DecodeScratch& s, int64_t padded_D, const KeyRows& key, int n,
                                   Ahead<Read>& ahead) {
  constexpr int U = W / R;
  const auto* k = reinterpret_cast<const typename Read::T*>(key.data);
  if constexpr (Read::kTiles) {
    return tile_scores_of<Read, R>(s.query, padded_D, k, key.stride, n, ahead, s.scores);
  }
  float out[W];
  for (int j = 0; j < n; j += U) {
    if (j + U <= n) {
      key_dots<Read, R>(s.query, padded_D, k + j * key.stride, key.stride, ahead, out);
    } else {  // the last keys one at a time, as U times the same one
      for (int i = j; i < n; ++i) {
        key_dots<Read, R>(s.query, padded_D, k + i * key.stride, 0, ahead, out);
        for (int r = 0; r < R; ++r) s.scores[r * Read::kTile + i] = out[r * U];
      }
      return;
    }
    for (int r = 0; r < R; ++r) memcpy(s.scores + r * Read::kTile + j, out + r * U, U * sizeof(float));
  }
}

// The same in integer arithmetic, times the keys' scales. Prefetches the rows of `next`.
template <class Read, int R>
static inline void decode_products_int8(const DecodeScratch& s, int64_t padded_D, int64_t D, const KeyRows& key, int n,
                                        const float* scales, NextRows next) {
  constexpr int Some = R < 4 ? R : 4;  // the registers hold no more rows
  const int64_t pitch = padded_D * kDigitBytes;
  const auto* k = reinterpret_cast<const int8_t*>(key.data);
  for (int j = 0; j < n; j += W) {
    const NextRows next_keys = {next.rows + j * next.stride, next.stride};
    for (int r = 0; r < R; r += Some) {
      products_int8<Read::kDigits, Some, Read::kTile>(s.query_digits + r * pitch, s.query_bias + r * 4,
                                                      s.query_unit + r, pitch, D, k + j * key.stride, key.stride, n - j,
                                                      scales + j, next_keys, s.scores + r * Read::kTile + j);
    }
  }
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
  constexpr int N = Read::kWeightDigits;
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
      some(values_int8<N, R, 0, 4, Read::kTile>);
    } else if constexpr (R == 4) {
      some(values_int8<N, R, 0, 2, Read::kTile>), some(values_int8<N, R, 2, 2, Read::kTile>);
    } else {
      some(values_int8<N, R, 0, 1, Read::kTile>), some(values_int8<N, R, 1, 1, Read::kTile>);
      some(values_int8<N, R, 2, 1, Read::kTile>), some(values_int8<N, R, 3, 1, Read::kTile>);
    }
  }
}

// The same in float arithmetic.
template <class Read, int R>
static inline void decode_values(const DecodeScratch& s, int n, const KeyRows& value, int64_t padded_V,
                                 Ahead<Read>& ahead) {
  const auto* v = reinterpret_cast<const typename Read::T*>(value.data);
  if constexpr (Read::kTiles) {
    tile_weights<R, Read::kTile>(s.scores, n, s.weight_tiles);
    return tile_sums_of<Read, R>(s.weight_tiles, n, v, value.stride, padded_V, ahead, s.rescale, s.sums);
  }
  constexpr int X = W < 16 ? (R == 1 ? 4 : R == 2 ? 2 : 1) : R <= 2 ? 4 : 8 / R;  // 8 accumulators, or 16
  int64_t d = 0;
  for (; d + 2 * W * X <= padded_V; d += 2 * W * X) {
    value_columns<Read, R, X>(s.scores, n, v + d, value.stride, ahead, s.rescale, s.sums + d, padded_V);
  }
  if constexpr (X == 4) {
    for (; d + 4 * W <= padded_V; d += 4 * W) {
      value_columns<Read, R, 2>(s.scores, n, v + d, value.stride, ahead, s.rescale, s.sums + d, padded_V);
    }
  }
  for (; d < padded_V; d += 2 * W) {
    value_columns<Read, R, 1>(s.scores, n, v + d, value.stride, ahead, s.rescale, s.sums + d, padded_V);
  }
}

// One pass over the keys of an item. Returns false where a NaN or Inf shows and `careful` is not set.
template <class Read, int R>
static inline bool decode_pass(const Problem& call, int64_t b, int64_t kv_head, const Reach& reach, bool careful,
                               DecodeScratch& s) {
  const int64_t padded_D = round_up(call.D, Read::kStep), padded_V = round_up(call.V, Read::kStep);
  const float c = softmax_scale(call) * kLog2e;
  memset(s.sums, 0, static_cast<size_t>(R * padded_V) * sizeof(float));
  for (int r = 0; r < R; ++r) s.row_max[r] = -kInf, s.row_sum[r] = 0.0f;
  BadKeys bad;
  PageTable pages(call), next_pages(call);
  [[maybe_unused]] float scales[Read::kTile];
  if (Read::kDigits != 0 && reach.from < reach.to) {
    prefetch_first(pages.tile(b, reach.from), b, kv_head, reach.from, min(reach.from + Read::kTile, reach.to));
  }
  bool finite = true;
  [[maybe_unused]] Ahead<Read> ahead;
  walk_tiles<Read::kTile, 1>(reach, [&](int64_t j0, int n) {
    const KeySpan span = {j0, n, tile_kind(call, b, *s.rows, j0, j0 + n)};
    if (span.kind == TileKind::empty || !finite) return;
    const Problem& p = pages.tile(b, j0);
    if (careful) bad.find(p, b, kv_head, j0, n);
    const KeyRows key = decode_rows(p.key, b, kv_head, j0, n, p.D, bad, s.key_copy, Read::kStep);
    const int64_t next = j0 + n < reach.to ? j0 + n : j0;
    const Problem& then = next_pages.tile(b, next);
    if constexpr (Read::kScaled) load_key_scales(p.key_scale, b, kv_head, j0, n, bad.from(0), scales);
    tile_scores<ScoreLayout<Read::kTile, 1>>(p, b, *s.rows, span, bad.from(0), s.scores, R * Read::kTile, nullptr, [&] {
      if constexpr (Read::kDigits != 0) {
        decode_products_int8<Read, R>(s, padded_D, p.D, key, n, scales, next_rows(p.value, b, kv_head, j0));
      } else {
        ahead.aim({p.value, b, kv_head, j0, p.V}, {then.key, b, kv_head, next, p.D});
        decode_products<Read, R>(s, padded_D, key, n, ahead);
        if constexpr (Read::kScaled) scale_keys<R, Read::kTile>(s.scores, scales, n);
      }
      finite = careful || scores_are_finite<Read::kTile>(s.scores, R, n);
    });
    if (!finite) return;
    softmax_rows<R, Read::kTile>(s.scores, n, c, s.row_max, s.row_sum, s.rescale);
    if (p.dropout > 0.0f) drop_tile<Read::kTile, 1>(p, b, *s.rows, j0, n, s.scores);
    if constexpr (Read::kScaled) {
      load_key_scales(p.value_scale, b, kv_head, j0, n, bad.from(0), scales);
      scale_keys<R, Read::kTile>(s.scores, scales, n);
    }
    const KeyRows value = decode_rows(p.value, b, kv_head, j0, n, p.V, bad, s.value_copy, Read::kStep);
    if constexpr (Read::kDigits != 0) {
      finite = careful || scores_are_finite<Read::kTile>(s.scores, R, n);
      if (!finite) return;
      const NextRows next_keys = next_rows(then.key, b, kv_head, next);
      decode_values_int8<Read, R>(s, n, value, p.V, padded_V, next_keys);
    } else {
      if constexpr (Read::kPairs) {
        for (int i = 0; i < R * Read::kTile; i += W) pair_neighbours(s.scores + i);
      }
      ahead.aim({then.key, b, kv_head, next, p.D}, {then.value, b, kv_head, next, p.V});
      decode_values<Read, R>(s, n, value, padded_V, ahead);
    }
  });
  return finite && (careful || floats_are_finite(s.sums, R * padded_V));
}

template <class Read, int R>
static void run_decode(const Problem& p, const Plan& plan, int64_t group, int64_t split, char* scratch) {
  Arena arena{scratch};
  DecodeScratch s(arena, p);
  const int64_t b = group / p.K, kv_head = group % p.K;
  const int64_t padded_D = round_up(p.D, Read::kStep), padded_V = round_up(p.V, Read::kStep);
  QueryRows& rows = *s.rows;
  const int n = static_cast<int>(plan.rows);
  place_rows(p, b, kv_head, 0, n, R, rows);
  memset(s.query, 0, static_cast<size_t>(kDecodeRows * padded_D) * sizeof(float));
  if constexpr (Read::kTiles) memset(s.weight_tiles, 0, weight_words(Read::kTile) * sizeof(uint32_t));
  for (int r = 0; r < n; ++r) {
    const char* row = at(p.query, b, rows.h[r], rows.t[r]);
    rows.query_bad[r] = !row_is_finite(row, p.query.dtype, p.query.stride[3], p.D);
    if (rows.query_bad[r]) continue;
    copy_floats(s.line, row, p.query.dtype, p.query.stride[3], p.D, padded_D);
    if constexpr (Read::kDigits != 0) {
      bool fits;
      s.query_unit[r] = quantize_query<Read::kDigits>(s.query_digits + r * padded_D * kDigitBytes, s.query_bias + r * 4,
                                                      s.line, padded_D, Read::kWeightDigits == 2, fits);
      if constexpr (Read::kDigits == 2) {
        if (!fits) return run_decode<typename Read::MoreDigits, R>(p, plan, group, split, scratch);
      }
    } else {
      for (int64_t d = 0; d < padded_D; ++d) Read::store_query(s.query, padded_D, r, d, s.line[d]);
    }
  }
  Reach all(p);
  all.add(rows);
  const Reach reach = all.within(split * plan.keys_per_split, (split + 1) * plan.keys_per_split);
  if (!decode_pass<Read, R>(p, b, kv_head, reach, false, s)) decode_pass<Read, R>(p, b, kv_head, reach, true, s);
  for (int r = 0; r < n; ++r) {
    for (int64_t d = 0; d < p.V; ++d) s.line[d] = s.sums[r * padded_V + Read::place(d)];
    const RowState state = row_state(p, b, rows, r, s.row_max[r], s.row_sum[r], reach.from, reach.to);
    finish_row(p, plan, b, kv_head, r, split, state, s.line);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
