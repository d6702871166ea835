// Few rows (decoding): lanes run along the head dim, every key and value is read once, from where it lies, for all
// rows. Memory sets the pace, so nothing is looked for in advance: a NaN or Inf shows in scores or sums, and then the
// item is done again on clean copies.
#pragma once

#include "kernels/decode_int8.h"
#include "kernels/dropout.h"
#include "kernels/epilogue.h"
#include "kernels/key_tiles.h"

namespace headwise {
namespace HW_ISA {

constexpr int kLineTile = 128;  // keys of a tile: so long does one stream of memory run before the other
constexpr int kLineRows = W < 16 ? 4 : 8;  // the most rows this kernel takes: W sums in registers, and what they need

// Elements of a row as two vectors of floats, from 2 W elements; and where element i of these goes.
struct ReadFloat {
  using T = float;
  static constexpr bool kPairs = false;  // whether values are multiplied as pairs of keys
  static constexpr bool kScaled = false;  // whether a token has a scale
  static constexpr int kDigits = 0;  // whole numbers are multiplied, of so many digits (digits.h)
  static constexpr int64_t kStep = 2 * W;  // elements at a time
  HW_INLINE void load2(const float* p, F& a, F& b) { a = load(p), b = load(p + W); }
  HW_INLINE int64_t place(int64_t i) { return i; }
  // Keys and queries, and their product.
  HW_INLINE void load_key(const float* p, F& a, F& b) { load2(p, a, b); }
  HW_INLINE void load_query(const float* q, int64_t i, F& a, F& b) { a = load(q + i), b = load(q + i + W); }
  HW_INLINE F times(F acc, F qa, F qb, F ka, F kb) { return fma(qb, kb, fma(qa, ka, acc)); }
  HW_INLINE void put_query(float* q, int64_t i, float x) { q[i] = x; }
};
struct ReadHalf : ReadFloat {
  using T = uint16_t;
  HW_INLINE void load2(const uint16_t* p, F& a, F& b) { a = load_f16(p), b = load_f16(p + W); }
  HW_INLINE void load_key(const uint16_t* p, F& a, F& b) { load2(p, a, b); }
};
struct ReadBfloat : ReadFloat {
  using T = uint16_t;
  HW_INLINE void load2(const uint16_t* p, F& a, F& b) { load_bf16_pairs(p, a, b); }  // even elements, then odd ones
#if HW_BF16  // pairs are multiplied as they are
  static constexpr bool kPairs = true;
  HW_INLINE int64_t place(int64_t i) { return i / (2 * W) * (2 * W) + place_of_pair(static_cast<int>(i % (2 * W))); }
  HW_INLINE void load_key(const uint16_t* p, F& a, F&) { a = load(reinterpret_cast<const float*>(p)); }
  HW_INLINE void load_query(const float* q, int64_t i, F& a, F&) { a = load(q + i / 2); }
  HW_INLINE F times(F acc, F qa, F, F ka, F) { return dot_pairs(acc, qa, ka); }
  HW_INLINE void put_query(float* q, int64_t i, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    reinterpret_cast<uint16_t*>(q)[i] = static_cast<uint16_t>(bits >> 16);  // exact: x was a bfloat16
  }
#else
  HW_INLINE int64_t place(int64_t i) {
    const int64_t in = i % (2 * W);
    return i - in + (in % 2 == 0 ? in / 2 : W + in / 2);
  }
  HW_INLINE void load_key(const uint16_t* p, F& a, F& b) { load2(p, a, b); }
  HW_INLINE void put_query(float* q, int64_t i, float x) { q[place(i)] = x; }
#endif
};

struct ReadByte : ReadFloat {
  using T = int8_t;
  static constexpr bool kScaled = true;
  HW_INLINE void load2(const int8_t* p, F& a, F& b) { a = load_i8(p), b = load_i8(p + W); }
  HW_INLINE void load_key(const int8_t* p, F& a, F& b) { load2(p, a, b); }
};

#if HW_BF16
template <int Query, int Weight>
struct ReadDigits : ReadByte {
  static constexpr int kDigits = Query, kWeightDigits = Weight;
  using More = ReadDigits<3, Weight>;  // for queries that need them
  static constexpr int64_t kStep = kBytes;
  HW_INLINE int64_t place(int64_t i) { return i / kBytes * kBytes + place_of_column(static_cast<int>(i % kBytes)); }
};
constexpr int64_t kMostStep = kBytes;
#else
constexpr int64_t kMostStep = 2 * W;
#endif

struct LineScratch {
  float* query;      // [row][D up to a step]
  float* sums;       // [row][V up to a step], in the reader's order
  float* scores;     // [row][kLineTile], then weights
  char *key_copy, *value_copy;
  float* line;
  Rows* rows;
  float top[kLineRows], total[kLineRows], alpha[W] = {0};
#if HW_BF16
  int8_t *query_digits, *digits;                        // of queries and of weights
  int32_t query_bias[kLineRows * 4], weight_bias[kLineRows * 4];
  float query_unit[kLineRows], weight_unit[kLineRows];  // what a last digit is worth
#endif

