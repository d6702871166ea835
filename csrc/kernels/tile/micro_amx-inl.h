// The products of the transposed tiles by matrix instructions: sums of 16 x 16 floats, with 32 products each at a time.
// Q^T and the weights are second factors, because they are pairs by rows. K is a first factor without conversion, and
// V^T, which is columns by keys, another one (transpose_amx-inl.h). Whatever does not fill a tile is padded with zeros
// in a copy, so that the sums of an element have one order in any tile.
//
// Six registers hold sums, of two first factors with three second ones. A store takes as long as a product, and runs at
// the same time as products of other sums.
#pragma once

#include "simd/numeric-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kTileStep = 32;           // numbers of a first factor that a tile product sums over
constexpr int kFirst = 6, kSecond = 7;  // registers of factors

// A first factor of 16 rows, and the same of fewer with zeros behind them.
struct TileCopy {
  alignas(64) uint16_t rows[W * kTileStep];

  void copy(const uint16_t* from, int64_t stride, int64_t n, int64_t width) {
    for (int64_t i = 0; i < W; ++i) {
      store(reinterpret_cast<float*>(rows + i * kTileStep), load_halves(from + i * stride, i < n ? width : 0));
    }
  }
};

// Computes the sums of U x NV tiles; those of the second first factor are in the registers from 3 on. Adds U first
// factors of 16 rows each times NV second ones, which lie side by side.
template <int U, int NV>
HW_INLINE void add_tiles(const uint16_t* first, int64_t stride, const uint32_t* second, int64_t pitch) {
  const int64_t rows = stride * 2, pairs = pitch * 4;
  tile_load<kFirst>(first, rows);
  tile_load<kSecond>(second, pairs);
  tile_times<0, kFirst, kSecond>();
  if constexpr (NV > 1) {
    tile_load<kSecond>(second + W, pairs);
    tile_times<1, kFirst, kSecond>();
  }
  if constexpr (NV > 2) {
    tile_load<kSecond>(second + 2 * W, pairs);
    tile_times<2, kFirst, kSecond>();
  }
  if constexpr (U == 1) return;
  tile_load<kFirst>(first + W * stride, rows);
  tile_times<2 + NV, kFirst, kSecond>();
  if constexpr (NV > 2) {
    tile_load<kSecond>(second + W, pairs);
    tile_times<4, kFirst, kSecond>();
  }
  if constexpr (NV > 1) {
    tile_load<kSecond>(second, pairs);
    tile_times<3, kFirst, kSecond>();
  }
}

template <int U, int NV>
HW_INLINE void clear_tiles() {
  tile_zero<0>();
  if constexpr (NV > 1) tile_zero<1>();
  if constexpr (NV > 2) tile_zero<2>();
  if constexpr (U == 1) return;
  tile_zero<3>();
  if constexpr (NV > 1) tile_zero<4>();
  if constexpr (NV > 2) tile_zero<5>();
}

template <int U, int NV>
HW_INLINE void load_tiles(const float* from, int64_t pitch) {
  tile_load<0>(from, pitch * 4);
  if constexpr (NV > 1) tile_load<1>(from + W, pitch * 4);
  if constexpr (NV > 2) tile_load<2>(from + 2 * W, pitch * 4);
  if constexpr (U == 1) return;
  tile_load<3>(from + W * pitch, pitch * 4);
  if constexpr (NV > 1) tile_load<4>(from + W * pitch + W, pitch * 4);
  if constexpr (NV > 2) tile_load<5>(from + W * pitch + 2 * W, pitch * 4);
}

template <int U, int NV>
HW_INLINE void store_tiles(float* to, int64_t pitch) {
  tile_store<0>(to, pitch * 4);
  if constexpr (NV > 1) tile_store<1>(to + W, pitch * 4);
  if constexpr (NV > 2) tile_store<2>(to + 2 * W, pitch * 4);
  if constexpr (U == 1) return;
  tile_store<3>(to + W * pitch, pitch * 4);
  if constexpr (NV > 1) tile_store<4>(to + W * pitch + W, pitch * 4);
  if constexpr (NV > 2) tile_store<5>(to + W * pitch + 2 * W, pitch * 4);
}

// Q^T of a block, with zeros behind its last whole step.
template <int NV>
struct TileQuery {
  const uint32_t* q;
  int64_t steps, rest;  // whole steps of 16 pairs, and the pairs behind them
  alignas(64) uint32_t last[W * NV * W];

