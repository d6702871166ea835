// The gradient by matrix instructions. A tile of keys is larger than in the other kernels, and is computed in units of
// 32 keys, whose scores stay in the L1 cache. P and dS of all blocks of rows of a step are stored side by side, so that
// dV and dK of a unit are products over all of its rows at once. Their sums are read from memory, which would take too
// long for a step of only 32 rows.
#pragma once

#include "kernels/backward/backward_rows-inl.h"

namespace headwise {
namespace HW_ISA {

// The blocks first <= i < last of a step that have P and dS of a unit of keys. Blocks between them that attend none of
// its keys have zeros. `first` is even, so that its rows begin a step of a product.
struct UnitRows {
  int first = 0, last = 0;
};

constexpr int kUnits = kTile / kTileStep;  // units of a tile
// floats of dK and dV up to which these are not prefetched, because they stay in the cache
constexpr int64_t kSumsInCache = int64_t{128} << 10;

// The factors of dV and dK are in the layout of the matrix instructions, in blocks of 16 or 32 consecutive lines: P and
// dS by unit, 32 rows, key and row; dO and Q by 16 columns, pair of rows and column.
constexpr int64_t kBlockCells = int64_t{kTileStep} * kTileStep;
HW_INLINE int64_t place_of_row(int64_t row) { return row / kTileStep * kBlockCells + row % kTileStep; }

// Prefetches, during the softmax of some keys, a block's part of the sums that are read when all blocks are done, and
// of the next tile.
struct UnitPrefetcher {
  NextTile* next;
  const char* sums[2] = {nullptr, nullptr};
  int64_t left[2] = {0, 0}, each[2] = {0, 0};  // lines
  int turn = 0;

  // The sums of some keys, of `width` columns, are prefetched in the 16 steps of a unit.
  void begin(int i, const float* rows, int64_t keys, int64_t width) {
    sums[i] = reinterpret_cast<const char*>(rows);
    left[i] = keys * width / W;
    each[i] = (left[i] + W - 1) / W;
  }
  HW_MEMBER void step() {
    if (turn % 4 == 0) next->key.step();
    if (turn++ % 4 == 2) next->value.step();
    for (int i = 0; i < 2; ++i) {
      const int64_t n = min(each[i], left[i]);
      for (int64_t line = 0; line < n; ++line) HW_PREFETCH_NEAR(sums[i] + line * 64);
      sums[i] += n * 64;
      left[i] -= n;
    }
  }
};

// The places for P and dS of some keys of a unit.
template <int NV>
struct UnitPlaces {
  uint16_t *weights[NV], *scores[NV];  // [key][row], of 16 rows each
  uint32_t* pairs;                     // dS in pairs of keys