  LineScratch(Arena& arena, const Problem& p) {
    const int64_t deep = round_up(p.D, kMostStep), wide = round_up(p.V, kMostStep);
    query = arena.take<float>(kLineRows * deep);
    sums = arena.take<float>(kLineRows * wide);
    scores = arena.take<float>(kLineRows * kLineTile);
    key_copy = arena.take<char>(kLineTile * deep * 4), value_copy = arena.take<char>(kLineTile * wide * 4);
    line = arena.take<float>(most(deep, wide));
    rows = arena.take<Rows>(1);
#if HW_BF16
    query_digits = reinterpret_cast<int8_t*>(query);
    digits = arena.take<int8_t>(kLineRows * kLineTile * kDigitBytes);
#endif
  }
};

// Asks for the 2 W elements that lie some way behind p: far enough for memory to answer, near enough to be still there.
template <class T>
HW_INLINE void prefetch(const T* p) {
  const char* next = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) + 4096);
  for (size_t line = 0; line < 2 * W * sizeof(T); line += 64) HW_PREFETCH_ONCE(next + line);
}

// Scores of U keys times R rows, U R = W sums: side by side in `out`, row by row.
template <class Read, int R>
static inline void dots(const float* HW_RESTRICT query, int64_t deep, const typename Read::T* HW_RESTRICT key,
                        int64_t stride, float* HW_RESTRICT out) {
  constexpr int U = W / R;
  F acc[W];
  HW_UNROLL
  for (int i = 0; i < W; ++i) acc[i] = zero();
  for (int64_t d = 0; d < deep; d += 2 * W) {
    F qa[R], qb[R];
    if constexpr (R <= U) {  // stay in registers for all the keys
      HW_UNROLL
      for (int r = 0; r < R; ++r) Read::load_query(query, r * deep + d, qa[r], qb[r]);
    }
    HW_UNROLL
    for (int u = 0; u < U; ++u) {
      F a, b;
      Read::load_key(key + u * stride + d, a, b);
      prefetch(key + u * stride + d);
      HW_UNROLL
      for (int r = 0; r < R; ++r) {
        if constexpr (R > U) Read::load_query(query, r * deep + d, qa[r], qb[r]);
        acc[r * U + u] = Read::times(acc[r * U + u], qa[r], qb[r], a, b);
      }
    }
  }
  store(out, reduce_each(acc));
}

// sums[row][columns] = sums * alpha + weights V for X pairs of vectors of columns.
template <class Read, int R, int X>
static inline void mix(const float* HW_RESTRICT weights, int n, const typename Read::T* HW_RESTRICT value,
                       int64_t stride, const float* alpha, float* HW_RESTRICT sums, int64_t wide) {
  F acc[R][2 * X];
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    HW_UNROLL
    for (int x = 0; x < 2 * X; ++x) acc[r][x] = zero();
  }
