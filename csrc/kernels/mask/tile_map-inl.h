// A map of tiles as a block of query rows reads it.
#pragma once

#include "kernels/mask/query_rows-inl.h"

namespace headwise {
namespace HW_ISA {

// The entry of a map for head h, queries 64 t to 64 t + 63 and column c of its tiles.
HW_INLINE int64_t entry_of(const MapRule& map, int64_t b, int64_t h, int64_t t, int64_t c) {
  return map.index[b * map.stride[0] + h * map.stride[1] + t * map.stride[2] + c * map.stride[3]];
}

// The keys of column c that row r may attend, one bit each.
HW_INLINE uint64_t word_of(const MapRule& map, int64_t b, const QueryRows& rows, int r, int64_t c) {
  const int64_t entry = entry_of(map, b, rows.h[r], rows.t[r] / MapRule::kSide, c);
  if (entry < MapRule::kBits) return entry == MapRule::kAll ? ~uint64_t{0} : 0;
  return map.bits[(entry - MapRule::kBits) * MapRule::kSide + rows.t[r] % MapRule::kSide];
}

// The kind of a tile by the entries of a map.
static inline TileKind map_kind(const MapRule& map, int64_t b, const QueryRows& rows, int64_t j0, int64_t j1) {
  bool some = false, every = true;
  const auto add = [&](int64_t h, int64_t t) {
    for (int64_t c = j0 / MapRule::kSide; c * MapRule::kSide < j1; ++c) {
      const int64_t entry = entry_of(map, b, h, t, c);
      some |= entry != MapRule::kNone;
      every &= entry == MapRule::kAll;
    }
  };
  if (map.stride[1] == 0) {  // positions of the rows are consecutive, so that they are in few rows of the map
    const int64_t last = rows.t[rows.n - 1] / MapRule::kSide;
    for (int64_t t = rows.t[0] / MapRule::kSide; t <= last; ++t) add(0, t);
  } else {
    for (int r = 0; r < rows.n && (every || !some); ++r) add(rows.h[r], rows.t[r] / MapRule::kSide);
  }
  return every ? TileKind::full : some ? TileKind::mixed : TileKind::empty;
}

// For each row the keys that it may attend, one bit each, in words of 32 keys of a tile.
constexpr int kKeyBits = 32;
using KeyBits = uint32_t[kTile / kKeyBits][kRows];

// The keys j0 <= j < j0 + n that a map lets each row attend; at most two words of the map hold them.
static inline void key_bits(const MapRule& map, int64_t b, const QueryRows& rows, int64_t j0, int n, KeyBits bits) {
  static_assert(kTile == 2 * MapRule::kSide && kTile == 4 * kKeyBits, "two words hold the keys of a tile");
  const int64_t column = j0 / MapRule::kSide, columns = (j0 + n - 1) / MapRule::kSide;
  const int shift = static_cast<int>(j0 % MapRule::kSide);
  for (int r = 0; r < rows.padded; ++r) {
    uint64_t three[3] = {0, 0, 0};
    for (int64_t c = column; c <= columns; ++c) three[c - column] = word_of(map, b, rows, r, c);
    for (int w = 0; w < 2; ++w) {
      const uint64_t word = three[w] >> shift | (shift > 0 ? three[w + 1] << (MapRule::kSide - shift) : 0);
      bits[2 * w][r] = static_cast<uint32_t>(word);
      bits[2 * w + 1][r] = static_cast<uint32_t>(word >> kKeyBits);
    }
  }
}

// The first and the last key of from <= j < to that some row may attend, and whether all rows may attend all keys
// between them.
struct KeyRange {
  int from, to;
  bool full;
};

static inline KeyRange range_of(const KeyBits bits, int rows, int n) {
  uint32_t some[kTile / kKeyBits] = {0}, every[kTile / kKeyBits];
  for (int i = 0; i * kKeyBits < n; ++i) {
    every[i] = ~uint32_t{0};
    for (int r = 0; r < rows; ++r) {
      some[i] |= bits[i][r];
      every[i] &= bits[i][r];
    }
  }
  const auto has = [](const uint32_t* of, int j) { return (of[j / kKeyBits] >> (j % kKeyBits) & 1) != 0; };
  KeyRange range = {0, n, true};
  while (range.from < range.to && !has(some, range.from)) ++range.from;
  while (range.from < range.to && !has(some, range.to - 1)) --range.to;
  for (int j = range.from; j < range.to; ++j) range.full &= has(every, j);
  return range;
}

}  // namespace HW_ISA
}  // namespace headwise
