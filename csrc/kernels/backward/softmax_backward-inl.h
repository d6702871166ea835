// Softmax backward for one tile: scores become weights P and their gradients dS, and sums over query rows are added to
// the gradients of keys, values, biases and slopes.
#pragma once

#include "kernels/prefill/prefill-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kBackwardTile = kBackwardKeys;

constexpr int kBackwardColumns = W >= 16 ? 4 : 2;  // vectors of columns in the micro-kernel that sums over rows

// Copies rows of x in memory order, for the products that sum over rows. Bad rows and those behind the last become
// zeros. The block has `padded` rows.
template <class N>
static inline void pack_rows(const Tensor4& x, int64_t b, const QueryRows& rows, int padded, int64_t width,
                             typename N::Query* out, int64_t pitch, char* spare) {
  const auto copied = [&](int r) { return r >= rows.n || rows.query_bad[r] ? 0 : width; };
  if constexpr (N::kPair == 2) {
    uint16_t* pair = reinterpret_cast<uint16_t*>(spare);
    for (int r = 0; r < padded; r += 2) {
      for (int side = 0; side < 2; ++side) {
        const char* row = at(x, b, rows.h[r + side], rows.t[r + side]);
        copy_halves(pair + side * pitch, row, x.stride[3], copied(r + side), pitch);
      }
      for (int64_t d = 0; d < pitch; d += W) interleave(out + r / 2 * pitch + d, pair + d, pair + pitch + d);
    }
  } else {
    (void)spare;
    for (int r = 0; r < padded; ++r) {
      copy_floats(out + r * pitch, at(x, b, rows.h[r], rows.t[r]), x.dtype, x.stride[3], copied(r), pitch);
    }
  }
}

// Packs rows of x for dV and dK: [column / 16][row / 2][column % 16], with panels of 16 columns that are `panel` words
// apart. Bad rows and those behind the last become zeros, up to `padded` rows of the block and 16 more.
static inline void pack_panels(const Tensor4& x, int64_t b, const QueryRows& rows, int padded, int64_t width,
                               uint32_t* out, int64_t panel, char* spare) {
  const int64_t pitch = round_up(width, W);
  for (int r = 0; r < padded + W; r += 2) {
    const uint16_t* row[2];
    for (int side = 0; side < 2; ++side) {
      const int i = r + side;
      const bool zeros = i >= rows.n || rows.query_bad[i];
      const char* from = zeros ? nullptr : at(x, b, rows.h[i], rows.t[i]);
      row[side] = reinterpret_cast<const uint16_t*>(from);
      if (!zeros && x.stride[3] == 1 && width == pitch) continue;
      uint16_t* copy = reinterpret_cast<uint16_t*>(spare) + side * pitch;
      copy_halves(copy, from, x.stride[3], zeros ? 0 : width, pitch);
      row[side] = copy;
    }
    uint32_t* to = out + r / 2 * W;
    for (int64_t d = 0; d < pitch; d += W, to += panel) interleave(to, row[0] + d, row[1] + d);
  }
}

// The online softmax of a tile without storing its weights: updates `row_max`, `row_sum` and `dot`, the sum of the
// weights times y = dP. `keep`, unless null, has the factors of dropout for dP.
template <int NV>
static inline void recompute_softmax(const float* HW_RESTRICT x, const float* HW_RESTRICT y, int64_t keys, float c,
                                     const float* HW_RESTRICT keep, float* HW_RESTRICT row_max,
                                     float* HW_RESTRICT row_sum, float* HW_RESTRICT dot) {
  constexpr int R = NV * W;
  const F scale = set1(c), lowest = set1(-3.4028235e38f);
  F peak[NV], sum[NV], mean[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = load(row_max + v * W);
  for (int64_t j = 0; j < keys; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) peak[v] = max(peak[v], load(x + j * R + v * W));
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F before = load(row_max + v * W);
    store(row_max + v * W, peak[v]);
    peak[v] =
        select(not_less(peak[v], lowest), peak[v], zero());  // there was no key so far: x is -inf and its weight 0
    const F rescale = exp2<6>(mul(sub(before, peak[v]), scale));
    store(row_sum + v * W, mul(load(row_sum + v * W), rescale));
    store(dot + v * W, mul(load(dot + v * W), rescale));
    sum[v] = mean[v] = zero();
  }
  for (int64_t j = 0; j < keys; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * R + v * W;
      const F s = load(x + at), w = exp2<6>(mul(sub(s, peak[v]), scale));
      const F dp = keep == nullptr ? load(y + at) : mul(load(y + at), load(keep + at));
      sum[v] = add(sum[v], w);
      mean[v] = fma(w, select(not_less(s, lowest), dp, zero()), mean[v]);
    }
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    store(row_sum + v * W, add(load(row_sum + v * W), sum[v]));
    store(dot + v * W, add(load(dot + v * W), mean[v]));
  }
}