#if HW_BF16
  for (int j = 0; Read::kPairs && j < n; j += 2) {  // the weight beyond the last key is 0
    const auto* first = reinterpret_cast<const uint16_t*>(value) + j * stride;
    const uint16_t* second = j + 1 < n ? first + stride : first;
    HW_UNROLL
    for (int x = 0; x < X; ++x) {
      F a, b;
      load_pairs(first + x * 2 * W, second + x * 2 * W, a, b);
      prefetch(first + x * 2 * W), prefetch(second + x * 2 * W);
      HW_UNROLL
      for (int r = 0; r < R; ++r) {
        const F w = set1(weights[r * kLineTile + j]);
        acc[r][2 * x] = dot_pairs(acc[r][2 * x], w, a);
        acc[r][2 * x + 1] = dot_pairs(acc[r][2 * x + 1], w, b);
      }
    }
  }
#endif
  for (int j = 0; !Read::kPairs && j < n; ++j) {
    HW_UNROLL
    for (int x = 0; x < X; ++x) {
      F a, b;
      Read::load2(value + j * stride + x * 2 * W, a, b);
      prefetch(value + j * stride + x * 2 * W);
      HW_UNROLL
      for (int r = 0; r < R; ++r) {
        const F w = set1(weights[r * kLineTile + j]);
        acc[r][2 * x] = fma(w, a, acc[r][2 * x]);
        acc[r][2 * x + 1] = fma(w, b, acc[r][2 * x + 1]);
      }
    }
  }
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    const F worth = set1(alpha[r]);
    HW_UNROLL
    for (int x = 0; x < 2 * X; ++x) {
      float* to = sums + r * wide + x * W;
      store(to, fma(load(to), worth, acc[r][x]));
    }
  }
}

// The online softmax along the keys of R rows, side by side so that one waits while another is computed.
template <int R>
static inline void softmax_lines(float* HW_RESTRICT x, int n, float c, float* HW_RESTRICT top,
                                 float* HW_RESTRICT total, float* HW_RESTRICT alpha) {
  const int padded = static_cast<int>(round_up(n, W));
  F peak[R], sum[R];
  for (int r = 0; r < R; ++r) {
    for (int j = n; j < padded; ++j) x[r * kLineTile + j] = -kInf;
    peak[r] = load(x + r * kLineTile), sum[r] = zero();
  }
  for (int j = W; j < padded; j += W) {
    HW_UNROLL
    for (int r = 0; r < R; ++r) peak[r] = max(peak[r], load(x + r * kLineTile + j));
  }
  const F scale = set1(c);
  float shift[W] = {0};  // a vector with a lane for each row
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    const float here = reduce_max(peak[r]), now = here > top[r] ? here : top[r];
    shift[r] = now == -kInf ? 0.0f : now;  // nothing seen yet: x is -inf, its weight 0
    alpha[r] = top[r], top[r] = now;
  }
  store(alpha, exp2<6>(mul(sub(load(alpha), load(shift)), scale)));
  for (int j = 0; j < padded; j += W) {
    HW_UNROLL
    for (int r = 0; r < R; ++r) {
      const F w = exp2<6>(mul(sub(load(x + r * kLineTile + j), set1(shift[r])), scale));
      sum[r] = add(sum[r], w);
      store(x + r * kLineTile + j, w);
    }
  }
  HW_UNROLL
  for (int r = 0; r < R; ++r) total[r] = total[r] * alpha[r] + reduce_add(sum[r]);
}

