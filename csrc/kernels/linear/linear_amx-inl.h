// Products of few rows with a bfloat16 weight matrix by matrix instructions. Sixteen rows of weights by 32 columns are
// a first factor where they are in memory, and pairs of columns by rows of x a second one, so any number of rows costs
// one pass over the weights.
#pragma once

#include "call/linear_call.h"
#include "kernels/tile/micro_amx-inl.h"

namespace headwise {
namespace HW_ISA {

// Adds to sum I, 0 or 1, the products of `columns` columns of n rows of weights; nothing behind them is read.
template <int I>
HW_INLINE void add_weights(const uint16_t* weight, int64_t stride, int64_t n, int64_t columns, const float* packed,
                           TileCopy& copy) {
  if (n >= W && columns >= kTileStep) {
    tile_load<4 + I>(weight, stride * 2);
  } else {
    copy.copy(weight, stride, min(n, W), min(columns, kTileStep));
    tile_load<4 + I>(copy.rows, kTileStep * 2);
  }
  tile_load<2 + I>(packed, W * 4);
  tile_times<I, 4 + I, 2 + I>();
}

// Writes row r of x, `padded` numbers of bfloat16 given as floats, into [pair of columns][row].
static inline void pack_pairs(const float* HW_RESTRICT x, int64_t padded, int64_t r, float* packed) {
  auto* to = reinterpret_cast<uint32_t*>(packed) + r;
  for (int64_t i = 0; i < padded / 2; ++i) {
    uint32_t low, high;
    memcpy(&low, x + 2 * i, sizeof(low));
    memcpy(&high, x + 2 * i + 1, sizeof(high));
    to[i * W] = (low >> 16) | (high & 0xffff0000u);
  }
}

// The sums of the outputs first <= n < last for all rows of x, [row][output]. `packed` is [pair of columns][row].
// Sixteen runs of neighbouring rows are read side by side: a page then belongs to one run, which the CPU's own
// prefetching can follow. The products of even and of odd steps of 32 columns have sums of their own, so that no
// product waits for the last. A template, so that no other instruction set has it.
template <class Read>
static void linear_tiles(const Linear& layer, const float* packed, int64_t first, int64_t last, float* sums) {
  [[maybe_unused]] const TileUnit tiles;
  TileCopy copy;
  alignas(64) float products[2][W * W];
  const int64_t run = (last - first) / W, rest = (last - first) % W;
  const auto* weights = reinterpret_cast<const uint16_t*>(layer.weight) + first * layer.weight_stride;
  const auto add = [&](int64_t n, int64_t from_run_to_run, int64_t runs) {
    const uint16_t* weight = weights + n * layer.weight_stride;
    const int64_t stride = from_run_to_run * layer.weight_stride;
    tile_zero<0>();
    tile_zero<1>();
    for (int64_t i = 0; i < layer.width; i += 2 * kTileStep) {
      add_weights<0>(weight + i, stride, runs, layer.width - i, packed + i / 2 * W, copy);
      const int64_t next = i + kTileStep;
      if (next < layer.width) {
        add_weights<1>(weight + next, stride, runs, layer.width - next, packed + next / 2 * W, copy);
      }
    }
    tile_store<0>(products[0], W * 4);
    tile_store<1>(products[1], W * 4);
    for (int64_t r = 0; r < layer.R; ++r) {
      float* to = sums + r * kLinearOutputs + n;
      for (int64_t i = 0; i < runs; ++i) to[i * from_run_to_run] = products[0][i * W + r] + products[1][i * W + r];
    }
  };
  for (int64_t n = 0; n < run; ++n) add(n, run, W);
  if (rest > 0) add(run * W, 1, rest);
}

}  // namespace HW_ISA
}  // namespace headwise
