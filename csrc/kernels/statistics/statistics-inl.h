// Computes statistics of the weights in the pass that computes the output. An item has all keys of its rows, so that
// nothing has to be merged.
#pragma once

#include "kernels/statistics/totals-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr float kLn2 = 0.69314718055994530942f;

template <class N>
struct StatisticsScratch {
  PrefillScratch<N> block;
  RowSums* sums;
  float* slots;         // [sum of weights of each slot, then whether it has any][row]
  float* feature_copy;  // rows of less than a vector are padded

  StatisticsScratch(Arena& arena, const Call& p, const Statistics& s, int blocks) : block(arena, p, blocks) {
    sums = arena.take<RowSums>(kMaxBlocks);
    slots = arena.take<float>(2 * s.n_slots * kRows);
    feature_copy = arena.take<float>(kTile * W);
    const bool counts_only = arena.base == nullptr;
    RowSums unused;
    for (int i = 0; i < blocks; ++i) {
      RowSums& t = counts_only ? unused : sums[i];
      t.log = arena.take<float>(kRows);
      t.distance = arena.take<float>(kRows);
      t.bin = arena.take<float>(s.bins * kRows);
      t.bin_max = arena.take<float>(s.bins * kRows);
      t.picked = arena.take<float>(s.n_picks * kRows);
      t.features = arena.take<float>(round_up(s.F, W) * kRows);
      t.largest_key = arena.take<int32_t>(kRows);
      t.keys = arena.take<int32_t>(kRows);
      t.pos = arena.take<int32_t>(kRows);
      t.pick_min = arena.take<int32_t>(s.n_picks);
      t.pick_max = arena.take<int32_t>(s.n_picks);
    }
  }
};

HW_INLINE int64_t pick_of(const Statistics& s, int64_t b, int64_t t, int64_t column) {
  return s.picks[b * s.picks_stride[0] + t * s.picks_stride[1] + column * s.picks_stride[2]];
}

static inline void clear_sums(const Call& p, const Statistics& s, int64_t b, const QueryRows& rows, RowSums& t) {
  for (int r = 0; r < kRows; ++r) {
    t.log[r] = t.distance[r] = 0.0f;
    t.largest_key[r] = -1;
    t.keys[r] = 0;
    t.key_bad[r] = false;
  }
  memset(t.bin, 0, static_cast<size_t>(s.bins * kRows) * sizeof(float));
  memset(t.features, 0, static_cast<size_t>(round_up(s.F, W) * kRows) * sizeof(float));
  for (int64_t i = 0; i < s.bins * kRows; ++i) t.bin_max[i] = -kInf;
  for (int64_t i = 0; i < s.n_picks * kRows; ++i) t.picked[i] = -kInf;
  for (int r = 0; r < rows.padded; ++r) {
    t.pos[r] = static_cast<int32_t>(rows.t[r] + p.S - p.T);
    if (r == 0 || t.pos[r] < t.pos_min) t.pos_min = t.pos[r];
    if (r == 0 || t.pos[r] > t.pos_max) t.pos_max = t.pos[r];
  }
  for (int64_t c = 0; c < s.n_picks; ++c) {
    int64_t low = p.S, high = -1;
    for (int r = 0; r < rows.n; ++r) {
      const int64_t pick = pick_of(s, b, rows.t[r], c);
      if (pick < 0 || pick >= p.S) continue;
      low = min(low, pick);
      high = max(high, pick);
    }
    t.pick_min[c] = static_cast<int32_t>(low);
    t.pick_max[c] = static_cast<int32_t>(high);
  }
}

// Counts the keys of a tile that each row may attend, if they do not follow from the bounds alone.
static inline void count_keys(const Call& p, const QueryRows& rows, const KeySpan& span, const float* x, int R,
                              RowSums& t) {
  bool biased = false;
  for (int i = 0; i < p.n_dense; ++i) biased |= p.dense[i].dtype != Dtype::boolean;
  if (span.kind == TileKind::full && !biased) {
    for (int r = 0; r < rows.n; ++r) t.keys[r] += span.n;
    return;
  }
  for (int j = 0; j < span.n; ++j) {
    for (int r = 0; r < rows.n; ++r) t.keys[r] += x[j * R + r] != -kInf;
  }
}