// Rows of keys or values that can be read `step` elements at a time to the end of `width`: in place or a copy.
static inline RowsOf line_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                               const BadKeys* bad, char* copy, int64_t step) {
  const bool drops = bad != nullptr && bad->any && x.dtype != Dtype::i8;
  const bool partly = x.dtype == Dtype::i8 && step > 2 * W;  // reads what there is of a step
  if (x.stride[3] == 1 && (width % step == 0 || partly) && !drops) return {at(x, b, kv_head, j0), x.stride[2]};
  const int64_t padded = round_up(width, step);
  for (int j = 0; j < n; ++j) {
    const char* row = at(x, b, kv_head, j0 + j);
    const int64_t kept = drops && bad->is[j] ? 0 : width;
    if (x.dtype == Dtype::f32) {
      copy_floats(reinterpret_cast<float*>(copy) + j * padded, row, x.dtype, x.stride[3], kept, padded);
    } else if (x.dtype == Dtype::i8) {
      copy_bytes(reinterpret_cast<int8_t*>(copy) + j * padded, row, x.stride[3], kept, padded);
    } else {
      copy_halves(reinterpret_cast<uint16_t*>(copy) + j * padded, row, x.stride[3], kept, padded);
    }
  }
  return {copy, padded};
}

template <class Read, int R>
static inline void scores_of_lines(const LineScratch& s, int64_t deep, const RowsOf& key, int n) {
  constexpr int U = W / R;
  const auto* k = reinterpret_cast<const typename Read::T*>(key.data);
  float out[W];
  for (int j = 0; j < n; j += U) {
    if (j + U <= n) {
      dots<Read, R>(s.query, deep, k + j * key.stride, key.stride, out);
    } else {  // the last keys one at a time, as U times the same one
      for (int i = j; i < n; ++i) {
        dots<Read, R>(s.query, deep, k + i * key.stride, 0, out);
        for (int r = 0; r < R; ++r) s.scores[r * kLineTile + i] = out[r * U];
      }
      return;
    }
    for (int r = 0; r < R; ++r) memcpy(s.scores + r * kLineTile + j, out + r * U, U * sizeof(float));
  }
}

static inline Ahead ahead_of(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j) {
  return {reinterpret_cast<const int8_t*>(at(x, b, kv_head, j)), x.stride[2]};
}

#if HW_BF16
// The first keys of an item: those that follow are asked for while their predecessors are worked on.
static inline void prefetch_first(const Problem& p, int64_t b, int64_t kv_head, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j) {
    const Ahead row = ahead_of(p.key, b, kv_head, j);
    for (int64_t d = 0; d < p.D; d += kBytes) prefetch_line(row.rows + d);
  }
}
#endif

template <int Digits, int R>
static inline void scores_of_digits(const LineScratch& s, int64_t deep, int64_t D, const RowsOf& key, int n,
                                    const float* scales, Ahead ahead) {
#if HW_BF16
  constexpr int Some = R < 4 ? R : 4;  // more would not fit into the registers
  const int64_t pitch = deep * kDigitBytes;
  const auto* k = reinterpret_cast<const int8_t*>(key.data);
  for (int j = 0; j < n; j += W) {
    for (int r = 0; r < R; r += Some) {
      score_digits<Digits, Some, kLineTile>(s.query_digits + r * pitch, s.query_bias + r * 4, s.query_unit + r, pitch, D,
                                    k + j * key.stride, key.stride, n - j, scales + j, {ahead.rows + j * ahead.stride, ahead.stride}, s.scores + r * kLineTile + j);
    }
  }
#else
  (void)s, (void)deep, (void)D, (void)key, (void)n, (void)scales, (void)ahead;
#endif
}

// Whether the products of R rows with n keys are numbers.
HW_INLINE bool lines_are_finite(const float* x, int R, int n) {
  bool good = true;
  for (int r = 0; r < R; ++r) {
    const float* row = x + r * kLineTile;
    good &= floats_are_finite(row, n / W * W);
    for (int i = n / W * W; i < n; ++i) good &= row[i] - row[i] == 0.0f;
  }
  return good;
}

