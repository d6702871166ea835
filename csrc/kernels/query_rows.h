// A block of query rows: which they are, which keys they may attend, and what a mask does to a tile of their scores.
// A row is a (position, query head of the group); row r stands for query r / G of head k G + r % G.
#pragma once

#include "simd/numeric.h"

namespace headwise {
namespace HW_ISA {

constexpr int kRows = kVectors * W;  // of a block of the transposed kernel; the row kernel has fewer
constexpr int kTile = 128;           // keys of a tile

enum class Tile { empty, mixed, full };

struct Rows {
  int n = 0;       // rows that are real
  int padded = 0;  // and with those that fill up the last vector: copies of the last real one
  int64_t t[kRows];
  int64_t h[kRows];
  // Row r may attend lo <= j < hi, and of the keys first_min <= j < first_max those below hi; an empty row has hi = 0,
  // and lo = S where there is nothing but the first keys.
  int32_t lo[kRows], hi[kRows];
  int32_t first_min, first_max;
  int32_t lo_min, lo_max, hi_min, hi_max;  // lo_min: of the first keys too
  int32_t gap_min, gap_max;                // no row may attend gap_min <= j < gap_max
  int64_t ids[kMaxSegments][kRows];
  int64_t id_min[kMaxSegments], id_max[kMaxSegments];
  bool bad[kRows];   // the query itself holds a NaN or Inf
  bool seen[kRows];  // a key or value with NaN or Inf may be attended
};

static inline void place_rows(const Problem& p, int64_t b, int64_t kv_head, int64_t first, int n, int padded,
                              Rows& rows) {
  const int64_t G = p.H / p.K;
  int64_t low = p.low, high = p.high, start = 0, stop = p.S, always = 0;
  if (p.bounds != nullptr) {
    const int64_t* of_batch = p.bounds + b * p.bounds_stride;
    low = of_batch[0], high = of_batch[1], start = of_batch[2], stop = of_batch[3];
    if (p.bounds_size > 4) always = of_batch[4];
  }
  low = most(least(low, kFar), -kFar), high = most(least(high, kFar), -kFar);
  start = most(least(start, p.S), 0), stop = most(least(stop, p.S), 0);
  rows.n = n, rows.padded = padded;
  rows.first_min = static_cast<int32_t>(start);
  rows.first_max = static_cast<int32_t>(most(least(always, stop), start));
  rows.lo_min = rows.hi_min = static_cast<int32_t>(p.S), rows.lo_max = rows.hi_max = 0;
  for (int r = 0; r < padded; ++r) {
    const int64_t row = first + (r < n ? r : n - 1), t = row / G;
    rows.t[r] = t, rows.h[r] = kv_head * G + row % G;
    rows.bad[r] = rows.seen[r] = false;
    const int64_t lo = most(start, t + low), hi = least(stop, t + high);
    const bool beyond = lo >= hi, empty = beyond && least(rows.first_max, hi) <= rows.first_min;
    rows.lo[r] = static_cast<int32_t>(beyond ? p.S : lo), rows.hi[r] = static_cast<int32_t>(empty ? 0 : hi);
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
      rows.id_min[s] = r == 0 ? id : least(rows.id_min[s], id);
      rows.id_max[s] = r == 0 ? id : most(rows.id_max[s], id);
    }
  }
}

// Whether bands and lengths let row r attend key j.
HW_INLINE bool may_reach(const Rows& rows, int r, int32_t j) {
  const bool above = (j >= rows.lo[r]) | ((j >= rows.first_min) & (j < rows.first_max));
  return above & (j < rows.hi[r]);
}

// What segments say of a tile, from the least and the greatest id on each side.
static inline Tile segment_tile(const SegmentRule& rule, int64_t b, int64_t id_min, int64_t id_max, int64_t j0,
                                int64_t j1) {
  const int64_t* ids = rule.key_ids + b * rule.key_stride[0];
  int64_t key_min = ids[j0 * rule.key_stride[1]], key_max = key_min;
  for (int64_t j = j0 + 1; j < j1; ++j) {
    const int64_t id = ids[j * rule.key_stride[1]];
    key_min = least(key_min, id), key_max = most(key_max, id);
  }
  if (key_min > id_max || key_max < id_min) return Tile::empty;
  return key_min == key_max && id_min == id_max ? Tile::full : Tile::mixed;
}

// What a boolean tensor says of a tile.
static inline Tile keep_tile(const Tensor4& keep, int64_t b, const Rows& rows, int64_t j0, int64_t j1) {
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
    if (some && !every) return Tile::mixed;
  }
  return every ? Tile::full : some ? Tile::mixed : Tile::empty;
}

// The entry of a map for row r and the tiles' column c.
HW_INLINE int64_t entry_of(const MapRule& map, int64_t b, const Rows& rows, int r, int64_t c) {
  return map.index[b * map.stride[0] + rows.h[r] * map.stride[1] + rows.t[r] / MapRule::kSide * map.stride[2] +
                   c * map.stride[3]];
}

