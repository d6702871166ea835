// Prefill of bfloat16 by matrix instructions, for head dims that fill tiles; see overlapped_softmax-inl.h.
#pragma once

#include "kernels/prefill/overlapped_softmax-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int64_t kTogether = kTile * kVisitTiles;  // the keys that all blocks visit before the next keys are packed

// Lists the visits of four tiles, block by block, so that the sums of a block stay in the L1 cache.
template <class N>
static inline int plan_visits(const Call& p, int64_t b, int tiles, int blocks, PrefillAmxScratch<N>& s) {
  int count = 0;
  for (int i = 0; i < blocks; ++i) {
    for (int t = 0; t < tiles; ++t) {
      const int64_t end = s.tiles[t].j0 + s.tiles[t].n;
      for (int64_t j0 = s.tiles[t].j0, j1; j0 < end; j0 = j1) {
        j1 = min((j0 / kVisitKeys + 1) * kVisitKeys, end);
        const KeySpan span = attended_span(p, b, s.rows[i], j0, static_cast<int>(j1 - j0), kTileStep);
        if (span.kind != TileKind::empty) s.visits[count++] = {i, s.tiles + t, span};
      }
    }
  }
  return count;
}

template <class N>
static inline void start_amx_block(const Call& p, int64_t b, int64_t kv_head, int64_t first, int n, int block,
                                   PrefillAmxScratch<N>& s) {
  place_rows(p, b, kv_head, first, n, kAmxRows, s.rows[block]);
  pack_query<N, kAmxVectors>(p, b, s.rows[block], s.query[block], s.spare);
  memset(s.sums[block], 0, static_cast<size_t>(p.V * kAmxRows) * sizeof(float));
  for (int r = block * kRows; r < (block + 1) * kRows; ++r) {
    s.row_max[r] = -kInf;
    s.row_sum[r] = 0.0f;
  }
}

// Computes an item. Unless `careful`, it returns false without a result if a key or value may be bad.
template <class N>
static bool attend_amx(const Call& p, const Plan& plan, const Item& item, int64_t split, char* scratch, bool careful) {
  Arena arena{scratch};
  PrefillAmxScratch<N> s(arena, p, static_cast<int>(plan.rows_per_item / kAmxRows));
  const int64_t b = item.b, kv_head = item.kv_head;
  const int blocks = static_cast<int>((item.last - item.first + kAmxRows - 1) / kAmxRows);
  const auto rows_of = [&](int i) { return static_cast<int>(min(kAmxRows, item.last - item.first - i * kAmxRows)); };
  Reach all(p);
  for (int i = 0; i < blocks; ++i) {
    start_amx_block<N>(p, b, kv_head, item.first + i * kAmxRows, rows_of(i), i, s);
    all.add(s.rows[i]);
  }
  const Reach reach = all.within(split * plan.keys_per_split, (split + 1) * plan.keys_per_split);
  OverlappedSoftmax<N> softmax(p, b, s);
  PageTable pages(p);
  int tiles = 0;
  const auto visit_all = [&] {
    const int count = plan_visits<N>(p, b, tiles, blocks, s);
    bool loaded[kVisitTiles] = {false};
    for (int i = 0; i < count; ++i) {
      const auto t = s.visits[i].tile - s.tiles;
      if (!loaded[t]) load_amx_tile<N>(pages.tile(b, s.tiles[t].j0), b, kv_head, careful, static_cast<int>(t), s);
      loaded[t] = true;
    }
    NextTile later;
    const int64_t first = (s.tiles[0].j0 / kTogether + 1) * kTogether, last = min(first + kTogether, reach.to);
    if (p.table == nullptr && first < last && count > 0) {
      later.key = RowPrefetcher(p.key, b, kv_head, first, last, p.D, count);
      later.value = RowPrefetcher(p.value, b, kv_head, first, last, p.V, count);
    }
    softmax.run(s.visits, count, later);
    tiles = 0;
  };
  walk_tiles<kTileStep>(reach, kTile, [&](int64_t j0, int n) {
    if (tiles > 0 && j0 / kTogether != s.tiles[0].j0 / kTogether) visit_all();
    s.tiles[tiles].j0 = j0;
    s.tiles[tiles].n = n;
    ++tiles;
  });
  if (tiles > 0) visit_all();
  bool finite = careful || softmax.finite();
  for (int i = 0; i < blocks && !careful; ++i) check_sums<N, kAmxVectors, 0>(s.sums[i], p.V, finite);
  if (!finite) return false;
  for (int i = 0; i < blocks; ++i) {
    finish_block<N, kAmxVectors>(p, plan, b, kv_head, item.first + i * kAmxRows, split, i, reach, s);
  }
  return true;
}

template <class N>
static void run_prefill_amx(const Call& p, const Plan& plan, int64_t group, int64_t split, char* scratch) {
  const Item item(p, plan, group);
  if (!attend_amx<N>(p, plan, item, split, scratch, false)) attend_amx<N>(p, plan, item, split, scratch, true);
}

}  // namespace HW_ISA
}  // namespace headwise
