// The gradient, on the transposed tiles of the forward. P is recomputed from each row's greatest score and its weight;
// then, with dP = dO V^T and delta = sum(P dP) - dlse, softmax backward gives dS = P (dP - delta), and dV = P^T dO,
// dQ = dS K, dK = dS^T Q. The products S, dP and dQ have query rows in their lanes. dV and dK sum over rows: there the
// lanes are columns.
#pragma once

#include "kernels/backward/backward_amx-inl.h"

namespace headwise {
namespace HW_ISA {

struct BackwardTile : KeyTile {
  KeyRows key_pairs;  // keys for dQ, which sums over them
};

template <class N>
static inline void load_tile(const Problem& p, int64_t b, int64_t kv_head, int64_t j0, int n, BackwardScratch<N>& s,
                             BackwardTile& tile) {
  tile.j0 = j0, tile.n = n;
  tile.bad.find(p, b, kv_head, j0, n);
  tile.key = tile_rows<N>(p.key, b, kv_head, tile, p.D, tile.bad, !(s.shared && collides(p.key)), s.key_copy);
  tile.value = tile_rows<N>(p.value, b, kv_head, tile, p.V, tile.bad, true, s.value_copy);
  tile.key_pairs = tile.key;
  if constexpr (N::kTiles) {
    tile.key_pairs = {reinterpret_cast<const char*>(s.pair_copy), 0};
    pack_key_columns(p.key, b, kv_head, tile, p.D, reinterpret_cast<uint16_t*>(s.pair_copy),
                     reinterpret_cast<uint16_t*>(s.spare));
  } else if constexpr (N::kPair == 2)
    tile.key_pairs = tile_pairs<N>(p.key, b, kv_head, tile, p.D, true, s.pair_copy, s.spare);
}

// Whether x and y of 16 keys are computed together. With smaller head dims Q^T and dO^T stay in the L1 cache beside 32.
HW_INLINE bool takes_both(const Problem& p) { return p.D == p.V && p.D % kTileStep == 0 && p.D > 64; }

// The factors of dropout, where there are any.
template <int R>
static inline void drop_factors(const Problem& p, int64_t b, const QueryRows& rows, const KeySpan& span,
                                const Products& products) {
  if (p.dropout == 0.0f) return;
  for (int64_t i = 0; i < int64_t{span.n} * R; ++i) products.keep[i] = 1.0f;
  drop_tile<1, R>(p, b, rows, span.j0, span.n, products.keep);
}

// Scores and dP of a block and a tile. They have the bits of the forward and of `add_deltas`; where neither is needed,
// the head dim is summed in shorter pieces.
template <class N, int NV>
static inline void forward_products(const Problem& p, int64_t b, const BackwardTile& tile, const KeySpan& span,
                                    int block, bool recomputes, const Products& products, BackwardScratch<N>& s) {
  constexpr int R = NV * W;
  const BackwardBlock<N>& own = s.block[block];
  const int64_t skip = span.j0 - tile.j0, cells = int64_t{span.n} * R;
  const auto* value = reinterpret_cast<const typename N::Key*>(tile.value.data) + skip * tile.value.stride;
  float* capped = p.softcap > 0.0f ? products.capped : nullptr;
  if constexpr (N::kTiles && NV == 3) {
    if (takes_both(p) && span.n == W) {
      const auto* key = reinterpret_cast<const typename N::Key*>(tile.key.data) + skip * tile.key.stride;
      tile_scores<ScoreLayout<1, R>>(p, b, s.rows[block], span, nullptr, products.x, {cells}, capped, [&] {
        add_both(own.query, own.dout, p.D / kTileStep, key, tile.key.stride, value, tile.value.stride, products.x,
                 products.y);
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
static inline void recompute_tile(const Problem& p, const KeySpan& span, const Products& products,
                                  BackwardScratch<N>& s) {
  const float* keep = p.dropout > 0.0f ? products.keep : nullptr;
  recompute_softmax<NV>(products.x, products.y, span.n, softmax_scale(p) * kLog2e, keep, s.row_max, s.row_sum, s.dot);
}

// Adds to the gradients of biases and slopes. Whether x and y have become P and dS: floats, where a rule needs them.
template <class N, int NV>
static inline bool float_scores(const Problem& p, const BackwardPlan& plan, const BackwardTarget& to,
                                const KeySpan& span, int block, const Products& products, BackwardScratch<N>& s) {
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

// The products of some keys of a tile, and what the forward has not left of the softmax.
template <class N, int NV>
static inline Products block_products(const Problem& p, const BackwardPlan& plan, int64_t b, const BackwardTile& tile,
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
static inline void backward_tile(const Problem& p, const BackwardPlan& plan, const BackwardTarget& to,
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
    weight_rows = products.x, score_rows = scores = products.y;
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
  if (to.queries) block_values<N, NV>(tile, span, tile.key_pairs, scores, p.D, s.ones, own.sums);
}

// P and dS of a block and `padded` keys of a unit, some or all of which `span` has; those of the others are zeros.
// Where the products have been computed, they begin at the key `first`.
template <class N, int NV>
static inline void backward_keys(const Problem& p, const BackwardPlan& plan, const BackwardTarget& to,
                                 const BackwardTile& tile, const KeySpan& span, int64_t padded, int64_t first,
                                 int block, UnitAhead& ahead, BackwardScratch<N>& s) {
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
                ready, span.kind == TileKind::full && !scales_first(p), places, ahead);
}

// The same of a tile, and dQ; dV and dK follow when all blocks of rows are done.
template <class N, int NV>
static inline void backward_units(const Problem& p, const BackwardPlan& plan, const BackwardTarget& to,
                                  const BackwardTile& tile, const KeySpan& span, int block, int blocks, UnitRows* units,
                                  NextTile& next, BackwardScratch<N>& s) {
  constexpr int64_t unit_pairs = W * NV * W;
  const bool in_cache = plan.partial_floats(p) <= kSumsInCache;
  const int from = static_cast<int>(span.j0 - tile.j0) / kTileStep,
            to_unit = from + (span.n + kTileStep - 1) / kTileStep;
  const int part = takes_both(p) && NV == 3 ? W : kTileStep;
  UnitAhead ahead{&next};
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
      ahead.begin(0, to.value_sums + first * plan.padded_V, n, plan.padded_V);
      ahead.begin(1, to.key_sums + first * plan.padded_D, n, plan.padded_D);
    }
    for (int k = 0; k < kTileStep; k += part) {
      const KeySpan some = {j0 + k, static_cast<int>(max(0, min(part, keys.n - k))), keys.kind};
      backward_keys<N, NV>(p, plan, to, tile, some, part, plan.keeps_products ? 0 : span.j0, block, ahead, s);
    }
  }
  if (to.only >= 0 || !to.queries) return;
  const auto* columns = reinterpret_cast<const uint16_t*>(tile.key_pairs.data);
  add_keys<NV>(columns + from * kTileStep * plan.padded_D, plan.padded_D, to_unit - from, s.scores + from * unit_pairs,
               s.block[block].sums);
}

// dV and dK of a tile, whose blocks of rows are done.
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

// The first of two passes where rows are few: the softmax alone.
template <class N, int NV>
static inline void recompute_pass(const Problem& p, const BackwardPlan& plan, int64_t b, const BackwardTile& tile,
                                  const KeySpan& span, BackwardScratch<N>& s) {
  const Products products = plan.keeps_products ? s.products.from(span.j0 * W) : s.products;
  forward_products<N, NV>(p, b, tile, span, 0, true, products, s);
  recompute_tile<N, NV>(p, span, products, s);
}

// The rows first <= row < last, at most a step of them, against all keys of the target that they may attend.
template <class N>
static void backward_rows(const Problem& p, const Gradients& g, const BackwardPlan& plan, const BackwardTarget& to,
                          int64_t first, int64_t last, BackwardScratch<N>& s) {
  const int blocks = static_cast<int>((last - first + kRows - 1) / kRows);
  Reach reach(p);
  for (int i = 0; i < blocks; ++i) {
    const int n = static_cast<int>(min(kRows, last - first - i * kRows));
    place_rows(p, to.b, to.kv_head, first + i * kRows, n, static_cast<int>(round_up(n, W)), s.rows[i]);
    reach.add(s.rows[i]);
  }
  reach = reach.within(to.first, to.last);
  if (!to.queries && reach.from >= reach.to) return;
  for (int i = 0; i < blocks; ++i) HW_BY_VECTORS(s.rows[i].n, begin_block, p, g, plan, to.b, i, s);
  BackwardTile tile;
  UnitRows units[kUnits];
  const auto end_tile = [&] {
    if constexpr (N::kTiles) end_units(plan, to, tile, blocks, units, s);
  };
  const auto load = [&](int64_t j0, int n) {
    end_tile();
    load_tile<N>(p, to.b, to.kv_head, j0, n, s, tile);
  };
  const auto span_of = [&](int i, int64_t j0, int n) { return attended_span(p, to.b, s.rows[i], j0, n, N::kStep); };
  if (plan.by_row && !s.block[0].one_tile) {
    start_recompute(s);
    walk_blocks<kKeysOf<N>, N::kStep>(p, to.b, to.kv_head, reach, 1, span_of, load,
                                      [&](int, const KeySpan& span, NextTile& next) {
                                        next.rest();
                                        HW_BY_VECTORS(s.rows[0].n, recompute_pass, p, plan, to.b, tile, span, s);
                                      });
    finish_recompute(p, 0, s);
  }
  walk_blocks<kKeysOf<N>, N::kStep>(
      p, to.b, to.kv_head, reach, blocks, span_of, load, [&](int i, const KeySpan& span, NextTile& next) {
        if constexpr (N::kTiles) {
          HW_BY_VECTORS(s.rows[i].n, backward_units, p, plan, to, tile, span, i, blocks, units, next, s);
        } else {
          next.rest();
          HW_BY_VECTORS(s.rows[i].n, backward_tile, p, plan, to, tile, span, i, s);
        }
      });
  end_tile();
  for (int i = 0; i < blocks && to.queries; ++i) HW_BY_VECTORS(s.rows[i].n, end_block, p, g, plan, to, i, s);
}

// Scales, rounds and writes a row of the gradient of a key or value.
static inline void write_sum(const Tensor4& to, int64_t b, int64_t kv_head, int64_t j, int64_t width, float scale,
                             float* sum) {
  if (scale != 1.0f) {
    const F factor = set1(scale);
    for (int64_t d = 0; d < width; d += W) store(sum + d, mul(load(sum + d), factor));  // rows are whole vectors
  }
  write_floats(const_cast<char*>(at(to, b, kv_head, j)), to.dtype, sum, width);
}

// Adds up the gradients of keys and values over the rows of a chunk.
template <class N>
static void sum_chunk(const Problem& p, const Gradients& g, const BackwardPlan& plan, const BackwardTarget& to,
                      BackwardScratch<N>& s) {
  memset(to.key_sums, 0, static_cast<size_t>((to.last - to.first) * plan.padded_D) * sizeof(float));
  memset(to.value_sums, 0, static_cast<size_t>((to.last - to.first) * plan.padded_V) * sizeof(float));
  for (int half = 0; half < 2; ++half) {
    const RowRange rows = plan.range(to.chunk, half);
    for (int64_t row = rows.first; row < rows.last; row += plan.rows_per_step) {
      backward_rows<N>(p, g, plan, to, row, min(row + plan.rows_per_step, rows.last), s);
    }
  }
}

// The sums of a later chunk join those before it. n is a multiple of W.
static inline void add_floats(float* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(to + i, add(load(to + i), load(from + i)));
}

template <class N>
static void run_part(const Problem& p, const Gradients& g, const BackwardPlan& plan, const BackwardItem& item,
                     char* scratch) {
  Arena arena{scratch};
  BackwardScratch<N> s(arena, p, plan);
  BackwardTarget to = {item.head / p.K, item.head % p.K, item.chunk, s.key_sums, s.value_sums, -1, true, true, 0, p.S};
  if (item.kind == BackwardItem::queries) {
    to.keys = false;
    return backward_rows<N>(p, g, plan, to, item.first, item.last, s);
  }
  to.queries = item.kind == BackwardItem::chunk_rows;
  to.first = item.first, to.last = item.last;
  for (; to.chunk < item.chunk + item.chunks; ++to.chunk) {
    if (plan.partial != nullptr) {
      float* sums = plan.partial + (item.head * plan.chunks + to.chunk) * plan.partial_floats(p);
      to.key_sums = sums + to.first * plan.padded_D;
      to.value_sums = sums + p.S * plan.padded_D + to.first * plan.padded_V;
    } else if (to.chunk > 0) {
      to.key_sums = s.key_sums + p.S * plan.padded_D, to.value_sums = s.value_sums + p.S * plan.padded_V;
    }
    sum_chunk(p, g, plan, to, s);
    if (plan.partial != nullptr || to.chunk == 0) continue;
    add_floats(s.key_sums, to.key_sums, p.S * plan.padded_D);
    add_floats(s.value_sums, to.value_sums, p.S * plan.padded_V);
  }
  if (plan.partial != nullptr) return;
  for (int64_t j = 0; j < p.S; ++j) {
    write_sum(g.key, to.b, to.kv_head, j, p.D, p.scale, s.key_sums + j * plan.padded_D);
    write_sum(g.value, to.b, to.kv_head, j, p.V, 1.0f, s.value_sums + j * plan.padded_V);
  }
}

// One bias that is summed over batch or heads, for some queries: all terms of a place are added here, in order.
template <class N>
static void run_bias(const Problem& p, const Gradients& g, const BackwardPlan& plan, int dense, int64_t item,
                     char* scratch) {
  Arena arena{scratch};
  BackwardScratch<N> s(arena, p, plan);
  const int64_t G = p.H / p.K, first = item * plan.queries_per_bias_item;
  const int64_t last = min(first + plan.queries_per_bias_item, p.T);
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t kv_head = 0; kv_head < p.K; ++kv_head) {
      const BackwardTarget to = {b, kv_head, 0, nullptr, nullptr, dense, false, false, 0, p.S};
      for (int64_t row = first * G; row < last * G; row += plan.rows_per_step) {
        backward_rows<N>(p, g, plan, to, row, min(row + plan.rows_per_step, last * G), s);
      }
    }
  }
}

static void run_backward(const Problem& p, const Gradients& g, const BackwardPlan& plan, const BackwardItem& item,
                         char* scratch) {
  const FlushDenormals flush;
  with_format(p, [&](auto format) { run_part<decltype(format)>(p, g, plan, item, scratch); });
}

static void run_backward_bias(const Problem& p, const Gradients& g, const BackwardPlan& plan, int dense, int64_t item,
                              char* scratch) {
  const FlushDenormals flush;
  with_format(p, [&](auto format) { run_bias<decltype(format)>(p, g, plan, dense, item, scratch); });
}

static void round_floats(const float* x, int64_t n, Dtype dtype, void* out) {
  if (dtype == Dtype::f64) {
    for (int64_t i = 0; i < n; ++i) static_cast<double*>(out)[i] = static_cast<double>(x[i]);
  } else {
    write_floats(static_cast<char*>(out), dtype, x, n);
  }
}

static void merge_backward(const Problem& p, const Gradients& g, const BackwardPlan& plan, int64_t b, int64_t kv_head,
                           int64_t first, int64_t last) {
  const FlushDenormals flush;  // as where an item writes its sums itself
  float* partial = plan.partial + (b * p.K + kv_head) * plan.chunks * plan.partial_floats(p);
  const auto merge = [&](int64_t at, int64_t width) {  // into the first chunk's sums
    for (int64_t chunk = 1; chunk < plan.chunks; ++chunk) {
      add_floats(partial + at, partial + chunk * plan.partial_floats(p) + at, width);
    }
    return partial + at;
  };
  for (int64_t j = first; j < last; ++j) {
    float* key_sum = merge(j * plan.padded_D, plan.padded_D);
    write_sum(g.key, b, kv_head, j, p.D, p.scale, key_sum);
    float* value_sum = merge(p.S * plan.padded_D + j * plan.padded_V, plan.padded_V);
    write_sum(g.value, b, kv_head, j, p.V, 1.0f, value_sum);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
