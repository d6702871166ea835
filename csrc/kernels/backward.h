// The gradient, on the same transposed tiles: weights P are found again from the lse, and then, with dP = dO V^T and
// delta = sum(P dP) - dlse, the scores get dS = P (dP - delta), and dV = P^T dO, dQ = dS K, dK = dS^T Q.
// The first, second and fourth product have query rows in their lanes, the other two sum over them: there the lanes are
// columns.
#pragma once

#include "kernels/prefill.h"

namespace headwise {
namespace HW_ISA {

constexpr int kGradTile = 64;                    // keys of a tile: scores and their gradients stay in the first cache
constexpr int kGradColumns = W >= 16 ? 4 : 2;    // vectors of columns in the micro-kernel that sums over rows
constexpr int64_t kChunkRows = 2048;             // rows of an item, but for groups so large that sums would add up
constexpr int64_t kStepBytes = 400 * 1024;       // of what belongs to the rows that share a tile
constexpr int64_t kOwnBytes = int64_t{16} << 20; // of sums that a thread's scratch may hold

// What belongs to one block of rows.
template <class N>
struct GradBlock {
  typename N::Query *query, *dout;              // Q^T, dO^T: [depth][row]
  typename N::Query *query_rows, *dout_rows;    // [row / kPair][column]
  float* sums;                                  // dQ^T [column][row]
  float lse[kRows], delta[kRows];
  float slope[kMaxAlibi][kRows];                // sum of dS times the distance, with its sign
};

template <class N>
struct GradScratch {
  GradBlock<N>* block;
  Rows* rows;
  float *x, *y;              // scores then weights, and dP then dS: [key][row]
  float *capped, *kept;      // where there is a softcap; what dropout multiplies with
  typename N::Key *weight_rows, *score_rows;  // P and dS where sums go over rows: [key][row]
  typename N::Weight* scores;                 // dS where they go over keys
  float *key_copy, *value_copy, *pair_copy;
  char* spare;
  float* line;
  float* ones;
  float *key_sums, *value_sums;  // [key][column], where this thread's item is the only one of its keys
  bool shared;

