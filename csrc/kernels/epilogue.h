// From sums to results: divided by the softmax's denominator, gated, rounded and written; or kept for the merge.
#pragma once

#include <math.h>

#include "kernels/micro.h"
#include "plan.h"

namespace headwise {
namespace HW_ISA {

// Where a row stands after its keys: the greatest score, not yet scaled and scaled, the sum of the weights, and whether a
// NaN or Inf was met or all scores that it may attend overflowed to -inf.
struct RowState {
  float raw;
  float top;
  float total;
  bool bad;
  bool lost;
};

static inline RowState state_of(const Problem& p, int64_t b, const Rows& rows, int r, float raw, float total,
                                int64_t from, int64_t to) {
  const float top = raw * unit_of(p);
  const bool lost = top == -kInf && attends_any(p, b, rows, r, from, to);
  return {raw, top, total, rows.seen[r] || (rows.bad[r] && (lost || top != -kInf)), lost};
}

// What a row's sums are multiplied with, which is the weight of its greatest score, and its lse. An empty row (greatest
// score -inf) gives 0 and -inf.
struct RowEnd {
  float factor;
  float lse;
};

static inline RowEnd end_row(const Problem& p, int64_t h, RowState row) {
  if (row.bad || row.lost || row.total != row.total) return {NAN, NAN};
  if (row.top == -kInf) return {0.0f, -kInf};
  float worth = 1.0f;
  if (p.sinks != nullptr) {  // one more key, without a value
    const float sink = p.sinks[h], peak = sink > row.top ? sink : row.top;
    worth = expf(row.top - peak);
    row.total = row.total * worth + expf(sink - peak);
    row.top = peak;
  }
  const float lse = p.lse != nullptr ? row.top + logf(row.total) : 0.0f;
  return {worth / row.total, lse};
}

// Writes one finished row of V floats, gated.
static inline void write_row(const Problem& p, int64_t b, int64_t h, int64_t t, float* x) {
  if (p.gate.data != nullptr) {
    const char* gate = at(p.gate, b, h, t);
    if (p.gate.stride[3] == 0) {
      const float all = element(gate, p.gate.dtype, 0);
      for (int64_t d = 0; d < p.V; ++d) x[d] *= all;
    } else {
      for (int64_t d = 0; d < p.V; ++d) x[d] *= element(gate, p.gate.dtype, d * p.gate.stride[3]);
    }
  }
  write_floats(const_cast<char*>(at(p.out, b, h, t)), p.out.dtype, x, p.V);
}

HW_INLINE float* partial_of(const Problem& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t row,
                            int64_t split) {
  return plan.partial + (((b * p.K + kv_head) * plan.rows + row) * plan.splits + split) * plan.share_floats(p);
}

// Divides, gates, rounds and writes a row; `x` holds its V sums.
static inline void write_end(const Problem& p, int64_t b, int64_t kv_head, int64_t row, RowState state, float* x) {
  const int64_t G = p.H / p.K, t = row / G, h = kv_head * G + row % G, at = (b * p.H + h) * p.T + t;
  const RowEnd end = end_row(p, h, state);
  for (int64_t d = 0; d < p.V; ++d) x[d] = end.factor == 0.0f ? 0.0f : x[d] * end.factor;
  if (p.lse != nullptr) p.lse[at] = end.lse;
  if (p.ends != nullptr) p.ends[at] = state.raw, p.ends[p.B * p.H * p.T + at] = end.factor;
  write_row(p, b, h, t, x);
}

// A row's sums, or its share of them where the keys are split. A share whose scores were all lost has the total 1.
static inline void finish_row(const Problem& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t row,
                              int64_t split, RowState state, float* x) {
  if (plan.splits == 1) {
    write_end(p, b, kv_head, row, state, x);
    return;
  }
  float* to = partial_of(p, plan, b, kv_head, row, split);
  to[0] = state.bad ? 0.0f : state.top;
  to[1] = state.bad ? NAN : state.lost ? 1.0f : state.total;
  to[2] = state.raw;
  memcpy(to + 3, x, static_cast<size_t>(p.V) * sizeof(float));
}

static void merge_rows(const Problem& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    RowState state = {-kInf, -kInf, 0.0f, false, false};
    bool lost = false;
    for (int64_t s = 0; s < plan.splits; ++s) {
      const float* share = partial_of(p, plan, b, kv_head, row, s);
      state.top = share[0] > state.top ? share[0] : state.top;
      state.raw = share[2] > state.raw ? share[2] : state.raw;
      lost |= share[0] == -kInf && share[1] > 0.0f;
    }
    state.lost = lost && state.top == -kInf;
    float* sums = partial_of(p, plan, b, kv_head, row, 0) + 3;  // the first split's place takes the sum
    for (int64_t s = 0; s < plan.splits; ++s) {
      const float* from = partial_of(p, plan, b, kv_head, row, s);
      const float worth = from[0] == -kInf ? 0.0f : expf(from[0] - state.top), share = from[1] * worth;
      state.total = s == 0 ? share : state.total + share;
      for (int64_t d = 0; d < p.V; ++d) sums[d] = s == 0 ? from[3 + d] * worth : sums[d] + from[3 + d] * worth;
    }
    write_end(p, b, kv_head, row, state, sums);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
