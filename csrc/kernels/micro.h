// The micro-kernels: transposed tiles, lanes are query rows. S^T[key][row] and O^T[column][row], so that the softmax
// is vertical and nothing is summed across lanes; elements of K and V are broadcast from where they lie.
#pragma once

#include "kernels/query_rows.h"

namespace headwise {
namespace HW_ISA {

// Numbers as float32: Q^T[d][row], K and V rows of floats, weights [key][row].
struct Float32 {
  using Query = float;
  using Key = float;
  using Weight = float;
  using Value = float;
  static constexpr int kPair = 1;   // elements in a step of the depth
  static constexpr int kDegree = 6;

  HW_INLINE int64_t depth(int64_t D) { return D; }
  HW_INLINE F times(F acc, const float* lanes, F b) { return fma(load(lanes), b, acc); }
  HW_INLINE F broadcast(const float* p) { return set1(*p); }
};

#if HW_BF16
// Numbers as pairs of bfloat16 that VDPBF16PS multiplies and adds in float32: Q^T[d / 2][row], K rows as they lie,
// weights [key / 2][row], V with two keys' elements in a pair.
struct Bfloat16 {
  using Query = uint32_t;
  using Key = uint16_t;
  using Weight = uint32_t;
  using Value = uint32_t;
  static constexpr int kPair = 2;
  static constexpr int kDegree = 4;

  HW_INLINE int64_t depth(int64_t D) { return (D + 1) / 2; }
  HW_INLINE F times(F acc, const uint32_t* lanes, F b) {
    return dot_pairs(acc, _mm512_castsi512_ps(_mm512_loadu_si512(lanes)), b);
  }
  HW_INLINE F broadcast(const void* p) {
    uint32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair)));
  }
};
#endif

// acc[u][lane] = sum over d of lanes[d][lane] * k[u][d], for U rows k and NV vectors of lanes, `pitch` apart.
template <class N, int NV, int U>
HW_INLINE void multiply(F acc[U][NV], const typename N::Query* HW_RESTRICT lanes, int64_t pitch, int64_t depth,
                        const typename N::Key* HW_RESTRICT k, int64_t stride) {
  HW_UNROLL
  for (int u = 0; u < U; ++u) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) acc[u][v] = zero();
  }
  for (int64_t d = 0; d < depth; ++d) {
    HW_UNROLL
    for (int u = 0; u < U; ++u) {
      const F b = N::broadcast(k + u * stride + d * N::kPair);
      HW_UNROLL
      for (int v = 0; v < NV; ++v) acc[u][v] = N::times(acc[u][v], lanes + d * pitch + v * W, b);
    }
  }
}

// x[u][row] = sum over d of Q^T[d][row] * k[u][d], for U keys and NV vectors of rows; added to x where it is no first.
template <class N, int NV, int U, bool First>
static inline void qk(const typename N::Query* HW_RESTRICT q, int64_t depth, const typename N::Key* HW_RESTRICT k,
                      int64_t stride, float* HW_RESTRICT x) {
  constexpr int R = NV * W;
  F acc[U][NV];
  multiply<N, NV, U>(acc, q, R, depth, k, stride);
  HW_UNROLL
  for (int u = 0; u < U; ++u) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      float* to = x + u * R + v * W;
      store(to, First ? acc[u][v] : add(load(to), acc[u][v]));
    }
  }
}

// O^T[u][row] = O^T[u][row] * alpha[row] + sum over keys of weights[key][row] * v[key][u], for U columns.
// A tile's sum is added to what the tiles before it gave: errors grow with the number of tiles, not of keys.
template <class N, int NV, int U>
static inline void pv(const typename N::Weight* HW_RESTRICT weights, int64_t keys,
                      const typename N::Value* HW_RESTRICT value, int64_t stride, const float* HW_RESTRICT alpha,
                      float* HW_RESTRICT out) {
  constexpr int R = NV * W;
  F acc[U][NV];
  HW_UNROLL
  for (int u = 0; u < U; ++u) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) acc[u][v] = zero();
  }
  for (int64_t j = 0; j < keys; ++j) {
    HW_UNROLL
    for (int u = 0; u < U; ++u) {
      const F b = N::broadcast(value + j * stride + u);
      HW_UNROLL
      for (int v = 0; v < NV; ++v) acc[u][v] = N::times(acc[u][v], weights + j * R + v * W, b);
    }
  }
  HW_UNROLL
  for (int u = 0; u < U; ++u) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      float* o = out + u * R + v * W;
      store(o, fma(load(o), load(alpha + v * W), acc[u][v]));
    }
  }
}

template <class N, int NV, bool First>
static inline void scores_of_piece(const typename N::Query* q, int64_t depth, const typename N::Key* k, int64_t stride,
                                   int64_t keys, float* x) {
  constexpr int R = NV * W;
  int64_t j = 0;
  for (; j + kUnroll <= keys; j += kUnroll) qk<N, NV, kUnroll, First>(q, depth, k + j * stride, stride, x + j * R);
  if constexpr (kUnroll > 4) {
    for (; j + 4 <= keys; j += 4) qk<N, NV, 4, First>(q, depth, k + j * stride, stride, x + j * R);
  }
  for (; j + 2 <= keys; j += 2) qk<N, NV, 2, First>(q, depth, k + j * stride, stride, x + j * R);
  if (j < keys) qk<N, NV, 1, First>(q, depth, k + j * stride, stride, x + j * R);
}

