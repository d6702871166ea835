// The sums of statistics for the rows of a block. While the weights of a tile are in registers, the softmax also adds
// up their entropy, distances and bins.
#pragma once

#include "call/statistics_call.h"
#include "kernels/prefill/prefill-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr float kMinLog2 = -200.0f;  // the log2 of a weight of 0, such that 0 times it is 0; -inf would give NaN
constexpr float kNoWeight = -1.0f;   // the score of a pick that no row may attend

// Running sums of the rows of a block. Like those of O, the weights are relative to the greatest score so far.
struct RowSums {
  float* log;            // [row]: sum of weight * log2(weight)
  float* distance;       // [row]: sum of weight * |pos - j|
  float* bin;            // [bin][row]: sum of weights, relative to
  float* bin_max;        // [bin][row]: the greatest score when the bin got its last key
  float* picked;         // [pick][row]: masked scores; -inf before the tile of the key
  float* features;       // [row][feature], as `add_values` adds to it
  int32_t* largest_key;  // [row]
  int32_t* keys;         // [row]: the number of keys that the row may attend; counted only if masks restrict them
  int32_t* pos;          // [row]: the position of the query among the keys
  int32_t pos_min, pos_max;
  int32_t *pick_min, *pick_max;  // [pick]
  bool key_bad[kRows];           // true if the row may attend a key that has a NaN or Inf
};

// The distances of a tile's keys from the rows. If all keys are on one side of all rows, `edge` is the distance of a
// row from the nearest key, and step[j] the distance of key j from that key. Otherwise `edge` is pos - j0 and step[j]
// is j.
struct TileDistances {
  bool across;
  float edge[kRows];
  float step[kTile];

  TileDistances(const RowSums& t, const QueryRows& rows, int64_t j0, int n) {
    const bool before = j0 + n - 1 <= t.pos_min, after = j0 >= t.pos_max;
    across = !before && !after;
    const int32_t first = static_cast<int32_t>(j0), last = static_cast<int32_t>(j0 + n - 1);
    for (int r = 0; r < rows.padded; ++r) {
      edge[r] = static_cast<float>(before ? t.pos[r] - last : after ? first - t.pos[r] : t.pos[r] - first);
    }
    for (int j = 0; j < n; ++j) step[j] = static_cast<float>(before ? n - 1 - j : j);
  }
};

// Finds the greatest score of each row, and the first group of keys that has it. `top`, unless null, holds the greatest
// scores of each group.
template <int NV>
static inline void group_maxima(const float* x, int n, const float* top, F* peak, F* group) {
  constexpr int R = NV * W;
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    peak[v] = set1(-kInf);
    group[v] = zero();
  }
  for (int g = 0; g < n; g += kGroup) {
    F best[NV];
    HW_UNROLL
    for (int v = 0; v < NV; ++v) best[v] = load(top != nullptr ? top + g / kGroup * R + v * W : x + g * R + v * W);
    if (top == nullptr && g + kGroup <= n) {
      HW_UNROLL
      for (int j = 1; j < kGroup; ++j) {
        HW_UNROLL
        for (int v = 0; v < NV; ++v) best[v] = max(best[v], load(x + (g + j) * R + v * W));
      }
    } else if (top == nullptr) {
      for (int j = g + 1; j < n; ++j) {
        for (int v = 0; v < NV; ++v) best[v] = max(best[v], load(x + j * R + v * W));
      }
    }
    const F at = set1(static_cast<float>(g));
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      group[v] = select(not_less(peak[v], best[v]), group[v], at);
      peak[v] = max(peak[v], best[v]);
    }
  }
}

