// The weight that each key receives: a second pass over the scores, with every row's greatest score and largest weight
// known. An item has a range of keys and all rows of one query head, so nothing is merged and heads need no telling apart.
#pragma once

#include "kernels/prefill.h"
#include "statistics_call.h"

namespace headwise {
namespace HW_ISA {

constexpr int kRange = 4 * kTile;  // keys of an item: so often serves a packed block of rows
constexpr int kFlush = 64;         // blocks of rows added up in float32 before they join the sums in float64

template <class N>
struct ReceivedScratch {
  typename N::Query* query;
  float* scores;  // [key][row]
  float* sums;    // [key of the range][lane]
  float *top, *largest;  // [row]
  double* mass;   // [key of the range]
  int64_t* seen;  // [key of the range]: rows that may attend it
  float* key_copy[kRange / kTile];
  float* spare;
  Rows* rows;
  TileOfKeys* tiles;

  ReceivedScratch(Arena& arena, const Problem& p) {
    query = arena.take<typename N::Query>(N::depth(p.D) * kRows);
    scores = arena.take<float>(kTile * kRows);
    sums = arena.take<float>(kRange * W);
    top = arena.take<float>(kRows), largest = arena.take<float>(kRows);
    mass = arena.take<double>(kRange), seen = arena.take<int64_t>(kRange);
    for (float*& copy : key_copy) copy = arena.take<float>(kTile * pitch_of(p.D));
    spare = arena.take<float>(W * round_up(p.D, W));
    rows = arena.take<Rows>(1);
    tiles = arena.take<TileOfKeys>(kRange / kTile);
  }
};

// sums[key][lane] += 2^(c (x - top)) * largest, over the vectors of a block.
template <int NV>
static inline void add_weights(const float* x, int n, float c, const float* HW_RESTRICT top,
                               const float* HW_RESTRICT largest, float* HW_RESTRICT sums) {
  constexpr int R = NV * W;
  const F scale = set1(c);
  F peak[NV], most_of[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = load(top + v * W), most_of[v] = load(largest + v * W);
  for (int j = 0; j < n; ++j) {
    F sum = load(sums + j * W);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const F weight = exp2<6>(mul(sub(load(x + j * R + v * W), peak[v]), scale));
      sum = fma(weight, most_of[v], sum);
    }
    store(sums + j * W, sum);
  }
}

// The rows' greatest scores and largest weights. Rows that give nothing get the greatest score inf, under which every
// weight is 0; those that are NaN too, and `bad` tells of them.
static inline bool take_ends(const Problem& p, const Received& asked, int64_t b, const Rows& rows, float* top,
                             float* largest) {
  bool bad = false;
  for (int r = 0; r < kRows; ++r) {
    top[r] = kInf, largest[r] = 0.0f;
    if (r >= rows.n) continue;
    const int64_t at = (b * p.H + rows.h[r]) * p.T + rows.t[r];
    bad |= asked.largest[at] != asked.largest[at];
    if (asked.largest[at] > 0.0f) top[r] = asked.top[at], largest[r] = asked.largest[at];
  }
  return bad;
}

// One block of rows against one tile.
template <class N, int NV>
static inline void received_tile(const Problem& p, const Received& asked, int64_t b, const TileOfKeys& tile, int offset,
                                 bool general, bool some_bad, ReceivedScratch<N>& s) {
  constexpr int R = NV * W;
  Rows& rows = *s.rows;
  const int64_t j0 = most(tile.j0, rows.lo_min), j1 = least(tile.j0 + tile.n, rows.hi_max);
  if (j0 >= j1) return;
  const int64_t skip = j0 - tile.j0;
  const int n = static_cast<int>(j1 - j0);
  const Tile kind = tile_of(p, b, rows, j0, j1);
  if (kind == Tile::empty) return;

  const auto* key = reinterpret_cast<const typename N::Key*>(tile.key.data) + skip * tile.key.stride;
  scores_of<N, NV>(s.query, N::depth(p.D), key, tile.key.stride, n, s.scores);
  if (general) scale_scores(p, s.scores, int64_t{n} * R);
  if (general || kind == Tile::mixed) mask_tile<Layout<1, R>>(p, b, rows, j0, n, s.scores, kind, nullptr);
  const int64_t at = offset + skip;
  add_weights<NV>(s.scores, n, unit_of(p) * kLog2e, s.top, s.largest, s.sums + at * W);

  bool biased = false;
  for (int i = 0; i < p.n_dense; ++i) biased |= p.dense[i].dtype != Dtype::boolean;
  for (int j = 0; j < n; ++j) {
    int count = rows.n;
    if (kind == Tile::mixed || biased) {
      count = 0;
      for (int r = 0; r < rows.n; ++r) count += s.scores[j * R + r] != -kInf;
    }
    s.seen[at + j] += count;
  }
  for (int r = 0; some_bad && r < rows.n; ++r) {
    const float largest = asked.largest[(b * p.H + rows.h[r]) * p.T + rows.t[r]];
    for (int j = 0; largest != largest && j < n; ++j) {
      if (s.scores[j * R + r] != -kInf) s.mass[at + j] = NAN;
    }
  }
}

static inline void flush_sums(int keys, float* sums, double* mass) {
  for (int j = 0; j < keys; ++j) {
    double sum = 0.0;
    for (int lane = 0; lane < W; ++lane) sum += static_cast<double>(sums[j * W + lane]), sums[j * W + lane] = 0.0f;
    mass[j] += sum;
  }
}

template <class N>
static void run_received_of(const Problem& p, const Received& asked, int64_t item, char* memory) {
  Arena arena{memory};
  ReceivedScratch<N> s(arena, p);
  const int64_t ranges = (p.S + kRange - 1) / kRange, first = item % ranges * kRange;
  const int64_t b = item / ranges / p.H, h = item / ranges % p.H, kv_head = h / (p.H / p.K);
  const int keys = static_cast<int>(least(kRange, p.S - first));
  const bool general = is_general(p);
  Problem own = p;
  own.K = p.H;  // every head its own group: the lanes of a block are then of one head

  memset(s.sums, 0, sizeof(float) * kRange * W);
  for (int j = 0; j < keys; ++j) s.mass[j] = 0.0, s.seen[j] = 0;
  for (int i = 0; i * kTile < keys; ++i) {
    TileOfKeys& tile = s.tiles[i];
    tile.j0 = first + i * kTile, tile.n = static_cast<int>(least(kTile, keys - i * kTile));
    tile.bad.look(p, b, kv_head, tile.j0, tile.n);
    if constexpr (N::kPair == 2) {
#if HW_BF16
      tile.key = half_rows(p.key, b, kv_head, tile.j0, tile.n, p.D, tile.bad,
                           reinterpret_cast<uint16_t*>(s.key_copy[i]));
#endif
    } else {
      tile.key = float_rows(p.key, b, kv_head, tile.j0, tile.n, p.D, tile.bad, true, s.key_copy[i]);
    }
  }
  int blocks = 0;
  for (int64_t t = 0; t < p.T; t += kRows) {
    const int n = static_cast<int>(least(kRows, p.T - t));
    place_rows(own, b, h, t, n, static_cast<int>(round_up(n, W)), *s.rows);
    if (s.rows->lo_min >= first + keys || s.rows->hi_max <= first) continue;
    if (s.rows->gap_min <= first && s.rows->gap_max >= first + keys) continue;
    HW_BY_VECTORS(n, pack_query, own, b, *s.rows, s.query, reinterpret_cast<char*>(s.spare));
    const bool bad = take_ends(own, asked, b, *s.rows, s.top, s.largest);
    for (int i = 0; i * kTile < keys; ++i) {
      HW_BY_VECTORS(n, received_tile, own, asked, b, s.tiles[i], i * kTile, general, bad, s);
    }
    if (++blocks % kFlush == 0) flush_sums(keys, s.sums, s.mass);
  }
  flush_sums(keys, s.sums, s.mass);
  const int64_t at = (b * p.H + h) * p.S + first;
  for (int j = 0; j < keys; ++j) asked.mass[at + j] = s.mass[j], asked.rows[at + j] = s.seen[j];
}

static void run_received(const Problem& p, const Received& asked, int64_t item, char* scratch) {
  const FlushDenormals flushed;
  (void)flushed;
#if HW_BF16
  if (p.dtype() == Dtype::bf16) {
    run_received_of<Bfloat16>(p, asked, item, scratch);
    return;
  }
#endif
  run_received_of<Float32>(p, asked, item, scratch);
}

static ItemPlan plan_received(const Problem& p) {
  Arena count{nullptr};
  ReceivedScratch<Float32>(count, p);
  return {p.B * p.H * ((p.S + kRange - 1) / kRange), count.used};
}

}  // namespace HW_ISA
}  // namespace headwise
