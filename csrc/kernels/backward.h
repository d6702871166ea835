// The gradient, on the same transposed tiles: weights P are made again from each row's greatest score and its weight;
// then, with dP = dO V^T and delta = sum(P dP) - dlse, the scores get dS = P (dP - delta), and dV = P^T dO, dQ = dS K,
// dK = dS^T Q.
// The first, second and fourth product have query rows in their lanes, the other two sum over them: there the lanes are
// columns.
#pragma once

#include "kernels/backward_rows.h"

namespace headwise {
namespace HW_ISA {

// A tile of keys for all blocks of a step.
template <class N>
struct GradTile {
  int64_t j0;
  int n;
  RowsOf key, value;
  RowsOf turned;  // keys as the product that sums over them takes them: for floats the same
  BadKeys bad;
};

template <class N>
static inline void load_tile(const Problem& p, int64_t b, int64_t kv_head, int64_t j0, int n, GradScratch<N>& s,
                             GradTile<N>& tile) {
  tile.j0 = j0, tile.n = n;
  tile.bad.look(p, b, kv_head, j0, n);
  if constexpr (N::kPair == 2) {
#if HW_BF16
    tile.key = half_rows(p.key, b, kv_head, j0, n, p.D, tile.bad, reinterpret_cast<uint16_t*>(s.key_copy));
    tile.value = half_rows(p.value, b, kv_head, j0, n, p.V, tile.bad, reinterpret_cast<uint16_t*>(s.value_copy));
    tile.turned = paired_rows(p.key, b, kv_head, j0, n, p.D, tile.bad, reinterpret_cast<uint32_t*>(s.pair_copy),
                              reinterpret_cast<uint16_t*>(s.spare));
#endif
  } else {
    tile.key = float_rows(p.key, b, kv_head, j0, n, p.D, tile.bad, !(s.shared && collides(p.key)), s.key_copy);
    tile.value = float_rows(p.value, b, kv_head, j0, n, p.V, tile.bad, true, s.value_copy);
    tile.turned = tile.key;
  }
}

// x, the scores of a block and its part of a tile, and y = dP. To the bit what the forward has and `take_deltas` adds up,
// or in shorter pieces where neither is used.
template <class N, int NV>
static inline void make_products(const Problem& p, int64_t b, const GradTile<N>& tile, const Part& part, int block,
                                 bool again, const Products& made, GradScratch<N>& s) {
  constexpr int R = NV * W;
  const GradBlock<N>& own = s.block[block];
  const int64_t piece = again ? kShortPiece : kPiece, skip = part.j0 - tile.j0, cells = int64_t{part.n} * R;
  const auto* key = reinterpret_cast<const typename N::Key*>(tile.key.data) + skip * tile.key.stride;
  const auto* value = reinterpret_cast<const typename N::Key*>(tile.value.data) + skip * tile.value.stride;
  scores_of<N, NV>(own.query, N::depth(p.D), key, tile.key.stride, part.n, made.x, piece);
  const bool general = is_general(p);
  if (general) scale_scores(p, made.x, cells);
  if (p.softcap > 0.0f) memcpy(made.capped, made.x, static_cast<size_t>(cells) * sizeof(float));
  if (general || part.kind == Tile::mixed) {
    mask_tile<Layout<1, R>>(p, b, s.rows[block], part.j0, part.n, made.x, part.kind, nullptr);
  }
  scores_of<N, NV>(own.dout, N::depth(p.V), value, tile.value.stride, part.n, made.y, kShortPiece);
  if (p.dropout > 0.0f) {
    for (int64_t i = 0; i < cells; ++i) made.kept[i] = 1.0f;
    drop_tile<1, R>(p, b, s.rows[block], part.j0, part.n, made.kept);
  }
}

template <class N, int NV>
static inline void weigh_tile(const Problem& p, const Part& part, const Products& made, GradScratch<N>& s) {
  const float* kept = p.dropout > 0.0f ? made.kept : nullptr;
  weigh_again<NV>(made.x, made.y, part.n, unit_of(p) * kLog2e, kept, s.top, s.total, s.dot);
}

// x and y become P and dS, as floats or as the products take them, and the gradients of biases and slopes get theirs.
template <class N, int NV>
static inline void grade_products(const Problem& p, const BackwardPlan& plan, const GradTarget& to, const Part& part,
                                  int block, const Products& made, GradScratch<N>& s) {
  constexpr int R = NV * W;
  const Rows& rows = s.rows[block];
  GradBlock<N>& own = s.block[block];
  const int64_t b = to.b, chunk = to.chunk, j0 = part.j0;
  const int n = part.n, only = to.only;
  const bool drops = p.dropout > 0.0f;
  const float c = unit_of(p) * kLog2e;
  bool ready = N::kPair == 1 || drops || p.softcap > 0.0f || only >= 0;
  for (int i = 0; i < p.n_dense; ++i) ready |= plan.dense[i].data != nullptr;
  for (int i = 0; i < p.n_alibi; ++i) ready |= plan.slopes[i].data != nullptr;
  if (ready) {
    grade<NV>(made.x, made.y, n, c, own.top, own.largest, own.delta, drops ? made.kept : nullptr);
    for (int i = 0; i < p.n_dense; ++i) {
      const bool wanted = plan.dense[i].data != nullptr && (only >= 0 ? i == only : !plan.summed[i]);
      if (wanted) add_bias<NV>(plan.dense[i], b, chunk, rows, j0, n, made.y, reinterpret_cast<float*>(s.spare));
    }
    for (int i = 0; i < p.n_alibi && only < 0; ++i) {
      if (plan.slopes[i].data != nullptr) add_slopes<NV>(p, i, b, rows, j0, n, made.y, own.slope[i]);
    }
    if (p.softcap > 0.0f) {
      const F one = set1(1.0f), per_cap = set1(1.0f / p.softcap);
      for (int64_t i = 0; i < int64_t{n} * R; i += W) {
        const F t = mul(load(made.capped + i), per_cap), dS = load(made.y + i);
        const F to_score = mul(dS, sub(one, mul(t, t)));  // 0 stays 0: what is masked may have a score that is NaN
        store(made.y + i, select(not_less(abs(dS), set1(1e-45f)), to_score, zero()));
      }
    }
  }
#if HW_BF16
  if constexpr (N::kPair == 2) {
    if (only < 0) {
      grade_pairs<NV>(made.x, made.y, n, c, own.top, own.largest, own.delta, ready, s.weight_rows, s.score_rows,
                      s.scores);
    }
  }
#endif
}

template <class N, int NV>
static inline void grade_tile(const Problem& p, const BackwardPlan& plan, const GradTarget& to, const GradTile<N>& tile,
                              int block, GradScratch<N>& s) {
  constexpr int R = NV * W;
  const Rows& rows = s.rows[block];
  const Part part = part_of(p, to.b, rows, tile.j0, tile.n, N::kPair);
  if (part.kind == Tile::empty) return;
  const int64_t j0 = part.j0;
  const int n = part.n;
  GradBlock<N>& own = s.block[block];
  const Products made = plan.held ? s.made.from(j0 * W) : s.made;
  if (!plan.held || own.alone) make_products<N, NV>(p, to.b, tile, part, block, plan.few || own.alone, made, s);
  if (own.alone) {
    begin_again(s);
    weigh_tile<N, NV>(p, part, made, s);
    end_again(p, block, s);
  }
  grade_products<N, NV>(p, plan, to, part, block, made, s);
  if (to.only >= 0) return;
  const typename N::Key *weight_rows = s.weight_rows, *score_rows = s.score_rows;
  const typename N::Weight* scores = s.scores;
  if constexpr (N::kPair == 1) weight_rows = made.x, score_rows = scores = made.y;
  add_product<N>(weight_rows, R, n, R / N::kPair, own.dout_rows, plan.wide_value, to.value_sums + j0 * plan.wide_value);
  add_product<N>(score_rows, R, n, R / N::kPair, own.query_rows, plan.wide_key, to.key_sums + j0 * plan.wide_key);
  const auto* key = reinterpret_cast<const typename N::Value*>(tile.turned.data) +
                    (j0 - tile.j0) / N::kPair * tile.turned.stride;
  values_of<N, NV>(scores, (n + N::kPair - 1) / N::kPair, key, tile.turned.stride, p.D, s.ones, own.sums);
}

template <class N, int NV>
static inline void weigh_few(const Problem& p, const BackwardPlan& plan, int64_t b, const GradTile<N>& tile,
                             GradScratch<N>& s) {
  const Part part = part_of(p, b, s.rows[0], tile.j0, tile.n, N::kPair);
  if (part.kind == Tile::empty) return;
  const Products made = plan.held ? s.made.from(part.j0 * W) : s.made;
  make_products<N, NV>(p, b, tile, part, 0, true, made, s);
  weigh_tile<N, NV>(p, part, made, s);
}

// The rows first <= row < last, at most a step of them, against all the keys that they may attend.
template <class N>
static void grade_rows(const Problem& p, const Gradients& g, const BackwardPlan& plan, const GradTarget& to,
                       int64_t first, int64_t last, GradScratch<N>& s) {
  const int blocks = static_cast<int>((last - first + kRows - 1) / kRows);
  int64_t k0 = p.S, k1 = 0, gap = p.S;
  for (int i = 0; i < blocks; ++i) {
    const int n = static_cast<int>(least(kRows, last - first - i * kRows));
    place_rows(p, to.b, to.kv_head, first + i * kRows, n, static_cast<int>(round_up(n, W)), s.rows[i]);
    HW_BY_VECTORS(n, begin_block, p, g, plan, to.b, i, s);
    k0 = least(k0, s.rows[i].lo_min), k1 = most(k1, s.rows[i].hi_max), gap = least(gap, s.rows[i].gap_max);
  }
  GradTile<N> tile;
  const auto walk = [&](const auto& visit) {
    for (int64_t j = k0 / kGradTile * kGradTile; j < k1; j += kGradTile) {
      const int64_t j0 = most(j, k0 / 2 * 2), j1 = least(j + kGradTile, k1);
      if (j0 >= s.rows[0].gap_min && j1 <= gap) continue;
      load_tile<N>(p, to.b, to.kv_head, j0, static_cast<int>(j1 - j0), s, tile);
      visit(j);
    }
  };
  if (plan.few && !s.block[0].alone) {
    begin_again(s);
    walk([&](int64_t) { HW_BY_VECTORS(s.rows[0].n, weigh_few, p, plan, to.b, tile, s); });
    end_again(p, 0, s);
  }
  walk([&](int64_t j) {
    for (int i = 0; i < blocks; ++i) {
      const int64_t next = least(j + kGradTile + i * kGradTile / blocks, k1);
      const int64_t end = least(j + kGradTile + (i + 1) * kGradTile / blocks, k1);
      prefetch_rows(p.key, to.b, to.kv_head, next, end, p.D);
      prefetch_rows(p.value, to.b, to.kv_head, next, end, p.V);
      HW_BY_VECTORS(s.rows[i].n, grade_tile, p, plan, to, tile, i, s);
    }
  });
  for (int i = 0; i < blocks && to.only < 0; ++i) HW_BY_VECTORS(s.rows[i].n, end_block, p, g, plan, to, i, s);
}

// A row of a key's or value's gradient, scaled and rounded.
static inline void write_sum(const Tensor4& to, int64_t b, int64_t kv_head, int64_t j, int64_t width, float scale,
                             float* sum) {
  if (scale != 1.0f) {
    for (int64_t d = 0; d < width; ++d) sum[d] *= scale;
  }
  write_floats(const_cast<char*>(at(to, b, kv_head, j)), to.dtype, sum, width);
}

template <class N>
static void run_chunk(const Problem& p, const Gradients& g, const BackwardPlan& plan, int64_t item, char* scratch) {
  Arena arena{scratch};
  GradScratch<N> s(arena, p, plan);
  const int64_t group = item / plan.chunks, chunk = item % plan.chunks;
  GradTarget to = {group / p.K, group % p.K, chunk, s.key_sums, s.value_sums, -1};
  if (plan.partial != nullptr) {
    to.key_sums = plan.partial + item * plan.share_floats(p);
    to.value_sums = to.key_sums + p.S * plan.wide_key;
  }
  memset(to.key_sums, 0, static_cast<size_t>(p.S * plan.wide_key) * sizeof(float));
  memset(to.value_sums, 0, static_cast<size_t>(p.S * plan.wide_value) * sizeof(float));
  const int64_t end = least((chunk + 1) * plan.rows_per_chunk, plan.rows);
  for (int64_t row = chunk * plan.rows_per_chunk; row < end; row += plan.rows_per_step) {
    grade_rows<N>(p, g, plan, to, row, least(row + plan.rows_per_step, end), s);
  }
  if (plan.partial != nullptr) return;
  for (int64_t j = 0; j < p.S; ++j) {
    write_sum(g.key, to.b, to.kv_head, j, p.D, p.scale, to.key_sums + j * plan.wide_key);
    write_sum(g.value, to.b, to.kv_head, j, p.V, 1.0f, to.value_sums + j * plan.wide_value);
  }
}

// One bias that is summed over batch or heads, for some queries: whatever adds to one place is done here, in order.
template <class N>
static void run_bias(const Problem& p, const Gradients& g, const BackwardPlan& plan, int dense, int64_t item,
                     char* scratch) {
  Arena arena{scratch};
  GradScratch<N> s(arena, p, plan);
  const int64_t G = p.H / p.K, first = item * plan.queries_per_bias_item;
  const int64_t last = least(first + plan.queries_per_bias_item, p.T);
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t kv_head = 0; kv_head < p.K; ++kv_head) {
      const GradTarget to = {b, kv_head, 0, nullptr, nullptr, dense};
      for (int64_t row = first * G; row < last * G; row += plan.rows_per_step) {
        grade_rows<N>(p, g, plan, to, row, least(row + plan.rows_per_step, last * G), s);
      }
    }
  }
}

