// The walk over the tiles of keys, and the scores of a tile. Prefill, decode, statistics and the gradient use both.
#pragma once

#include "kernels/tile/key_tiles-inl.h"
#include "kernels/tile/weighted_values-inl.h"
#include "runtime/kernel_table.h"

namespace headwise {
namespace HW_ISA {

// the most blocks of an item; they use a tile of keys while it is in the cache
constexpr int kMaxBlocks = kHasAmx ? 8 : 4;

// The rows of an item: the blocks of one key-value head of one batch row.
struct Item {
  int64_t b, kv_head, first, last;  // rows first <= row < last
  int blocks;

  Item(const Call& p, const Plan& plan, int64_t group)
      : b(group / plan.row_items / p.K),
        kv_head(group / plan.row_items % p.K),
        first(group % plan.row_items * plan.rows_per_item),
        last(min(first + plan.rows_per_item, plan.rows)),
        blocks(static_cast<int>((last - first + kRows - 1) / kRows)) {}
  int rows_of(int block) const { return static_cast<int>(min(kRows, last - first - block * kRows)); }
};

// The keys from <= j < to that some row of an item may attend. No row attends gap_min <= j < gap_max, between a prefix
// and the windows.
struct Reach {
  int64_t from, to, gap_min, gap_max;

  explicit Reach(const Call& p) : from(p.S), to(0), gap_min(0), gap_max(p.S) {}
  Reach(int64_t first, int64_t last) : from(first), to(last), gap_min(0), gap_max(0) {}
  void add(const QueryRows& rows) {
    from = min(from, rows.lo_min);
    to = max(to, rows.hi_max);
    gap_min = rows.gap_min;  // all rows of an item have one prefix
    gap_max = min(gap_max, rows.gap_max);
  }
  // The reach within first <= j < last.
  Reach within(int64_t first, int64_t last) const {
    Reach part = *this;
    part.from = max(from, first);
    part.to = min(to, last);
    return part;
  }
};

// Calls visit(j0, n) for each tile within the reach. Tiles begin at multiples of `step`, the first one at a multiple of
// Pair.
template <int Pair, class Visit>
static inline void walk_tiles(const Reach& reach, int64_t step, const Visit& visit) {
  for (int64_t j = reach.from / step * step; j < reach.to; j += step) {
    const int64_t j0 = max(j, reach.from / Pair * Pair), j1 = min(j + step, reach.to);
    if (j0 >= reach.gap_min && j1 <= reach.gap_max) continue;
    visit(j0, static_cast<int>(j1 - j0));
  }
}

// A tile, and the keys of it that each block of rows of an item attends.
struct TileSpans {
  int64_t j0 = 0;
  int n = 0;
  KeySpan block[kMaxBlocks];
};

// Prefetches a part of the next tile while a block is computed.
struct NextTile {
  RowPrefetcher key, value;