// Updates `row_max` and the first key that has this score, with the scores of a tile; `rescale` is as in softmax_tile.
// Rescales the sums to the new maximum, except the bins. The key is searched in one group only, so that this costs one
// comparison for kGroup keys.
template <int NV>
static inline void update_maxima(const float* x, int n, const float* top, float c, int64_t j0,
                                 float* HW_RESTRICT row_max, const float* HW_RESTRICT row_sum,
                                 float* HW_RESTRICT rescale, const QueryRows& rows, RowSums& t) {
  constexpr int R = NV * W;
  F peak[NV], group[NV];
  group_maxima<NV>(x, n, top, peak, group);
  float old_max[R], from[R];
  const F scale = set1(c), none = set1(-kInf), min_log = set1(kMinLog2);
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F before = load(row_max + v * W), now = max(before, peak[v]);
    store(old_max + v * W, before);
    store(from + v * W, group[v]);
    store(row_max + v * W, now);
    const F drop = mul(sub(before, select(not_less(none, now), zero(), now)), scale), factor = exp2<6>(drop);
    store(rescale + v * W, factor);
    const F log = fma(max(min_log, drop), load(row_sum + v * W), load(t.log + v * W));
    store(t.log + v * W, mul(log, factor));
    store(t.distance + v * W, mul(load(t.distance + v * W), factor));
  }
  // There are no branches here, because it cannot be predicted which rows have a new maximum, and where.
  int changed[R], count = 0;
  for (int r = 0; r < rows.n; ++r) {
    changed[count] = r;
    count += old_max[r] < row_max[r];
  }
  for (int i = 0; i < count; ++i) {
    const int r = changed[i], first = static_cast<int>(from[r]);
    int at = n - 1;
    for (int j = (first + kGroup < n ? first + kGroup : n) - 1; j >= first; --j)
      at = x[j * R + r] == row_max[r] ? j : at;
    t.largest_key[r] = static_cast<int32_t>(j0 + at);
  }
}

// The sums of a part of a tile, to be added to RowSums.
template <int NV>
struct PartSums {
  float weight[NV * W];  // from the last call of `weigh_keys`
  float log[NV * W] = {0}, distance[NV * W] = {0}, mass[NV * W] = {0};
};

// Replaces the scores of the keys from <= j < to by their weights, and adds these up.
template <class N, int NV, bool Across, bool AsPairs>
static inline void weigh_keys(float* x, int from, int to, float c, const float* HW_RESTRICT row_max,
                              const TileDistances& to_keys, PartSums<NV>& part) {
  constexpr int R = NV * W;
  const F scale = set1(c), none = set1(-kInf), min_log = set1(kMinLog2);
  F peak[NV], sum[NV], log[NV], distance[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F now = load(row_max + v * W);
    peak[v] = select(not_less(none, now), zero(), now);  // there was no key so far: x is -inf and its weight 0
    sum[v] = zero();
    log[v] = load(part.log + v * W);
    distance[v] = load(part.distance + v * W);
  }
  const auto weigh = [&](int j, F* w) HW_LAMBDA {
    const F step = set1(to_keys.step[j]);
    F z[NV];
    HW_UNROLL
    for (int v = 0; v < NV; ++v) w[v] = z[v] = max(min_log, mul(sub(load(x + j * R + v * W), peak[v]), scale));
    exp2_each<N::kDegree, NV>(w);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      sum[v] = add(sum[v], w[v]);
      log[v] = fma(w[v], z[v], log[v]);
      distance[v] = fma(w[v], Across ? abs(sub(load(to_keys.edge + v * W), step)) : step, distance[v]);
    }
  };
  if constexpr (AsPairs) {
    uint32_t* pairs = reinterpret_cast<uint32_t*>(x);  // pair j is stored below the scores still to be read
    for (int j = from; j < to; j += 2) {
      F a[NV], b[NV];
      weigh(j, a);
      weigh(j + 1, b);
      HW_UNROLL
      for (int v = 0; v < NV; ++v) store_pairs(pairs + j / 2 * R + v * W, a[v], b[v]);
    }
  } else {
    for (int j = from; j < to; ++j) {
      F w[NV];
      weigh(j, w);
      HW_UNROLL
      for (int v = 0; v < NV; ++v) store(x + j * R + v * W, w[v]);
    }
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    store(part.weight + v * W, sum[v]);
    store(part.log + v * W, log[v]);
    store(part.distance + v * W, distance[v]);
  }
}