// Stores the scores of the picks that are in the tile.
static inline void store_picks(const Statistics& s, int64_t b, const QueryRows& rows, const KeySpan& span,
                               const float* x, int R, RowSums& t) {
  for (int64_t c = 0; c < s.n_picks; ++c) {
    if (t.pick_min[c] >= span.j0 + span.n || t.pick_max[c] < span.j0) continue;
    for (int r = 0; r < rows.n; ++r) {
      const int64_t j = pick_of(s, b, rows.t[r], c) - span.j0;
      if (j >= 0 && j < span.n) t.picked[c * kRows + r] = x[j * R + r];
    }
  }
}

// Loads the keys of a tile again, with zeros only for keys that have a NaN or Inf themselves: one in a value does not
// change the weights.
template <class N>
static inline void reload_keys(const Call& p, int64_t b, int64_t kv_head, PrefillScratch<N>& s, KeyTile& tile,
                               BadKeys& bad_key) {
  bad_key.any = false;
  for (int j = 0; j < tile.n; ++j) {
    bad_key.is[j] = !row_is_finite(at(p.key, b, kv_head, tile.j0 + j), p.dtype(), p.key.stride[3], p.D);
    bad_key.any |= bad_key.is[j];
  }
  tile.key = tile_rows<N>(p.key, b, kv_head, tile, p.D, bad_key, true, s.key_copy);
}

// Computes one block of rows against one tile. `bad_key` is filled if the tile has a NaN or Inf.
template <class N, int NV, class Search>
static inline void statistics_tile(const Call& p, const Statistics& s, int64_t b, const KeyTile& tile,
                                   const BadKeys& bad_key, const KeySpan& span, int block,
                                   StatisticsScratch<N>& scratch, NextTile& next, const Search& search) {
  constexpr int R = NV * W;
  PrefillScratch<N>& own = scratch.block;
  QueryRows& rows = own.rows[block];
  RowSums& t = scratch.sums[block];
  const int n = span.n;
  float* x = own.scores;
  ScoreMaxima maxima(next.key);
  VectorEnds of_vectors;
  const VectorEnds* ends = find_ends<NV>(rows, span, of_vectors);
  const float* top = searched_scores<N, NV>(p, b, tile, span, own.query[block], rows, x, maxima, ends, search);
  for (int j = 0; tile.bad.any && j < n; ++j) {
    for (int r = 0; r < rows.n; ++r) t.key_bad[r] |= bad_key.is[span.j0 - tile.j0 + j] && x[j * R + r] != -kInf;
  }
  if (!only_bounds(p)) count_keys(p, rows, span, x, R, t);
  store_picks(s, b, rows, span, x, R, t);

  float* row_max = own.row_max + block * kRows;
  float* row_sum = own.row_sum + block * kRows;
  const float c = softmax_scale(p) * kLog2e;
  const bool as_pairs = N::kPair == 2 && s.F == 0;
  const TileDistances to_keys(t, rows, span.j0, n);
  Bins bins{s.bins, p.S, span.j0, n, 0, 0};
  bins.enter(span.j0 * s.bins / p.S);
  update_maxima<NV>(x, n, top, c, span.j0, row_max, row_sum, own.rescale, rows, t);
  if (to_keys.across) {
    sum_weights<N, NV, true>(x, n, c, as_pairs, row_max, row_sum, own.rescale, to_keys, bins, t);
  } else {
    sum_weights<N, NV, false>(x, n, c, as_pairs, row_max, row_sum, own.rescale, to_keys, bins, t);
  }
  if (s.F > 0) {
    int64_t stride = s.features_stride[1];
    const float* features = s.features + b * s.features_stride[0] + span.j0 * stride;
    for (int j = 0; s.F < W && j < n; ++j) {
      const char* row = reinterpret_cast<const char*>(features + j * stride);
      copy_floats(scratch.feature_copy + j * W, row, Dtype::f32, 1, s.F, W);
    }
    if (s.F < W) {
      features = scratch.feature_copy;
      stride = W;
    }
    add_values<Float32>(x, R, n, features, stride, s.F, {t.features, own.rescale, false});
    pack_weights<N, NV>(x, n);
  }
  next.key = maxima.next;
  if (p.V > 0) block_values<N, NV>(tile, span, tile.value, x, p.V, own.next_sums(block), &next.value, ends);
}

