// The gradient by matrix instructions. A tile of keys is larger, and computed in units of 32 keys, whose scores stay in
// the L1 cache. P and dS of all blocks of rows of a step lie side by side: dV and dK of a unit are products over all of
// its rows at once, for their sums come from memory, where a step of 32 rows is too few to pay for it.
#pragma once

#include "kernels/backward_rows.h"

namespace headwise {
namespace HW_ISA {

// The blocks first <= i < last of a step that have P and dS of a unit of keys; those between that attend none of its
// keys have zeros. `first` is even, so that its rows begin a step of a product.
struct UnitRows {
  int first = 0, last = 0;
};

constexpr int kUnits = kTile / kTileStep;  // of a tile

// What is prefetched beside the softmax of a unit: a block's share of the sums that are read when all blocks are done,
// and of the next tile.
struct UnitAhead {
  const char* sums[2] = {nullptr, nullptr};
  int64_t bytes[2] = {0, 0};
  NextTile* next = nullptr;

  // Of two keys, the j-th of a unit and the next one.
  HW_MEMBER void step(int64_t j) {
    if (j % 8 == 0) next->key.step();
    if (j % 8 == 4) next->value.step();
    for (int i = 0; i < 2; ++i) {
      for (int64_t at = bytes[i] * j / kTileStep; at < bytes[i] * (j + 2) / kTileStep; at += 64) {
        HW_PREFETCH_NEAR(sums[i] + at);
      }
    }
  }
};

// The gradients of a block's scores for the keys of a tile: x = S and y = dP, or P and dS if `ready`, become P and dS by
// key and row, and dS in pairs of keys. `keys` are those of a unit or two; places of others up to whole units are
// zeros. `full`: no score is -inf by a mask.
template <int NV>
static inline void pack_unit(const float* HW_RESTRICT x, const float* HW_RESTRICT y, int keys, float c,
                             const float* HW_RESTRICT row_max, const float* HW_RESTRICT largest,
                             const float* HW_RESTRICT delta, bool ready, bool full, uint16_t* HW_RESTRICT weight_rows,
                             uint16_t* HW_RESTRICT score_rows, int64_t pitch, uint32_t* HW_RESTRICT pairs,
                             UnitAhead& ahead) {
  constexpr int R = NV * W;
  const F scale = set1(c), lowest = set1(-3.4028235e38f);
  F peak[NV], most[NV], mean[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    peak[v] = load(row_max + v * W), most[v] = load(largest + v * W), mean[v] = load(delta + v * W);
  }
  const auto gradients = [&](int64_t j, F* w, F* d, auto masked) HW_LAMBDA {
    F t[NV];
    HW_UNROLL
    for (int v = 0; v < NV; ++v) t[v] = mul(sub(load(x + j * R + v * W), peak[v]), scale);
    exp2_each<Bfloat16::kDegree, NV>(t);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      w[v] = mul(t[v], most[v]), d[v] = mul(w[v], sub(load(y + j * R + v * W), mean[v]));
      if constexpr (decltype(masked)::value != 0) {  // 0 for -inf alone: a NaN stays NaN, and dP may be inf
        const auto attended = not_less(load(x + j * R + v * W), lowest);
        w[v] = select(attended, w[v], zero()), d[v] = select(attended, d[v], zero());
      }
    }
  };
  const auto any = [&](int64_t j, F* w, F* d) HW_LAMBDA {
    if (j >= keys) {
      HW_UNROLL
      for (int v = 0; v < NV; ++v) w[v] = d[v] = zero();
    } else if (ready) {
      HW_UNROLL
      for (int v = 0; v < NV; ++v) w[v] = load(x + j * R + v * W), d[v] = load(y + j * R + v * W);
    } else {
      gradients(j, w, d, Number<1>{});
    }
  };
  const auto pack = [&](int64_t j, const F* w, const F* d) HW_LAMBDA {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * pitch + v * W;
      store_two_rows(weight_rows + at, weight_rows + at + pitch, round_two(w[v], w[NV + v]));
      const F two = round_two(d[v], d[NV + v]);
      store_two_rows(score_rows + at, score_rows + at + pitch, two);
      store(reinterpret_cast<float*>(pairs + j / 2 * R + v * W), pairs_of_two(two));
    }
  };
  F w[2 * NV], d[2 * NV];
  int64_t j = 0;
  for (; full && !ready && j + 2 <= keys; j += 2) {
    ahead.step(j);
    gradients(j, w, d, Number<0>{}), gradients(j + 1, w + NV, d + NV, Number<0>{});
    pack(j, w, d);
  }
  for (; j < round_up(keys, kTileStep); j += 2) {
    any(j, w, d), any(j + 1, w + NV, d + NV);
    pack(j, w, d);
  }
}