  template <class N>
  UnitPlaces(const BackwardScratch<N>& s, int unit, int block, int64_t key) {
    for (int v = 0; v < NV; ++v) {
      const int64_t at = unit * s.steps * kBlockCells + key * kTileStep + place_of_row(block * kRows + v * W);
      weights[v] = s.weight_rows + at;
      scores[v] = s.score_rows + at;
    }
    pairs = s.scores + (unit * kTileStep + key) / 2 * NV * W;
  }
};

// Computes the gradients of a block's scores for the keys of a tile: x = S and y = dP, or P and dS if `ready`, become P
// and dS by key and row, and dS in pairs of keys. Keys behind the last one get zeros, up to `padded` keys. `full` tells
// that no mask has made a score -inf.
template <int NV>
static inline void pack_unit(const float* HW_RESTRICT x, const float* HW_RESTRICT y, int64_t keys, int64_t padded,
                             float c, const float* HW_RESTRICT row_max, const float* HW_RESTRICT largest,
                             const float* HW_RESTRICT delta, bool ready, bool full, const UnitPlaces<NV>& to,
                             UnitPrefetcher& prefetcher) {
  constexpr int R = NV * W;
  const F scale = set1(c), lowest = set1(-3.4028235e38f);
  F peak[NV], most[NV], mean[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    peak[v] = load(row_max + v * W);
    most[v] = load(largest + v * W);
    mean[v] = load(delta + v * W);
  }
  const auto gradients = [&](int64_t j, F* w, F* d, auto masked) HW_LAMBDA {
    F t[NV];
    HW_UNROLL
    for (int v = 0; v < NV; ++v) t[v] = mul(sub(load(x + j * R + v * W), peak[v]), scale);
    exp2_each<Bfloat16::kDegree, NV>(t);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      w[v] = mul(t[v], most[v]);
      d[v] = mul(w[v], sub(load(y + j * R + v * W), mean[v]));
      if constexpr (decltype(masked)::value != 0) {  // 0 only for -inf: a NaN stays NaN, and dP may be inf
        const auto attended = not_less(load(x + j * R + v * W), lowest);
        w[v] = select(attended, w[v], zero());
        d[v] = select(attended, d[v], zero());
      }
    }
  };
  const auto any = [&](int64_t j, F* w, F* d) HW_LAMBDA {
    if (j >= keys) {
      HW_UNROLL
      for (int v = 0; v < NV; ++v) w[v] = d[v] = zero();
    } else if (ready) {
      HW_UNROLL
      for (int v = 0; v < NV; ++v) {
        w[v] = load(x + j * R + v * W);
        d[v] = load(y + j * R + v * W);
      }
    } else {
      gradients(j, w, d, Constant<1>{});
    }
  };
  const auto pack = [&](int64_t j, const F* w, const F* d) HW_LAMBDA {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int64_t at = j * kTileStep;
      store_two_rows(to.weights[v] + at, to.weights[v] + at + kTileStep, round_two(w[v], w[NV + v]));
      const F two = round_two(d[v], d[NV + v]);
      store_two_rows(to.scores[v] + at, to.scores[v] + at + kTileStep, two);
      store(reinterpret_cast<float*>(to.pairs + j / 2 * R + v * W), pairs_of_two(two));
    }
  };
  F w[2 * NV], d[2 * NV];
  int64_t j = 0;
  for (; full && !ready && j + 2 <= keys; j += 2) {
    prefetcher.step();
    gradients(j, w, d, Constant<0>{});
    gradients(j + 1, w + NV, d + NV, Constant<0>{});
    pack(j, w, d);
  }
  for (; j < padded; j += 2) {
    any(j, w, d);
    any(j + 1, w + NV, d + NV);
    pack(j, w, d);
  }
}

// out[key][column] += sum over rows of k[key][row] * second[row][column], for 16 U keys and 16 NV columns, `steps`
// times 32 rows.
template <int U, int NV>
static inline void add_rows_to(const uint16_t* k, int64_t steps, const uint32_t* second, int64_t panel, float* out,
                               int64_t to) {
  load_tiles<U, NV>(out, to);
  for (int64_t s = 0; s < steps; ++s, k += kBlockCells, second += W * W) {
    tile_load<kFirst>(k, 64);
    tile_load<kSecond>(second, 64);
    tile_times<0, kFirst, kSecond>();
    if constexpr (NV > 1) {
      tile_load<5>(second + panel, 64);
      tile_times<1, kFirst, 5>();
    }
    if constexpr (U == 1) continue;
    tile_load<kFirst>(k + kBlockCells / 2, 64);
    if constexpr (NV > 1) tile_times<4, kFirst, 5>();
    tile_times<3, kFirst, kSecond>();
  }
  store_tiles<U, NV>(out, to);
}

// The same for the keys of a unit, and `width` columns.
static inline void add_unit_product(const uint16_t* k, int64_t keys, int64_t steps, const uint32_t* second,
                                    int64_t panel, int64_t width, float* out) {
  int64_t d = 0;
  if (keys == kTileStep) {
    for (; d + 2 * W <= width; d += 2 * W) add_rows_to<2, 2>(k, steps, second + d / W * panel, panel, out + d, width);
    if (d < width) add_rows_to<2, 1>(k, steps, second + d / W * panel, panel, out + d, width);
    return;
  }
  for (int64_t j = 0; j < keys; j += W) {
    for (d = 0; d < width; d += W) {
      alignas(64) float sums[W * W];
      const int64_t n = min(W, keys - j);
      for (int64_t i = 0; i < n; ++i) store(sums + i * W, load(out + (j + i) * width + d));
      add_rows_to<1, 1>(k + j * kTileStep, steps, second + d / W * panel, panel, sums, W);
      for (int64_t i = 0; i < n; ++i) store(out + (j + i) * width + d, load(sums + i * W));
    }
  }
}

// K of a tile as first factors of dQ: [unit][column][key], with zeros behind the last key.
static inline void pack_key_columns(const Tensor4& x, int64_t b, int64_t kv_head, const KeyTile& tile, int64_t width,
                                    uint16_t* out, uint16_t* spare) {
  const int64_t padded = round_up(width, W);
  for (int j0 = 0; j0 < tile.n; j0 += kTileStep, out += padded * kTileStep) {
    columns_of_keys(static_cast<int>(min(kTileStep, tile.n - j0)), width, kTileStep, out,
                    [&](int j, int place) -> const uint16_t* {
                      if (tile.bad.any && tile.bad.is[j0 + j]) return nullptr;
                      const char* row = at(x, b, kv_head, tile.j0 + j0 + j);
                      if (x.stride[3] == 1) return reinterpret_cast<const uint16_t*>(row);
                      copy_halves(spare + place * padded, row, x.stride[3], width, width);
                      return spare + place * padded;
                    });
  }
}