// The keys of column c that row r may attend, a bit each.
HW_INLINE uint64_t word_of(const MapRule& map, int64_t b, const Rows& rows, int r, int64_t c) {
  const int64_t entry = entry_of(map, b, rows, r, c);
  if (entry < MapRule::kBits) return entry == MapRule::kAll ? ~uint64_t{0} : 0;
  return map.bits[(entry - MapRule::kBits) * MapRule::kSide + rows.t[r] % MapRule::kSide];
}

// What a map says of a tile.
static inline Tile map_tile(const MapRule& map, int64_t b, const Rows& rows, int64_t j0, int64_t j1) {
  bool some = false, every = true;
  for (int r = 0; r < rows.n; ++r) {
    const bool as_before = r > 0 && rows.t[r] / MapRule::kSide == rows.t[r - 1] / MapRule::kSide &&
                           (rows.h[r] == rows.h[r - 1] || map.stride[1] == 0);
    if (as_before) continue;
    for (int64_t c = j0 / MapRule::kSide; c * MapRule::kSide < j1; ++c) {
      const int64_t entry = entry_of(map, b, rows, r, c);
      some |= entry != MapRule::kNone, every &= entry == MapRule::kAll;
    }
    if (some && !every) return Tile::mixed;
  }
  return every ? Tile::full : some ? Tile::mixed : Tile::empty;
}

// Whether any, some or all pairs of the rows and the keys j0 <= j < j1 may attend (a bias is not looked at).
static inline Tile tile_of(const Problem& p, int64_t b, const Rows& rows, int64_t j0, int64_t j1) {
  if (j0 >= rows.hi_max || j1 <= rows.lo_min || (j0 >= rows.gap_min && j1 <= rows.gap_max)) return Tile::empty;
  const bool reached = j0 >= rows.lo_max || (j0 >= rows.first_min && j1 <= rows.first_max);
  Tile tile = reached && j1 <= rows.hi_min ? Tile::full : Tile::mixed;
  for (int s = 0; s < p.n_segments; ++s) {
    const Tile by_ids = segment_tile(p.segments[s], b, rows.id_min[s], rows.id_max[s], j0, j1);
    if (by_ids == Tile::empty) return Tile::empty;
    if (by_ids == Tile::mixed) tile = Tile::mixed;
  }
  for (int i = 0; i < p.n_dense; ++i) {
    if (p.dense[i].dtype != Dtype::boolean) continue;
    const Tile by_keep = keep_tile(p.dense[i], b, rows, j0, j1);
    if (by_keep == Tile::empty) return Tile::empty;
    if (by_keep == Tile::mixed) tile = Tile::mixed;
  }
  for (int i = 0; i < p.n_maps; ++i) {
    const Tile by_map = map_tile(p.maps[i], b, rows, j0, j1);
    if (by_map == Tile::empty) return Tile::empty;
    if (by_map == Tile::mixed) tile = Tile::mixed;
  }
  return tile;
}

// The part of a tile that a block of rows reaches, and what masks say of it.
struct Part {
  int64_t j0;
  int n;
  Tile kind;
};

// `pair` keys are taken together, from where the tile begins.
static inline Part part_of(const Problem& p, int64_t b, const Rows& rows, int64_t tile_j0, int tile_n, int pair) {
  int64_t j0 = most(tile_j0, rows.lo_min);
  const int64_t j1 = least(tile_j0 + tile_n, rows.hi_max);
  if (j0 >= j1) return {j0, 0, Tile::empty};
  j0 -= (j0 - tile_j0) % pair;
  return {j0, static_cast<int>(j1 - j0), tile_of(p, b, rows, j0, j1)};
}