  GradScratch(Arena& arena, const Problem& p, const BackwardPlan& plan) {
    const int blocks = static_cast<int>(plan.rows_per_step / kRows);
    const int64_t wide = most(plan.wide_key, plan.wide_value), cells = kGradTile * kRows;
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
    x = arena.take<float>(cells), y = arena.take<float>(cells);
    capped = arena.take<float>(cells), kept = arena.take<float>(cells);
    weight_rows = arena.take<typename N::Key>(cells), score_rows = arena.take<typename N::Key>(cells);
    scores = arena.take<typename N::Weight>(cells);
    key_copy = arena.take<float>(kGradTile * pitch_of(p.D)), value_copy = arena.take<float>(kGradTile * pitch_of(p.V));
    pair_copy = arena.take<float>(kGradTile * pitch_of(p.D));
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
  plan.has_partial = plan.chunks > 1 || plan.share_floats(p) * 4 > kOwnBytes;
  plan.queries_per_bias_item = most(1, plan.rows_per_step / G);
  Arena count{nullptr};
  GradScratch<Float32>(count, p, plan);  // no format needs more
  plan.scratch_bytes = count.used;
  return plan;
}

// Rows of x in memory order, for the sums over rows: bad rows and those beyond the last as zeros.
template <class N>
static inline void pack_rows(const Tensor4& x, int64_t b, const Rows& rows, int padded, int64_t width,
                             typename N::Query* out, int64_t pitch, char* spare) {
  const auto kept = [&](int r) { return r >= rows.n || rows.bad[r] ? 0 : width; };
  if constexpr (N::kPair == 2) {
#if HW_BF16
    uint16_t* pair = reinterpret_cast<uint16_t*>(spare);
    for (int r = 0; r < padded; r += 2) {
      for (int side = 0; side < 2; ++side) {
        const char* row = at(x, b, rows.h[r + side], rows.t[r + side]);
        copy_halves(pair + side * pitch, row, x.stride[3], kept(r + side), pitch);
      }
      for (int64_t d = 0; d < pitch; d += W) interleave(out + r / 2 * pitch + d, pair + d, pair + pitch + d);
    }
#endif
  } else {
    (void)spare;
    for (int r = 0; r < padded; ++r) {
      copy_floats(out + r * pitch, at(x, b, rows.h[r], rows.t[r]), x.dtype, x.stride[3], kept(r), pitch);
    }
  }
}

// delta of each row, and the lse as the weights take it: NaN for a row in which anything is no number, so that all it
// may attend comes out NaN; +inf, whose weights are 0, for one that attends nothing, or that is no number but left out
// of the loss. All of these are packed as zeros.
static inline void look_at_ends(const Problem& p, const Gradients& g, int64_t b, Rows& rows, float* line, float* lse,
                                float* delta) {
  const int64_t padded = round_up(p.V, W);
  for (int r = 0; r < rows.n; ++r) {
    const int64_t h = rows.h[r], t = rows.t[r];
    float* out = line + padded;
    copy_floats(line, at(g.grad_out, b, h, t), g.grad_out.dtype, g.grad_out.stride[3], p.V, padded);
    copy_floats(out, at(p.out, b, h, t), p.out.dtype, p.out.stride[3], p.V, padded);
    F sum = zero();
    for (int64_t d = 0; d < padded; d += W) sum = fma(load(line + d), load(out + d), sum);
    delta[r] = reduce_add(sum);
    if (g.grad_lse.data != nullptr) delta[r] -= read_as<float>(at(g.grad_lse, b, h, t));
    lse[r] = p.lse[(b * p.H + h) * p.T + t];
    if (lse[r] != -kInf && !rows.bad[r] && lse[r] - lse[r] == 0.0f && delta[r] - delta[r] == 0.0f) continue;
    bool wanted = g.grad_lse.data != nullptr && read_as<float>(at(g.grad_lse, b, h, t)) != 0.0f;
    for (int64_t d = 0; d < p.V; ++d) wanted |= line[d] != 0.0f;
    rows.bad[r] = true, delta[r] = 0.0f;
    lse[r] = lse[r] == -kInf || !wanted ? kInf : NAN;
  }
  for (int r = rows.n; r < kRows; ++r) lse[r] = kInf, delta[r] = 0.0f;
}

// x becomes the weights 2^(log2(e) (unit x - lse)), y = dP becomes dS = P (dP - delta); -inf in x gives 0 in both.
template <int NV>
static inline void grade(float* HW_RESTRICT x, float* HW_RESTRICT y, int64_t keys, float unit,
                         const float* HW_RESTRICT lse, const float* HW_RESTRICT delta, const float* HW_RESTRICT kept) {
  constexpr int R = NV * W;
  const F scale = set1(unit), log2e = set1(kLog2e), lowest = set1(-3.4028235e38f);
  F shift[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) shift[v] = sub(zero(), load(lse + v * W));
  for (int64_t j = 0; j < keys; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * R + v * W;
      const F s = load(x + at);
      const F weight = exp2<6>(mul(fma(s, scale, shift[v]), log2e));  // rounded when the difference is small already
      const F w = select(not_less(s, lowest), weight, zero());  // 0 for -inf alone: a NaN shows
      F dp = load(y + at);
      if (kept != nullptr) {
        const F keep = load(kept + at);
        dp = mul(dp, keep);
        store(x + at, mul(w, keep));
      } else {
        store(x + at, w);
      }
      store(y + at, mul(w, sub(dp, load(delta + v * W))));
    }
  }
}

#if HW_BF16
// The same for bfloat16, from floats to the forms in which the products take them; `ready`: x and y hold P and dS.
template <int NV>
static inline void grade_pairs(const float* HW_RESTRICT x, const float* HW_RESTRICT y, int64_t keys, float unit,
                               const float* HW_RESTRICT lse, const float* HW_RESTRICT delta, bool ready,
                               uint16_t* HW_RESTRICT weight_rows, uint16_t* HW_RESTRICT score_rows,
                               uint32_t* HW_RESTRICT scores) {
  constexpr int R = NV * W;
  const F scale = set1(unit), log2e = set1(kLog2e), lowest = set1(-3.4028235e38f);
  F shift[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) shift[v] = sub(zero(), load(lse + v * W));
  const auto one = [&](int64_t j, int v) {
    const int64_t at = j * R + v * W;
    F w = load(x + at), d = load(y + at);
    if (!ready) {
      const F weight = exp2<Bfloat16::kDegree>(mul(fma(w, scale, shift[v]), log2e));
      w = select(not_less(w, lowest), weight, zero());
      d = mul(w, sub(d, load(delta + v * W)));
    }
    store_bf16_fast(weight_rows + at, w);
    store_bf16_fast(score_rows + at, d);
    return d;
  };
  for (int64_t j = 0; j < keys; j += 2) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const F a = one(j, v), b = j + 1 < keys ? one(j + 1, v) : zero();
      store_pairs(scores + j / 2 * R + v * W, a, b);
    }
  }
}
#endif

