// Decode's products of bfloat16 by matrix instructions. Products by vector instructions would take longer than reading
// the keys and values; a matrix instruction takes one cycle for each line. Keys and values are not converted.
//
// Q K^T: 16 keys by 32 columns are a first factor, and pairs of columns by rows of Q a second one. P V: 16 keys by 32
// columns of V are a second factor, in which neighbours are columns and not keys. So a weight w is paired with 0: (w,
// 0) gives the sums of the even columns, and (0, w) those of the odd ones. A first factor has 16 rows: for four rows, w
// is written as the sum of two bfloat16 numbers, each in both places.
#pragma once

#include "kernels/decode/prefetch-inl.h"
#include "kernels/tile/micro_amx-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kQuad = 4;                       // rows of a tile of weights
constexpr int kWeightTile = W * W;             // words
constexpr int kFirstWeights = 4, kValues = 6;  // registers, of two each

// The words of the tiles of weights for this many keys and the most rows.
HW_INLINE constexpr int64_t weight_words(int64_t keys) { return keys / W * 2 * kWeightTile; }

// Loads 16 rows by 32 columns into a register: in place, or padded with zeros in a copy.
template <int Tile>
HW_INLINE void load_rows(const uint16_t* from, int64_t stride, int64_t n, TileCopy& copy) {
  if (n >= W) return tile_load<Tile>(from, stride * 2);
  copy.copy(from, stride, n, kTileStep);
  tile_load<Tile>(copy.rows, kTileStep * 2);
}

// Of the 16 lines that a product reads, 12 are prefetched during the product. The other lines are prefetched at once
// before code that has no products, which runs while memory answers.
constexpr int kLinesPerProduct = 12;

template <class Read>
HW_INLINE void prefetch_with_product(Prefetcher<Read>& prefetcher) {
  HW_UNROLL
  for (int64_t i = 0; i < kLinesPerProduct; i += Prefetcher<Read>::kLines) prefetcher.step();
}

// Prefetches the other lines, or a part of them, for the products of n keys with this many columns.
template <class Read>
HW_INLINE void prefetch_rest(Prefetcher<Read>& prefetcher, int n, int64_t columns, int64_t part) {
  const int64_t products = (n + W - 1) / W * (columns / kTileStep);
  for (int64_t i = 0; i < products * (W - kLinesPerProduct) / part; i += Prefetcher<Read>::kLines) prefetcher.step();
}

// Adds the products of the u-th 16 of n keys.
template <int U, class Read>
HW_INLINE void add_keys(const uint16_t* k, int64_t stride, int n, TileCopy& copy, Prefetcher<Read>& prefetcher) {
  if (n <= U * W) return;
  load_rows<4 + U % 2>(k + U * W * stride, stride, n - U * W, copy);
  tile_times<U, 4 + U % 2, kSecond>();
  prefetch_with_product(prefetcher);
}

// The scores of the u-th 16 of n keys, from [key][row] to [row][key].
template <int U, int R, int Tile>
HW_INLINE void store_scores(int n, float* HW_RESTRICT out) {
  if (n <= U * W) return;
  alignas(64) float sums[W * W];
  tile_store<U>(sums, W * 4);
  for (int r = 0; r < R; r += kQuad) {
    F row[kQuad];
    columns_of_sums(sums + r, row);
    HW_UNROLL
    for (int i = 0; i < (R < kQuad ? R : kQuad); ++i) store(out + (r + i) * Tile + U * W, row[i]);
  }
}

// Scores of R rows and the n keys of a tile: out[row][key].
template <class Read, int R>
static inline void tile_scores_of(const float* query, int64_t padded_D, const uint16_t* k, int64_t stride, int n,
                                  Prefetcher<Read>& prefetcher, float* HW_RESTRICT out) {
  const auto* q = reinterpret_cast<const uint32_t*>(query);
  TileCopy copy;
  for (int j = 0; j < n; j += 2 * W) {  // more keys at a time would wait for the lines of more streams
    const uint16_t* keys = k + j * stride;
    const int left = n - j;
    tile_zero<0>();
    tile_zero<1>();
    for (int64_t d = 0; d < padded_D; d += kTileStep) {
      tile_load<kSecond>(q + d / 2 * W, W * 4);
      add_keys<0>(keys + d, stride, left, copy, prefetcher);
      add_keys<1>(keys + d, stride, left, copy, prefetcher);
    }
    if (left <= 2 * W) prefetch_rest(prefetcher, n, padded_D, 1);  // the softmax follows
    store_scores<0, R, Read::kTile>(left, out + j);
    store_scores<1, R, Read::kTile>(left, out + j);
  }
}

