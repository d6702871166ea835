// The query rows of the gradient: their scratch memory, what the forward has stored of them, and their results.
#pragma once

#include <float.h>

#include "kernels/backward/softmax_backward-inl.h"
#include "kernels/decode/decode-inl.h"

namespace headwise {
namespace HW_ISA {

// with at most this many keys a row's delta is summed again, which rounds less
constexpr int kShort = 16;
constexpr int64_t kShortPiece = 32;    // piece of a head dim, if the forward's bits are not needed
constexpr int64_t kStrands = 8;        // partial sums of a delta, which round less
constexpr float kAllWeight = 0.9999f;  // the least weight of a key that counts as having all of it
// bytes of the products of few rows, which are computed once and used twice
constexpr int64_t kProductBytes = int64_t{1} << 20;
constexpr int64_t kChunkRows = 2048;              // rows of an item, unless that would make more chunks than 2 G
constexpr int64_t kStepBytes = 400 * 1024;        // bytes of the scratch of rows that share a tile
constexpr int64_t kTiledStepBytes = 1000 * 1024;  // the same with matrix instructions, which need more rows in a step
constexpr int64_t kOwnBytes = int64_t{4} << 20;   // bytes of sums in a thread's scratch, which stays allocated

// Keys of a tile. With matrix instructions, which compute a tile in units, the most that a tile may have.
template <class N>
constexpr int kKeysOf = N::kTiles ? kTile : kBackwardTile;

// One block of rows.
template <class N>
struct BackwardBlock {
  typename N::Query *query, *dout;            // Q^T, dO^T: [depth][row]
  typename N::Query *query_rows, *dout_rows;  // [row / kPair][column]
  float* sums;                                // dQ, as `block_values` adds to it
  float row_max[kRows], largest[kRows];       // the greatest score, unscaled, and its weight
  float delta[kRows];                         // sum(dO O) - dlse
  bool one_tile;                              // true if the rows reach few keys, all in one tile
  float slope[kMaxAlibi][kRows];              // sum of dS times the distance, negated
};

// The products of a block and a tile, [key][row].
struct Products {
  float *x, *y;          // scores, then weights; dP, then dS
  float *capped, *keep;  // scores behind the softcap; the factors of dropout

  Products from(int64_t cell) const { return {x + cell, y + cell, capped + cell, keep + cell}; }
};

template <class N>
struct BackwardScratch {
  BackwardBlock<N>* block;
  QueryRows* rows;
  Products products;
  typename N::Key *weight_rows, *score_rows;  // P and dS for products that sum over rows: [key][row]
  // for matrix instructions (backward_amx-inl.h): steps of 32 rows each; elements from panel to panel of the factors
  int64_t steps, panel;
  typename N::Weight* scores;  // dS for the product that sums over keys
  float *key_copy, *value_copy, *pair_copy;
  typename N::Query* out;          // O^T
  float *row_max, *row_sum, *dot;  // [row], for the softmax if it is recomputed; `dot` sums weights times dP
  char* spare;
  float* grad_rows;  // W rows of dQ
  float* ones;
  float *key_sums, *value_sums;  // [key][column], if one item has all rows of its keys; behind them those of a chunk
  bool shared;                   // several blocks use a tile