// sums = sums * alpha + weights V, all columns.
template <class Read, int R>
static inline void mix_lines(LineScratch& s, int n, const RowsOf& value, int64_t V, int64_t wide, Ahead ahead) {
  const auto* v = reinterpret_cast<const typename Read::T*>(value.data);
#if HW_BF16
  if constexpr (Read::kDigits != 0) {
    for (int r = 0; r < R; ++r) {
      s.weight_unit[r] = put_weights<Read::kWeightDigits>(s.digits + r * kLineTile * kDigitBytes, s.weight_bias + r * 4,
                                                          s.scores + r * kLineTile, n);
    }
    for (int64_t d = 0; d < wide; d += kBytes) {
      constexpr int N = Read::kWeightDigits;
      const auto some = [&](auto mix) {
        const Ahead row = {ahead.rows + d, ahead.stride};
        mix(s.digits, s.weight_bias, s.weight_unit, n, v + d, value.stride, V - d, row, s.alpha, s.sums + d, wide);
      };
      if constexpr (R <= 2) {
        some(mix_digits<N, R, 0, 4, kLineTile>);
      } else if constexpr (R == 4) {
        some(mix_digits<N, R, 0, 2, kLineTile>), some(mix_digits<N, R, 2, 2, kLineTile>);
      } else {
        some(mix_digits<N, R, 0, 1, kLineTile>), some(mix_digits<N, R, 1, 1, kLineTile>);
        some(mix_digits<N, R, 2, 1, kLineTile>), some(mix_digits<N, R, 3, 1, kLineTile>);
      }
    }
    return;
  }
#endif
  (void)V, (void)ahead;
  constexpr int X = W < 16 ? (R == 1 ? 4 : R == 2 ? 2 : 1) : R <= 2 ? 4 : 8 / R;  // 8 accumulators, or 16
  int64_t d = 0;
  for (; d + 2 * W * X <= wide; d += 2 * W * X) {
    mix<Read, R, X>(s.scores, n, v + d, value.stride, s.alpha, s.sums + d, wide);
  }
  if constexpr (X == 4) {
    for (; d + 4 * W <= wide; d += 4 * W) mix<Read, R, 2>(s.scores, n, v + d, value.stride, s.alpha, s.sums + d, wide);
  }
  for (; d < wide; d += 2 * W) mix<Read, R, 1>(s.scores, n, v + d, value.stride, s.alpha, s.sums + d, wide);
}

// One pass over the keys of an item; false where a NaN or Inf has shown and `careful` was not set.
template <class Read, int R>
static inline bool pass_lines(const Problem& call, int64_t b, int64_t kv_head, int64_t from, int64_t to, bool careful,
                              LineScratch& s) {
  const int64_t deep = round_up(call.D, Read::kStep), wide = round_up(call.V, Read::kStep);
  Rows& rows = *s.rows;
  const bool general = is_general(call);
  const float c = unit_of(call) * kLog2e;
  memset(s.sums, 0, static_cast<size_t>(R * wide) * sizeof(float));
  for (int r = 0; r < R; ++r) s.top[r] = -kInf, s.total[r] = 0.0f;
  BadKeys bad;
  Pages pages(call), ahead(call);
  float scales[kLineTile];
  (void)scales;
#if HW_BF16
  if constexpr (Read::kDigits != 0) prefetch_first(pages.turn(b, from), b, kv_head, from, least(from + kLineTile, to));
#endif
  for (int64_t j = from / kLineTile * kLineTile; j < to; j += kLineTile) {
    const int64_t j0 = most(j, from), j1 = least(j + kLineTile, to);
    const int n = static_cast<int>(j1 - j0);
    const Tile kind = tile_of(call, b, rows, j0, j1);
    if (kind == Tile::empty) continue;
    const Problem& p = pages.turn(b, j0);
    if (careful) bad.look(p, b, kv_head, j0, n);
    const RowsOf key = line_rows(p.key, b, kv_head, j0, n, p.D, &bad, s.key_copy, Read::kStep);
    if constexpr (Read::kScaled) of_keys(p.key_scale, b, kv_head, j0, n, bad.any ? bad.is : nullptr, scales);
    if constexpr (Read::kDigits != 0) {
      scores_of_digits<Read::kDigits, R>(s, deep, p.D, key, n, scales, ahead_of(p.value, b, kv_head, j0));
    } else {
      scores_of_lines<Read, R>(s, deep, key, n);
      if constexpr (Read::kScaled) scale_lines<R, kLineTile>(s.scores, scales, n);
    }
    if (!careful && !lines_are_finite(s.scores, R, n)) return false;
    if (general) scale_scores(p, s.scores, R * kLineTile);
    if (general || kind == Tile::mixed || bad.any) {
      mask_tile<Layout<kLineTile, 1>>(p, b, rows, j0, n, s.scores, kind, bad.any ? bad.is : nullptr);
    }
    softmax_lines<R>(s.scores, n, c, s.top, s.total, s.alpha);
    if (p.dropout > 0.0f) drop_tile<kLineTile, 1>(p, b, rows, j0, n, s.scores);
    if constexpr (Read::kScaled) {
      of_keys(p.value_scale, b, kv_head, j0, n, bad.any ? bad.is : nullptr, scales);
      scale_lines<R, kLineTile>(s.scores, scales, n);
      if (Read::kDigits != 0 && !careful && !lines_are_finite(s.scores, R, n)) return false;
    }
#if HW_BF16
    for (int i = 0; Read::kPairs && i < R * kLineTile; i += W) pair_neighbours(s.scores + i);
#endif
    const RowsOf value = line_rows(p.value, b, kv_head, j0, n, p.V, &bad, s.value_copy, Read::kStep);
    const int64_t next = j1 < to ? j1 : j0;
    mix_lines<Read, R>(s, n, value, p.V, wide, ahead_of(ahead.turn(b, next).key, b, kv_head, next));
  }
  if (careful) return true;
  return floats_are_finite(s.sums, R * wide);
}