// out[key][column] += sum over rows of k[key][row] * second[row][column], for 16 U keys and 16 NV columns.
template <int U, int NV>
static inline void add_rows_to(const uint16_t* k, int64_t stride, int64_t rows, const uint32_t* second, int64_t pitch,
                               float* out, int64_t to) {
  load_tiles<U, NV>(out, to);
  for (int64_t r = 0; r < rows; r += kTileStep) add_tiles<U, NV>(k + r, stride, second + r / 2 * pitch, pitch);
  store_tiles<U, NV>(out, to);
}

// The same for the keys of a unit, and `pitch` columns. The rows are a multiple of 32.
static inline void add_unit_product(const uint16_t* k, int64_t stride, int64_t keys, int64_t rows,
                                    const uint32_t* second, int64_t pitch, float* out) {
  int64_t d = 0;
  if (keys == kTileStep) {
    for (; d + 2 * W <= pitch; d += 2 * W) add_rows_to<2, 2>(k, stride, rows, second + d, pitch, out + d, pitch);
    if (d < pitch) add_rows_to<2, 1>(k, stride, rows, second + d, pitch, out + d, pitch);
    return;
  }
  for (int64_t j = 0; j < keys; j += W) {
    for (d = 0; d < pitch; d += W) {
      alignas(64) float sums[W * W];
      const int64_t n = min(W, keys - j);
      for (int64_t i = 0; i < n; ++i) store(sums + i * W, load(out + (j + i) * pitch + d));
      add_rows_to<1, 1>(k + j * stride, stride, rows, second + d, pitch, sums, W);
      for (int64_t i = 0; i < n; ++i) store(out + (j + i) * pitch + d, load(sums + i * W));
    }
  }
}

// out[u][row] += sum over keys of columns[u][key] * pairs[key][row], for 16 U columns.
template <int U, int NV>
static inline void add_keys_to(const uint16_t* columns, int64_t pitch, int64_t steps, const uint32_t* pairs, float* out) {
  constexpr int R = NV * W;
  load_tiles<U, NV>(out, R);
  for (int64_t s = 0; s < steps; ++s) {
    add_tiles<U, NV>(columns + s * kTileStep, pitch, pairs + s * W * R, R);
  }
  store_tiles<U, NV>(out, R);
}

// The same for `width` columns, rounded up to 16.
template <int NV>
static inline void add_keys(const uint16_t* columns, int64_t pitch, int64_t width, int64_t steps, const uint32_t* pairs,
                            float* out) {
  int64_t u = 0;
  for (; u + W < width; u += 2 * W) add_keys_to<2, NV>(columns + u * pitch, pitch, steps, pairs, out + u * NV * W);
  if (u < width) add_keys_to<1, NV>(columns + u * pitch, pitch, steps, pairs, out + u * NV * W);
}

// Zeros as P and dS of a block and a unit.
template <class N>
static inline void clear_unit(int unit, int block, BackwardScratch<N>& s) {
  const int64_t at = unit * kTileStep * s.pitch + block * kRows;
  for (int64_t j = 0; j < kTileStep; ++j) {
    memset(s.weight_rows + at + j * s.pitch, 0, kRows * sizeof(uint16_t));
    memset(s.score_rows + at + j * s.pitch, 0, kRows * sizeof(uint16_t));
  }
}

// Zeros behind the last row of a step, up to a whole step of a product.
template <class N>
static inline void clear_behind(int blocks, BackwardScratch<N>& s) {
  const int64_t end = (blocks - 1) * kRows + s.rows[blocks - 1].padded;
  for (int64_t j = 0; j < kTile; ++j) {
    memset(s.weight_rows + j * s.pitch + end, 0, W * sizeof(uint16_t));
    memset(s.score_rows + j * s.pitch + end, 0, W * sizeof(uint16_t));
  }
}

// A block that has P and dS of a unit; those before it have theirs, or get zeros.
template <class N>
static inline void join_unit(int unit, int block, UnitRows& rows, BackwardScratch<N>& s) {
  if (rows.last == 0) rows.first = rows.last = block & ~1;
  for (; rows.last < block; ++rows.last) clear_unit(unit, rows.last, s);
  rows.last = block + 1;
}

}  // namespace HW_ISA
}  // namespace headwise
