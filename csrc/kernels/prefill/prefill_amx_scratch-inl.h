// The memory of an item of prefill by matrix instructions, and its keys and values.
//
// A block has 32 rows and a visit 64 keys, so that everything that is written repeatedly (scores, weights, sums) stays
// in the L1 cache: a store of 16 x 16 floats to the L2 cache takes as long as four products.
#pragma once

#include "kernels/prefill/amx_pipeline-inl.h"
#include "kernels/prefill/prefill-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kAmxRows = kAmxVectors * W;  // rows of a block
constexpr int kVisitKeys = 64;             // keys of a visit
constexpr int kAmxBlocks = 32;             // blocks of an item: at most 768 KiB of queries and sums, in the L2 cache
constexpr int kVisitTiles = 4;             // tiles of kTile keys that are packed at a time
constexpr int64_t kChainWidth = 256;       // D + V at most
constexpr int kChainVisits = kAmxBlocks * kVisitTiles * (kTile / kVisitKeys);

// True if prefill uses matrix instructions in this way. It does not if the head dims do not fill tiles, if the sums do
// not fit into the L1 cache, if the rows fill at most half a block, or with dropout.
HW_INLINE bool uses_amx_prefill(const Call& p) {
  const bool fits = p.D % kTileStep == 0 && p.V % kTileStep == 0 && p.D + p.V <= kChainWidth;
  return kHasAmx && p.dtype() == Dtype::bf16 && fits && p.T * (p.H / p.K) > W && p.dropout == 0.0f;
}

// A block of rows and some keys that it attends.
struct Visit {
  int block;
  const KeyTile* tile;
  KeySpan span;
};

// A thread's scratch memory for an item.
template <class N>
struct PrefillAmxScratch {
  uint32_t* query[kAmxBlocks];
  float* sums[kAmxBlocks];
  // [block][row]: the score to which the weights are relative, near the greatest one, and the sum of the weights.
  float *row_max, *row_sum;
  float* scores[2];      // [key][row]
  uint32_t* weights[2];  // [key / 2][row]
  uint16_t *keys[kVisitTiles], *values[kVisitTiles];
  float *key_scale[kVisitTiles], *value_scale[kVisitTiles];
  char* spare;
  float* out_rows;  // W rows of O
  QueryRows* rows;
  KeyTile* tiles;
  Visit* visits;

  PrefillAmxScratch(Arena& arena, const Call& p, int blocks) {
    for (int i = 0; i < blocks; ++i) {
      query[i] = arena.take<uint32_t>(p.D / 2 * kAmxRows);
      sums[i] = arena.take<float>(p.V * kAmxRows);
    }
    row_max = arena.take<float>(kAmxBlocks * kRows);
    row_sum = arena.take<float>(kAmxBlocks * kRows);
    for (int i = 0; i < 2; ++i) {
      scores[i] = arena.take<float>(kVisitKeys * kAmxRows);
      weights[i] = arena.take<uint32_t>(kVisitKeys / 2 * kAmxRows);
    }
    for (int i = 0; i < kVisitTiles; ++i) {
      keys[i] = arena.take<uint16_t>(kTile * p.D);
      values[i] = arena.take<uint16_t>(kTile * p.V);
      key_scale[i] = arena.take<float>(kTile);
      value_scale[i] = arena.take<float>(kTile);
    }
    spare = reinterpret_cast<char*>(arena.take<float>(W * max(p.D, p.V)));
    out_rows = arena.take<float>(W * p.V);
    rows = arena.take<QueryRows>(kAmxBlocks);
    tiles = arena.take<KeyTile>(kVisitTiles);
    visits = arena.take<Visit>(kChainVisits);
  }
};

// V^T of a tile, 32 keys after 32 keys: [key / 32][column][key % 32].
template <class N>
static inline void pack_values(const Call& p, int64_t b, int64_t kv_head, const KeyTile& tile, uint16_t* copy,
                               char* spare) {
  for (int j = 0; j < tile.n; j += kTileStep) {
    const int n = static_cast<int>(min(kTileStep, tile.n - j));
    if constexpr (kScaled<N>) {
      bytes_to_columns(p.value, b, kv_head, tile.j0 + j, n, p.V, kTileStep, copy + j * p.V, spare);
      continue;
    }
    columns_of_keys(n, p.V, kTileStep, copy + j * p.V, [&](int i, int place) -> const uint16_t* {
      if (tile.bad.any && tile.bad.is[j + i]) return nullptr;
      const char* row = at(p.value, b, kv_head, tile.j0 + j + i);
      if (p.value.stride[3] == 1) return reinterpret_cast<const uint16_t*>(row);
      uint16_t* to = reinterpret_cast<uint16_t*>(spare) + place * p.V;
      copy_halves(to, row, p.value.stride[3], p.V, p.V);
      return to;
    });
  }
}

// The keys of a tile, padded by further rows to whole steps; read in place if memory has these rows.
template <class N>
static inline KeyRows amx_key_rows(const Call& p, int64_t b, int64_t kv_head, const KeyTile& tile, uint16_t* copy,
                                   char* spare) {
  const int64_t padded = round_up(tile.n, kTileStep);
  const bool rows_behind = p.table != nullptr || tile.j0 + padded <= p.S;
  const bool in_place = !kScaled<N> && p.key.stride[3] == 1 && !tile.bad.any && rows_behind;
  if (in_place) return {at(p.key, b, kv_head, tile.j0), p.key.stride[2]};
  if constexpr (kScaled<N>) {
    bytes_to_rows(p.key, b, kv_head, tile.j0, tile.n, p.D, copy, spare);
  } else {
    for (int j = 0; j < tile.n; ++j) {
      const int64_t width = tile.bad.any && tile.bad.is[j] ? 0 : p.D;
      copy_halves(copy + j * p.D, at(p.key, b, kv_head, tile.j0 + j), p.key.stride[3], width, p.D);
    }
  }
  memset(copy + tile.n * p.D, 0, static_cast<size_t>((padded - tile.n) * p.D) * sizeof(uint16_t));
  return {reinterpret_cast<const char*>(copy), p.D};
}

template <class N>
static inline void load_amx_tile(const Call& p, int64_t b, int64_t kv_head, bool careful, int i,
                                 PrefillAmxScratch<N>& s) {
  KeyTile& tile = s.tiles[i];
  tile.bad.any = false;
  if (careful || kScaled<N>) tile.bad.find(p, b, kv_head, tile.j0, tile.n);
  tile.key = amx_key_rows<N>(p, b, kv_head, tile, s.keys[i], s.spare);
  pack_values<N>(p, b, kv_head, tile, s.values[i], s.spare);
  tile.value = {reinterpret_cast<const char*>(s.values[i]), kTileStep};
  if constexpr (kScaled<N>) {
    load_key_scales(p.key_scale, b, kv_head, tile.j0, tile.n, tile.bad.from(0), s.key_scale[i]);
    load_key_scales(p.value_scale, b, kv_head, tile.j0, tile.n, tile.bad.from(0), s.value_scale[i]);
    tile.key_scale = s.key_scale[i];
    tile.value_scale = s.value_scale[i];
  }
}

}  // namespace HW_ISA
}  // namespace headwise
