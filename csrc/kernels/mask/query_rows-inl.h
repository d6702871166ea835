// A block of query rows and their bounds. A row is a pair (position, query head of the group): row r is query r / G of
// head k G + r % G.
#pragma once

#include "simd/numeric-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kRows = kVectors * W;  // rows of a block of the transposed kernels
constexpr int kTile = 128;           // keys of a tile

// The kind of a tile of keys for a block of rows: no pair may attend, some pairs may, or all may.
enum class TileKind { empty, mixed, full };

// The kind according to two rules, both of which must allow a pair.
HW_INLINE TileKind join(TileKind a, TileKind b) { return a < b ? a : b; }

struct QueryRows {
  int n = 0;       // rows of the call
  int padded = 0;  // rows up to whole vectors; the additional ones are copies of the last row
  int64_t t[kRows];
  int64_t h[kRows];
  // Row r may attend lo <= j < hi, and the keys below hi of the prefix first_min <= j < first_max. An empty row has hi
  // = 0; a row that reaches only the prefix has lo = S.
  int32_t lo[kRows], hi[kRows];
  int32_t first_min, first_max;
  int32_t lo_min, lo_max, hi_min, hi_max;  // lo_min includes the prefix
  int32_t gap_min, gap_max;                // no row may attend gap_min <= j < gap_max
  int64_t ids[kMaxSegments][kRows];
  int64_t id_min[kMaxSegments], id_max[kMaxSegments];
  bool query_bad[kRows];  // the query has a NaN or Inf
  bool key_bad[kRows];    // the row may attend a key or value that has one
};

static inline void place_rows(const Call& p, int64_t b, int64_t kv_head, int64_t first, int n, int padded,
                              QueryRows& rows) {
  const int64_t G = p.H / p.K;
  const auto [low, high, start, stop, always] = bounds_of(p, b);
  rows.n = n;
  rows.padded = padded;
  rows.first_min = static_cast<int32_t>(start);
  rows.first_max = static_cast<int32_t>(max(min(always, stop), start));
  // incremented, because a division for each row would take longer than everything else here
  int64_t t = first / G, member = first % G;
  for (int r = 0; G == 1 && r < padded; ++r) {
    rows.t[r] = first + min(r, n - 1);
    rows.h[r] = kv_head;
  }
  for (int r = 0; G > 1 && r < padded; ++r) {
    rows.t[r] = t;
    rows.h[r] = kv_head * G + member;
    if (r + 1 < n && ++member == G) {
      member = 0;
      ++t;
    }
  }
  // loops of their own, without branches, so that compilers vectorise them
  const int64_t first_min = rows.first_min, first_max = rows.first_max, keys = p.S;
  for (int r = 0; r < padded; ++r) {
    const int64_t lo = max(start, rows.t[r] + low), hi = min(stop, rows.t[r] + high);
    const bool no_window = lo >= hi, empty = no_window & (min(first_max, hi) <= first_min);
    rows.lo[r] = static_cast<int32_t>(no_window ? keys : lo);
    rows.hi[r] = static_cast<int32_t>(empty ? 0 : hi);
    rows.query_bad[r] = rows.key_bad[r] = false;
  }
  int32_t lo_min = static_cast<int32_t>(keys), hi_min = lo_min, lo_max = 0, hi_max = 0;
  for (int r = 0; r < padded; ++r) {
    const int32_t lo = rows.lo[r], hi = rows.hi[r];
    lo_min = lo < lo_min ? lo : lo_min;
    lo_max = lo > lo_max ? lo : lo_max;
    hi_min = hi < hi_min ? hi : hi_min;
    hi_max = hi > hi_max ? hi : hi_max;
  }
  rows.lo_min = lo_min;
  rows.lo_max = lo_max;
  rows.hi_min = hi_min;
  rows.hi_max = hi_max;
  rows.gap_min = rows.first_max;
  rows.gap_max = rows.lo_min;
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

// The places in x of the W rows of a block from the r-th on.
static inline void find_rows(const Tensor4& x, int64_t b, const QueryRows& rows, int r, char** place) {
  char* base = const_cast<char*>(at(x, b, 0, 0));
  const int64_t head = x.stride[1] * size_of(x.dtype), query = x.stride[2] * size_of(x.dtype);
  for (int i = 0; i < W; ++i) place[i] = base + (rows.h[r + i] * head + rows.t[r + i] * query);
}

// True if the bounds allow row r to attend key j.
HW_INLINE bool in_bounds(const QueryRows& rows, int r, int32_t j) {
  const bool above = (j >= rows.lo[r]) | ((j >= rows.first_min) & (j < rows.first_max));
  return above & (j < rows.hi[r]);
}

}  // namespace HW_ISA
}  // namespace headwise