// The bin of a key of a tile, and the key of the tile where the bin ends.
struct Bins {
  int64_t n, S, j0;
  int keys;
  int64_t bin;
  int end;

  void enter(int64_t b) {
    bin = b;
    end = n == 0 ? keys : static_cast<int>(min(keys, ((b + 1) * S + n - 1) / n - j0));
  }
};

// Adds the weights of the last keys to their bin, rescaled to the present maximum, and to the mass of the tile.
template <int NV>
static inline void add_to_bin(const Bins& at, float c, const float* HW_RESTRICT row_max, PartSums<NV>& part,
                              RowSums& t) {
  const F scale = set1(c), none = set1(-kInf);
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F now = load(row_max + v * W), peak = select(not_less(none, now), zero(), now);
    store(part.mass + v * W, add(load(part.mass + v * W), load(part.weight + v * W)));
    if (at.n == 0) continue;
    float* bin = t.bin + at.bin * kRows + v * W;
    float* bin_max = t.bin_max + at.bin * kRows + v * W;
    store(bin, fma(load(bin), exp2<6>(mul(sub(load(bin_max), peak), scale)), load(part.weight + v * W)));
    store(bin_max, now);
  }
}

// Converts the weights of two neighbouring keys, or of one, from floats to a pair. `to` may be the address of the
// first.
template <class N, int NV>
static inline void pack_pair([[maybe_unused]] const float* first, [[maybe_unused]] bool two,
                             [[maybe_unused]] float* to) {
  constexpr int R = NV * W;
  if constexpr (N::kPair == 2) {
    for (int v = 0; v < NV; ++v) {
      const F a = load(first + v * W), b = two ? load(first + R + v * W) : zero();
      store_pairs(reinterpret_cast<uint32_t*>(to) + v * W, a, b);
    }
  }
}

// Computes the weights of a tile as softmax_tile does, after update_maxima, and adds them up.
template <class N, int NV, bool Across>
static inline void sum_weights(float* x, int n, float c, bool as_pairs, const float* HW_RESTRICT row_max,
                               float* HW_RESTRICT row_sum, const float* HW_RESTRICT rescale,
                               const TileDistances& to_keys, Bins at, RowSums& t) {
  constexpr int R = NV * W;
  PartSums<NV> part;
  for (int j = 0; j < n;) {
    if (!as_pairs) {
      weigh_keys<N, NV, Across, false>(x, j, at.end, c, row_max, to_keys, part);
      j = at.end;
    } else {
      const int even = j + (at.end - j) / 2 * 2;
      if (even > j) {
        weigh_keys<N, NV, Across, N::kPair == 2>(x, j, even, c, row_max, to_keys, part);
        j = even;
        if (j < at.end) add_to_bin<NV>(at, c, row_max, part, t);
      }
      if (j < at.end) {  // for a pair across the border of two bins, and for a last key without a partner: floats first
        float* first = x + j * R;
        weigh_keys<N, NV, Across, false>(x, j, j + 1, c, row_max, to_keys, part);
        const bool two = j + 1 < n;
        if (two) {
          add_to_bin<NV>(at, c, row_max, part, t);
          at.enter(at.bin + 1);
          weigh_keys<N, NV, Across, false>(x, j + 1, j + 2, c, row_max, to_keys, part);
        }
        pack_pair<N, NV>(first, two, x + j / 2 * R);
        j += 2;
        if (j < at.end) {
          add_to_bin<NV>(at, c, row_max, part, t);
          continue;
        }
      }
    }
    add_to_bin<NV>(at, c, row_max, part, t);
    at.enter(at.bin + 1);
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F mass = load(part.mass + v * W), distance = load(part.distance + v * W);
    const F far = Across ? distance : fma(mass, load(to_keys.edge + v * W), distance);
    store(row_sum + v * W, fma(load(row_sum + v * W), load(rescale + v * W), mass));
    store(t.log + v * W, add(load(t.log + v * W), load(part.log + v * W)));
    store(t.distance + v * W, add(load(t.distance + v * W), far));
  }
}

}  // namespace HW_ISA
}  // namespace headwise