  // Prefetches what is left of it.
  void rest() {
    key.rest();
    value.rest();
  }
};

// The same for several blocks of rows. span_of(i, j0, n) returns the part of a tile that block i attends, and load(j0,
// n) reads a tile that some block attends. visit(i, span, next) computes a block that attends the tile, and prefetches
// a part of the next such tile.
template <int Step, int Pair, class Span, class Load, class Visit>
static inline void walk_blocks(const Call& p, int64_t b, int64_t kv_head, const Reach& reach, int blocks,
                               const Span& span_of, const Load& load_tile, const Visit& visit) {
  const auto compute = [&](const TileSpans& tile, const TileSpans* next) {
    load_tile(tile.j0, tile.n);
    for (int i = 0; i < blocks; ++i) {
      NextTile prefetch;
      if (next != nullptr && p.table == nullptr) {  // with pages the next tile may be anywhere in memory
        const int64_t first = next->j0 + i * next->n / blocks, last = next->j0 + (i + 1) * next->n / blocks;
        prefetch.key = RowPrefetcher(p.key, b, kv_head, first, last, p.D, max(tile.block[i].n / kUnroll, 1));
        prefetch.value = RowPrefetcher(p.value, b, kv_head, first, last, p.V, max(p.V / kUnroll, 1));
      }
      if (tile.block[i].kind != TileKind::empty) visit(i, tile.block[i], prefetch);
      prefetch.rest();
    }
  };
  TileSpans tiles[2];
  int count = 0;
  walk_tiles<Pair>(reach, Step, [&](int64_t j0, int n) {
    TileSpans& tile = tiles[count % 2];
    tile.j0 = j0;
    tile.n = n;
    bool attended = false;
    for (int i = 0; i < blocks; ++i) {
      tile.block[i] = span_of(i, j0, n);
      attended |= tile.block[i].kind != TileKind::empty;
    }
    if (!attended) return;
    if (count > 0) compute(tiles[(count - 1) % 2], &tile);
    ++count;
  });
  if (count > 0) compute(tiles[(count - 1) % 2], nullptr);
}

// The layout of a tile's scores: `runs` runs of n floats, a multiple of W, which are `stride` floats apart.
struct Cells {
  int64_t n;
  int runs = 1;
  int64_t stride = 0;
};

// Computes the scores of a tile in x, as the softmax takes them: products() writes Q K^T, and then scale, softcap,
// biases and the mask are applied. `capped`, unless null, gets the scores of one run before biases and mask.
template <class L, class Products>
static inline void tile_scores(const Call& p, int64_t b, QueryRows& rows, const KeySpan& span, const bool* bad,
                               float* x, Cells cells, float* capped, const Products& products) {
  products();
  const bool scaled = scales_first(p);
  for (int i = 0; scaled && i < cells.runs; ++i) scale_scores(p, x + i * cells.stride, cells.n);
  if (capped != nullptr) memcpy(capped, x, static_cast<size_t>(cells.n) * sizeof(float));
  if (scaled || span.kind == TileKind::mixed || bad != nullptr) {
    mask_tile<L>(p, b, rows, span.j0, span.n, x, span.kind, bad);
  }
}

// Computes the scores of a block of rows, [key][row], by the transposed micro-kernel. If `marks`, rows that may attend
// a bad key are marked. The head dim is summed in pieces of `piece`.
template <class N, int NV>
static inline void block_scores(const Call& p, int64_t b, const KeyTile& tile, const KeySpan& span,
                                const typename N::Query* query, QueryRows& rows, bool marks, float* x,
                                float* capped = nullptr, int64_t piece = kPiece, ScoreMaxima* maxima = nullptr,
                                const VectorEnds* ends = nullptr) {
  constexpr int R = NV * W;
  const int64_t skip = span.j0 - tile.j0;
  const auto* key = reinterpret_cast<const typename N::Key*>(tile.key.data) + skip * tile.key.stride;
  tile_scores<ScoreLayout<1, R>>(
      p, b, rows, span, marks ? tile.bad.from(skip) : nullptr, x, {int64_t{span.n} * R}, capped, [&] {
        key_products<N, NV>(query, N::depth(p.D), key, tile.key.stride, span.n, x, piece, maxima, ends);
        if constexpr (kScaled<N>) scale_columns<NV>(x, tile.key_scale + skip, span.n);
      });
}

// Computes out = out * rescale + weights V, for the keys of a span and the `width` columns of V. `weights` needs room
// for the keys up to a multiple of N::kStep. `out` is [row][column] (`add_values`), but [column][row] where `kTiles`.
template <class N, int NV>
static inline void block_values(const KeyTile& tile, const KeySpan& span, const KeyRows& value, float* weights,
                                int64_t width, const ValueSums& sums, [[maybe_unused]] RowPrefetcher* next = nullptr,
                                [[maybe_unused]] const VectorEnds* ends = nullptr) {
  constexpr int R = NV * W;
  if constexpr (N::kTiles) {
    const auto* columns = reinterpret_cast<const uint16_t*>(value.data) + (span.j0 - tile.j0);
    if (sums.first) memset(sums.out, 0, static_cast<size_t>(width * R) * sizeof(float));
    return tile_add_values<NV>(whole_steps<NV>(weights, span.n), (span.n + N::kStep - 1) / N::kStep, columns,
                               value.stride, width, sums.rescale, sums.out);
  }
  const int64_t skip = (span.j0 - tile.j0) / N::kPair;
  const auto* v = reinterpret_cast<const typename N::Value*>(value.data) + skip * value.stride;
  add_values<N>(reinterpret_cast<const typename N::Weight*>(weights), R, (span.n + N::kPair - 1) / N::kPair, v,
                value.stride, width, sums, next, ends);
}

// Calls f<N, NV>() for the fewest vectors that hold n rows.
#define HW_BY_VECTORS(n, f, ...)       \
  do {                                 \
    if ((n) > 2 * W && kVectors > 2) { \
      f<N, kVectors>(__VA_ARGS__);     \
    } else if ((n) > W) {              \
      f<N, 2>(__VA_ARGS__);            \
    } else {                           \
      f<N, 1>(__VA_ARGS__);            \
    }                                  \
  } while (false)

}  // namespace HW_ISA
}  // namespace headwise
