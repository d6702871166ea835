// Many rows: blocks of NV vectors of rows on the transposed micro-kernels, a few blocks sharing each tile of keys.
#pragma once

#include "kernels/dropout.h"
#include "kernels/epilogue.h"
#include "kernels/key_tiles.h"

namespace headwise {
namespace HW_ISA {

constexpr int kMaxBlocks = 4;  // of an item: so often is a tile of keys used while it is near

// A thread's memory for one item.
template <class N>
struct BlockScratch {
  typename N::Query* query[kMaxBlocks];
  float* sums[kMaxBlocks];  // O^T[column][row]
  float *top, *total;       // [block][row]
  float* alpha;
  float* scores;  // [key][row], then weights
  float* key_copy;
  void* value_copy;
  float* spare;
  float* line;
  Rows* rows;
  bool shared;  // several blocks use a tile, so that a copy of it pays

  BlockScratch(Arena& arena, const Problem& p, int blocks) {
    const int64_t depth = N::depth(p.D), wide = round_up(p.V, W);
    for (int i = 0; i < blocks; ++i) {
      query[i] = arena.take<typename N::Query>(depth * kRows);
      sums[i] = arena.take<float>(p.V * kRows);
    }
    top = arena.take<float>(kMaxBlocks * kRows), total = arena.take<float>(kMaxBlocks * kRows);
    alpha = arena.take<float>(kRows);
    scores = arena.take<float>(kTile * kRows);
    key_copy = arena.take<float>(kTile * pitch_of(p.D));
    value_copy = arena.take<float>(kTile * pitch_of(p.V));
    spare = arena.take<float>(most(W * round_up(p.D, W), W * wide));
    line = arena.take<float>(W * wide);
    rows = arena.take<Rows>(kMaxBlocks);
    shared = blocks > 1;
  }
};

// The keys of a tile for all blocks of an item.
struct TileOfKeys {
  int64_t j0;
  int n;
  RowsOf key, value;
  BadKeys bad;
};

template <class N>
static inline void load_tile(const Problem& p, int64_t b, int64_t kv_head, int64_t j0, int n, BlockScratch<N>& s,
                             TileOfKeys& tile) {
  tile.j0 = j0, tile.n = n;
  tile.bad.look(p, b, kv_head, j0, n);
  if constexpr (N::kPair == 2) {
#if HW_BF16
    tile.key = half_rows(p.key, b, kv_head, j0, n, p.D, tile.bad, reinterpret_cast<uint16_t*>(s.key_copy));
    tile.value = paired_rows(p.value, b, kv_head, j0, n, p.V, tile.bad, static_cast<uint32_t*>(s.value_copy),
                             reinterpret_cast<uint16_t*>(s.spare));
#endif
  } else {
    tile.key = float_rows(p.key, b, kv_head, j0, n, p.D, tile.bad, true, s.key_copy);
    tile.value = float_rows(p.value, b, kv_head, j0, n, p.V, tile.bad, !(s.shared && collides(p.value)),
                            static_cast<float*>(s.value_copy));
    if (p.bytes()) {
      scale_rows(s.key_copy, pitch_of(p.D), p.key_scale, b, kv_head, j0, n, p.D);
      scale_rows(static_cast<float*>(s.value_copy), pitch_of(p.V), p.value_scale, b, kv_head, j0, n, p.V);
    }
  }
}

// Asks for some rows of the next tile, j0 <= j < j1, while this one is worked on.
static inline void prefetch_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int64_t j1, int64_t width) {
  const int64_t bytes = x.stride[3] == 1 ? width * size_of(x.dtype) : 0;
  for (int64_t j = j0; j < j1; ++j) {
    const char* row = at(x, b, kv_head, j);
    for (int64_t line = 0; line < bytes; line += 64) HW_PREFETCH_NEAR(row + line);
  }
}

// Scores of a block of rows and its part of a tile, as the softmax takes them.
template <class N, int NV>
static inline void score_part(const Problem& p, int64_t b, const TileOfKeys& tile, const Part& part, bool general,
                              int block, BlockScratch<N>& s) {
  constexpr int R = NV * W;
  const int64_t skip = part.j0 - tile.j0;
  const auto* key = reinterpret_cast<const typename N::Key*>(tile.key.data) + skip * tile.key.stride;
  scores_of<N, NV>(s.query[block], N::depth(p.D), key, tile.key.stride, part.n, s.scores);
  if (general) scale_scores(p, s.scores, int64_t{part.n} * R);
  if (general || part.kind == Tile::mixed || tile.bad.any) {
    const bool* bad = tile.bad.any ? tile.bad.is + skip : nullptr;
    mask_tile<Layout<1, R>>(p, b, s.rows[block], part.j0, part.n, s.scores, part.kind, bad);
  }
}

// One block of rows against one tile.
template <class N, int NV>
static inline void block_tile(const Problem& p, int64_t b, const TileOfKeys& tile, bool general, int block,
                              BlockScratch<N>& s) {
  constexpr int R = NV * W;
  const Rows& rows = s.rows[block];
  const Part part = part_of(p, b, rows, tile.j0, tile.n, N::kPair);
  if (part.kind == Tile::empty) return;
  const int64_t j0 = part.j0, skip = j0 - tile.j0;
  const int n = part.n;
  score_part<N, NV>(p, b, tile, part, general, block, s);
  float* top = s.top + block * kRows;
  float* total = s.total + block * kRows;
  const bool drops = p.dropout > 0.0f;
  softmax_tile<N, NV>(s.scores, n, unit_of(p) * kLog2e, top, total, s.alpha, !drops);
  if (drops) {
    drop_tile<1, R>(p, b, rows, j0, n, s.scores);
    pack_weights<N, NV>(s.scores, n);
  }
  const auto* value = reinterpret_cast<const typename N::Value*>(tile.value.data) + skip / N::kPair * tile.value.stride;
  values_of<N, NV>(reinterpret_cast<const typename N::Weight*>(s.scores), (n + N::kPair - 1) / N::kPair, value,
                   tile.value.stride, p.V, s.alpha, s.sums[block]);
}

// W rows of sums^T, [column][row] with `pitch` from column to column, turned back to rows of `wide`.
static inline void turn_back(const float* sums, int64_t pitch, int64_t width, float* line, int64_t wide) {
  for (int64_t d = 0; d < width; d += W) {
    F x[W];
    const float* from = sums + d * pitch;
    if (width - d >= W) {
      HW_UNROLL
      for (int i = 0; i < W; ++i) x[i] = load(from + i * pitch);
    } else {
      for (int i = 0; i < W; ++i) x[i] = d + i < width ? load(from + i * pitch) : zero();
    }
    transpose(x);
    HW_UNROLL
    for (int i = 0; i < W; ++i) store(line + i * wide + d, x[i]);
  }
}

template <class N, int NV>
static inline void finish_block(const Problem& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t first,
                                int64_t split, int block, int64_t from, int64_t to, BlockScratch<N>& s) {
  const Rows& rows = s.rows[block];
  const int64_t wide = round_up(p.V, W);
  for (int v = 0; v < NV && v * W < rows.n; ++v) {
    turn_back(s.sums[block] + v * W, NV * W, p.V, s.line, wide);
    for (int i = 0; i < W && v * W + i < rows.n; ++i) {
      const int r = v * W + i;
      const float raw = s.top[block * kRows + r], total = s.total[block * kRows + r];
      const RowState state = state_of(p, b, rows, r, raw, total, from, to);
      finish_row(p, plan, b, kv_head, first + r, split, state, s.line + i * wide);
    }
  }
}

// Calls f<NV>() for the fewest vectors that hold n rows.
#define HW_BY_VECTORS(n, f, ...)                                   \
  do {                                                             \
    if ((n) > 2 * W && kVectors > 2) {                             \
      f<N, kVectors>(__VA_ARGS__);                                 \
    } else if ((n) > W) {                                          \
      f<N, 2>(__VA_ARGS__);                                        \
    } else {                                                       \
      f<N, 1>(__VA_ARGS__);                                        \
    }                                                              \
  } while (false)

template <class N>
static void run_blocks(const Problem& p, const Plan& plan, int64_t group, int64_t split, char* scratch) {
  Arena arena{scratch};
  const int64_t b = group / plan.row_items / p.K, kv_head = group / plan.row_items % p.K;
  const int64_t first = group % plan.row_items * plan.rows_per_item;
  const int64_t last = least(first + plan.rows_per_item, plan.rows);
  const int blocks = static_cast<int>((last - first + kRows - 1) / kRows);
  BlockScratch<N> s(arena, p, static_cast<int>(plan.rows_per_item / kRows));

  int64_t k0 = p.S, k1 = 0, gap = p.S;
  for (int i = 0; i < blocks; ++i) {
    const int n = static_cast<int>(least(kRows, last - first - i * kRows));
    place_rows(p, b, kv_head, first + i * kRows, n, static_cast<int>(round_up(n, W)), s.rows[i]);
    HW_BY_VECTORS(n, pack_query, p, b, s.rows[i], s.query[i], reinterpret_cast<char*>(s.spare));
    k0 = least(k0, s.rows[i].lo_min), k1 = most(k1, s.rows[i].hi_max), gap = least(gap, s.rows[i].gap_max);
    memset(s.sums[i], 0, static_cast<size_t>(p.V * kRows) * sizeof(float));
    for (int r = 0; r < kRows; ++r) s.top[i * kRows + r] = -kInf, s.total[i * kRows + r] = 0.0f;
  }
  const int64_t from = most(k0, split * plan.keys_per_split), to = least(k1, (split + 1) * plan.keys_per_split);
  const bool general = is_general(p);
  TileOfKeys tile;
  Pages pages(p);
  for (int64_t j = from / kTile * kTile; j < to; j += kTile) {
    const int64_t j0 = most(j, from / 2 * 2), j1 = least(j + kTile, to);
    if (j0 >= s.rows[0].gap_min && j1 <= gap) continue;  // between the first keys and the window
    load_tile<N>(pages.turn(b, j0), b, kv_head, j0, static_cast<int>(j1 - j0), s, tile);
    for (int i = 0; i < blocks; ++i) {
      const int64_t next = least(j + kTile + i * kTile / blocks, to);
      const int64_t end = least(j + kTile + (i + 1) * kTile / blocks, to);
      if (p.table == nullptr) {
        prefetch_rows(p.key, b, kv_head, next, end, p.D);
        prefetch_rows(p.value, b, kv_head, next, end, p.V);
      }
      HW_BY_VECTORS(s.rows[i].n, block_tile, p, b, tile, general, i, s);
    }
  }
  for (int i = 0; i < blocks; ++i) {
    HW_BY_VECTORS(s.rows[i].n, finish_block, p, plan, b, kv_head, first + i * kRows, split, i, from, to, s);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