  BackwardScratch(Arena& arena, const Call& p, const BackwardPlan& plan) {
    const int blocks = static_cast<int>(plan.rows_per_step / kRows);
    const int64_t widest = max(plan.padded_D, plan.padded_V), cells = kBackwardTile * kRows;
    const int64_t floats = plan.keeps_products ? max(p.S * W, cells) : cells, keys_of_tile = kKeysOf<N>;
    steps = (blocks * kRows + kTileStep - 1) / kTileStep;
    panel = (steps * kTileStep + W) / 2 * W;
    const int64_t side_by_side = N::kTiles ? panel / W : 0;  // pairs of rows of all blocks, and some behind them
    typename N::Query* query_rows = arena.take<typename N::Query>(side_by_side * plan.padded_D);
    typename N::Query* dout_rows = arena.take<typename N::Query>(side_by_side * plan.padded_V);
    block = arena.take<BackwardBlock<N>>(blocks);
    rows = arena.take<QueryRows>(blocks);
    for (int i = 0; i < blocks; ++i) {
      BackwardBlock<N> one;
      one.query = arena.take<typename N::Query>(N::depth(p.D) * kRows);
      one.dout = arena.take<typename N::Query>(N::depth(p.V) * kRows);
      if constexpr (N::kTiles) {
        one.query_rows = query_rows + i * kRows / 2 * W;
        one.dout_rows = dout_rows + i * kRows / 2 * W;
      } else {
        one.query_rows = arena.take<typename N::Query>(kRows / N::kPair * plan.padded_D);
        one.dout_rows = arena.take<typename N::Query>(kRows / N::kPair * plan.padded_V);
      }
      one.sums = arena.take<float>(plan.padded_D * kRows);
      if (arena.base != nullptr) block[i] = one;
    }
    products.x = arena.take<float>(floats);
    products.y = arena.take<float>(floats);
    products.capped = arena.take<float>(floats);
    products.keep = arena.take<float>(floats);
    const int64_t row_cells = keys_of_tile * (N::kTiles ? steps * kTileStep : kRows);
    weight_rows = arena.take<typename N::Key>(row_cells);
    score_rows = arena.take<typename N::Key>(row_cells);
    scores = arena.take<typename N::Weight>(keys_of_tile * kRows);
    key_copy = arena.take<float>(keys_of_tile * pitch_of(p.D));
    value_copy = arena.take<float>(keys_of_tile * pitch_of(p.V));
    pair_copy = arena.take<float>(keys_of_tile * pitch_of(p.D));
    out = arena.take<typename N::Query>(N::depth(p.V) * kRows);
    row_max = arena.take<float>(kRows);
    row_sum = arena.take<float>(kRows);
    dot = arena.take<float>(kRows);
    spare = arena.take<char>(W * max(widest, kBackwardTile) * 4);
    grad_rows = arena.take<float>(W * widest);
    ones = arena.take<float>(kRows);
    for (int r = 0; r < kRows && arena.base != nullptr; ++r) ones[r] = 1.0f;
    const int64_t keys = plan.has_partial ? 0 : plan.chunks > 1 ? 2 * p.S : p.S;
    key_sums = arena.take<float>(keys * plan.padded_D);
    value_sums = arena.take<float>(keys * plan.padded_V);
    shared = blocks > 1;
  }
};

static BackwardPlan plan_backward(const Call& p) {
  BackwardPlan plan;
  const int64_t G = p.H / p.K;
  plan.rows = p.T * G;
  plan.padded_D = round_up(p.D, W);
  plan.padded_V = round_up(p.V, W);
  // Each chunk has a copy of the sums. All copies together take at most twice the memory of dQ in float32.
  plan.chunks = max(1, min((plan.rows + kChunkRows - 1) / kChunkRows, 2 * G));
  plan.rows_per_block = kRows;
  const bool halves = kHasBf16 && p.dtype() == Dtype::bf16;
  const int64_t block_bytes = kRows * (3 * p.D + 2 * p.V) * (halves ? 3 : 4);
  const int64_t blocks = max(1, min(kMaxBlocks, (kHasAmx && halves ? kTiledStepBytes : kStepBytes) / block_bytes));
  plan.rows_per_step = min(blocks, (plan.rows + kRows - 1) / kRows) * kRows;
  plan.by_row = plan.rows <= kDecodeRows && !p.is_part;
  plan.keeps_products = plan.by_row && p.S * W * 16 <= kProductBytes;
  plan.splits = !plan.by_row;
  plan.has_partial = plan.chunks > 1 || plan.partial_floats(p) * 4 > kOwnBytes;
  plan.queries_per_bias_item = max(1, plan.rows_per_step / G);
  with_format(p, [&](auto format) {
    Arena count{nullptr};
    BackwardScratch<decltype(format)>(count, p, plan);
    plan.scratch_bytes = count.used;
  });
  // Two sums: that of the chunks so far, and that of the next one.
  if (plan.chunks > 1 && 2 * plan.partial_floats(p) * 4 <= kOwnBytes) plan.whole_bytes = 2 * plan.partial_floats(p) * 4;
  return plan;
}

// The sums to which the blocks of a step add.
struct BackwardTarget {
  int64_t b, kv_head, chunk;
  float *key_sums, *value_sums;
  int only;             // the one bias whose gradient is computed, or -1 for all gradients
  bool queries, keys;   // which gradients are computed: dQ, and dK and dV
  int64_t first, last;  // keys
};

// Loads the greatest score of a row and its weight, which define all weights. A row with a NaN or Inf anywhere gets the
// largest weight NaN, so that everything it may attend becomes NaN. A row that attends nothing, or that has a NaN or
// Inf but no gradient of its output, gets the greatest score +inf, so that all its weights are 0. Both kinds of rows
// are packed as zeros.
template <class N>
static inline void load_row_end(const Call& p, const Gradients& g, int64_t b, QueryRows& rows, int r, bool bad,
                                BackwardBlock<N>& own) {
  const int64_t h = rows.h[r], t = rows.t[r], at_row = (b * p.H + h) * p.T + t;
  own.row_max[r] = p.ends[at_row];
  own.largest[r] = p.ends[p.B * p.H * p.T + at_row];
  const bool empty = own.row_max[r] == -kInf && own.largest[r] == 0.0f;
  if (!empty && !bad && own.row_max[r] - own.row_max[r] == 0.0f && own.largest[r] == own.largest[r]) return;
  const Tensor4& dout = g.grad_out;
  bool in_loss = g.grad_lse.data != nullptr && element(at(g.grad_lse, b, h, t), Dtype::f32, 0) != 0.0f;
  for (int64_t d = 0; d < p.V; ++d) in_loss |= element(at(dout, b, h, t), dout.dtype, d * dout.stride[3]) != 0.0f;
  rows.query_bad[r] = true;
  own.delta[r] = 0.0f;
  own.row_max[r] = empty || !in_loss ? kInf : 0.0f;
  own.largest[r] = empty || !in_loss ? 0.0f : NAN;
}

// Computes sum(dO O) of each row in the order in which matrix instructions sum dP: as the diagonal of rows of O times
// dO^T.
template <class N, int NV>
static inline void deltas_as_tiles(const Call& p, int64_t b, const QueryRows& rows, const typename N::Query* dout,
                                   char* spare, F* as_dp) {
  constexpr int R = NV * W;
  const int64_t padded = round_up(p.V, 2);
  uint16_t* out = reinterpret_cast<uint16_t*>(spare);
  for (int v = 0; v < NV; ++v) {
    for (int i = 0; i < W; ++i) {
      const int r = v * W + i;
      const int64_t copied = r >= rows.n || rows.query_bad[r] ? 0 : p.V;
      copy_halves(out + i * padded, at(p.out, b, rows.h[r], rows.t[r]), p.out.stride[3], copied, padded);
    }
    alignas(64) float products[W * R], diagonal[W];
    tile_key_products<NV>(dout, N::depth(p.V), out, padded, W, products);
    for (int i = 0; i < W; ++i) diagonal[i] = products[i * R + v * W + i];
    as_dp[v] = load(diagonal);
  }
}

// Computes sum(dO O) of each row in an order that rounds less, along the rows in memory.
template <class N, int NV>
static inline void deltas_of_rows(const Call& p, const Gradients& g, int64_t b, const QueryRows& rows, char* spare,
                                  F* sums) {
  uint16_t* copy = reinterpret_cast<uint16_t*>(spare);
  const auto row_of = [&](const Tensor4& x, int r, int64_t place) {
    const char* row = at(x, b, rows.h[r], rows.t[r]);
    if (x.stride[3] == 1) return reinterpret_cast<const uint16_t*>(row);
    copy_halves(copy + place, row, x.stride[3], p.V, p.V);
    return static_cast<const uint16_t*>(copy + place);
  };
  for (int v = 0; v < NV; ++v) {
    F of_row[W];
    for (int i = 0; i < W; ++i) {
      const int r = v * W + i;
      of_row[i] = zero();
      if (r >= rows.n || rows.query_bad[r]) continue;
      const uint16_t *out = row_of(p.out, r, 0), *dout = row_of(g.grad_out, r, p.V);
      for (int64_t d = 0; d < p.V; d += 2 * W) {
        const int64_t n = min(2 * W, p.V - d);
        of_row[i] = dot_pairs(of_row[i], load_halves(out + d, n), load_halves(dout + d, n));
      }
    }
    sums[v] = reduce_each(of_row);
  }
}

// The same along the transposed rows: all of them, `step` apart, or a piece.
template <class N, int NV>
static inline void deltas_of_lanes(const Call& p, int64_t b, const QueryRows& rows, const typename N::Query* dout,
                                   bool one_has_all, BackwardScratch<N>& s, F* as_dp, F* in_strands) {
  constexpr int R = NV * W;
  pack_transposed<N, NV>(p.out, b, rows, p.V, s.out, s.spare);
  const auto add_sum = [&](F* to_sum, int64_t from, int64_t to, int64_t step) {
    F sum[NV];
    for (int v = 0; v < NV; ++v) sum[v] = zero();
    for (int64_t d = from; d < to; d += step) {
      HW_UNROLL
      for (int v = 0; v < NV; ++v) {
        const int64_t at = d * R + v * W;
        sum[v] = N::times(sum[v], dout + at, load(reinterpret_cast<const float*>(s.out + at)));
      }
    }
    for (int v = 0; v < NV; ++v) to_sum[v] = add(to_sum[v], sum[v]);
  };
  const int64_t depth = N::depth(p.V);
  for (int64_t d = 0; one_has_all && d < depth; d += kShortPiece) add_sum(as_dp, d, min(d + kShortPiece, depth), 1);
  for (int64_t d = 0; d < kStrands; ++d) add_sum(in_strands, d, depth, kStrands);
}

// Adds sum(dO O) to the delta of each row. Returns false if a row had to be marked as bad. If a key has all the weight,
// O has the bits of its value; the sum is then in the order of dP, so that dP - delta is 0. Otherwise the order is one
// that rounds less.
template <class N, int NV>
static inline bool add_deltas(const Call& p, const Gradients& g, int64_t b, int block, BackwardScratch<N>& s) {
  QueryRows& rows = s.rows[block];
  BackwardBlock<N>& own = s.block[block];
  F as_dp[NV], in_strands[NV];
  for (int v = 0; v < NV; ++v) as_dp[v] = in_strands[v] = zero();
  bool one_has_all = false;
  for (int r = 0; r < rows.n; ++r) one_has_all |= own.largest[r] >= kAllWeight;
  if constexpr (N::kTiles) {
    if (one_has_all) deltas_as_tiles<N, NV>(p, b, rows, own.dout, s.spare, as_dp);
    deltas_of_rows<N, NV>(p, g, b, rows, s.spare, in_strands);
  } else {
    deltas_of_lanes<N, NV>(p, b, rows, own.dout, one_has_all, s, as_dp, in_strands);
  }
  for (int v = 0; v < NV; ++v) {
    const F sum = select(not_less(load(own.largest + v * W), set1(kAllWeight)), as_dp[v], in_strands[v]);
    store(own.delta + v * W, add(load(own.delta + v * W), sum));
  }
  bool good = true;
  for (int r = 0; r < rows.n; ++r) {
    if (own.delta[r] - own.delta[r] == 0.0f) continue;
    load_row_end(p, g, b, rows, r, true, own);
    good = false;
  }
  return good;
}

// Clears the sums of `recompute_softmax`.
template <class N>
static inline void start_recompute(BackwardScratch<N>& s) {
  for (int r = 0; r < kRows; ++r) {
    s.row_max[r] = -kInf;
    s.row_sum[r] = s.dot[r] = 0.0f;
  }
}

// Computes the greatest scores, largest weights and deltas of a block from these sums.
template <class N>
static inline void finish_recompute(const Call& p, int block, BackwardScratch<N>& s) {
  const QueryRows& rows = s.rows[block];
  BackwardBlock<N>& own = s.block[block];
  for (int r = 0; r < rows.n; ++r) {
    if (rows.query_bad[r]) continue;
    const RowState row = {s.row_max[r], s.row_max[r] * softmax_scale(p), s.row_sum[r], false, false};
    own.row_max[r] = s.row_max[r];
    own.largest[r] = row_result(p, rows.h[r], row).factor;
    own.delta[r] += s.dot[r] * own.largest[r];
    if (own.delta[r] - own.delta[r] != 0.0f) {
      own.largest[r] = NAN;
      own.delta[r] = 0.0f;
    }
  }
}

template <class N, int NV>
static inline void begin_block(const Call& p, const Gradients& g, const BackwardPlan& plan, int64_t b, int block,
                               BackwardScratch<N>& s) {
  constexpr int R = NV * W;
  QueryRows& rows = s.rows[block];
  BackwardBlock<N>& own = s.block[block];
  for (int r = 0; r < kRows; ++r) {
    own.row_max[r] = kInf;
    own.largest[r] = own.delta[r] = 0.0f;
  }
  const auto load_and_pack = [&] {
    for (int r = 0; r < rows.n; ++r) load_row_end(p, g, b, rows, r, rows.query_bad[r], own);
    const bool finite = pack_transposed<N, NV>(g.grad_out, b, rows, p.V, own.dout, s.spare);
    return pack_transposed<N, NV>(p.query, b, rows, p.D, own.query, s.spare) && finite;
  };
  if (!load_and_pack()) {
    mark_bad(p.query, b, rows, p.D);
    mark_bad(g.grad_out, b, rows, p.V);
    load_and_pack();
  }
  for (int r = 0; r < rows.n && g.grad_lse.data != nullptr; ++r) {
    if (!rows.query_bad[r]) own.delta[r] = -element(at(g.grad_lse, b, rows.h[r], rows.t[r]), Dtype::f32, 0);
  }
  own.one_tile = !p.is_part && rows.hi_max - rows.lo_min <= kShort &&
                 rows.lo_min / kBackwardTile == (rows.hi_max - 1) / kBackwardTile;
  if (!own.one_tile && !plan.by_row && !add_deltas<N, NV>(p, g, b, block, s)) {
    pack_transposed<N, NV>(p.query, b, rows, p.D, own.query, s.spare);
  }
  if constexpr (N::kTiles) {
    pack_panels(p.query, b, rows, R, p.D, own.query_rows, s.panel, s.spare);
    pack_panels(g.grad_out, b, rows, R, p.V, own.dout_rows, s.panel, s.spare);
  } else {
    pack_rows<N>(p.query, b, rows, R, p.D, own.query_rows, plan.padded_D, s.spare);
    pack_rows<N>(g.grad_out, b, rows, R, p.V, own.dout_rows, plan.padded_V, s.spare);
  }
  memset(own.sums, 0, static_cast<size_t>(plan.padded_D * R) * sizeof(float));
  memset(own.slope, 0, sizeof(own.slope));
}

// Writes dQ of a block, and adds to the gradients of sinks and slopes.
template <class N, int NV>
static inline void end_block(const Call& p, const Gradients& g, const BackwardPlan& plan, const BackwardTarget& to,
                             int block, BackwardScratch<N>& s) {
  const QueryRows& rows = s.rows[block];
  BackwardBlock<N>& own = s.block[block];
  for (int r = 0; r < rows.n; ++r) {
    float* grad = own.sums + r * plan.padded_D;
    if constexpr (N::kTiles) {
      if (r % W == 0) transpose_back(own.sums + r, NV * W, p.D, s.grad_rows, plan.padded_D);
      grad = s.grad_rows + r % W * plan.padded_D;
    } else {
      close_gap(grad, p.D);
    }
    for (int64_t d = 0; d < p.D; ++d) grad[d] *= p.scale;
    write_floats(const_cast<char*>(at(g.query, to.b, rows.h[r], rows.t[r])), g.query.dtype, grad, p.D);
  }
  const auto place = [&](const SharedGradient<double>& x, int r) {
    return x.data + to.b * x.stride[0] + rows.h[r] * x.stride[1] + to.chunk * x.chunk;
  };
  for (int r = 0; r < rows.n; ++r) {
    if (plan.sinks.data != nullptr && own.row_max[r] != kInf) {
      // If the largest weight of a key is not a normal number, the sink has all the weight.
      const float ratio = expf(p.sinks[rows.h[r]] - own.row_max[r] * softmax_scale(p));
      const float weight = own.largest[r] < FLT_MIN ? 1.0f : ratio * own.largest[r];
      *place(plan.sinks, r) -= static_cast<double>(weight) * static_cast<double>(own.delta[r]);
    }
    for (int i = 0; i < p.n_alibi; ++i) {
      if (plan.slopes[i].data != nullptr) *place(plan.slopes[i], r) += static_cast<double>(own.slope[i][r]);
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
