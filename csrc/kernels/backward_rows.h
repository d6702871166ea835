// What the gradient knows of its query rows: their places in memory, where the forward left them, how they end.
#pragma once

#include <float.h>

#include "kernels/grade.h"
#include "kernels/decode.h"

namespace headwise {
namespace HW_ISA {

constexpr int kShort = 16;                       // so few keys give a row's delta by themselves: it rounds less
constexpr int64_t kShortPiece = 32;              // of a head dim, where few products are made
constexpr int64_t kStrands = 8;                  // of a sum over a head dim that rounds less
constexpr float kAll = 0.9999f;                  // the least weight of a key that may have all of it
constexpr int64_t kHeldBytes = int64_t{1} << 20; // of products of few rows, made once and used twice
constexpr int64_t kChunkRows = 2048;             // rows of an item, but for groups so large that sums would add up
constexpr int64_t kStepBytes = 400 * 1024;       // of what belongs to the rows that share a tile
constexpr int64_t kOwnBytes = int64_t{16} << 20; // of sums that a thread's scratch may hold

// What belongs to one block of rows.
template <class N>
struct GradBlock {
  typename N::Query *query, *dout;              // Q^T, dO^T: [depth][row]
  typename N::Query *query_rows, *dout_rows;    // [row / kPair][column]
  float* sums;                                  // dQ^T [column][row]
  float top[kRows], largest[kRows];             // the greatest score, unscaled, and its weight
  float delta[kRows];                           // before it is there: -dlse
  bool alone;                                   // the rows reach few keys, all in one tile
  float slope[kMaxAlibi][kRows];                // sum of dS times the distance, with its sign
};

struct Products {
  float *x, *y;          // scores then weights, and dP then dS: [key][row]
  float *capped, *kept;  // where there is a softcap; what dropout multiplies with

  Products from(int64_t cell) const { return {x + cell, y + cell, capped + cell, kept + cell}; }
};

template <class N>
struct GradScratch {
  GradBlock<N>* block;
  Rows* rows;
  Products made;
  typename N::Key *weight_rows, *score_rows;  // P and dS where sums go over rows: [key][row]
  typename N::Weight* scores;                 // dS where they go over keys
  float *key_copy, *value_copy, *pair_copy;
  typename N::Query* out;    // O^T
  float *top, *total, *dot;  // of the softmax, where it is made again, and its sum of weight times dP: [row]
  char* spare;
  float* line;
  float* ones;
  float *key_sums, *value_sums;  // [key][column], where this thread's item is the only one of its keys
  bool shared;

