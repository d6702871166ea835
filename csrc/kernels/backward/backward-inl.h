// The gradient, on the transposed tiles of the forward. P is recomputed from each row's greatest score and its weight.
// With dP = dO V^T and delta = sum(P dP) - dlse, softmax backward gives dS = P (dP - delta). Then dV = P^T dO, dQ = dS
// K and dK = dS^T Q. The products S, dP and dQ have query rows in their lanes. dV and dK sum over rows, so their lanes
// are columns.
#pragma once

#include "kernels/backward/backward_tile-inl.h"

namespace headwise {
namespace HW_ISA {

// Computes the rows first <= row < last, at most a step of them, against all keys of the target that they may attend.
template <class N>
static void backward_rows(const Call& p, const Gradients& g, const BackwardPlan& plan, const BackwardTarget& to,
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
static void sum_chunk(const Call& p, const Gradients& g, const BackwardPlan& plan, const BackwardTarget& to,
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

// Adds the sums of a later chunk to those before it. n must be a multiple of W.
static inline void add_floats(float* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(to + i, add(load(to + i), load(from + i)));
}

template <class N>
static void run_part(const Call& p, const Gradients& g, const BackwardPlan& plan, const BackwardItem& item,
                     char* scratch) {
  Arena arena{scratch};
  BackwardScratch<N> s(arena, p, plan);
  BackwardTarget to = {item.head / p.K, item.head % p.K, item.chunk, s.key_sums, s.value_sums, -1, true, true, 0, p.S};
  if (item.kind == BackwardItem::queries) {
    to.keys = false;
    return backward_rows<N>(p, g, plan, to, item.first, item.last, s);
  }
  to.queries = item.kind == BackwardItem::chunk_rows;
  to.first = item.first;
  to.last = item.last;
  for (; to.chunk < item.chunk + item.chunks; ++to.chunk) {
    if (plan.partial != nullptr) {
      float* sums = plan.partial + (item.head * plan.chunks + to.chunk) * plan.partial_floats(p);
      to.key_sums = sums + to.first * plan.padded_D;
      to.value_sums = sums + p.S * plan.padded_D + to.first * plan.padded_V;
    } else if (to.chunk > 0) {
      to.key_sums = s.key_sums + p.S * plan.padded_D;
      to.value_sums = s.value_sums + p.S * plan.padded_V;
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

// Computes one bias that is summed over batch or heads, for some queries: all terms of a place are added here, in
// order.
template <class N>
static void run_bias(const Call& p, const Gradients& g, const BackwardPlan& plan, int dense, int64_t item,
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

static void run_backward(const Call& p, const Gradients& g, const BackwardPlan& plan, const BackwardItem& item,
                         char* scratch) {
  const FlushDenormals flush;
  with_format(p, [&](auto format) { run_part<decltype(format)>(p, g, plan, item, scratch); });
}

static void run_backward_bias(const Call& p, const Gradients& g, const BackwardPlan& plan, int dense, int64_t item,
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

static void merge_backward(const Call& p, const Gradients& g, const BackwardPlan& plan, int64_t b, int64_t kv_head,
                           int64_t first, int64_t last) {
  const FlushDenormals flush;  // as in an item that writes its sums itself
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