// out[u][row] += sum over keys of columns[u][key] * pairs[key][row], for 16 U columns and `units` of keys, whose
// columns are `unit` elements apart.
template <int U, int NV>
static inline void add_keys_to(const uint16_t* columns, int64_t unit, int64_t units, const uint32_t* pairs,
                               float* out) {
  constexpr int R = NV * W;
  load_tiles<U, NV>(out, R);
  for (int64_t s = 0; s < units; ++s) add_tiles<U, NV>(columns + s * unit, kTileStep, pairs + s * W * R, R);
  store_tiles<U, NV>(out, R);
}

// The same for `width` columns, a multiple of 16.
template <int NV>
static inline void add_keys(const uint16_t* columns, int64_t width, int64_t units, const uint32_t* pairs, float* out) {
  const int64_t unit = width * kTileStep;
  int64_t u = 0;
  for (; u + 2 * W <= width; u += 2 * W) {
    add_keys_to<2, NV>(columns + u * kTileStep, unit, units, pairs, out + u * NV * W);
  }
  if (u < width) add_keys_to<1, NV>(columns + u * kTileStep, unit, units, pairs, out + u * NV * W);
}

// Computes x and y, the products of 16 keys with Q^T and of their values with dO^T. Both are computed together: only
// three sums would wait for one another, and 16 keys leave room for Q^T and dO^T in the L1 cache.
static inline void add_fused_products(const uint32_t* query, const uint32_t* dout, int64_t steps, const uint16_t* key,
                                      int64_t key_stride, const uint16_t* value, int64_t value_stride, float* x,
                                      float* y) {
  constexpr int64_t R = 3 * W, pitch = R * 4;
  clear_tiles<2, 3>();
  for (int64_t s = 0; s < steps; ++s, query += W * R, dout += W * R) {
    tile_load<kFirst>(key + s * kTileStep, key_stride * 2);
    tile_load<kSecond>(query, pitch);
    tile_times<0, kFirst, kSecond>();
    tile_load<kSecond>(query + W, pitch);
    tile_times<1, kFirst, kSecond>();
    tile_load<kSecond>(query + 2 * W, pitch);
    tile_times<2, kFirst, kSecond>();
    tile_load<kFirst>(value + s * kTileStep, value_stride * 2);
    tile_load<kSecond>(dout, pitch);
    tile_times<3, kFirst, kSecond>();
    tile_load<kSecond>(dout + W, pitch);
    tile_times<4, kFirst, kSecond>();
    tile_load<kSecond>(dout + 2 * W, pitch);
    tile_times<5, kFirst, kSecond>();
  }
  tile_store<0>(x, pitch);
  tile_store<1>(x + W, pitch);
  tile_store<2>(x + 2 * W, pitch);
  tile_store<3>(y, pitch);
  tile_store<4>(y + W, pitch);
  tile_store<5>(y + 2 * W, pitch);
}

// Writes zeros as P and dS of 16 rows and a unit.
template <class N>
static inline void clear_rows(int64_t unit, int64_t row, BackwardScratch<N>& s) {
  const int64_t at = unit * s.steps * kBlockCells + place_of_row(row);
  for (int64_t j = 0; j < kTileStep; ++j) {
    memset(s.weight_rows + at + j * kTileStep, 0, W * sizeof(uint16_t));
    memset(s.score_rows + at + j * kTileStep, 0, W * sizeof(uint16_t));
  }
}

// The same for a block.
template <class N>
static inline void clear_unit(int unit, int block, BackwardScratch<N>& s) {
  for (int r = 0; r < kRows; r += W) clear_rows(unit, block * kRows + r, s);
}

// Registers a block that has P and dS of a unit. Blocks before it have theirs, or get zeros.
template <class N>
static inline void join_unit(int unit, int block, UnitRows& rows, BackwardScratch<N>& s) {
  if (rows.last == 0) rows.first = rows.last = block & ~1;
  for (; rows.last < block; ++rows.last) clear_unit(unit, rows.last, s);
  rows.last = block + 1;
}

}  // namespace HW_ISA
}  // namespace headwise
