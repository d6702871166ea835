// The online softmax of a tile of transposed scores.
#pragma once

#include "kernels/tile/micro-inl.h"

namespace headwise {
namespace HW_ISA {

// Updates the greatest x of each row so far, in `row_max` and `peak`. `peak` is 0 before the first key, because x is
// then -inf and its weight 0. `rescale` is the factor from the old maximum to the new one. `top`, unless null, holds
// the greatest x of each group of keys.
template <int NV>
static inline void raise_maxima(const float* x, int64_t keys, F scale, const float* top, float* HW_RESTRICT row_max,
                                float* HW_RESTRICT rescale, F* peak) {
  constexpr int R = NV * W;
  const float* of = top != nullptr ? top : x;
  const int64_t n = top != nullptr ? (keys + kGroup - 1) / kGroup : keys;
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = load(of + v * W);
  for (int64_t j = 1; j < n; ++j) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) peak[v] = max(peak[v], load(of + j * R + v * W));
  }
  const F none = set1(-kInf);
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F before = load(row_max + v * W), now = max(before, peak[v]);
    store(row_max + v * W, now);
    peak[v] = select(not_less(none, now), zero(), now);
    store(rescale + v * W, exp2<6>(mul(sub(before, peak[v]), scale)));
  }
}

// The online softmax of one tile, in place: x[key][row] becomes the weights 2^(c (x - row_max)). `row_max` is the
// greatest x so far, and `row_sum` the sum of weights. `rescale` is the factor from the old maximum to the new one. `c`
// > 0 is log2(e) times the scale that x still lacks. With `as_pairs` the weights are stored in the format N, otherwise
// as floats. `top`, unless null, holds the greatest x of each group of keys. The difference is taken first, so that the
// greatest score has the weight 1 exactly.
template <class N, int NV>
static inline void softmax_tile(float* x, int64_t keys, float c, float* HW_RESTRICT row_max, float* HW_RESTRICT row_sum,
                                float* HW_RESTRICT rescale, [[maybe_unused]] bool as_pairs, const float* top) {
  constexpr int R = NV * W;
  const F scale = set1(c);
  F peak[NV], sum[NV];
  raise_maxima<NV>(x, keys, scale, top, row_max, rescale, peak);
  HW_UNROLL
  for (int v = 0; v < NV; ++v) sum[v] = zero();
  const auto weigh = [&](auto count, int64_t j, F* w) HW_LAMBDA {
    constexpr int kVectorsOf = decltype(count)::value * NV;
    HW_UNROLL
    for (int i = 0; i < kVectorsOf; ++i) w[i] = mul(sub(load(x + j * R + i * W), peak[i % NV]), scale);
    exp2_each<N::kDegree, kVectorsOf>(w);
  };
  constexpr int kAtOnce = HW_KEYS_AT_ONCE;
  int64_t j = 0;
  if constexpr (N::kPair == 2) {
    if (as_pairs) {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(x);  // pair j is stored below the scores still to be read
      for (; kAtOnce > 1 && j + kAtOnce <= keys; j += kAtOnce) {
        F w[kAtOnce][NV];
        weigh(Constant<kAtOnce>{}, j, w[0]);
        HW_UNROLL
        for (int i = 0; i + 1 < kAtOnce; i += 2) {
          HW_UNROLL
          for (int v = 0; v < NV; ++v) {
            sum[v] = add(sum[v], add(w[i][v], w[i + 1][v]));
            store_pairs(pairs + (j + i) / 2 * R + v * W, w[i][v], w[i + 1][v]);
          }
        }
      }
      for (; j < keys; j += 2) {
        F a[NV], b[NV];
        weigh(Constant<1>{}, j, a);
        if (j + 1 < keys) {
          weigh(Constant<1>{}, j + 1, b);
        } else {
          HW_UNROLL
          for (int v = 0; v < NV; ++v) b[v] = zero();
        }
        HW_UNROLL
        for (int v = 0; v < NV; ++v) {
          sum[v] = add(sum[v], add(a[v], b[v]));
          store_pairs(pairs + j / 2 * R + v * W, a[v], b[v]);
        }
      }
    }
  }
  constexpr int kFloatsAtOnce = kAtOnce > 2 ? 2 : 1;  // with degree 6 more registers hold constants
  for (; kFloatsAtOnce > 1 && j + kFloatsAtOnce <= keys; j += kFloatsAtOnce) {
    F w[kFloatsAtOnce][NV];
    weigh(Constant<kFloatsAtOnce>{}, j, w[0]);
    HW_UNROLL
    for (int i = 0; i < kFloatsAtOnce * NV; ++i) {
      sum[i % NV] = add(sum[i % NV], w[i / NV][i % NV]);
      store(x + j * R + i * W, w[i / NV][i % NV]);
    }
  }
  for (; j < keys; ++j) {
    F a[NV];
    weigh(Constant<1>{}, j, a);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      sum[v] = add(sum[v], a[v]);
      store(x + j * R + v * W, a[v]);
    }
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) store(row_sum + v * W, fma(load(row_sum + v * W), load(rescale + v * W), sum[v]));
}

// Converts the weights of a tile from floats to the format N, after dropout.
template <class N, int NV>
static inline void pack_weights([[maybe_unused]] float* x, [[maybe_unused]] int64_t keys) {
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
}

}  // namespace HW_ISA
}  // namespace headwise
