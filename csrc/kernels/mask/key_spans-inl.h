// The keys of a tile that a block of query rows reaches, and whether no pair, some pairs or all pairs of them may
// attend.
#pragma once

#include "kernels/mask/tile_map-inl.h"

namespace headwise {
namespace HW_ISA {

// The kind of a tile by the bounds of its rows.
HW_INLINE TileKind bounds_kind(const QueryRows& rows, int64_t j0, int64_t j1) {
  if (j0 >= rows.hi_max || j1 <= rows.lo_min || (j0 >= rows.gap_min && j1 <= rows.gap_max)) return TileKind::empty;
  const bool reached = j0 >= rows.lo_max || (j0 >= rows.first_min && j1 <= rows.first_max);
  return reached && j1 <= rows.hi_min ? TileKind::full : TileKind::mixed;
}

// The kind of a tile by segments, from the least and the greatest id on each side.
static inline TileKind segment_kind(const SegmentRule& rule, int64_t b, int64_t id_min, int64_t id_max, int64_t j0,
                                    int64_t j1) {
  const int64_t* ids = rule.key_ids + b * rule.key_stride[0];
  int64_t key_min = ids[j0 * rule.key_stride[1]], key_max = key_min;
  for (int64_t j = j0 + 1; j < j1; ++j) {
    const int64_t id = ids[j * rule.key_stride[1]];
    key_min = min(key_min, id);
    key_max = max(key_max, id);
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
      some |= row[0] != 0;
      every &= row[0] != 0;
      continue;
    }
    uint8_t any = 0, none = 0;
    const auto look = [&](int64_t j) HW_LAMBDA {
      any |= static_cast<uint8_t>(row[j]);
      none |= row[j] == 0;
    };
    if (keep.stride[3] == 1) {  // a loop that compilers vectorise
      for (int64_t j = j0; j < j1; ++j) look(j);
    } else {
      for (int64_t j = j0; j < j1; ++j) look(j * keep.stride[3]);
    }
    some |= any != 0;
    every &= none == 0;
    if (some && !every) return TileKind::mixed;
  }
  return every ? TileKind::full : some ? TileKind::mixed : TileKind::empty;
}

// The kind of the tile j0 <= j < j1 according to all rules except maps; biases do not count.
static inline TileKind kind_without_maps(const Call& p, int64_t b, const QueryRows& rows, int64_t j0, int64_t j1) {
  TileKind tile = bounds_kind(rows, j0, j1);
  for (int s = 0; s < p.n_segments && tile != TileKind::empty; ++s) {
    tile = join(tile, segment_kind(p.segments[s], b, rows.id_min[s], rows.id_max[s], j0, j1));
  }
  for (int i = 0; i < p.n_dense && tile != TileKind::empty; ++i) {
    if (p.dense[i].dtype == Dtype::boolean) tile = join(tile, keep_kind(p.dense[i], b, rows, j0, j1));
  }
  return tile;
}

static inline TileKind tile_kind(const Call& p, int64_t b, const QueryRows& rows, int64_t j0, int64_t j1) {
  TileKind tile = kind_without_maps(p, b, rows, j0, j1);
  for (int i = 0; i < p.n_maps && tile != TileKind::empty; ++i) {
    tile = join(tile, map_kind(p.maps[i], b, rows, j0, j1));
  }
  return tile;
}

// The keys of a tile that a block of rows reaches, and their kind.
struct KeySpan {
  int64_t j0;
  int n;
  TileKind kind;
};

// The keys that the bounds reach. The first key of the span is a multiple of `pair` behind the tile's first key.
static inline KeySpan key_span(const Call& p, int64_t b, const QueryRows& rows, int64_t tile_j0, int tile_n, int pair) {
  int64_t j0 = max(tile_j0, rows.lo_min);
  const int64_t j1 = min(tile_j0 + tile_n, rows.hi_max);
  if (j0 >= j1) return {j0, 0, TileKind::empty};
  j0 -= (j0 - tile_j0) % pair;
  return {j0, static_cast<int>(j1 - j0), tile_kind(p, b, rows, j0, j1)};
}

// The same without the keys at both ends that segments or maps let no row attend, because their weights are 0. The rest
// of a tile is often full.
static inline KeySpan attended_span(const Call& p, int64_t b, const QueryRows& rows, int64_t tile_j0, int tile_n,
                                    int pair) {
  const KeySpan span = key_span(p, b, rows, tile_j0, tile_n, pair);
  if (span.kind != TileKind::mixed || (p.n_segments == 0 && p.n_maps == 0)) return span;
  int64_t j0 = span.j0, j1 = span.j0 + span.n;
  for (int s = 0; s < p.n_segments; ++s) {
    const SegmentRule& rule = p.segments[s];
    const auto attended = [&](int64_t j) {
      const int64_t id = rule.key_ids[b * rule.key_stride[0] + j * rule.key_stride[1]];
      return rows.id_min[s] <= id && id <= rows.id_max[s];
    };
    while (j0 < j1 && !attended(j0)) ++j0;
    while (j0 < j1 && !attended(j1 - 1)) --j1;
  }
  bool full = true;
  for (int i = 0; i < p.n_maps && j0 < j1; ++i) {
    KeyBits bits;
    key_bits(p.maps[i], b, rows, j0, static_cast<int>(j1 - j0), bits);
    const KeyRange range = range_of(bits, rows.n, static_cast<int>(j1 - j0));
    j1 = j0 + range.to;
    j0 += range.from;
    full &= range.full;
  }
  if (j0 >= j1) return {j0, 0, TileKind::empty};
  const int64_t odd = (j0 - tile_j0) % pair;
  j0 -= odd;
  full &= odd == 0;
  const TileKind kind = full ? kind_without_maps(p, b, rows, j0, j1) : TileKind::mixed;
  return {j0, static_cast<int>(j1 - j0), kind};
}

}  // namespace HW_ISA
}  // namespace headwise