// Rescales the bins to the final maximum, and turns the scores of picks into weights relative to it.
template <int NV>
static inline void finish_sums(const Statistics& s, float c, const float* row_max, RowSums& t) {
  const F scale = set1(c), none = set1(-kInf), min_log = set1(kMinLog2);
  for (int v = 0; v < NV; ++v) {
    const F now = load(row_max + v * W), peak = select(not_less(none, now), zero(), now);
    for (int64_t i = 0; i < s.bins; ++i) {
      float* bin = t.bin + i * kRows + v * W;
      const F drop = mul(sub(load(t.bin_max + i * kRows + v * W), peak), scale);
      store(bin, mul(load(bin), exp2<6>(drop)));
    }
    for (int64_t i = 0; i < s.n_picks; ++i) {
      float* score = t.picked + i * kRows + v * W;
      const F weight = exp2<6>(max(min_log, mul(sub(load(score), peak), scale)));
      store(score, select(equal(load(score), none), set1(kNoWeight), weight));  // keeps a NaN
    }
  }
}

// Writes the planes of `numbers` and the lse of one row, at index `at` of (B, H, T).
static inline void write_numbers(const Call& p, const Statistics& s, int64_t h, int64_t at, RowState row, float log,
                                 float distance) {
  const int64_t plane = p.B * p.H * p.T;
  float* to = s.numbers + at;
  to[kRowMax * plane] = row.raw_max;
  if (row.bad || row.overflow || row.row_sum != row.row_sum) {
    for (int64_t i = 0; i < kNumbers; ++i) to[i * plane] = NAN;
    s.lse[at] = NAN;
    return;
  }
  if (row.row_max == -kInf) {
    for (int64_t i = 0; i < kRowMax; ++i) to[i * plane] = 0.0f;
    to[kLargest * plane] = 0.0f;
    s.lse[at] = -kInf;
    return;
  }
  float rescale = 1.0f, peak = row.row_max, sink_weight = 0.0f, sink_log = 0.0f;
  if (p.sinks != nullptr) {  // the sink is one more key, which no statistic counts
    const float sink = p.sinks[h];
    peak = sink > row.row_max ? sink : row.row_max;
    rescale = expf(row.row_max - peak);
    sink_weight = expf(sink - peak);
    sink_log = sink - peak > -1e30f ? sink - peak : -1e30f;
  }
  const float whole = row.row_sum * rescale + sink_weight, mass = row.row_sum * rescale / whole;
  const float drop = row.row_max - peak > -1e30f ? row.row_max - peak : -1e30f;
  const float log_whole = logf(whole);
  const float mean = (kLn2 * log / row.row_sum + drop) * mass + sink_weight / whole * sink_log;
  to[kEntropy * plane] = log_whole - mean;
  to[kDistance * plane] = mass == 0.0f ? 0.0f : distance / row.row_sum;
  to[kSink * plane] = sink_weight / whole;
  to[kMass * plane] = mass;
  to[kLargest * plane] = rescale / whole;
  s.lse[at] = peak + log_whole;
}

// The number of keys that the bounds allow row r to attend.
static inline int64_t keys_of(const QueryRows& rows, int r) {
  const int64_t prefix = min(min(rows.first_max, rows.hi[r]), rows.lo[r]) - rows.first_min;
  return max(0, int64_t{rows.hi[r]} - rows.lo[r]) + max(0, prefix);
}

