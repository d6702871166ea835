// Products of few rows with a weight matrix, whose speed is that of reading the matrix.
#pragma once

#include "call/linear_call.h"
#include "kernels/decode/decode_formats-inl.h"
#include "kernels/linear/linear_amx-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kLinearSums = 8;  // outputs at a time: as many sums as a CPU needs to start two products every cycle

// Rows of weights that are read side by side for R rows of x. AMD's CPUs read four runs faster than eight, and faster
// without prefetching.
template <int R>
constexpr int kLinearRuns = kReadsInOrder && R == 1 ? 4 : kLinearSums / R;

// Calls run(reader) with the format in which weights are read.
template <class Run>
static inline void with_weights(Dtype dtype, const Run& run) {
  if (dtype == Dtype::f32) {
    run(ReadF32{});
  } else if (dtype == Dtype::f16) {
    run(ReadF16{});
  } else if constexpr (kHasAmx) {
    run(ReadBf16Tiles{});
  } else if constexpr (kHasBf16) {
    run(ReadBf16Pairs{});
  } else {
    run(ReadBf16{});
  }
}

static int64_t linear_padded(int64_t width) { return round_up(width, ReadF32::kStep); }

// Writes the rows of x in the order in which they are read, into kLinearRows padded rows; `row` has room for one.
static void pack_linear(const Linear& layer, float* packed, float* row) {
  const int64_t padded = linear_padded(layer.width);
  with_weights(layer.dtype, [&](auto read) {
    for (int64_t r = 0; r < layer.R; ++r) {
      copy_floats(row, layer.x + r * layer.x_stride * size_of(layer.dtype), layer.dtype, 1, layer.width, padded);
      if constexpr (decltype(read)::kTiles) {
        pack_pairs(row, padded, r, packed);
      } else {
        decltype(read)::store_query(packed, padded, r, row);
      }
    }
  });
}

// The products of R rows of x, starting at row r, with kLinearRuns<R> rows of weights, `stride` elements apart.
template <class Read, int R>
static void linear_sums(const Linear& layer, const float* packed, int64_t r, const typename Read::T* weights,
                        int64_t stride, float* sums) {
  using T = typename Read::T;
  constexpr int N = kLinearRuns<R>;
  constexpr int64_t kAhead = 512 / sizeof(T);  // that far the CPU's own prefetching does not reach
  const int64_t padded = linear_padded(layer.width), whole = layer.width / Read::kStep * Read::kStep;
  F acc[N * R];
  HW_UNROLL
  for (int i = 0; i < N * R; ++i) acc[i] = zero();
  const auto step = [&](const T* w, int64_t from_row_to_row, int64_t i) HW_LAMBDA {
    F ka[N], kb[N];
    HW_UNROLL
    for (int n = 0; n < N; ++n) Read::load_key(w + n * from_row_to_row, ka[n], kb[n]);
    HW_UNROLL
    for (int row = 0; row < R; ++row) {
      F qa, qb;
      load_query_once<Read>(packed, (r + row) * padded + i, qa, qb);
      HW_UNROLL
      for (int n = 0; n < N; ++n) acc[row * N + n] = Read::times(acc[row * N + n], qa, qb, ka[n], kb[n]);
    }
  };
  for (int64_t i = 0; i < whole; i += Read::kStep) {
    HW_UNROLL
    for (int n = 0; n < N && !kReadsInOrder; ++n) {
      HW_UNROLL
      for (int64_t line = 0; line < Read::kStep; line += 64 / int64_t{sizeof(T)}) {
        HW_PREFETCH_ONCE(weights + n * stride + i + kAhead + line);
      }
    }
    step(weights + i, stride, i);
  }
  if (whole < layer.width) {  // nothing behind the end of a row is read
    T rest[N * Read::kStep] = {};
    for (int n = 0; n < N; ++n) {
      memcpy(rest + n * Read::kStep, weights + n * stride + whole,
             static_cast<size_t>(layer.width - whole) * sizeof(T));
    }
    step(rest, Read::kStep, whole);
  }
  HW_UNROLL
  for (int i = 0; i < N * R; ++i) sums[i] = reduce_add(acc[i]);
}

// The sums of an item for R rows of x, starting at row r, [row][output]. Several runs of neighbouring rows of weights
// are read side by side, because the CPU's own prefetching follows one run in a page.
template <class Read, int R>
static void linear_runs(const Linear& layer, const float* packed, int64_t r, int64_t first, int64_t last, float* sums) {
  constexpr int N = kLinearRuns<R>;
  const int64_t run = (last - first) / N, stride = layer.weight_stride;
  const auto* weights = reinterpret_cast<const typename Read::T*>(layer.weight) + first * stride;
  const auto add = [&](int64_t n, int64_t from_run_to_run, int runs) {
    float products[kLinearSums];
    linear_sums<Read, R>(layer, packed, r, weights + n * stride, from_run_to_run * stride, products);
    for (int row = 0; row < R; ++row) {
      for (int i = 0; i < runs; ++i) {
        sums[(r + row) * kLinearOutputs + n + i * from_run_to_run] = products[row * N + i];
      }
    }
  };
  for (int64_t n = 0; n < run; ++n) add(n, run, N);
  for (int64_t n = run * N; n < last - first; ++n) add(n, 0, 1);  // one row of weights, N times
}

// The outputs first <= n < last, at most kLinearOutputs. `packed`: the rows of x, from `pack_linear`.
static void run_linear(const Linear& layer, const float* packed, int64_t first, int64_t last) {
  const FlushDenormals flush;
  alignas(64) float sums[kLinearRows * kLinearOutputs];
  with_weights(layer.dtype, [&](auto read) {
    using Read = decltype(read);
    if constexpr (Read::kTiles) return linear_tiles<Read>(layer, packed, first, last, sums);
    int64_t r = 0;
    for (; layer.R - r >= 4; r += 4) linear_runs<Read, 4>(layer, packed, r, first, last, sums);
    for (; layer.R - r >= 2; r += 2) linear_runs<Read, 2>(layer, packed, r, first, last, sums);
    for (; r < layer.R; ++r) linear_runs<Read, 1>(layer, packed, r, first, last, sums);
  });
  const int64_t n = last - first, size = size_of(layer.dtype);
  float bias[kLinearOutputs] = {};
  if (layer.bias) copy_floats(bias, layer.bias + first * size, layer.dtype, 1, n, n);
  for (int64_t r = 0; r < layer.R; ++r) {
    float* row = sums + r * kLinearOutputs;
    for (int64_t i = 0; i < n; ++i) row[i] += bias[i];
    write_floats(layer.out + (r * layer.count + first) * size, layer.dtype, row, n);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