// The scores of row r and key j of a tile lie at x[r * RowStep + j * KeyStep], one of the two being 1.
template <int RowStep, int KeyStep>
struct Layout {
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
static inline void join_dense(const Tensor4& dense, int64_t b, const Rows& rows, int64_t j0, int n, float* x,
                              Read read) {
  const int64_t size = size_of(dense.dtype), step = dense.stride[3] * size;
  const char* row[kRows];
  for (int r = 0; r < rows.padded; ++r) row[r] = at(dense, b, rows.h[r], rows.t[r]) + j0 * step;
  if (dense.stride[1] == 0 && dense.stride[2] == 0) {  // the same for all rows: read once
    float one[kTile];
    for (int j = 0; j < n; ++j) one[j] = read(row[0] + j * step);
    L::each(rows.padded, n, x, [&](int, int j, float s) { return s == -kInf || one[j] == -kInf ? -kInf : s + one[j]; });
    return;
  }
  L::each(rows.padded, n, x, [&](int r, int j, float s) {
    const float added = read(row[r] + j * step);
    return s == -kInf || added == -kInf ? -kInf : s + added;  // forbidden stays forbidden, whatever is added
  });
}

template <class T>
HW_INLINE T read_as(const char* p) {
  T x;
  memcpy(&x, p, sizeof(x));
  return x;
}

// -inf where a map lets a row attend no key; at most two words of keys.
template <class L>
static inline void join_map(const MapRule& map, int64_t b, const Rows& rows, int64_t j0, int n, float* x) {
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
  L::each(rows.padded, n, x, [&](int r, int j, float s) {
    return words[j / MapRule::kSide][r] >> (j % MapRule::kSide) & 1 ? s : -kInf;
  });
}

// A row's place beside a tile's first key, and what its distances to the tile's keys must still be multiplied with: a
// place far off is brought near, where all of these differ by less than they round.
struct FromKeys {
  int32_t pos;
  float more;
};

HW_INLINE FromKeys from_keys(int64_t pos) {
  constexpr int64_t kNear = 1 << 30;
  const int64_t near = most(least(pos, kNear), -kNear);
  return {static_cast<int32_t>(near), near == pos ? 1.0f : static_cast<float>(pos) / static_cast<float>(near)};
}

// Scores of a tile as the softmax takes them: biases added, -inf where a row may not attend, rows marked that may
// attend a bad key. `x` holds raw products, scaled (and softcapped) before where the call is `general`.
template <class L>
static inline void mask_tile(const Problem& p, int64_t b, Rows& rows, int64_t j0, int n, float* x, Tile tile,
                             const bool* bad) {
  for (int i = 0; i < p.n_alibi; ++i) {
    const AlibiRule& rule = p.alibi[i];
    const int64_t offset = most(least(rule.offsets[b * rule.offsets_stride], kFar), -kFar);
    float slope[kRows];
    int32_t pos[kRows];
    for (int r = 0; r < rows.padded; ++r) {
      const FromKeys from = from_keys(rows.t[r] + offset - j0);
      slope[r] = rule.slopes[b * rule.slopes_stride[0] + rows.h[r] * rule.slopes_stride[1]] * from.more;
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
        if (tile == Tile::mixed) {
          join_dense<L>(dense, b, rows, j0, n, x, [](const char* q) { return *q != 0 ? 0.0f : -kInf; });
        }
        break;
      case Dtype::f32:
        join_dense<L>(dense, b, rows, j0, n, x, [](const char* q) { return read_as<float>(q); });
        break;
      case Dtype::f64:
        join_dense<L>(dense, b, rows, j0, n, x, [](const char* q) { return static_cast<float>(read_as<double>(q)); });
        break;
      default:
        join_dense<L>(dense, b, rows, j0, n, x, [&](const char* q) { return element(q, dense.dtype, 0); });
    }
  }
  if (tile == Tile::mixed) {
    for (int i = 0; i < p.n_segments; ++i) {
      const SegmentRule& rule = p.segments[i];
      int64_t ids[kTile];
      for (int j = 0; j < n; ++j) ids[j] = rule.key_ids[b * rule.key_stride[0] + (j0 + j) * rule.key_stride[1]];
      L::each(rows.padded, n, x, [&](int r, int j, float s) { return rows.ids[i][r] == ids[j] ? s : -kInf; });
    }
    for (int i = 0; i < p.n_maps; ++i) join_map<L>(p.maps[i], b, rows, j0, n, x);
    const int32_t at0 = static_cast<int32_t>(j0);
    L::each(rows.padded, n, x, [&](int r, int j, float s) {
      return may_reach(rows, r, at0 + j) ? s : -kInf;
    });
  }
  if (bad == nullptr) return;
  L::each(rows.padded, n, x, [&](int r, int j, float s) {
    rows.seen[r] |= bad[j] && s != -kInf;
    return s;
  });
}

// Whether row r may attend any of the keys from <= j < to. Read only for rows whose greatest score is -inf: they are
// empty, or their scores overflowed.
static inline bool attends_any(const Problem& p, int64_t b, const Rows& rows, int r, int64_t from, int64_t to) {
  for (int64_t j = most(from, rows.lo_min); j < least(to, rows.hi[r]); ++j) {
    bool allowed = may_reach(rows, r, static_cast<int32_t>(j));
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

// Whether bands and lengths alone restrict, so that the bounds of a row tell how many keys it may attend.
HW_INLINE bool only_bands(const Problem& p) { return p.n_segments == 0 && p.n_dense == 0 && p.n_maps == 0; }

// Whether scores are brought to natural units before the softmax, as whatever comes between scale and mask wants it.
HW_INLINE bool is_general(const Problem& p) {
  bool biased = p.n_alibi > 0;
  for (int i = 0; i < p.n_dense; ++i) biased |= p.dense[i].dtype != Dtype::boolean;
  return biased || p.softcap > 0.0f || !(p.scale > 1e-30f);  // a smaller one would vanish when it is multiplied on
}

// What a score in the softmax is still to be multiplied with.
HW_INLINE float unit_of(const Problem& p) { return is_general(p) ? 1.0f : p.scale; }

// Scale and softcap of `n` scores next to each other; n a multiple of W.
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