template <class N, int NV>
static inline void finish_statistics(const Call& p, const Plan& plan, const Statistics& s, const Item& item, int block,
                                     const Reach& reach, const Totals& totals, StatisticsScratch<N>& scratch) {
  const QueryRows& rows = scratch.block.rows[block];
  RowSums& t = scratch.sums[block];
  const float* row_max = scratch.block.row_max + block * kRows;
  finish_sums<NV>(s, softmax_scale(p) * kLog2e, row_max, t);
  RowFactors factors;
  for (int r = 0; r < rows.n; ++r) {
    const float row_sum = scratch.block.row_sum[block * kRows + r];
    RowState row = row_state(p, item.b, rows, r, row_max[r], row_sum, reach.from, reach.to);
    row.bad = t.key_bad[r] || (rows.query_bad[r] && (row.overflow || row.row_max != -kInf));
    const int64_t at = (item.b * p.H + rows.h[r]) * p.T + rows.t[r], plane = p.B * p.H * p.T;
    write_numbers(p, s, rows.h[r], at, row, t.log[r], t.distance[r]);
    const float largest = s.numbers[kLargest * plane + at], mass = s.numbers[kMass * plane + at];
    const bool empty = row.row_max == -kInf && largest == 0.0f;
    const int64_t keys = only_bounds(p) ? keys_of(rows, r) : t.keys[r];
    s.places[at] = empty ? -1 : max(t.largest_key[r], 0);
    s.places[plane + at] = empty ? 0 : max(keys, 1);
    factors.largest[r] = largest;
    factors.per_mass[r] = empty || mass == 0.0f ? 0.0f : mass != mass ? NAN : 1.0f / row_sum;
    factors.on_keys[r] = !empty && mass > 0.0f;
  }
  add_to_totals<NV>(p, s, rows, factors, t, scratch.slots, totals);
  if (p.V == 0) return;
  finish_block<N, NV>(p, plan, item.b, item.kv_head, item.first + block * kRows, 0, block, reach, scratch.block);
}

// Computes an item. Unless `careful`, it stops and returns false, without a result, when a value may be bad.
template <class N>
static bool run_statistics_of(const Call& p, const Plan& plan, const Statistics& s, int64_t group, char* memory,
                              bool careful) {
  Arena arena{memory};
  const Item item(p, plan, group);
  const int64_t b = item.b, kv_head = item.kv_head;
  StatisticsScratch<N> scratch(arena, p, s, static_cast<int>(plan.rows_per_item / kRows));
  PrefillScratch<N>& own = scratch.block;
  const Totals totals(p, plan, s, group);
  totals.clear(s);
  Reach reach(p);
  for (int i = 0; i < item.blocks; ++i) {
    start_block<N>(p, b, kv_head, item.first + i * kRows, item.rows_of(i), i, own);
    clear_sums(p, s, b, own.rows[i], scratch.sums[i]);
    reach.add(own.rows[i]);
  }
  KeyTile tile;
  BadKeys bad_key;
  walk_blocks<kTile, N::kStep>(
      p, b, kv_head, reach, item.blocks,
      [&](int i, int64_t j0, int n) { return key_span(p, b, own.rows[i], j0, n, N::kStep); },
      [&](int64_t j0, int n) {
        load_tile<N>(p, b, kv_head, j0, n, careful, own, tile);
        if (tile.bad.any) reload_keys<N>(p, b, kv_head, own, tile, bad_key);
      },
      [&](int i, const KeySpan& span, NextTile& next) {
        const auto search = [&] {
          const bool changed = search_tile<N>(p, b, kv_head, own, tile);
          if (changed) reload_keys<N>(p, b, kv_head, own, tile, bad_key);
          return changed;
        };
        HW_BY_VECTORS(own.rows[i].n, statistics_tile, p, s, b, tile, bad_key, span, i, scratch, next, search);
      });
  bool finite = true;
  for (int i = 0; i < item.blocks; ++i) own.finish_sums(i, p.V);
  for (int i = 0; i < item.blocks && !careful; ++i) {
    HW_BY_VECTORS(own.rows[i].n, check_sums, own.sums[i], p.V, finite);
  }
  if (!finite) return false;
  for (int i = 0; i < item.blocks; ++i) {
    HW_BY_VECTORS(own.rows[i].n, finish_statistics, p, plan, s, item, i, reach, totals, scratch);
  }
  return true;
}

static void run_statistics(const Call& p, const Plan& plan, const Statistics& s, int64_t group, char* scratch) {
  const FlushDenormals flush;
  with_format(p, [&](auto format) {
    using N = decltype(format);
    if (!run_statistics_of<N>(p, plan, s, group, scratch, false))
      run_statistics_of<N>(p, plan, s, group, scratch, true);
  });
}

}  // namespace HW_ISA
}  // namespace headwise