// Tiles of the weights of n keys: [16 keys][four rows][part of a weight and row][key]. Those behind the last key are 0.
template <int R, int Tile>
static inline void tile_weights(const float* HW_RESTRICT weights, int n, uint32_t* HW_RESTRICT tiles) {
  constexpr int Quads = (R + kQuad - 1) / kQuad;
  for (int j = 0; j < n; j += W) {
    HW_UNROLL
    for (int r = 0; r < R; ++r) {
      uint32_t* to = tiles + (j / W * Quads + r / kQuad) * kWeightTile + r % kQuad * W;
      split_weights(load(weights + r * Tile + j), to, kQuad * W);
    }
  }
}

// Adds the products of 16 keys' weights with the B-th 32 of some columns.
template <int B, int Quads, class Read>
HW_INLINE void add_value_columns(const uint16_t* v, int64_t stride, int64_t n, int64_t width, TileCopy& copy,
                                 Prefetcher<Read>& prefetcher) {
  if (width <= B * kTileStep) return;
  load_rows<kValues + B % 2>(v + B * kTileStep, stride, n, copy);
  tile_times<B * Quads, kFirstWeights, kValues + B % 2>();
  if constexpr (Quads == 2) tile_times<B * Quads + 1, kFirstWeights + 1, kValues + B % 2>();
  prefetch_with_product(prefetcher);
}

// sums = sums * rescale + those of a register, for the rows of one quad.
template <int Sum, int R>
HW_INLINE void join_sums(const float* rescale, float* HW_RESTRICT sums, int64_t padded_V) {
  alignas(64) float parts[4][kQuad * W];
  tile_store<Sum>(parts, W * 4);
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    const F factor = set1(rescale[r]);
    HW_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      float* to = sums + r * padded_V + odd * W;
      store(to, fma(load(to), factor, add(load(parts[odd] + r * W), load(parts[2 + odd] + r * W))));
    }
  }
}

template <int B, int R>
HW_INLINE void join_columns(const float* rescale, float* HW_RESTRICT sums, int64_t padded_V, int64_t width) {
  if (width <= B * kTileStep) return;
  constexpr int Quads = (R + kQuad - 1) / kQuad, First = R < kQuad ? R : kQuad;
  join_sums<B * Quads, First>(rescale, sums + B * kTileStep, padded_V);
  if constexpr (Quads == 2) {
    join_sums<B * Quads + 1, R - kQuad>(rescale + kQuad, sums + B * kTileStep + kQuad * padded_V, padded_V);
  }
}

// sums = sums * rescale + weights V, all columns: even ones and odd ones of each 32.
template <class Read, int R>
static inline void tile_sums_of(const uint32_t* weights, int n, const uint16_t* v, int64_t stride, int64_t padded_V,
                                Prefetcher<Read>& prefetcher, const float* rescale, float* HW_RESTRICT sums) {
  constexpr int Quads = (R + kQuad - 1) / kQuad, Columns = 4 / Quads;  // of 32, whose sums are in four registers
  TileCopy copy;
  for (int64_t d = 0; d < padded_V; d += Columns * kTileStep) {
    const int64_t width = padded_V - d;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int j = 0; j < n; j += W) {
      const uint16_t* rows = v + j * stride + d;
      const uint32_t* w = weights + j / W * Quads * kWeightTile;
      tile_load<kFirstWeights>(w, W * 4);
      if constexpr (Quads == 2) tile_load<kFirstWeights + 1>(w + kWeightTile, W * 4);
      add_value_columns<0, Quads>(rows, stride, n - j, width, copy, prefetcher);
      add_value_columns<1, Quads>(rows, stride, n - j, width, copy, prefetcher);
      if constexpr (Quads == 1) {
        add_value_columns<2, Quads>(rows, stride, n - j, width, copy, prefetcher);
        add_value_columns<3, Quads>(rows, stride, n - j, width, copy, prefetcher);
      }
    }
    prefetch_rest(prefetcher, n, min(width, Columns * kTileStep), 2);
    join_columns<0, R>(rescale, sums + d, padded_V, width);
    join_columns<1, R>(rescale, sums + d, padded_V, width);
    if constexpr (Quads == 1) {
      join_columns<2, R>(rescale, sums + d, padded_V, width);
      join_columns<3, R>(rescale, sums + d, padded_V, width);
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
