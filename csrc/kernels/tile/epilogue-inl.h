// The epilogue: sums are divided by the softmax's denominator, gated, rounded and written, or stored for the merge.
#pragma once

#include <math.h>

#include "kernels/tile/micro-inl.h"
#include "runtime/kernel_table.h"

namespace headwise {
namespace HW_ISA {

// The softmax of a row after its keys.
struct RowState {
  float raw_max;  // the score to which the weights are relative (the greatest one, or near it), not yet scaled
  float row_max;  // the same, scaled
  float row_sum;  // the sum of the weights
  bool bad;       // the row has a NaN or Inf in its query, or may attend one
  bool overflow;  // all scores of keys that the row may attend are -inf
};

static inline RowState row_state(const Call& p, int64_t b, const QueryRows& rows, int r, float raw_max, float row_sum,
                                 int64_t from, int64_t to) {
  const float row_max = raw_max * softmax_scale(p);
  const bool overflow = row_max == -kInf && attends_any(p, b, rows, r, from, to);
  const bool bad = rows.key_bad[r] || (rows.query_bad[r] && (overflow || row_max != -kInf));
  return {raw_max, row_max, row_sum, bad, overflow};
}

// The factor of a row's sums, which is the weight of its greatest score, and its lse. An empty row has the factor 0 and
// the lse -inf.
struct RowResult {
  float factor;
  float lse;
};

static inline RowResult row_result(const Call& p, int64_t h, RowState row) {
  if (row.bad || row.overflow || row.row_sum != row.row_sum) return {NAN, NAN};
  if (row.row_max == -kInf) return {0.0f, -kInf};
  float rescale = 1.0f;
  if (p.sinks != nullptr) {  // the sink is one more key, without a value
    const float sink = p.sinks[h], peak = sink > row.row_max ? sink : row.row_max;
    rescale = expf(row.row_max - peak);
    row.row_sum = row.row_sum * rescale + expf(sink - peak);
    row.row_max = peak;
  }
  const float lse = p.lse != nullptr ? row.row_max + logf(row.row_sum) : 0.0f;
  return {rescale / row.row_sum, lse};
}

// Gates and writes the V floats of a row, times a factor.
static inline void write_row(const Call& p, int64_t b, int64_t h, int64_t t, float* x, float factor = 1.0f) {
  if (p.gate.data != nullptr) {
    const char* gate = at(p.gate, b, h, t);
    const bool one = p.gate.stride[3] == 0;
    const float of_row = one ? element(gate, p.gate.dtype, 0) : 0.0f;
    for (int64_t d = 0; d < p.V; ++d) {
      x[d] = x[d] * factor * (one ? of_row : element(gate, p.gate.dtype, d * p.gate.stride[3]));
    }
    factor = 1.0f;
  }
  write_floats(const_cast<char*>(at(p.out, b, h, t)), p.out.dtype, x, p.V, factor);
}

HW_INLINE float* partial_row(const Call& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t row, int64_t split) {
  return plan.partial + ((b * p.K + kv_head) * plan.splits + split) * plan.split_floats(p) +
         row * plan.partial_floats(p);
}

// Stores the partial result of rows that attend no key of a split. Its V sums are never read.
static inline void skip_split(const Call& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t first, int64_t last,
                              int64_t split) {
  for (int64_t row = first; row < last; ++row) {
    float* to = partial_row(p, plan, b, kv_head, row, split);
    to[0] = -kInf;
    to[1] = 0.0f;
    to[2] = -kInf;
  }
}

// Returns the factor of a row's sums, and writes lse and ends of the row if the call has them.
static inline float write_softmax_state(const Call& p, int64_t b, int64_t h, int64_t t, RowState state) {
  const int64_t at = (b * p.H + h) * p.T + t;
  const RowResult result = row_result(p, h, state);
  if (p.lse != nullptr) p.lse[at] = result.lse;
  if (p.ends != nullptr) {
    p.ends[at] = state.raw_max;
    p.ends[p.B * p.H * p.T + at] = result.factor;
  }
  return result.factor;
}

// Divides, gates, rounds and writes a row; x has its V sums.
static inline void write_result(const Call& p, int64_t b, int64_t h, int64_t t, RowState state, float* x) {
  const float factor = write_softmax_state(p, b, h, t, state);
  if (factor == 0.0f) memset(x, 0, static_cast<size_t>(p.V) * sizeof(float));  // the sums of an empty row can be NaN
  write_row(p, b, h, t, x, factor);
}

// Writes row `row` of its key-value head, which is query t of head h. If the keys are split it stores the row's partial
// result instead; a split whose scores all overflowed stores the sum 1.
static inline void finish_row(const Call& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t row, int64_t split,
                              int64_t h, int64_t t, RowState state, float* x) {
  if (plan.splits == 1) {
    write_result(p, b, h, t, state, x);
    return;
  }
  float* to = partial_row(p, plan, b, kv_head, row, split);
  to[0] = state.bad ? 0.0f : state.row_max;
  to[1] = state.bad ? NAN : state.overflow ? 1.0f : state.row_sum;
  to[2] = state.raw_max;
  memcpy(to + 3, x, static_cast<size_t>(p.V) * sizeof(float));
}

static void merge_rows(const Call& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t first, int64_t last) {
  const int64_t G = p.H / p.K;
  for (int64_t row = first; row < last; ++row) {
    RowState state = {-kInf, -kInf, 0.0f, false, false};
    bool overflow = false;
    for (int64_t s = 0; s < plan.splits; ++s) {
      const float* from = partial_row(p, plan, b, kv_head, row, s);
      state.row_max = from[0] > state.row_max ? from[0] : state.row_max;
      state.raw_max = from[2] > state.raw_max ? from[2] : state.raw_max;
      overflow |= from[0] == -kInf && from[1] > 0.0f;
    }
    state.overflow = overflow && state.row_max == -kInf;
    float* sums = partial_row(p, plan, b, kv_head, row, 0) + 3;  // the merge is done in place, in the first split
    for (int64_t s = 0; s < plan.splits; ++s) {
      const float* from = partial_row(p, plan, b, kv_head, row, s);
      const float rescale = from[0] == -kInf ? 0.0f : expf(from[0] - state.row_max), sum = from[1] * rescale;
      state.row_sum = s == 0 ? sum : state.row_sum + sum;
      if (from[0] == -kInf && from[1] == 0.0f) {  // no key
        for (int64_t d = 0; d < p.V && s == 0; ++d) sums[d] = 0.0f;
        continue;
      }
      for (int64_t d = 0; d < p.V; ++d) sums[d] = s == 0 ? from[3 + d] * rescale : sums[d] + from[3 + d] * rescale;
    }
    write_result(p, b, kv_head * G + row % G, row / G, state, sums);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