// The head dim in pieces: a long chain of additions rounds more, and a piece of Q^T stays in the first cache.
constexpr int64_t kPiece = 128;

template <class N, int NV>
static inline void scores_of(const typename N::Query* q, int64_t depth, const typename N::Key* k, int64_t stride,
                             int64_t keys, float* x, int64_t piece = kPiece) {
  scores_of_piece<N, NV, true>(q, least(depth, piece), k, stride, keys, x);
  for (int64_t d = piece; d < depth; d += piece) {
    scores_of_piece<N, NV, false>(q + d * NV * W, least(depth - d, piece), k + d * N::kPair, stride, keys, x);
  }
}

template <class N, int NV>
static inline void values_of(const typename N::Weight* weights, int64_t keys, const typename N::Value* value,
                             int64_t stride, int64_t V, const float* alpha, float* out) {
  constexpr int R = NV * W;
  int64_t u = 0;
  for (; u + kUnroll <= V; u += kUnroll) pv<N, NV, kUnroll>(weights, keys, value + u, stride, alpha, out + u * R);
  if constexpr (kUnroll > 4) {
    for (; u + 4 <= V; u += 4) pv<N, NV, 4>(weights, keys, value + u, stride, alpha, out + u * R);
  }
  for (; u + 2 <= V; u += 2) pv<N, NV, 2>(weights, keys, value + u, stride, alpha, out + u * R);
  if (u < V) pv<N, NV, 1>(weights, keys, value + u, stride, alpha, out + u * R);
}

// The online softmax of one tile, in place: x[key][row] becomes the weights 2^(c (x - top)) of each row, with `top`, the
// greatest x so far, and `total` carried on, and `alpha` what earlier tiles are worth under the new maximum.
// `c` > 0 is log2(e) times what is still to be scaled. `as_pairs`: leave weights as N takes them, else as floats.
// The difference comes first, so that the greatest score has the weight 1 exactly.
template <class N, int NV>
static inline void softmax_tile(float* x, int64_t keys, float c, float* HW_RESTRICT top, float* HW_RESTRICT total,
                                float* HW_RESTRICT alpha, bool as_pairs) {
  constexpr int R = NV * W;
  F peak[NV], sum[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = load(x + v * W), sum[v] = zero();
  for (int64_t j = 1; j < keys; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) peak[v] = max(peak[v], load(x + j * R + v * W));
  }
  const F scale = set1(c), none = set1(-kInf);
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F before = load(top + v * W), now = max(before, peak[v]);
    store(top + v * W, now);
    peak[v] = select(not_less(none, now), zero(), now);  // nothing seen yet: x is -inf, its weight 0
    store(alpha + v * W, exp2<6>(mul(sub(before, peak[v]), scale)));
  }
  const auto weight = [&](int64_t j, int v) {
    return exp2<N::kDegree>(mul(sub(load(x + j * R + v * W), peak[v]), scale));
  };
  int64_t j = 0;
#if HW_BF16
  if (N::kPair == 2 && as_pairs) {
    uint32_t* pairs = reinterpret_cast<uint32_t*>(x);  // of j lie before what is still to be read
    for (; j + 1 < keys; j += 2) {
      HW_UNROLL
      for (int v = 0; v < NV; ++v) {
        const F a = weight(j, v), b = weight(j + 1, v);
        sum[v] = add(sum[v], add(a, b));
        store_pairs(pairs + j / 2 * R + v * W, a, b);
      }
    }
    for (int v = 0; v < NV && j < keys; ++v) {
      const F a = weight(j, v);
      sum[v] = add(sum[v], a);
      store_pairs(pairs + j / 2 * R + v * W, a, zero());
    }
    j = keys;
  }
#else
  (void)as_pairs;
#endif
  for (; j < keys; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const F a = weight(j, v);
      sum[v] = add(sum[v], a);
      store(x + j * R + v * W, a);
    }
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) store(total + v * W, fma(load(total + v * W), load(alpha + v * W), sum[v]));
}

// Weights as floats, after dropout has been at them, to pairs.
template <class N, int NV>
static inline void pack_weights(float* x, int64_t keys) {
#if HW_BF16
  constexpr int R = NV * W;
  if constexpr (N::kPair == 2) {
    uint32_t* pairs = reinterpret_cast<uint32_t*>(x);
    for (int64_t j = 0; j < keys; j += 2) {
      for (int v = 0; v < NV; ++v) {
        const F b = j + 1 < keys ? load(x + (j + 1) * R + v * W) : zero();
        store_pairs(pairs + j / 2 * R + v * W, load(x + j * R + v * W), b);
      }
    }
  }
#else
  (void)x, (void)keys;
#endif
}

}  // namespace HW_ISA
}  // namespace headwise
