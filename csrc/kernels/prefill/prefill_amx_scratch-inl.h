// The memory of an item of prefill by chains of tile products, and its keys and values.
//
// Blocks have 32 rows and visits 64 keys, so that what is written again and again (scores, weights, sums) stays in the
// L1 cache: a store of 16 x 16 floats to the L2 cache takes as long as four products.
#pragma once

#include "kernels/prefill/amx_pipeline-inl.h"
#include "kernels/prefill/prefill-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kChainRows = kChainVectors * W;  // of a block
constexpr int kChainKeys = 64;                 // of a visit
constexpr int kChainBlocks = 12;               // of an item
constexpr int kChainTiles = 4;                 // of kTile keys, packed at a time
constexpr int64_t kChainWidth = 256;           // of a query and a value
constexpr int kChainVisits = kChainBlocks * kChainTiles * (kTile / kChainKeys);

// Whether prefill computes a call in this way. Not where head dims do not fill tiles, where sums do not fit into the L1
// cache, where the rows fill at most half a block, or with dropout.
HW_INLINE bool by_chains(const Problem& p) {
  const bool fits = p.D % kTileStep == 0 && p.V % kTileStep == 0 && p.D + p.V <= kChainWidth;
  return kHasAmx && p.dtype() == Dtype::bf16 && fits && p.T * (p.H / p.K) > W && p.dropout == 0.0f;
}

// A block of rows and some keys that it attends.
struct ChainVisit {
  int block;
  const KeyTile* tile;
  KeySpan span;
};

// A thread's scratch for an item.
template <class N>
struct ChainScratch {
  uint32_t* query[kChainBlocks];
  float* sums[kChainBlocks];
  // [block][row]: the greatest score, that which the weights are relative to, and the sum of the weights.
  float *row_max, *row_ref, *row_sum;
  float* scores[2];      // [key][row]
  uint32_t* weights[2];  // [key / 2][row]
  uint16_t *keys[kChainTiles], *values[kChainTiles];
  float *key_scale[kChainTiles], *value_scale[kChainTiles];
  char* spare;
  float* out_rows;  // W rows of O
  QueryRows* rows;
  KeyTile* tiles;
  ChainVisit* visits;

  ChainScratch(Arena& arena, const Problem& p, int blocks) {
    for (int i = 0; i < blocks; ++i) {
      query[i] = arena.take<uint32_t>(p.D / 2 * kChainRows);
      sums[i] = arena.take<float>(p.V * kChainRows);
    }
    row_max = arena.take<float>(kChainBlocks * kRows);
    row_ref = arena.take<float>(kChainBlocks * kRows);
    row_sum = arena.take<float>(kChainBlocks * kRows);
    for (int i = 0; i < 2; ++i) {
      scores[i] = arena.take<float>(kChainKeys * kChainRows);
      weights[i] = arena.take<uint32_t>(kChainKeys / 2 * kChainRows);
    }
    for (int i = 0; i < kChainTiles; ++i) {
      keys[i] = arena.take<uint16_t>(kTile * p.D);
      values[i] = arena.take<uint16_t>(kTile * p.V);
      key_scale[i] = arena.take<float>(kTile);
      value_scale[i] = arena.take<float>(kTile);
    }
    spare = reinterpret_cast<char*>(arena.take<float>(W * max(p.D, p.V)));
    out_rows = arena.take<float>(W * p.V);
    rows = arena.take<QueryRows>(kChainBlocks);
    tiles = arena.take<KeyTile>(kChainTiles);
    visits = arena.take<ChainVisit>(kChainVisits);
  }
};

// V^T of a tile, 32 keys after 32 keys: [key / 32][column][key % 32].
template <class N>
static inline void pack_values(const Problem& p, int64_t b, int64_t kv_head, const KeyTile& tile, uint16_t* copy,
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

// The keys of a tile, and rows behind them up to whole steps: in place where there are any.
template <class N>
static inline KeyRows chain_keys(const Problem& p, int64_t b, int64_t kv_head, const KeyTile& tile, uint16_t* copy,
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
static inline void load_chain_tile(const Problem& p, int64_t b, int64_t kv_head, bool careful, int i,
                                   ChainScratch<N>& s) {
  KeyTile& tile = s.tiles[i];
  tile.bad.any = false;
  if (careful || kScaled<N>) tile.bad.find(p, b, kv_head, tile.j0, tile.n);
  tile.key = chain_keys<N>(p, b, kv_head, tile, s.keys[i], s.spare);
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