  GradScratch(Arena& arena, const Problem& p, const BackwardPlan& plan) {
    const int blocks = static_cast<int>(plan.rows_per_step / kRows);
    const int64_t wide = most(plan.wide_key, plan.wide_value), cells = kGradTile * kRows;
    const int64_t products = plan.held ? most(p.S * W, cells) : cells;
    block = arena.take<GradBlock<N>>(blocks);
    rows = arena.take<Rows>(blocks);
    for (int i = 0; i < blocks; ++i) {
      GradBlock<N> one;
      one.query = arena.take<typename N::Query>(N::depth(p.D) * kRows);
      one.dout = arena.take<typename N::Query>(N::depth(p.V) * kRows);
      one.query_rows = arena.take<typename N::Query>(kRows / N::kPair * plan.wide_key);
      one.dout_rows = arena.take<typename N::Query>(kRows / N::kPair * plan.wide_value);
      one.sums = arena.take<float>(p.D * kRows);
      if (arena.base != nullptr) block[i] = one;
    }
    made.x = arena.take<float>(products), made.y = arena.take<float>(products);
    made.capped = arena.take<float>(products), made.kept = arena.take<float>(products);
    weight_rows = arena.take<typename N::Key>(cells), score_rows = arena.take<typename N::Key>(cells);
    scores = arena.take<typename N::Weight>(cells);
    key_copy = arena.take<float>(kGradTile * pitch_of(p.D)), value_copy = arena.take<float>(kGradTile * pitch_of(p.V));
    pair_copy = arena.take<float>(kGradTile * pitch_of(p.D));
    out = arena.take<typename N::Query>(N::depth(p.V) * kRows);
    top = arena.take<float>(kRows), total = arena.take<float>(kRows), dot = arena.take<float>(kRows);
    spare = arena.take<char>(W * most(wide, kGradTile) * 4);
    line = arena.take<float>(W * wide);
    ones = arena.take<float>(kRows);
    for (int r = 0; r < kRows && arena.base != nullptr; ++r) ones[r] = 1.0f;
    const int64_t own = plan.has_partial ? 0 : p.S;
    key_sums = arena.take<float>(own * plan.wide_key), value_sums = arena.take<float>(own * plan.wide_value);
    shared = blocks > 1;
  }
};

static BackwardPlan plan_backward(const Problem& p) {
  BackwardPlan plan;
  const int64_t G = p.H / p.K;
  plan.rows = p.T * G;
  plan.wide_key = round_up(p.D, W), plan.wide_value = round_up(p.V, W);
  // A chunk more is another copy of the sums: no more of them than twice the memory of the queries' own gradients.
  plan.chunks = most(1, least((plan.rows + kChunkRows - 1) / kChunkRows, 2 * G));
  plan.rows_per_chunk = (plan.rows + plan.chunks - 1) / plan.chunks;
  const int64_t block_bytes = kRows * (3 * p.D + 2 * p.V) * (HW_BF16 && p.dtype() == Dtype::bf16 ? 3 : 4);
  const int64_t blocks = most(1, least(kMaxBlocks, kStepBytes / block_bytes));
  plan.rows_per_step = least(blocks, (plan.rows_per_chunk + kRows - 1) / kRows) * kRows;
  plan.few = plan.rows <= kLineRows;
  plan.held = plan.few && p.S * W * 16 <= kHeldBytes;
  plan.has_partial = plan.chunks > 1 || plan.share_floats(p) * 4 > kOwnBytes;
  plan.queries_per_bias_item = most(1, plan.rows_per_step / G);
  Arena count{nullptr};
  GradScratch<Float32>(count, p, plan);  // no format needs more
  plan.scratch_bytes = count.used;
  return plan;
}

// What a step's blocks add to.
struct GradTarget {
  int64_t b, kv_head, chunk;
  float *key_sums, *value_sums;
  int only;  // the bias that is wanted alone, or -1
};

// Where a row ended: `top` and `largest`, which give its weights. One in which anything is no number has the largest
// weight NaN, so that all it may attend comes out NaN; one that attends nothing, or that is no number but left out of
// the loss, has the greatest score +inf, under which all weights are 0. These are packed as zeros.
template <class N>
static inline void take_end(const Problem& p, const Gradients& g, int64_t b, Rows& rows, int r, bool bad,
                            GradBlock<N>& own) {
  const int64_t h = rows.h[r], t = rows.t[r], at_row = (b * p.H + h) * p.T + t;
  own.top[r] = p.ends[at_row], own.largest[r] = p.ends[p.B * p.H * p.T + at_row];
  const bool empty = own.top[r] == -kInf && own.largest[r] == 0.0f;
  if (!empty && !bad && own.top[r] - own.top[r] == 0.0f && own.largest[r] == own.largest[r]) return;
  const Tensor4& dout = g.grad_out;
  bool wanted = g.grad_lse.data != nullptr && read_as<float>(at(g.grad_lse, b, h, t)) != 0.0f;
  for (int64_t d = 0; d < p.V; ++d) wanted |= element(at(dout, b, h, t), dout.dtype, d * dout.stride[3]) != 0.0f;
  rows.bad[r] = true, own.delta[r] = 0.0f;
  own.top[r] = empty || !wanted ? kInf : 0.0f, own.largest[r] = empty || !wanted ? 0.0f : NAN;
}

// delta of each row from its output. Where a key has all the weight, O is its value to the bit: there it is summed up as
// dP is, so that dP - delta is 0; elsewhere in a way that rounds less.
template <class N, int NV>
static inline void take_deltas(const Problem& p, const Gradients& g, int64_t b, int block, GradScratch<N>& s) {
  constexpr int R = NV * W;
  Rows& rows = s.rows[block];
  GradBlock<N>& own = s.block[block];
  pack_turned<N, NV>(p.out, b, rows, p.V, s.out, s.spare);
  F as_dp[NV], apart[NV];
  for (int v = 0; v < NV; ++v) as_dp[v] = apart[v] = zero();
  const auto join = [&](F* whole, int64_t from, int64_t to, int64_t step) {
    F sum[NV];
    for (int v = 0; v < NV; ++v) sum[v] = zero();
    for (int64_t d = from; d < to; d += step) {
      HW_UNROLL
      for (int v = 0; v < NV; ++v) {
        const int64_t at = d * R + v * W;
        sum[v] = N::times(sum[v], own.dout + at, load(reinterpret_cast<const float*>(s.out + at)));
      }
    }
    for (int v = 0; v < NV; ++v) whole[v] = add(whole[v], sum[v]);
  };
  const int64_t depth = N::depth(p.V);
  bool one_has_all = false;
  for (int r = 0; r < rows.n; ++r) one_has_all |= own.largest[r] >= kAll;
  for (int64_t d = 0; one_has_all && d < depth; d += kShortPiece) join(as_dp, d, least(d + kShortPiece, depth), 1);
  for (int64_t d = 0; d < kStrands; ++d) join(apart, d, depth, kStrands);
  for (int v = 0; v < NV; ++v) {
    const F sum = select(not_less(load(own.largest + v * W), set1(kAll)), as_dp[v], apart[v]);
    store(own.delta + v * W, add(load(own.delta + v * W), sum));
  }
  for (int r = 0; r < rows.n; ++r) {
    if (own.delta[r] - own.delta[r] == 0.0f) continue;
    take_end(p, g, b, rows, r, true, own);
  }
}

// Sums that `weigh_again` carries on.
template <class N>
static inline void begin_again(GradScratch<N>& s) {
  for (int r = 0; r < kRows; ++r) s.top[r] = -kInf, s.total[r] = s.dot[r] = 0.0f;
}

// Where the rows of a block ended, from these sums.
template <class N>
static inline void end_again(const Problem& p, int block, GradScratch<N>& s) {
  const Rows& rows = s.rows[block];
  GradBlock<N>& own = s.block[block];
  for (int r = 0; r < rows.n; ++r) {
    if (rows.bad[r]) continue;
    const RowState row = {s.top[r], s.top[r] * unit_of(p), s.total[r], false, false};
    own.top[r] = s.top[r], own.largest[r] = end_row(p, rows.h[r], row).factor;
    own.delta[r] += s.dot[r] * own.largest[r];
    if (own.delta[r] - own.delta[r] != 0.0f) own.largest[r] = NAN, own.delta[r] = 0.0f;
  }
}

template <class N, int NV>
static inline void begin_block(const Problem& p, const Gradients& g, const BackwardPlan& plan, int64_t b, int block,
                               GradScratch<N>& s) {
  constexpr int R = NV * W;
  Rows& rows = s.rows[block];
  GradBlock<N>& own = s.block[block];
  mark_bad(p.query, b, rows, p.D);
  mark_bad(g.grad_out, b, rows, p.V);
  for (int r = 0; r < kRows; ++r) own.top[r] = kInf, own.largest[r] = own.delta[r] = 0.0f;
  for (int r = 0; r < rows.n; ++r) {
    take_end(p, g, b, rows, r, rows.bad[r], own);
    if (g.grad_lse.data == nullptr || rows.bad[r]) continue;
    own.delta[r] = -read_as<float>(at(g.grad_lse, b, rows.h[r], rows.t[r]));
  }
  pack_turned<N, NV>(g.grad_out, b, rows, p.V, own.dout, s.spare);
  own.alone = rows.hi_max - rows.lo_min <= kShort && rows.lo_min / kGradTile == (rows.hi_max - 1) / kGradTile;
  if (!own.alone && !plan.few) take_deltas<N, NV>(p, g, b, block, s);
  pack_turned<N, NV>(p.query, b, rows, p.D, own.query, s.spare);
  pack_rows<N>(p.query, b, rows, R, p.D, own.query_rows, plan.wide_key, s.spare);
  pack_rows<N>(g.grad_out, b, rows, R, p.V, own.dout_rows, plan.wide_value, s.spare);
  memset(own.sums, 0, static_cast<size_t>(p.D * R) * sizeof(float));
  memset(own.slope, 0, sizeof(own.slope));
}

// The block's own gradients written, and its share of what rows have in common.
template <class N, int NV>
static inline void end_block(const Problem& p, const Gradients& g, const BackwardPlan& plan, const GradTarget& to,
                             int block, GradScratch<N>& s) {
  const Rows& rows = s.rows[block];
  GradBlock<N>& own = s.block[block];
  for (int v = 0; v < NV && v * W < rows.n; ++v) {
    turn_back(own.sums + v * W, NV * W, p.D, s.line, plan.wide_key);
    for (int i = 0; i < W && v * W + i < rows.n; ++i) {
      const int r = v * W + i;
      float* line = s.line + i * plan.wide_key;
      for (int64_t d = 0; d < p.D; ++d) line[d] *= p.scale;
      write_floats(const_cast<char*>(at(g.query, to.b, rows.h[r], rows.t[r])), g.query.dtype, line, p.D);
    }
  }
  const auto place = [&](const SharedOf<double>& x, int r) {
    return x.data + to.b * x.stride[0] + rows.h[r] * x.stride[1] + to.chunk * x.chunk;
  };
  for (int r = 0; r < rows.n; ++r) {
    if (plan.sinks.data != nullptr && own.top[r] != kInf) {
      // A sink so far above all keys that their largest weight is no normal number has the weight 1.
      const float times = expf(p.sinks[rows.h[r]] - own.top[r] * unit_of(p));
      const float weight = own.largest[r] < FLT_MIN ? 1.0f : times * own.largest[r];
      *place(plan.sinks, r) -= static_cast<double>(weight) * static_cast<double>(own.delta[r]);
    }
    for (int i = 0; i < p.n_alibi; ++i) {
      if (plan.slopes[i].data != nullptr) *place(plan.slopes[i], r) += static_cast<double>(own.slope[i][r]);
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