  TileQuery(const uint32_t* query, int64_t depth) : q(query), steps(depth / W), rest(depth % W) {
    if (rest == 0) return;
    constexpr int64_t R = NV * W;
    memcpy(last, q + steps * W * R, static_cast<size_t>(rest * R) * sizeof(uint32_t));
    memset(last + rest * R, 0, static_cast<size_t>((W - rest) * R) * sizeof(uint32_t));
  }
};

// Computes x[key][row] = sum over d of k[key][d] * Q^T[d][row], for 16 U keys; if U is 1, also for fewer than 16.
template <int U, int NV>
static inline void scores_of_keys(const TileQuery<NV>& q, const uint16_t* k, int64_t stride, int64_t keys, float* x) {
  constexpr int R = NV * W;
  clear_tiles<U, NV>();
  TileCopy copy;
  for (int64_t s = 0; s < q.steps; ++s) {
    if (keys == U * W) {
      add_tiles<U, NV>(k + s * kTileStep, stride, q.q + s * W * R, R);
    } else {
      copy.copy(k + s * kTileStep, stride, keys, kTileStep);
      add_tiles<1, NV>(copy.rows, kTileStep, q.q + s * W * R, R);
    }
  }
  if (q.rest > 0) {
    copy.copy(k + q.steps * kTileStep, stride, keys, 2 * q.rest);
    add_tiles<1, NV>(copy.rows, kTileStep, q.last, R);
  }
  if (keys == U * W) return store_tiles<U, NV>(x, R);
  alignas(64) float rows[W * R];
  store_tiles<1, NV>(rows, R);
  memcpy(x, rows, static_cast<size_t>(keys * R) * sizeof(float));
}

// The same for any number of keys.
template <int NV>
static inline void tile_key_products(const uint32_t* query, int64_t depth, const uint16_t* k, int64_t stride,
                                     int64_t keys, float* x) {
  constexpr int R = NV * W;
  const TileQuery<NV> q(query, depth);
  int64_t j = 0;
  for (; q.rest == 0 && j + 2 * W <= keys; j += 2 * W)
    scores_of_keys<2, NV>(q, k + j * stride, stride, 2 * W, x + j * R);
  for (; j < keys; j += W) scores_of_keys<1, NV>(q, k + j * stride, stride, min(W, keys - j), x + j * R);
}

// Weights of n keys in pairs, with pairs of zeros up to whole steps behind them.
template <int NV>
static inline const uint32_t* whole_steps(float* weights, int n) {
  constexpr int R = NV * W;
  const int64_t pairs = (n + 1) / 2, padded = round_up(pairs, W);
  memset(weights + pairs * R, 0, static_cast<size_t>((padded - pairs) * R) * sizeof(float));
  return reinterpret_cast<const uint32_t*>(weights);
}

// Computes O^T[u][row] = O^T[u][row] * rescale[row] + sum over keys of weights[key][row] * columns[u][key], for `width`
// columns, at most 16 U. A tile of keys is summed on its own before it is added to the earlier ones.
template <int U, int NV>
static inline void add_columns_of(const uint32_t* weights, int64_t steps, const uint16_t* columns, int64_t pitch,
                                  int64_t width, const float* rescale, float* out) {
  constexpr int R = NV * W;
  clear_tiles<U, NV>();
  for (int64_t s = 0; s < steps; ++s) {
    add_tiles<U, NV>(columns + s * kTileStep, pitch, weights + s * W * R, R);
  }
  alignas(64) float sums[U * W * R];
  store_tiles<U, NV>(sums, R);
  for (int64_t u = 0; u < width; ++u) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t at = u * R + v * W;
      store(out + at, fma(load(out + at), load(rescale + v * W), load(sums + at)));
    }
  }
}

// The same for V columns. `weights` has pairs of `steps` times 32 keys.
template <int NV>
static inline void tile_add_values(const uint32_t* weights, int64_t steps, const uint16_t* columns, int64_t pitch,
                                   int64_t V, const float* rescale, float* out) {
  constexpr int R = NV * W;
  int64_t u = 0;
  for (; u + 2 * W <= V; u += 2 * W) {
    add_columns_of<2, NV>(weights, steps, columns + u * pitch, pitch, 2 * W, rescale, out + u * R);
  }
  for (; u < V; u += W) {
    add_columns_of<1, NV>(weights, steps, columns + u * pitch, pitch, min(W, V - u), rescale, out + u * R);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
