// The micro-kernel of results, the values of keys times their weights: O[row][column]. Its lanes are columns. Weights
// are broadcast from memory, and rows of V are read as vectors, so that results need not be transposed.
#pragma once

#include "kernels/tile/micro-inl.h"

namespace headwise {
namespace HW_ISA {

// The sums O[row][column] of a block of rows, to which tiles of keys are added.
struct ValueSums {
  float* out;
  const float* rescale;  // the factor of the sums so far, a number for each row
  bool first;            // there are no sums so far
};

// The keys before the end of the v-th vector of rows, of all `keys`; both in groups of N::kPair.
template <class N>
HW_INLINE int64_t keys_before(const VectorEnds* ends, int v, int64_t keys) {
  return ends == nullptr ? keys : min((ends->end[v] + N::kPair - 1) / N::kPair, keys);
}

// Computes out[row] = out[row] * rescale[row] + sum over keys of weights[key][row] * value[key], for C vectors of
// columns and all `rows`, U of them at once. A tile is summed on its own before it is added to the earlier tiles, so
// that errors grow with the number of tiles and not of keys.
template <class N, int U, int C>
static inline void add_columns_of_values(const typename N::Weight* weights, int rows, int64_t keys,
                                         const VectorEnds* ends, const typename N::Value* value, int64_t stride,
                                         const ValueSums& sums, int64_t at, int64_t pitch, RowPrefetcher* next) {
  const auto* weight = reinterpret_cast<const typename N::Key*>(weights);
  for (int r = 0; r < rows; r += U) {
    if (next != nullptr) next->step();
    const int64_t n = keys_before<N>(ends, (r + U - 1) / W, keys);
    F acc[U][C];
    multiply<N, C, U>(acc, value, stride, n, weight + r * N::kPair, N::kPair, rows * N::kPair);
    float* to = sums.out + r * pitch + at;
    if (sums.first) {
      HW_UNROLL
      for (int u = 0; u < U; ++u, to += pitch) {
        HW_UNROLL
        for (int c = 0; c < C; ++c) store(to + c * W, add(acc[u][c], zero()));  // 0 in the place of -0
      }
      continue;
    }
    HW_UNROLL
    for (int u = 0; u < U; ++u, to += pitch) {
      const F rescale = set1(sums.rescale[r + u]);
      HW_UNROLL
      for (int c = 0; c < C; ++c) store(to + c * W, fma(load(to + c * W), rescale, acc[u][c]));
    }
  }
}

// How many columns the last vector of a row of `width` sums has. It overlaps the columns before it if there are too few
// columns for a vector, so that nothing is read behind the end of a row of V. Up to kUnroll columns are computed as
// columns by rows, which takes half as long where they fill half a vector. If a whole row is less than that, V is a
// copy with zeros behind it.
HW_INLINE int64_t last_columns(int64_t width) {
  const int64_t rest = width % W;
  return kUnroll < W && rest > 0 && rest <= kUnroll && width >= kUnroll ? kUnroll : min(width, W);
}

// Moves the last columns of a row of sums next to those before them.
static inline void close_gap(float* row, int64_t width) {
  const int64_t whole = width / W * W, rest = width - whole, gap = last_columns(width) - rest;
  if (rest > 0 && gap > 0) memmove(row + whole, row + whole + gap, static_cast<size_t>(rest) * sizeof(float));
}

// The same for kUnroll columns, which are computed as columns by NV vectors of rows and transposed.
template <class N, int NV>
static inline void add_few_columns(const typename N::Weight* weights, int rows, int64_t keys, const VectorEnds* ends,
                                   const typename N::Value* value, int64_t stride, const ValueSums& sums, int64_t at,
                                   int64_t pitch) {
  for (int r = 0; r < rows; r += NV * W) {
    const int64_t n = keys_before<N>(ends, r / W, keys);
    F acc[kUnroll][NV];
    multiply<N, NV, kUnroll>(acc, weights + r, rows, n, reinterpret_cast<const typename N::Key*>(value), N::kPair,
                             stride * N::kPair);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      F x[W];
      HW_UNROLL
      for (int i = 0; i < W; ++i) x[i] = i < kUnroll ? acc[i % kUnroll][v] : zero();
      transpose(x);
      float* to = sums.out + (r + v * W) * pitch + at;
      HW_UNROLL
      for (int i = 0; i < W; ++i, to += pitch) {
        store(to, sums.first ? add(x[i], zero()) : fma(load(to), set1(sums.rescale[r + v * W + i]), x[i]));
      }
    }
  }
}

// The same for all columns. Vector i of a row of sums is at i * W. If `ends`, keys behind a vector's end are left out,
// because their weights are 0.
template <class N>
static inline void add_values(const typename N::Weight* weights, int rows, int64_t keys, const typename N::Value* value,
                              int64_t stride, int64_t width, const ValueSums& sums, RowPrefetcher* next = nullptr,
                              const VectorEnds* ends = nullptr) {
  const int64_t whole = width / W, pitch = round_up(width, W);
  if (next != nullptr) next->spread((pitch / W + kVectors - 1) / kVectors * (rows / kUnroll));
  int64_t i = 0;
  const auto add = [&](auto rows_at_once, auto count, int64_t column) {
    constexpr int U = decltype(rows_at_once)::value, C = decltype(count)::value;
    add_columns_of_values<N, U, C>(weights, rows, keys, ends, value + column, stride, sums, i * W, pitch, next);
    i += C;
  };
  if constexpr (W >= 8) {  // 24 or 12 sums
    constexpr int kMost = W >= 16 ? 4 : 2;
    while (rows % 6 == 0 && whole - i >= kMost && whole - i != kMost + 1) add(Constant<6>{}, Constant<kMost>{}, i * W);
  }
  while (whole - i >= kVectors && whole - i != kVectors + 1) add(Constant<kUnroll>{}, Constant<kVectors>{}, i * W);
  while (whole - i >= 2) add(Constant<kUnroll>{}, Constant<2>{}, i * W);
  const auto add_one = [&](int64_t column) {
    if (rows % (2 * kUnroll) == 0) return add(Constant<2 * kUnroll>{}, Constant<1>{}, column);
    add(Constant<kUnroll>{}, Constant<1>{}, column);
  };
  if (whole > i) add_one(i * W);
  if (whole * W == width) return;
  const int64_t last = last_columns(width), column = width - last;
  if constexpr (kUnroll < W) {
    if (last == kUnroll && ends == nullptr && rows == kVectors * W)
      return add_few_columns<N, kVectors>(weights, rows, keys, nullptr, value + column, stride, sums, i * W, pitch);
    if (last == kUnroll)
      return add_few_columns<N, 1>(weights, rows, keys, ends, value + column, stride, sums, i * W, pitch);
  }
  add_one(column);
}

}  // namespace HW_ISA
}  // namespace headwise