static void run_backward(const Problem& p, const Gradients& g, const BackwardPlan& plan, int64_t item, char* scratch) {
  const FlushDenormals flushed;
  (void)flushed;
#if HW_BF16
  if (p.dtype() == Dtype::bf16) {
    run_chunk<Bfloat16>(p, g, plan, item, scratch);
    return;
  }
#endif
  run_chunk<Float32>(p, g, plan, item, scratch);
}

static void run_backward_bias(const Problem& p, const Gradients& g, const BackwardPlan& plan, int dense, int64_t item,
                              char* scratch) {
  const FlushDenormals flushed;
  (void)flushed;
#if HW_BF16
  if (p.dtype() == Dtype::bf16) {
    run_bias<Bfloat16>(p, g, plan, dense, item, scratch);
    return;
  }
#endif
  run_bias<Float32>(p, g, plan, dense, item, scratch);
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
  float* shares = plan.partial + (b * p.K + kv_head) * plan.chunks * plan.share_floats(p);
  const auto merge = [&](int64_t at, int64_t wide) {  // into the first share
    for (int64_t chunk = 1; chunk < plan.chunks; ++chunk) {
      const float* from = shares + chunk * plan.share_floats(p) + at;
      for (int64_t d = 0; d < wide; d += W) store(shares + at + d, add(load(shares + at + d), load(from + d)));
    }
    return shares + at;
  };
  for (int64_t j = first; j < last; ++j) {
    write_sum(g.key, b, kv_head, j, p.D, p.scale, merge(j * plan.wide_key, plan.wide_key));
    write_sum(g.value, b, kv_head, j, p.V, 1.0f, merge(p.S * plan.wide_key + j * plan.wide_value, plan.wide_value));
  }
}

}  // namespace HW_ISA
}  // namespace headwise