// Replaces x by the weights P = 2^(c (x - row_max)) largest, and y = dP by dS = P (dP - delta). Both are 0 where x is
// -inf.
template <int NV>
static inline void softmax_backward(float* HW_RESTRICT x, float* HW_RESTRICT y, int64_t keys, float c,
                                    const float* HW_RESTRICT row_max, const float* HW_RESTRICT largest,
                                    const float* HW_RESTRICT delta, const float* HW_RESTRICT keep) {
  constexpr int R = NV * W;
  const F scale = set1(c), lowest = set1(-3.4028235e38f);
  F peak[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = load(row_max + v * W);
  for (int64_t j = 0; j < keys; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * R + v * W;
      const F s = load(x + at);
      const F weight = mul(exp2<6>(mul(sub(s, peak[v]), scale)), load(largest + v * W));
      const F w = select(not_less(s, lowest), weight, zero());  // 0 only for -inf: a NaN stays NaN
      F dp = load(y + at);
      if (keep != nullptr) {
        const F factor = load(keep + at);
        dp = mul(dp, factor);
        store(x + at, mul(w, factor));
      } else {
        store(x + at, w);
      }
      const F score = mul(w, sub(dp, load(delta + v * W)));
      store(y + at, select(not_less(s, lowest), score, zero()));  // because dP may be inf
    }
  }
}

// The same for bfloat16, in the three layouts that the products read: P and dS by key and row, and dS in pairs of keys.
// With `ready`, x and y are P and dS already.
template <int NV>
static inline void softmax_backward_pairs(const float* HW_RESTRICT x, const float* HW_RESTRICT y, int64_t keys, float c,
                                          const float* HW_RESTRICT row_max, const float* HW_RESTRICT largest,
                                          const float* HW_RESTRICT delta, bool ready, uint16_t* HW_RESTRICT weight_rows,
                                          uint16_t* HW_RESTRICT score_rows, uint32_t* HW_RESTRICT scores) {
  constexpr int R = NV * W;
  const F scale = set1(c), lowest = set1(-3.4028235e38f);
  F peak[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = load(row_max + v * W);
  const auto convert = [&](int64_t j, int v) {
    const int64_t at = j * R + v * W;
    F w = load(x + at), d = load(y + at);
    if (!ready) {
      const auto attended = not_less(w, lowest);
      w = select(attended, mul(exp2<Bfloat16::kDegree>(mul(sub(w, peak[v]), scale)), load(largest + v * W)), zero());
      d = select(attended, mul(w, sub(d, load(delta + v * W))), zero());
    }
    store_bf16_fast(weight_rows + at, w);
    store_bf16_fast(score_rows + at, d);
    return d;
  };
  for (int64_t j = 0; j < keys; j += 2) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const F a = convert(j, v), b = j + 1 < keys ? convert(j + 1, v) : zero();
      store_pairs(scores + j / 2 * R + v * W, a, b);
    }
  }
}

// Computes dS = dS * (1 - (x / softcap)^2), where x is the capped score: the gradient of the raw score. A dS of 0 stays
// 0, because a masked score may be NaN.
static inline void softcap_backward(float softcap, const float* capped, float* dS, int64_t cells) {
  const F one = set1(1.0f), inverse = set1(1.0f / softcap);
  for (int64_t i = 0; i < cells; i += W) {
    const F t = mul(load(capped + i), inverse), before = load(dS + i);
    const F after = mul(before, sub(one, mul(t, t)));
    store(dS + i, select(not_less(abs(before), set1(1e-45f)), after, zero()));
  }
}

