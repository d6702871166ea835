// V^T of a tile of keys in the layout of the matrix instructions: [column][key].
#pragma once

#include "kernels/tile/micro_amx-inl.h"

namespace headwise {
namespace HW_ISA {

// The distance between columns of a tile with this many keys, in elements: an odd number of cache lines, so that the
// columns do not share a few lines of the cache.
HW_INLINE constexpr int64_t column_pitch(int64_t keys) { return (keys + 63) / 64 * 64 + 32; }

// The columns of 32 keys, a row each; null is a row of zeros. Writes `width` columns, rounded up to vectors.
static inline void transpose_keys(const uint16_t* const* rows, int64_t width, int64_t pitch, uint16_t* to) {
  const int64_t padded = round_up(width, W);
  for (int64_t d = 0; d < width; d += 2 * W) {
    F even[W], odd[W];
    HW_UNROLL
    for (int i = 0; i < W; ++i) {
      const int64_t n = min(2 * W, width - d);
      even[i] = rows[2 * i] == nullptr ? zero() : load_halves(rows[2 * i] + d, n);
      odd[i] = rows[2 * i + 1] == nullptr ? zero() : load_halves(rows[2 * i + 1] + d, n);
    }
    transpose(even);
    transpose(odd);
    for (int64_t i = 0; i < W && d + 2 * i < padded; ++i) {
      exchange_halves(even[i], odd[i]);
      store(reinterpret_cast<float*>(to + (d + 2 * i) * pitch), even[i]);
      store(reinterpret_cast<float*>(to + (d + 2 * i + 1) * pitch), odd[i]);
    }
  }
}

// The columns of n keys; those up to a multiple of 32 are zeros. row_of(j, i) gives the row of key j or null, and may
// write a copy of it to place i < 32.
template <class Row>
static inline void columns_of_keys(int n, int64_t width, int64_t pitch, uint16_t* to, const Row& row_of) {
  for (int j0 = 0; j0 < n; j0 += kTileStep) {
    const uint16_t* rows[kTileStep];
    for (int i = 0; i < kTileStep; ++i) rows[i] = j0 + i < n ? row_of(j0 + i, i) : nullptr;
    transpose_keys(rows, width, pitch, to + j0);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
