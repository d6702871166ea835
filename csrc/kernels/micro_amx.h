// The products of the transposed tiles by matrix instructions: sums of 16 x 16 floats, 32 products each at a time. Q^T
// and the weights are second factors as they are, pairs by rows; K is a first factor as it lies, and V^T, columns by
// keys, is another (amx_tiles.h). What is short of a tile is filled up with zeros in a copy: so the sums of an element
// have one order, whatever tile it is in.
#pragma once

#include "simd/numeric.h"

namespace headwise {
namespace HW_ISA {

constexpr int kTileStep = 32;  // numbers of a first factor that a tile product sums over

// A first factor of 16 rows, and the same of fewer with zeros behind them.
struct TileCopy {
  alignas(64) uint16_t rows[W * kTileStep];

  void copy(const uint16_t* from, int64_t stride, int64_t n, int64_t width) {
    for (int64_t i = 0; i < W; ++i) {
      store(reinterpret_cast<float*>(rows + i * kTileStep), load_halves(from + i * stride, i < n ? width : 0));
    }
  }
};

// Sums U x NV: += U first factors, 16 rows of the stride behind one another, times NV second ones side by side.
template <int U, int NV, int A = kFirst, int B = kSecond>
HW_INLINE void add_tiles(const uint16_t* first, int64_t stride, const uint32_t* second, int64_t pitch) {
  const int64_t rows = stride * 2, pairs = pitch * 4;
  tile_load<A>(first, rows);
  tile_load<B>(second, pairs), tile_times<0, A, B>();
  if constexpr (NV > 1) tile_load<B>(second + W, pairs), tile_times<1, A, B>();
  if constexpr (NV > 2) tile_load<B>(second + 2 * W, pairs), tile_times<2, A, B>();
  if constexpr (U > 1) {
    static_assert(U == 2 && NV <= 2, "four registers hold sums");
    tile_load<A>(first + W * stride, rows);
    tile_times<2 * NV - 1, A, B>();
    if constexpr (NV > 1) tile_load<B>(second, pairs), tile_times<2, A, B>();
  }
}

template <int NV>
HW_INLINE void clear_tiles() {
  tile_zero<0>();
  if constexpr (NV > 1) tile_zero<1>();
  if constexpr (NV > 2) tile_zero<2>();
  if constexpr (NV > 3) tile_zero<3>();
}

// Writes the sums of 1 x NV tiles side by side.
template <int NV>
HW_INLINE void store_tiles(float* to, int64_t pitch) {
  tile_store<0>(to, pitch * 4);
  if constexpr (NV > 1) tile_store<1>(to + W, pitch * 4);
  if constexpr (NV > 2) tile_store<2>(to + 2 * W, pitch * 4);
}

// x[key][row] = sum over d of k[key][d] * Q^T[d][row], for `keys` <= 16 keys. `last` is what Q^T has behind its last
// whole step, with zeros.
template <int NV>
static inline void scores_of_keys(const uint32_t* q, const uint32_t* last, int64_t depth, const uint16_t* k,
                                  int64_t stride, int64_t keys, float* x) {
  constexpr int R = NV * W;
  const int64_t steps = depth / W, rest = depth % W;
  clear_tiles<NV>();
  TileCopy copy;
  for (int64_t s = 0; s < steps; ++s) {
    if (keys == W) {
      add_tiles<1, NV>(k + s * kTileStep, stride, q + s * W * R, R);
    } else {
      copy.copy(k + s * kTileStep, stride, keys, kTileStep);
      add_tiles<1, NV>(copy.rows, kTileStep, q + s * W * R, R);
    }
  }
  if (rest > 0) {
    copy.copy(k + steps * kTileStep, stride, keys, 2 * rest);
    add_tiles<1, NV>(copy.rows, kTileStep, last, R);
  }
  if (keys == W) return store_tiles<NV>(x, R);
  alignas(64) float rows[W * R];
  store_tiles<NV>(rows, R);
  memcpy(x, rows, static_cast<size_t>(keys * R) * sizeof(float));
}

template <int NV>
static inline void tile_key_products(const uint32_t* q, int64_t depth, const uint16_t* k, int64_t stride, int64_t keys,
                                     float* x) {
  constexpr int R = NV * W;
  const int64_t rest = depth % W;
  alignas(64) uint32_t last[W * R];
  if (rest > 0) {
    memcpy(last, q + (depth - rest) * R, static_cast<size_t>(rest * R) * sizeof(uint32_t));
    memset(last + rest * R, 0, static_cast<size_t>((W - rest) * R) * sizeof(uint32_t));
  }
  for (int64_t j = 0; j < keys; j += W) {
    scores_of_keys<NV>(q, last, depth, k + j * stride, stride, min(W, keys - j), x + j * R);
  }
}

// Weights of n keys in pairs, with pairs of zeros up to whole steps behind them.
template <int NV>
static inline const uint32_t* whole_steps(float* weights, int n) {
  constexpr int R = NV * W;
  const int64_t pairs = (n + 1) / 2, padded = round_up(pairs, W);
  memset(weights + pairs * R, 0, static_cast<size_t>((padded - pairs) * R) * sizeof(float));
  return reinterpret_cast<const uint32_t*>(weights);
}

// O^T[u][row] = O^T[u][row] * rescale[row] + sum over keys of weights[key][row] * columns[u][key], for V columns.
// `weights` has pairs of `steps` times 32 keys.
template <int NV>
static inline void tile_add_values(const uint32_t* weights, int64_t steps, const uint16_t* columns, int64_t pitch,
                                   int64_t V, const float* rescale, float* out) {
  constexpr int R = NV * W;
  alignas(64) float sums[W * R];
  for (int64_t u = 0; u < V; u += W) {
    clear_tiles<NV>();
    for (int64_t s = 0; s < steps; ++s) {
      add_tiles<1, NV>(columns + u * pitch + s * kTileStep, pitch, weights + s * W * R, R);
    }
    store_tiles<NV>(sums, R);
    const int64_t width = min(W, V - u);
    for (int64_t i = 0; i < width; ++i) {
      float* to = out + (u + i) * R;
      HW_UNROLL
      for (int v = 0; v < NV; ++v) {
        store(to + v * W, fma(load(to + v * W), load(rescale + v * W), load(sums + i * R + v * W)));
      }
    }
  }
}

// Two keys' tiles by two columns' of the product below, of 16 U keys and 16 NV columns.
template <int U, int NV>
static inline void tile_sums(const uint16_t* k, int64_t rows, const uint32_t* second, int64_t pitch, float* out,
                             int64_t to) {
  tile_load<0>(out, to * 4);
  if constexpr (NV > 1) tile_load<1>(out + W, to * 4);
  if constexpr (U > 1) tile_load<NV>(out + W * to, to * 4);
  if constexpr (U * NV > 3) tile_load<3>(out + W * to + W, to * 4);
  int64_t r = 0;
  for (; r + kTileStep <= rows; r += kTileStep) add_tiles<U, NV>(k + r, rows, second + r / 2 * pitch, pitch);
  if (r < rows) add_tiles<U, NV, kShortFirst, kShortSecond>(k + r, rows, second + r / 2 * pitch, pitch);
  tile_store<0>(out, to * 4);
  if constexpr (NV > 1) tile_store<1>(out + W, to * 4);
  if constexpr (U > 1) tile_store<NV>(out + W * to, to * 4);
  if constexpr (U * NV > 3) tile_store<3>(out + W * to + W, to * 4);
}

// out[key][column] += sum over rows of k[key][row] * second[row][column], for `pitch` columns. The rows are 16, 32 or
// 48, and k has room for whole tiles of keys.
static inline void tile_add_product(const uint16_t* k, int64_t rows, int64_t keys, const uint32_t* second,
                                    int64_t pitch, float* out) {
  int64_t j = 0;
  for (; j + 2 * W <= keys; j += 2 * W) {
    int64_t d = 0;
    for (; d + 2 * W <= pitch; d += 2 * W) {
      tile_sums<2, 2>(k + j * rows, rows, second + d, pitch, out + j * pitch + d, pitch);
    }
    if (d < pitch) tile_sums<2, 1>(k + j * rows, rows, second + d, pitch, out + j * pitch + d, pitch);
  }
  for (; j < keys; j += W) {
    for (int64_t d = 0; d < pitch; d += W) {
      alignas(64) float sums[W * W];
      const int64_t n = min(W, keys - j);
      for (int64_t i = 0; i < n; ++i) store(sums + i * W, load(out + (j + i) * pitch + d));
      tile_sums<1, 1>(k + j * rows, rows, second + d, pitch, sums, W);
      for (int64_t i = 0; i < n; ++i) store(out + (j + i) * pitch + d, load(sums + i * W));
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