// out[u][column] += sum over rows of k[u][row] * rows[row][column], for U keys and NV vectors of columns.
template <class N, int NV, int U>
static inline void add_columns(const typename N::Key* HW_RESTRICT k, int64_t stride, int64_t depth,
                               const typename N::Query* HW_RESTRICT rows, int64_t pitch, float* HW_RESTRICT out,
                               int64_t wide) {
  F acc[U][NV];
  multiply<N, NV, U>(acc, rows, pitch, depth, k, stride);
  HW_UNROLL
  for (int u = 0; u < U; ++u) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) store(out + u * wide + v * W, add(load(out + u * wide + v * W), acc[u][v]));
  }
}

template <class N, int NV>
static inline void add_rows_of(const typename N::Key* k, int64_t stride, int keys, int64_t depth,
                               const typename N::Query* rows, int64_t wide, float* out) {
  constexpr int U = W >= 16 ? 6 : 4;
  int j = 0;
  for (; j + U <= keys; j += U) add_columns<N, NV, U>(k + j * stride, stride, depth, rows, wide, out + j * wide, wide);
  for (; j + 2 <= keys; j += 2) add_columns<N, NV, 2>(k + j * stride, stride, depth, rows, wide, out + j * wide, wide);
  if (j < keys) add_columns<N, NV, 1>(k + j * stride, stride, depth, rows, wide, out + j * wide, wide);
}

// out[key][column] += sum over rows of k[key][row] * rows[row][column].
template <class N>
static inline void add_product(const typename N::Key* k, int64_t stride, int keys, int64_t depth,
                               const typename N::Query* rows, int64_t wide, float* out) {
  int64_t d = 0;
  for (; d + kGradColumns * W <= wide; d += kGradColumns * W) {
    add_rows_of<N, kGradColumns>(k, stride, keys, depth, rows + d, wide, out + d);
  }
  if constexpr (kGradColumns > 2) {
    for (; d + 2 * W <= wide; d += 2 * W) add_rows_of<N, 2>(k, stride, keys, depth, rows + d, wide, out + d);
  }
  for (; d < wide; d += W) add_rows_of<N, 1>(k, stride, keys, depth, rows + d, wide, out + d);
}

// Adds the dS of a tile, [key][row], to the gradient of a bias.
template <int NV>
static inline void add_bias(const Shared& to, int64_t b, int64_t chunk, const Rows& rows, int64_t j0, int n,
                            const float* dS, float* spare) {
  constexpr int R = NV * W;
  float* base = to.data + b * to.stride[0] + chunk * to.chunk;
  const auto place = [&](int r) { return base + rows.h[r] * to.stride[1] + rows.t[r] * to.stride[2]; };
  if (to.stride[3] == 0) {
    for (int r = 0; r < rows.n; ++r) {
      float sum = 0.0f;
      for (int j = 0; j < n; ++j) sum += dS[j * R + r];
      *place(r) += sum;
    }
    return;
  }
  // Rows that go to one place are added up here first: its sum grows by few and larger terms, and rounds less.
  float sum[kGradTile] = {0};
  for (int v = 0; v < NV && v * W < rows.n; ++v) {
    turn_back(dS + v * W, R, n, spare, kGradTile);
    for (int r = v * W; r < v * W + W && r < rows.n; ++r) {
      const float* from = spare + (r - v * W) * kGradTile;
      for (int j = 0; j < n; ++j) sum[j] += from[j];
      if (r + 1 < rows.n && place(r + 1) == place(r)) continue;
      float* row = place(r) + j0 * to.stride[3];  // such a gradient has contiguous keys
      for (int j = 0; j < n; ++j) row[j] += sum[j], sum[j] = 0.0f;
    }
  }
}