template <class Read, int R>
static void run_lines(const Problem& p, const Plan& plan, int64_t group, int64_t split, char* scratch) {
  Arena arena{scratch};
  LineScratch s(arena, p);
  const int64_t b = group / p.K, kv_head = group % p.K;
  const int64_t deep = round_up(p.D, Read::kStep), wide = round_up(p.V, Read::kStep);
  Rows& rows = *s.rows;
  const int n = static_cast<int>(plan.rows);
  place_rows(p, b, kv_head, 0, n, R, rows);
  memset(s.query, 0, static_cast<size_t>(R * deep) * sizeof(float));
#if HW_BF16
  memset(s.query_bias, 0, sizeof(s.query_bias)), memset(s.query_unit, 0, sizeof(s.query_unit));
#endif
  for (int r = 0; r < n; ++r) {
    const char* row = at(p.query, b, rows.h[r], rows.t[r]);
    rows.bad[r] = !row_is_finite(row, p.query.dtype, p.query.stride[3], p.D);
    if (rows.bad[r]) continue;
    copy_floats(s.line, row, p.query.dtype, p.query.stride[3], p.D, deep);
#if HW_BF16
    if constexpr (Read::kDigits != 0) {
      bool fits;
      s.query_unit[r] = put_query<Read::kDigits>(s.query_digits + r * deep * kDigitBytes, s.query_bias + r * 4, s.line, deep,
                                                 Read::kWeightDigits == 2, fits);
      if constexpr (Read::kDigits == 2) {
        if (!fits) return run_lines<typename Read::More, R>(p, plan, group, split, scratch);
      }
      continue;
    }
#endif
    for (int64_t d = 0; d < deep; ++d) Read::put_query(s.query, r * deep + d, s.line[d]);
  }
  const int64_t from = most(rows.lo_min, split * plan.keys_per_split);
  const int64_t to = least(rows.hi_max, (split + 1) * plan.keys_per_split);
  if (!pass_lines<Read, R>(p, b, kv_head, from, to, false, s)) pass_lines<Read, R>(p, b, kv_head, from, to, true, s);
  for (int r = 0; r < n; ++r) {
    for (int64_t d = 0; d < p.V; ++d) s.line[d] = s.sums[r * wide + Read::place(d)];
    const RowState state = state_of(p, b, rows, r, s.top[r], s.total[r], from, to);
    finish_row(p, plan, b, kv_head, r, split, state, s.line);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
