// From sums to results: divided by the softmax's denominator, gated, rounded and written; or kept for the merge.
#pragma once

#include <math.h>

#include "micro.h"
#include "plan.h"

namespace headwise {
namespace HW_ISA {

// What a row's sums are multiplied with, and its lse. `top` is the greatest score; an empty row (-inf) gives 0 and -inf.
struct RowEnd {
  float factor;
  float lse;
};

static inline RowEnd end_row(const Problem& p, int64_t h, float top, float total, bool bad) {
  if (bad) return {NAN, NAN};
  if (top == -kInf) return {0.0f, -kInf};
  float worth = 1.0f;
  if (p.sinks != nullptr) {  // one more key, without a value
    const float sink = p.sinks[h], peak = sink > top ? sink : top;
    worth = expf(top - peak);
    total = total * worth + expf(sink - peak);
    top = peak;
  }
  const float lse = p.lse != nullptr ? top + logf(total) : 0.0f;
  return {worth / total, lse};
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
  return plan.partial + (((b * p.K + kv_head) * plan.rows + row) * plan.splits + split) * (p.V + 2);
}

// A row's sums, or its share of them where the keys are split. `x` holds V floats (and room up to W more).
static inline void finish_row(const Problem& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t row,
                              int64_t split, float top, float total, bool bad, float* x) {
  if (plan.splits > 1) {
    float* to = partial_of(p, plan, b, kv_head, row, split);
    to[0] = bad ? 0.0f : top, to[1] = bad ? NAN : total;
    memcpy(to + 2, x, static_cast<size_t>(p.V) * sizeof(float));
    return;
  }
  const int64_t G = p.H / p.K, t = row / G, h = kv_head * G + row % G;
  const RowEnd end = end_row(p, h, top, total, bad);
  for (int64_t d = 0; d < p.V; ++d) x[d] = end.factor == 0.0f ? 0.0f : x[d] * end.factor;
  if (p.lse != nullptr) p.lse[(b * p.H + h) * p.T + t] = end.lse;
  write_row(p, b, h, t, x);
}

static void merge_rows(const Problem& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t first, int64_t last) {
  const int64_t G = p.H / p.K;
  for (int64_t row = first; row < last; ++row) {
    float top = -kInf, total = 0.0f;
    for (int64_t s = 0; s < plan.splits; ++s) {
      const float other = partial_of(p, plan, b, kv_head, row, s)[0];
      top = other > top ? other : top;
    }
    float* sums = partial_of(p, plan, b, kv_head, row, 0);  // the first split's place takes the sum
    for (int64_t s = 0; s < plan.splits; ++s) {
      const float* from = partial_of(p, plan, b, kv_head, row, s);
      const float worth = from[0] == -kInf ? 0.0f : expf(from[0] - top), share = from[1] * worth;
      total = s == 0 ? share : total + share;
      for (int64_t d = 0; d < p.V; ++d) sums[2 + d] = s == 0 ? from[2 + d] * worth : sums[2 + d] + from[2 + d] * worth;
    }
    const bool bad = total != total;
    const int64_t t = row / G, h = kv_head * G + row % G;
    const RowEnd end = end_row(p, h, top, total, bad);
    for (int64_t d = 0; d < p.V; ++d) sums[2 + d] = end.factor == 0.0f ? 0.0f : sums[2 + d] * end.factor;
    if (p.lse != nullptr) p.lse[(b * p.H + h) * p.T + t] = end.lse;
    write_row(p, b, h, t, sums + 2);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
