// Products of few rows with a weight matrix, whose speed is that of reading the matrix.
#pragma once

#include "call/linear_call.h"
#include "kernels/decode/decode_formats-inl.h"
#include "kernels/linear/linear_amx-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kLinearSums = 8;  // outputs at a time: as many sums as a CPU needs to start two products every cycle

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

// The products of R rows of x, starting at row r, with kLinearSums / R rows of weights, `stride` elements apart.
template <class Read, int R>
static void linear_sums(const Linear& layer, const float* packed, int64_t r, const typename Read::T* weights,
                        int64_t stride, float* sums) {
  using T = typename Read::T;
  constexpr int N = kLinearSums / R;
  const int64_t padded = linear_padded(layer.width), whole = layer.width / Read::kStep * Read::kStep;
  F acc[kLinearSums];
  HW_UNROLL
  for (int i = 0; i < kLinearSums; ++i) acc[i] = zero();
  const auto step = [&](const T* w, int64_t from_row_to_row, int64_t i) HW_LAMBDA {
    F ka[N], kb[N];
    HW_UNROLL
    for (int n = 0; n < N; ++n) Read::load_key(w + n * from_row_to_row, ka[n], kb[n]);
    HW_UNROLL
    for (int row = 0; row < R; ++row) {
      F qa, qb;
      Read::load_query(packed, (r + row) * padded + i, qa, qb);
      HW_UNROLL
      for (int n = 0; n < N; ++n) acc[row * N + n] = Read::times(acc[row * N + n], qa, qb, ka[n], kb[n]);
    }
  };
  for (int64_t i = 0; i < whole; i += Read::kStep) {
    // The rows after these are prefetched, because the CPU's own prefetching begins anew in each row. Rows of float32
    // are so long that it does not matter.
    HW_UNROLL
    for (int n = 0; sizeof(T) == 2 && n < N; ++n) HW_PREFETCH_NEAR(weights + (N + n) * stride + i);
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
  for (int i = 0; i < kLinearSums; ++i) sums[i] = reduce_add(acc[i]);
}

// The outputs first <= n < last of R rows of x, starting at row r.
template <class Read, int R>
static void linear_outputs(const Linear& layer, const float* packed, int64_t r, int64_t first, int64_t last) {
  constexpr int N = kLinearSums / R;
  const int64_t size = size_of(layer.dtype);
  const auto* weight = reinterpret_cast<const typename Read::T*>(layer.weight);
  const auto write = [&](int64_t n, int64_t count, const float* sums) {
    float outputs[N], bias[N] = {};
    if (layer.bias) copy_floats(bias, layer.bias + n * size, layer.dtype, 1, count, count);
    for (int row = 0; row < R; ++row) {
      for (int64_t i = 0; i < count; ++i) outputs[i] = sums[row * N + i] + bias[i];
      write_floats(layer.out + ((r + row) * layer.count + n) * size, layer.dtype, outputs, count);
    }
  };
  float sums[kLinearSums];
  int64_t n = first;
  for (; n + N <= last; n += N) {
    linear_sums<Read, R>(layer, packed, r, weight + n * layer.weight_stride, layer.weight_stride, sums);
    write(n, N, sums);
  }
  for (; n < last; ++n) {  // one row of weights, N times
    linear_sums<Read, R>(layer, packed, r, weight + n * layer.weight_stride, 0, sums);
    write(n, 1, sums);
  }
}

// `packed`: the rows of x, from `pack_linear`.
static void run_linear(const Linear& layer, const float* packed, int64_t first, int64_t last) {
  const FlushDenormals flush;
  with_weights(layer.dtype, [&](auto read) {
    using Read = decltype(read);
    if constexpr (Read::kTiles) return linear_tiles<Read>(layer, packed, first, last);
    int64_t r = 0;
    for (; layer.R - r >= 4; r += 4) linear_outputs<Read, 4>(layer, packed, r, first, last);
    for (; layer.R - r >= 2; r += 2) linear_outputs<Read, 2>(layer, packed, r, first, last);
    for (; r < layer.R; ++r) linear_outputs<Read, 1>(layer, packed, r, first, last);
  });
}

}  // namespace HW_ISA
}  // namespace headwise
