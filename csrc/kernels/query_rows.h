// A block of query rows: their bounds, the kind of each key tile for them, and the mask of a tile of their scores.
// A row is a pair (position, query head of the group): row r is query r / G of head k G + r % G.
#pragma once

#include "simd/numeric.h"

namespace headwise {
namespace HW_ISA {

constexpr int kRows = kVectors * W;  // of a block of the transposed kernels
constexpr int kTile = 128;           // keys of a tile

// Of a tile of keys for a block of rows: no pair may attend, some may, all may.
enum class TileKind { empty, mixed, full };

struct QueryRows {
  int n = 0;       // rows of the call
  int padded = 0;  // up to whole vectors: the rest are copies of the last row
  int64_t t[kRows];
  int64_t h[kRows];
  // Row r may attend lo <= j < hi, and of the prefix first_min <= j < first_max the keys below hi. An empty row has
  // hi = 0; a row that reaches the prefix alone has lo = S.
  int32_t lo[kRows], hi[kRows];
  int32_t first_min, first_max;
  int32_t lo_min, lo_max, hi_min, hi_max;  // lo_min includes the prefix
  int32_t gap_min, gap_max;                // no row may attend gap_min <= j < gap_max
  int64_t ids[kMaxSegments][kRows];
  int64_t id_min[kMaxSegments], id_max[kMaxSegments];
  bool query_bad[kRows];  // the query has a NaN or Inf
  bool key_bad[kRows];    // the row may attend a key or value that has one
};

static inline void place_rows(const Problem& p, int64_t b, int64_t kv_head, int64_t first, int n, int padded,
                              QueryRows& rows) {
  const int64_t G = p.H / p.K;
  int64_t low = p.low, high = p.high, start = 0, stop = p.S, always = 0;
  if (p.bounds != nullptr) {
    const int64_t* of_batch = p.bounds + b * p.bounds_stride;
    low = of_batch[0], high = of_batch[1], start = of_batch[2], stop = of_batch[3];
    if (p.bounds_size > 4) always = of_batch[4];
  }
  low = max(min(low, kFar), -kFar), high = max(min(high, kFar), -kFar);
  start = max(min(start, p.S), 0), stop = max(min(stop, p.S), 0);
  rows.n = n, rows.padded = padded;
  rows.first_min = static_cast<int32_t>(start);
  rows.first_max = static_cast<int32_t>(max(min(always, stop), start));
  rows.lo_min = rows.hi_min = static_cast<int32_t>(p.S), rows.lo_max = rows.hi_max = 0;
  for (int r = 0; r < padded; ++r) {
    const int64_t row = first + (r < n ? r : n - 1), t = row / G;
    rows.t[r] = t, rows.h[r] = kv_head * G + row % G;
    rows.query_bad[r] = rows.key_bad[r] = false;
    const int64_t lo = max(start, t + low), hi = min(stop, t + high);
    const bool no_window = lo >= hi, empty = no_window && min(rows.first_max, hi) <= rows.first_min;
    rows.lo[r] = static_cast<int32_t>(no_window ? p.S : lo), rows.hi[r] = static_cast<int32_t>(empty ? 0 : hi);
    if (rows.lo[r] < rows.lo_min) rows.lo_min = rows.lo[r];
    if (rows.lo[r] > rows.lo_max) rows.lo_max = rows.lo[r];
    if (rows.hi[r] < rows.hi_min) rows.hi_min = rows.hi[r];
    if (rows.hi[r] > rows.hi_max) rows.hi_max = rows.hi[r];
  }
  rows.gap_min = rows.first_max, rows.gap_max = rows.lo_min;
  if (rows.first_max > rows.first_min && rows.hi_max > 0) rows.lo_min = rows.first_min;
  for (int s = 0; s < p.n_segments; ++s) {
    const SegmentRule& rule = p.segments[s];
    for (int r = 0; r < padded; ++r) {
      const int64_t id = rule.query_ids[b * rule.query_stride[0] + rows.t[r] * rule.query_stride[1]];
      rows.ids[s][r] = id;
      rows.id_min[s] = r == 0 ? id : min(rows.id_min[s], id);
      rows.id_max[s] = r == 0 ? id : max(rows.id_max[s], id);
    }
  }
}

// Whether the bounds allow row r to attend key j.
HW_INLINE bool in_bounds(const QueryRows& rows, int r, int32_t j) {
  const bool above = (j >= rows.lo[r]) | ((j >= rows.first_min) & (j < rows.first_max));
  return above & (j < rows.hi[r]);
}

// The kind of a tile by segments, from the least and the greatest id on each side.
static inline TileKind segment_kind(const SegmentRule& rule, int64_t b, int64_t id_min, int64_t id_max, int64_t j0,
                                    int64_t j1) {
  const int64_t* ids = rule.key_ids + b * rule.key_stride[0];
  int64_t key_min = ids[j0 * rule.key_stride[1]], key_max = key_min;
  for (int64_t j = j0 + 1; j < j1; ++j) {
    const int64_t id = ids[j * rule.key_stride[1]];
    key_min = min(key_min, id), key_max = max(key_max, id);
  }
  if (key_min > id_max || key_max < id_min) return TileKind::empty;
  return key_min == key_max && id_min == id_max ? TileKind::full : TileKind::mixed;
}

// The kind of a tile by a boolean tensor.
static inline TileKind keep_kind(const Tensor4& keep, int64_t b, const QueryRows& rows, int64_t j0, int64_t j1) {
  bool some = false, every = true;
  const bool one_row = keep.stride[1] == 0 && keep.stride[2] == 0;
  for (int r = 0; r < (one_row ? 1 : rows.n); ++r) {
    const char* row = at(keep, b, rows.h[r], rows.t[r]);
    if (keep.stride[3] == 0) {
      some |= row[0] != 0, every &= row[0] != 0;
      continue;
    }
    unsigned any = 0, none = 0;
    for (int64_t j = j0; j < j1; ++j) {
      const unsigned on = row[j * keep.stride[3]] != 0;
      any |= on, none |= on ^ 1u;
    }
    some |= any != 0, every &= none == 0;
    if (some && !every) return TileKind::mixed;
  }
  return every ? TileKind::full : some ? TileKind::mixed : TileKind::empty;
}

// The entry of a map for row r and column c of its tiles.
HW_INLINE int64_t entry_of(const MapRule& map, int64_t b, const QueryRows& rows, int r, int64_t c) {
  return map.index[b * map.stride[0] + rows.h[r] * map.stride[1] + rows.t[r] / MapRule::kSide * map.stride[2] +
                   c * map.stride[3]];
}

// The keys of column c that row r may attend, one bit each.
HW_INLINE uint64_t word_of(const MapRule& map, int64_t b, const QueryRows& rows, int r, int64_t c) {
  const int64_t entry = entry_of(map, b, rows, r, c);
  if (entry < MapRule::kBits) return entry == MapRule::kAll ? ~uint64_t{0} : 0;
  return map.bits[(entry - MapRule::kBits) * MapRule::kSide + rows.t[r] % MapRule::kSide];
}

// The kind of a tile by a map.
static inline TileKind map_kind(const MapRule& map, int64_t b, const QueryRows& rows, int64_t j0, int64_t j1) {
  bool some = false, every = true;
  for (int r = 0; r < rows.n; ++r) {
    const bool same_entry = r > 0 && rows.t[r] / MapRule::kSide == rows.t[r - 1] / MapRule::kSide &&
                            (rows.h[r] == rows.h[r - 1] || map.stride[1] == 0);
    if (same_entry) continue;
    for (int64_t c = j0 / MapRule::kSide; c * MapRule::kSide < j1; ++c) {
      const int64_t entry = entry_of(map, b, rows, r, c);
      some |= entry != MapRule::kNone, every &= entry == MapRule::kAll;
    }
    if (some && !every) return TileKind::mixed;
  }
  return every ? TileKind::full : some ? TileKind::mixed : TileKind::empty;
}

// The kind of the tile j0 <= j < j1, biases left aside.
static inline TileKind tile_kind(const Problem& p, int64_t b, const QueryRows& rows, int64_t j0, int64_t j1) {
  if (j0 >= rows.hi_max || j1 <= rows.lo_min || (j0 >= rows.gap_min && j1 <= rows.gap_max)) return TileKind::empty;
  const bool reached = j0 >= rows.lo_max || (j0 >= rows.first_min && j1 <= rows.first_max);
  TileKind tile = reached && j1 <= rows.hi_min ? TileKind::full : TileKind::mixed;
  for (int s = 0; s < p.n_segments; ++s) {
    const TileKind by_segments = segment_kind(p.segments[s], b, rows.id_min[s], rows.id_max[s], j0, j1);
    if (by_segments == TileKind::empty) return TileKind::empty;
    if (by_segments == TileKind::mixed) tile = TileKind::mixed;
  }
  for (int i = 0; i < p.n_dense; ++i) {
    if (p.dense[i].dtype != Dtype::boolean) continue;
    const TileKind by_keep = keep_kind(p.dense[i], b, rows, j0, j1);
    if (by_keep == TileKind::empty) return TileKind::empty;
    if (by_keep == TileKind::mixed) tile = TileKind::mixed;
  }
  for (int i = 0; i < p.n_maps; ++i) {
    const TileKind by_map = map_kind(p.maps[i], b, rows, j0, j1);
    if (by_map == TileKind::empty) return TileKind::empty;
    if (by_map == TileKind::mixed) tile = TileKind::mixed;
  }
  return tile;
}

// The keys of a tile that a block of rows reaches, and their kind.
struct KeySpan {
  int64_t j0;
  int n;
  TileKind kind;
};

// The span begins a multiple of `pair` keys behind the tile's first key.
static inline KeySpan key_span(const Problem& p, int64_t b, const QueryRows& rows, int64_t tile_j0, int tile_n,
                               int pair) {
  int64_t j0 = max(tile_j0, rows.lo_min);
  const int64_t j1 = min(tile_j0 + tile_n, rows.hi_max);
  if (j0 >= j1) return {j0, 0, TileKind::empty};
  j0 -= (j0 - tile_j0) % pair;
  return {j0, static_cast<int>(j1 - j0), tile_kind(p, b, rows, j0, j1)};
}

// The scores of row r and key j of a tile are at x[r * RowStep + j * KeyStep], one of the two being 1.
template <int RowStep, int KeyStep>
struct ScoreLayout {
  template <class Op>
  HW_INLINE void each(int rows, int keys, float* x, Op op) {
    if constexpr (RowStep == 1) {
      for (int j = 0; j < keys; ++j) {
        for (int r = 0; r < rows; ++r) x[r + j * KeyStep] = op(r, j, x[r + j * KeyStep]);
      }
    } else {
      for (int r = 0; r < rows; ++r) {
        for (int j = 0; j < keys; ++j) x[r * RowStep + j] = op(r, j, x[r * RowStep + j]);
      }
    }
  }
};

template <class L, class Read>
static inline void add_dense(const Tensor4& dense, int64_t b, const QueryRows& rows, int64_t j0, int n, float* x,
                             Read read) {
  const int64_t size = size_of(dense.dtype), step = dense.stride[3] * size;
  const char* row[kRows];
  for (int r = 0; r < rows.padded; ++r) row[r] = at(dense, b, rows.h[r], rows.t[r]) + j0 * step;
  if (dense.stride[1] == 0 && dense.stride[2] == 0) {  // the same for all rows: read once
    float row_bias[kTile];
    for (int j = 0; j < n; ++j) row_bias[j] = read(row[0] + j * step);
    L::each(rows.padded, n, x,
            [&](int, int j, float s) { return s == -kInf || row_bias[j] == -kInf ? -kInf : s + row_bias[j]; });
    return;
  }
  L::each(rows.padded, n, x, [&](int r, int j, float s) {
    const float bias = read(row[r] + j * step);
    return s == -kInf || bias == -kInf ? -kInf : s + bias;  // -inf stays -inf, whatever the bias
  });
}

template <class T>
HW_INLINE T read_as(const char* p) {
  T x;
  memcpy(&x, p, sizeof(x));
  return x;
}

// -inf where a map forbids; the span has at most two words of keys.
template <class L>
static inline void apply_map(const MapRule& map, int64_t b, const QueryRows& rows, int64_t j0, int n, float* x) {
  static_assert(kTile <= 2 * MapRule::kSide, "two words hold the keys of a tile");
  uint64_t words[2][kRows];
  const int64_t column = j0 / MapRule::kSide, columns = (j0 + n - 1) / MapRule::kSide;
  const int shift = static_cast<int>(j0 % MapRule::kSide);
  for (int r = 0; r < rows.padded; ++r) {
    uint64_t three[3] = {0, 0, 0};
    for (int64_t c = column; c <= columns; ++c) three[c - column] = word_of(map, b, rows, r, c);
    for (int w = 0; w < 2; ++w) {
      words[w][r] = three[w] >> shift | (shift > 0 ? three[w + 1] << (MapRule::kSide - shift) : 0);
    }
  }
  L::each(rows.padded, n, x,
          [&](int r, int j, float s) { return words[j / MapRule::kSide][r] >> (j % MapRule::kSide) & 1 ? s : -kInf; });
}

// The position of a row relative to a tile's first key. A position beyond 2^30 is clamped to it, and the distances to
// the keys are multiplied by `factor`: they differ from one another by less than float32 rounds.
struct KeyDistance {
  int32_t pos;
  float factor;
};

HW_INLINE KeyDistance key_distance(int64_t pos) {
  constexpr int64_t kNear = 1 << 30;
  const int64_t near = max(min(pos, kNear), -kNear);
  return {static_cast<int32_t>(near), near == pos ? 1.0f : static_cast<float>(pos) / static_cast<float>(near)};
}

// Adds biases to the scores of a tile and puts -inf where a row may not attend. Marks the rows that may attend one of
// the `bad` keys. `x` is scaled and softcapped before where `scales_first`.
template <class L>
static inline void mask_tile(const Problem& p, int64_t b, QueryRows& rows, int64_t j0, int n, float* x, TileKind tile,
                             const bool* bad) {
  for (int i = 0; i < p.n_alibi; ++i) {
    const AlibiRule& rule = p.alibi[i];
    const int64_t offset = max(min(rule.offsets[b * rule.offsets_stride], kFar), -kFar);
    float slope[kRows];
    int32_t pos[kRows];
    for (int r = 0; r < rows.padded; ++r) {
      const KeyDistance from = key_distance(rows.t[r] + offset - j0);
      slope[r] = rule.slopes[b * rule.slopes_stride[0] + rows.h[r] * rule.slopes_stride[1]] * from.factor;
      pos[r] = from.pos;
    }
    L::each(rows.padded, n, x, [&](int r, int j, float s) {
      const int32_t far = pos[r] > j ? pos[r] - j : j - pos[r];
      return s - slope[r] * static_cast<float>(far);
    });
  }
  for (int i = 0; i < p.n_dense; ++i) {
    const Tensor4& dense = p.dense[i];
    switch (dense.dtype) {
      case Dtype::boolean:
        if (tile == TileKind::mixed) {
          add_dense<L>(dense, b, rows, j0, n, x, [](const char* q) { return *q != 0 ? 0.0f : -kInf; });
        }
        break;
      case Dtype::f32: add_dense<L>(dense, b, rows, j0, n, x, [](const char* q) { return read_as<float>(q); }); break;
      case Dtype::f64:
        add_dense<L>(dense, b, rows, j0, n, x, [](const char* q) { return static_cast<float>(read_as<double>(q)); });
        break;
      default: add_dense<L>(dense, b, rows, j0, n, x, [&](const char* q) { return element(q, dense.dtype, 0); });
    }
  }
  if (tile == TileKind::mixed) {
    for (int i = 0; i < p.n_segments; ++i) {
      const SegmentRule& rule = p.segments[i];
      int64_t ids[kTile];
      for (int j = 0; j < n; ++j) ids[j] = rule.key_ids[b * rule.key_stride[0] + (j0 + j) * rule.key_stride[1]];
      L::each(rows.padded, n, x, [&](int r, int j, float s) { return rows.ids[i][r] == ids[j] ? s : -kInf; });
    }
    for (int i = 0; i < p.n_maps; ++i) apply_map<L>(p.maps[i], b, rows, j0, n, x);
    const int32_t at0 = static_cast<int32_t>(j0);
    L::each(rows.padded, n, x, [&](int r, int j, float s) { return in_bounds(rows, r, at0 + j) ? s : -kInf; });
  }
  if (bad == nullptr) return;
  L::each(rows.padded, n, x, [&](int r, int j, float s) {
    rows.key_bad[r] |= bad[j] && s != -kInf;
    return s;
  });
}

// Whether row r may attend any of the keys from <= j < to. Needed only where the greatest score is -inf: the row is
// empty, or its scores overflowed.
static inline bool attends_any(const Problem& p, int64_t b, const QueryRows& rows, int r, int64_t from, int64_t to) {
  for (int64_t j = max(from, rows.lo_min); j < min(to, rows.hi[r]); ++j) {
    bool allowed = in_bounds(rows, r, static_cast<int32_t>(j));
    for (int i = 0; i < p.n_segments; ++i) {
      const SegmentRule& rule = p.segments[i];
      allowed &= rule.key_ids[b * rule.key_stride[0] + j * rule.key_stride[1]] == rows.ids[i][r];
    }
    for (int i = 0; i < p.n_dense && allowed; ++i) {
      const Tensor4& dense = p.dense[i];
      const char* row = at(dense, b, rows.h[r], rows.t[r]);
      const float x = element(row, dense.dtype, j * dense.stride[3]);
      allowed = dense.dtype == Dtype::boolean ? x != 0.0f : x != -kInf;
    }
    for (int i = 0; i < p.n_maps && allowed; ++i) {
      allowed = word_of(p.maps[i], b, rows, r, j / MapRule::kSide) >> (j % MapRule::kSide) & 1;
    }
    if (allowed) return true;
  }
  return false;
}

// Whether no mask but the bounds restricts rows: then the bounds of a row count its keys.
HW_INLINE bool only_bounds(const Problem& p) { return p.n_segments == 0 && p.n_dense == 0 && p.n_maps == 0; }

// Whether scores are scaled before the softmax, because a softcap or a bias comes between. Else the scale is applied
// inside the exponential.
HW_INLINE bool scales_first(const Problem& p) {
  bool biased = p.n_alibi > 0;
  for (int i = 0; i < p.n_dense; ++i) biased |= p.dense[i].dtype != Dtype::boolean;
  return biased || p.softcap > 0.0f || !(p.scale > 1e-30f);  // times log2(e) and a score, a smaller one underflows
}

// The factor that the softmax applies to the scores.
HW_INLINE float softmax_scale(const Problem& p) { return scales_first(p) ? 1.0f : p.scale; }

// Scale and softcap of n contiguous scores; n is a multiple of W.
static inline void scale_scores(const Problem& p, float* x, int64_t n) {
  const F scale = set1(p.scale);
  if (p.softcap > 0.0f) {
    const F cap = set1(p.softcap);
    for (int64_t i = 0; i < n; i += W) store(x + i, mul(cap, tanh(div(mul(load(x + i), scale), cap))));
  } else {
    for (int64_t i = 0; i < n; i += W) store(x + i, mul(load(x + i), scale));
  }
}

}  // namespace HW_ISA
}  // namespace headwise
