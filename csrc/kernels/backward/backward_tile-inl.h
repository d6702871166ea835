// The gradient of one tile of keys: its products, P and dS, and what they add to the gradients.
#pragma once

#include "kernels/backward/backward_amx-inl.h"

namespace headwise {
namespace HW_ISA {

struct BackwardTile : KeyTile {
  KeyRows key_pairs;  // keys in the layout for dQ, which sums over them
};

template <class N>
static inline void load_tile(const Call& p, int64_t b, int64_t kv_head, int64_t j0, int n, BackwardScratch<N>& s,
                             BackwardTile& tile) {
  tile.j0 = j0;
  tile.n = n;
  tile.bad.find(p, b, kv_head, j0, n);
  const bool in_place = p.D >= W && !(s.shared && collides(p.key));  // dQ reads whole vectors of columns
  tile.key = tile_rows<N>(p.key, b, kv_head, tile, p.D, tile.bad, in_place, s.key_copy);
  tile.value = tile_rows<N>(p.value, b, kv_head, tile, p.V, tile.bad, true, s.value_copy);
  tile.key_pairs = tile.key;
  if constexpr (N::kTiles) {
    tile.key_pairs = {reinterpret_cast<const char*>(s.pair_copy), 0};
    pack_key_columns(p.key, b, kv_head, tile, p.D, reinterpret_cast<uint16_t*>(s.pair_copy),
                     reinterpret_cast<uint16_t*>(s.spare));
  } else if constexpr (N::kPair == 2)
    tile.key_pairs = tile_pairs<N>(p.key, b, kv_head, tile, p.D, true, s.pair_copy, s.spare);
}

// True if x and y of 16 keys are computed together. With smaller head dims Q^T and dO^T of 32 keys stay in the L1
// cache.
HW_INLINE bool fuses_products(const Call& p) { return p.D == p.V && p.D % kTileStep == 0 && p.D > 64; }

// Writes the factors of dropout, if there is any.
template <int R>
static inline void drop_factors(const Call& p, int64_t b, const QueryRows& rows, const KeySpan& span,
                                const Products& products) {
  if (p.dropout == 0.0f) return;
  for (int64_t i = 0; i < int64_t{span.n} * R; ++i) products.keep[i] = 1.0f;
  drop_tile<1, R>(p, b, rows, span.j0, span.n, products.keep);
}

// Computes scores and dP of a block and a tile. They have the bits of the forward and of `add_deltas`; if neither is
// needed, the head dim is summed in shorter pieces.
template <class N, int NV>
static inline void forward_products(const Call& p, int64_t b, const BackwardTile& tile, const KeySpan& span, int block,
                                    bool recomputes, const Products& products, BackwardScratch<N>& s) {
  constexpr int R = NV * W;
  const BackwardBlock<N>& own = s.block[block];
  const int64_t skip = span.j0 - tile.j0, cells = int64_t{span.n} * R;
  const auto* value = reinterpret_cast<const typename N::Key*>(tile.value.data) + skip * tile.value.stride;
  float* capped = p.softcap > 0.0f ? products.capped : nullptr;
  if constexpr (N::kTiles && NV == 3) {
    if (fuses_products(p) && span.n == W) {
      const auto* key = reinterpret_cast<const typename N::Key*>(tile.key.data) + skip * tile.key.stride;
      tile_scores<ScoreLayout<1, R>>(p, b, s.rows[block], span, nullptr, products.x, {cells}, capped, [&] {
        add_fused_products(own.query, own.dout, p.D / kTileStep, key, tile.key.stride, value, tile.value.stride,
                           products.x, products.y);
      });
      return drop_factors<R>(p, b, s.rows[block], span, products);
    }
  }
  block_scores<N, NV>(p, b, tile, span, own.query, s.rows[block], false, products.x, capped,
                      recomputes ? kShortPiece : kPiece);
  key_products<N, NV>(own.dout, N::depth(p.V), value, tile.value.stride, span.n, products.y, kShortPiece);
  drop_factors<R>(p, b, s.rows[block], span, products);
}

template <class N, int NV>
static inline void recompute_tile(const Call& p, const KeySpan& span, const Products& products, BackwardScratch<N>& s) {
  const float* keep = p.dropout > 0.0f ? products.keep : nullptr;
  recompute_softmax<NV>(products.x, products.y, span.n, softmax_scale(p) * kLog2e, keep, s.row_max, s.row_sum, s.dot);
}

// Adds to the gradients of biases and slopes. Returns whether x and y have become P and dS as floats, which happens if
// a rule needs them.
template <class N, int NV>
static inline bool float_scores(const Call& p, const BackwardPlan& plan, const BackwardTarget& to, const KeySpan& span,
                                int block, const Products& products, BackwardScratch<N>& s) {
  const QueryRows& rows = s.rows[block];
  BackwardBlock<N>& own = s.block[block];
  const int64_t b = to.b, chunk = to.chunk, j0 = span.j0;
  const int n = span.n, only = to.only;
  const bool drops = p.dropout > 0.0f;
  const float c = softmax_scale(p) * kLog2e;
  bool as_floats = N::kPair == 1 || drops || p.softcap > 0.0f || only >= 0;
  for (int i = 0; i < p.n_dense; ++i) as_floats |= plan.dense[i].data != nullptr;
  for (int i = 0; i < p.n_alibi; ++i) as_floats |= plan.slopes[i].data != nullptr;
  if (as_floats) {
    const float* keep = drops ? products.keep : nullptr;
    softmax_backward<NV>(products.x, products.y, n, c, own.row_max, own.largest, own.delta, keep);
    for (int i = 0; i < p.n_dense; ++i) {
      const bool wanted = plan.dense[i].data != nullptr && (only >= 0 ? i == only : !plan.summed[i]);
      if (wanted) add_bias<NV>(plan.dense[i], b, chunk, rows, j0, n, products.y, reinterpret_cast<float*>(s.spare));
    }
    for (int i = 0; i < p.n_alibi && only < 0; ++i) {
      if (plan.slopes[i].data != nullptr) add_slopes<NV>(p, i, b, rows, j0, n, products.y, own.slope[i]);
    }
    if (p.softcap > 0.0f) softcap_backward(p.softcap, products.capped, products.y, int64_t{n} * NV * W);
  }
  return as_floats;
}

// Computes the products of some keys of a tile, and what is missing of the softmax if the forward has not stored it.
template <class N, int NV>
static inline Products block_products(const Call& p, const BackwardPlan& plan, int64_t b, const BackwardTile& tile,
                                      const KeySpan& span, int block, BackwardScratch<N>& s) {
  const bool one_tile = s.block[block].one_tile;
  const Products products = plan.keeps_products ? s.products.from(span.j0 * W) : s.products;
  if (!plan.keeps_products || one_tile) {
    forward_products<N, NV>(p, b, tile, span, block, plan.by_row || one_tile, products, s);
  }
  if (one_tile) {
    start_recompute(s);
    recompute_tile<N, NV>(p, span, products, s);
    finish_recompute(p, block, s);
  }
  return products;
}

template <class N, int NV>
static inline void backward_tile(const Call& p, const BackwardPlan& plan, const BackwardTarget& to,
                                 const BackwardTile& tile, const KeySpan& span, int block, BackwardScratch<N>& s) {
  constexpr int R = NV * W;
  const int n = span.n;
  BackwardBlock<N>& own = s.block[block];
  const Products products = block_products<N, NV>(p, plan, to.b, tile, span, block, s);
  const bool ready = float_scores<N, NV>(p, plan, to, span, block, products, s);
  if (to.only >= 0) return;
  const typename N::Key *weight_rows = s.weight_rows, *score_rows = s.score_rows;
  float* scores = reinterpret_cast<float*>(s.scores);
  if constexpr (N::kPair == 1) {
    weight_rows = products.x;
    score_rows = scores = products.y;
  } else {
    softmax_backward_pairs<NV>(products.x, products.y, n, softmax_scale(p) * kLog2e, own.row_max, own.largest,
                               own.delta, ready, s.weight_rows, s.score_rows, s.scores);
  }
  if (to.keys) {
    float* value_sums = to.value_sums + (span.j0 - to.first) * plan.padded_V;
    float* key_sums = to.key_sums + (span.j0 - to.first) * plan.padded_D;
    add_product<N>(weight_rows, R, n, R / N::kPair, own.dout_rows, plan.padded_V, value_sums);
    add_product<N>(score_rows, R, n, R / N::kPair, own.query_rows, plan.padded_D, key_sums);
  }
  if (to.queries) block_values<N, NV>(tile, span, tile.key_pairs, scores, p.D, {own.sums, s.ones, false});
}

// Computes P and dS of a block and `padded` keys of a unit, some or all of which `span` has; the others get zeros. If
// the products have been computed before, they begin at the key `first`.
template <class N, int NV>
static inline void backward_keys(const Call& p, const BackwardPlan& plan, const BackwardTarget& to,
                                 const BackwardTile& tile, const KeySpan& span, int64_t padded, int64_t first,
                                 int block, UnitPrefetcher& prefetcher, BackwardScratch<N>& s) {
  BackwardBlock<N>& own = s.block[block];
  const bool computed = plan.keeps_products || own.one_tile;
  const Products products = computed ? s.products.from((span.j0 - first) * NV * W) : s.products;
  bool ready = false;
  if (span.n > 0) {
    if (!computed) forward_products<N, NV>(p, to.b, tile, span, block, plan.by_row, products, s);
    ready = float_scores<N, NV>(p, plan, to, span, block, products, s);
  }
  if (to.only >= 0) return;
  const int64_t key = span.j0 - tile.j0;
  const UnitPlaces<NV> places(s, static_cast<int>(key / kTileStep), block, key % kTileStep);
  pack_unit<NV>(products.x, products.y, span.n, padded, softmax_scale(p) * kLog2e, own.row_max, own.largest, own.delta,
                ready, span.kind == TileKind::full && !scales_first(p), places, prefetcher);
}

// The same for a tile, and dQ. dV and dK follow when all blocks of rows are done.
template <class N, int NV>
static inline void backward_units(const Call& p, const BackwardPlan& plan, const BackwardTarget& to,
                                  const BackwardTile& tile, const KeySpan& span, int block, int blocks, UnitRows* units,
                                  NextTile& next, BackwardScratch<N>& s) {
  constexpr int64_t unit_pairs = W * NV * W;
  const bool in_cache = plan.partial_floats(p) <= kSumsInCache;
  const int from = static_cast<int>(span.j0 - tile.j0) / kTileStep,
            to_unit = from + (span.n + kTileStep - 1) / kTileStep;
  const int part = fuses_products(p) && NV == 3 ? W : kTileStep;
  UnitPrefetcher prefetcher{&next};
  if (s.block[block].one_tile) block_products<N, NV>(p, plan, to.b, tile, span, block, s);
  for (int unit = from; unit < to_unit; ++unit) {
    const int64_t j0 = tile.j0 + unit * kTileStep;
    KeySpan keys = {j0, static_cast<int>(min(kTileStep, span.j0 + span.n - j0)), span.kind};
    if (span.kind == TileKind::mixed) keys = attended_span(p, to.b, s.rows[block], j0, keys.n, kTileStep);
    if (keys.kind == TileKind::empty) {
      memset(s.scores + unit * unit_pairs, 0, unit_pairs * sizeof(uint32_t));
      continue;
    }
    if (to.keys) {
      join_unit(unit, block, units[unit], s);
      const int64_t first = j0 - to.first + kTileStep * block / blocks, n = in_cache ? 0 : kTileStep / blocks;
      prefetcher.begin(0, to.value_sums + first * plan.padded_V, n, plan.padded_V);
      prefetcher.begin(1, to.key_sums + first * plan.padded_D, n, plan.padded_D);
    }
    for (int k = 0; k < kTileStep; k += part) {
      const KeySpan some = {j0 + k, static_cast<int>(max(0, min(part, keys.n - k))), keys.kind};
      backward_keys<N, NV>(p, plan, to, tile, some, part, plan.keeps_products ? 0 : span.j0, block, prefetcher, s);
    }
  }
  if (to.only >= 0 || !to.queries) return;
  const auto* columns = reinterpret_cast<const uint16_t*>(tile.key_pairs.data);
  add_keys<NV>(columns + from * kTileStep * plan.padded_D, plan.padded_D, to_unit - from, s.scores + from * unit_pairs,
               s.block[block].sums);
}

// Computes dV and dK of a tile, whose blocks of rows are done.
template <class N>
static inline void end_units(const BackwardPlan& plan, const BackwardTarget& to, const BackwardTile& tile, int blocks,
                             UnitRows* units, BackwardScratch<N>& s) {
  for (int u = 0; u < kUnits; ++u) {
    UnitRows& rows = units[u];
    if (rows.last == 0) continue;
    if (rows.last % 2 == 1 && rows.last < blocks) clear_unit(u, rows.last++, s);
    const int64_t first = rows.first * kRows, end = (rows.last - 1) * kRows + s.rows[rows.last - 1].padded;
    if (end % kTileStep != 0) clear_rows(u, end, s);
    const int64_t steps = (end - first + kTileStep - 1) / kTileStep, keys = min(kTileStep, tile.n - u * kTileStep);
    const int64_t from = u * s.steps * kBlockCells + place_of_row(first), key = tile.j0 + u * kTileStep - to.first;
    const BackwardBlock<N>& own = s.block[rows.first];
    add_unit_product(s.weight_rows + from, keys, steps, own.dout_rows, s.panel, plan.padded_V,
                     to.value_sums + key * plan.padded_V);
    add_unit_product(s.score_rows + from, keys, steps, own.query_rows, s.panel, plan.padded_D,
                     to.key_sums + key * plan.padded_D);
    rows = {};
  }
}

// The first of two passes if rows are few: only the softmax.
template <class N, int NV>
static inline void recompute_pass(const Call& p, const BackwardPlan& plan, int64_t b, const BackwardTile& tile,
                                  const KeySpan& span, BackwardScratch<N>& s) {
  const Products products = plan.keeps_products ? s.products.from(span.j0 * W) : s.products;
  forward_products<N, NV>(p, b, tile, span, 0, true, products, s);
  recompute_tile<N, NV>(p, span, products, s);
}

}  // namespace HW_ISA
}  // namespace headwise
