// What the gradient does with one tile: scores become weights and their gradients, and sums over query rows are added
// to those of keys, biases and slopes.
#pragma once

#include "kernels/prefill.h"

namespace headwise {
namespace HW_ISA {

constexpr int kGradTile = 64;                    // keys of a tile: scores and their gradients stay in the first cache
constexpr int kGradColumns = W >= 16 ? 4 : 2;    // vectors of columns in the micro-kernel that sums over rows

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

// The softmax of a tile, and the sums of its weights and of these times y = dP; all relative to `top`, and carried on.
template <int NV>
static inline void weigh_again(const float* HW_RESTRICT x, const float* HW_RESTRICT y, int64_t keys, float c,
                               const float* HW_RESTRICT kept, float* HW_RESTRICT top, float* HW_RESTRICT total,
                               float* HW_RESTRICT dot) {
  constexpr int R = NV * W;
  const F scale = set1(c), lowest = set1(-3.4028235e38f);
  F peak[NV], sum[NV], mean[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = load(top + v * W);
  for (int64_t j = 0; j < keys; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) peak[v] = max(peak[v], load(x + j * R + v * W));
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F before = load(top + v * W);
    store(top + v * W, peak[v]);
    peak[v] = select(not_less(peak[v], lowest), peak[v], zero());  // nothing seen yet: x is -inf, its weight 0
    const F worth = exp2<6>(mul(sub(before, peak[v]), scale));
    store(total + v * W, mul(load(total + v * W), worth)), store(dot + v * W, mul(load(dot + v * W), worth));
    sum[v] = mean[v] = zero();
  }
  for (int64_t j = 0; j < keys; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * R + v * W;
      const F s = load(x + at), w = exp2<6>(mul(sub(s, peak[v]), scale));
      const F dp = kept == nullptr ? load(y + at) : mul(load(y + at), load(kept + at));
      sum[v] = add(sum[v], w);
      mean[v] = fma(w, select(not_less(s, lowest), dp, zero()), mean[v]);
    }
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    store(total + v * W, add(load(total + v * W), sum[v])), store(dot + v * W, add(load(dot + v * W), mean[v]));
  }
}

// x becomes the weights 2^(c (x - top)) largest, y = dP becomes dS = P (dP - delta); -inf in x gives 0 in both.
template <int NV>
static inline void grade(float* HW_RESTRICT x, float* HW_RESTRICT y, int64_t keys, float c,
                         const float* HW_RESTRICT top, const float* HW_RESTRICT largest,
                         const float* HW_RESTRICT delta, const float* HW_RESTRICT kept) {
  constexpr int R = NV * W;
  const F scale = set1(c), lowest = set1(-3.4028235e38f);
  F peak[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = load(top + v * W);
  for (int64_t j = 0; j < keys; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * R + v * W;
      const F s = load(x + at);
      const F weight = mul(exp2<6>(mul(sub(s, peak[v]), scale)), load(largest + v * W));
      const F w = select(not_less(s, lowest), weight, zero());  // 0 for -inf alone: a NaN shows
      F dp = load(y + at);
      if (kept != nullptr) {
        const F keep = load(kept + at);
        dp = mul(dp, keep);
        store(x + at, mul(w, keep));
      } else {
        store(x + at, w);
      }
      const F score = mul(w, sub(dp, load(delta + v * W)));
      store(y + at, select(not_less(s, lowest), score, zero()));  // dP may have overflowed there
    }
  }
}

#if HW_BF16
// The same for bfloat16, from floats to the forms in which the products take them; `ready`: x and y hold P and dS.
template <int NV>
static inline void grade_pairs(const float* HW_RESTRICT x, const float* HW_RESTRICT y, int64_t keys, float c,
                               const float* HW_RESTRICT top, const float* HW_RESTRICT largest,
                               const float* HW_RESTRICT delta, bool ready, uint16_t* HW_RESTRICT weight_rows,
                               uint16_t* HW_RESTRICT score_rows, uint32_t* HW_RESTRICT scores) {
  constexpr int R = NV * W;
  const F scale = set1(c), lowest = set1(-3.4028235e38f);
  F peak[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = load(top + v * W);
  const auto one = [&](int64_t j, int v) {
    const int64_t at = j * R + v * W;
    F w = load(x + at), d = load(y + at);
    if (!ready) {
      const auto on = not_less(w, lowest);
      w = select(on, mul(exp2<Bfloat16::kDegree>(mul(sub(w, peak[v]), scale)), load(largest + v * W)), zero());
      d = select(on, mul(w, sub(d, load(delta + v * W))), zero());
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

}  // namespace HW_ISA
}  // namespace headwise