// The gradient of ALiBi's slopes: the scores had -slope * |i + offset - j| added.
template <int NV>
static inline void add_slopes(const Problem& p, int rule, int64_t b, const Rows& rows, int64_t j0, int n,
                              const float* dS, float* sum) {
  constexpr int R = NV * W;
  const AlibiRule& alibi = p.alibi[rule];
  const int64_t offset = most(least(alibi.offsets[b * alibi.offsets_stride], kFar), -kFar);
  FromKeys from[R];
  for (int r = 0; r < R; ++r) from[r] = from_keys(rows.t[r] + offset - j0);
  for (int j = 0; j < n; ++j) {
    for (int r = 0; r < R; ++r) {
      const int32_t pos = from[r].pos, far = pos > j ? pos - j : j - pos;
      sum[r] -= dS[j * R + r] * static_cast<float>(far) * from[r].more;
    }
  }
}

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

// What a step's blocks add to.
struct GradTarget {
  int64_t b, kv_head, chunk;
  float *key_sums, *value_sums;
  int only;  // the bias that is wanted alone, or -1
};

// P and dS of one block and its part of a tile, as floats in x and y or as the products take them, and what the gradients
// of biases and slopes get of them.
template <class N, int NV>
static inline void scores_and_gradients(const Problem& p, const BackwardPlan& plan, const GradTarget& to,
                                        const GradTile<N>& tile, const Part& part, int block, GradScratch<N>& s) {
  constexpr int R = NV * W;
  Rows& rows = s.rows[block];
  GradBlock<N>& own = s.block[block];
  const int64_t b = to.b, chunk = to.chunk, j0 = part.j0;
  const int n = part.n, only = to.only;
  const Tile kind = part.kind;
  const int64_t skip = j0 - tile.j0;
  const auto* key = reinterpret_cast<const typename N::Key*>(tile.key.data) + skip * tile.key.stride;
  const auto* value = reinterpret_cast<const typename N::Key*>(tile.value.data) + skip * tile.value.stride;
  scores_of<N, NV>(own.query, N::depth(p.D), key, tile.key.stride, n, s.x);
  const bool general = is_general(p), drops = p.dropout > 0.0f;
  if (general) scale_scores(p, s.x, int64_t{n} * R);
  if (p.softcap > 0.0f) memcpy(s.capped, s.x, static_cast<size_t>(n * R) * sizeof(float));
  if (general || kind == Tile::mixed) mask_tile<Layout<1, R>>(p, b, rows, j0, n, s.x, kind, nullptr);
  scores_of<N, NV>(own.dout, N::depth(p.V), value, tile.value.stride, n, s.y);
  bool ready = N::kPair == 1 || drops || p.softcap > 0.0f || only >= 0;
  for (int i = 0; i < p.n_dense; ++i) ready |= plan.dense[i].data != nullptr;
  for (int i = 0; i < p.n_alibi; ++i) ready |= plan.slopes[i].data != nullptr;
  if (drops) {
    for (int64_t i = 0; i < int64_t{n} * R; ++i) s.kept[i] = 1.0f;
    drop_tile<1, R>(p, b, rows, j0, n, s.kept);
  }
  if (ready) {
    grade<NV>(s.x, s.y, n, unit_of(p), own.lse, own.delta, drops ? s.kept : nullptr);
    for (int i = 0; i < p.n_dense; ++i) {
      const bool wanted = plan.dense[i].data != nullptr && (only >= 0 ? i == only : !plan.summed[i]);
      if (wanted) add_bias<NV>(plan.dense[i], b, chunk, rows, j0, n, s.y, reinterpret_cast<float*>(s.spare));
    }
    for (int i = 0; i < p.n_alibi && only < 0; ++i) {
      if (plan.slopes[i].data != nullptr) add_slopes<NV>(p, i, b, rows, j0, n, s.y, own.slope[i]);
    }
    if (p.softcap > 0.0f) {
      const F one = set1(1.0f), per_cap = set1(1.0f / p.softcap);
      for (int64_t i = 0; i < int64_t{n} * R; i += W) {
        const F t = mul(load(s.capped + i), per_cap);
        store(s.y + i, mul(load(s.y + i), sub(one, mul(t, t))));
      }
    }
  }
#if HW_BF16
  if constexpr (N::kPair == 2) {
    if (only < 0) {
      grade_pairs<NV>(s.x, s.y, n, unit_of(p), own.lse, own.delta, ready, s.weight_rows, s.score_rows, s.scores);
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
  scores_and_gradients<N, NV>(p, plan, to, tile, part, block, s);
  if (to.only >= 0) return;
  GradBlock<N>& own = s.block[block];
  const typename N::Key *weight_rows = s.weight_rows, *score_rows = s.score_rows;
  const typename N::Weight* scores = s.scores;
  if constexpr (N::kPair == 1) weight_rows = s.x, score_rows = scores = s.y;
  add_product<N>(weight_rows, R, n, R / N::kPair, own.dout_rows, plan.wide_value, to.value_sums + j0 * plan.wide_value);
  add_product<N>(score_rows, R, n, R / N::kPair, own.query_rows, plan.wide_key, to.key_sums + j0 * plan.wide_key);
  const auto* key = reinterpret_cast<const typename N::Value*>(tile.turned.data) +
                    (j0 - tile.j0) / N::kPair * tile.turned.stride;
  values_of<N, NV>(scores, (n + N::kPair - 1) / N::kPair, key, tile.turned.stride, p.D, s.ones, own.sums);
}

template <class N, int NV>
static inline void begin_block(const Problem& p, const Gradients& g, const BackwardPlan& plan, int64_t b, int block,
                               GradScratch<N>& s) {
  constexpr int R = NV * W;
  Rows& rows = s.rows[block];
  GradBlock<N>& own = s.block[block];
  mark_bad(p.query, b, rows, p.D);
  mark_bad(g.grad_out, b, rows, p.V);
  look_at_ends(p, g, b, rows, s.line, own.lse, own.delta);
  pack_turned<N, NV>(p.query, b, rows, p.D, own.query, s.spare);
  pack_turned<N, NV>(g.grad_out, b, rows, p.V, own.dout, s.spare);
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
    if (plan.sinks.data != nullptr && own.lse[r] != kInf) {
      const float weight = expf(p.sinks[rows.h[r]] - own.lse[r]);
      *place(plan.sinks, r) -= static_cast<double>(weight) * static_cast<double>(own.delta[r]);
    }
    for (int i = 0; i < p.n_alibi; ++i) {
      if (plan.slopes[i].data != nullptr) *place(plan.slopes[i], r) += static_cast<double>(own.slope[i][r]);
    }
  }
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
  for (int64_t j = k0 / kGradTile * kGradTile; j < k1; j += kGradTile) {
    const int64_t j0 = most(j, k0 / 2 * 2), j1 = least(j + kGradTile, k1);
    if (j0 >= s.rows[0].gap_min && j1 <= gap) continue;
    load_tile<N>(p, to.b, to.kv_head, j0, static_cast<int>(j1 - j0), s, tile);
    for (int i = 0; i < blocks; ++i) {
      const int64_t next = least(j + kGradTile + i * kGradTile / blocks, k1);
      const int64_t end = least(j + kGradTile + (i + 1) * kGradTile / blocks, k1);
      prefetch_rows(p.key, to.b, to.kv_head, next, end, p.D);
      prefetch_rows(p.value, to.b, to.kv_head, next, end, p.V);
      HW_BY_VECTORS(s.rows[i].n, grade_tile, p, plan, to, tile, i, s);
    }
  }
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