// out[u][column] += sum over rows of k[u][row] * rows[row][column], for U keys and NV vectors of columns.
template <class N, int NV, int U>
static inline void add_columns(const typename N::Key* HW_RESTRICT k, int64_t stride, int64_t depth,
                               const typename N::Query* HW_RESTRICT rows, int64_t pitch, float* HW_RESTRICT out) {
  F acc[U][NV];
  multiply<N, NV, U>(acc, rows, pitch, depth, k, stride);
  HW_UNROLL
  for (int u = 0; u < U; ++u) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) store(out + u * pitch + v * W, add(load(out + u * pitch + v * W), acc[u][v]));
  }
}

template <class N, int NV>
static inline void add_rows_of(const typename N::Key* k, int64_t stride, int keys, int64_t depth,
                               const typename N::Query* rows, int64_t pitch, float* out) {
  constexpr int U = W >= 16 ? 6 : 4;
  int j = 0;
  for (; j + U <= keys; j += U) add_columns<N, NV, U>(k + j * stride, stride, depth, rows, pitch, out + j * pitch);
  for (; j + 2 <= keys; j += 2) add_columns<N, NV, 2>(k + j * stride, stride, depth, rows, pitch, out + j * pitch);
  if (j < keys) add_columns<N, NV, 1>(k + j * stride, stride, depth, rows, pitch, out + j * pitch);
}

// out[key][column] += sum over rows of k[key][row] * rows[row][column].
template <class N>
static inline void add_product(const typename N::Key* k, int64_t stride, int keys, int64_t depth,
                               const typename N::Query* rows, int64_t pitch, float* out) {
  int64_t d = 0;
  for (; d + kBackwardColumns * W <= pitch; d += kBackwardColumns * W) {
    add_rows_of<N, kBackwardColumns>(k, stride, keys, depth, rows + d, pitch, out + d);
  }
  if constexpr (kBackwardColumns > 2) {
    for (; d + 2 * W <= pitch; d += 2 * W) add_rows_of<N, 2>(k, stride, keys, depth, rows + d, pitch, out + d);
  }
  for (; d < pitch; d += W) add_rows_of<N, 1>(k, stride, keys, depth, rows + d, pitch, out + d);
}

// Adds dS of a tile, [key][row], to the gradient of a bias.
template <int NV>
static inline void add_bias(const SharedGradient<float>& to, int64_t b, int64_t chunk, const QueryRows& rows,
                            int64_t j0, int n, const float* dS, float* spare) {
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
  // Neighbouring rows of one place are summed first. The place then gets fewer and larger terms, which rounds less.
  float sum[kBackwardTile] = {0};
  for (int v = 0; v < NV && v * W < rows.n; ++v) {
    transpose_back(dS + v * W, R, n, spare, kBackwardTile);
    for (int r = v * W; r < v * W + W && r < rows.n; ++r) {
      const float* from = spare + (r - v * W) * kBackwardTile;
      for (int j = 0; j < n; ++j) sum[j] += from[j];
      if (r + 1 < rows.n && place(r + 1) == place(r)) continue;
      float* row = place(r) + j0 * to.stride[3];  // such a gradient has contiguous keys
      for (int j = 0; j < n; ++j) {
        row[j] += sum[j];
        sum[j] = 0.0f;
      }
    }
  }
}

// Adds the gradient of ALiBi's slopes, whose bias is -slope * |i + offset - j|.
template <int NV>
static inline void add_slopes(const Call& p, int rule, int64_t b, const QueryRows& rows, int64_t j0, int n,
                              const float* dS, float* sum) {
  constexpr int R = NV * W;
  const AlibiRule& alibi = p.alibi[rule];
  const int64_t offset = max(min(alibi.offsets[b * alibi.offsets_stride], kFar), -kFar);
  KeyDistance from[R];
  for (int r = 0; r < R; ++r) from[r] = key_distance(rows.t[r] + offset - j0);
  for (int j = 0; j < n; ++j) {
    for (int r = 0; r < R; ++r) {
      const int32_t pos = from[r].pos, far = pos > j ? pos - j : j - pos;
      sum[r] -= dS[j * R + r] * static_cast<float>(far) * from[r].factor;
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
