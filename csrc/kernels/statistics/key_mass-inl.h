// The mass of each key, which is the sum of the weights that it gets from all rows. This is a second pass over the
// scores, which uses the greatest score and the largest weight of each row from the first. An item is a range of keys
// and all rows of one query head, so that nothing has to be merged.
#pragma once

#include "call/statistics_call.h"
#include "kernels/tile/tile_scores-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kRange = 4 * kTile;  // the most keys of an item; a packed block of rows is used for all of them
// the blocks of rows that are summed in float32 before they are added to the sums in float64
constexpr int kFlush = 64;

template <class N>
struct KeyMassScratch {
  typename N::Query* query;
  float* scores;             // [key][row]
  float* sums;               // [key of the range][lane]
  float *row_max, *largest;  // [row]
  double* mass;              // [key of the range]
  int64_t* count;            // [key of the range]: the number of rows that may attend it
  float* key_copy[kRange / kTile];
  char* spare;
  QueryRows* rows;
  KeyTile* tiles;

  KeyMassScratch(Arena& arena, const Call& p) {
    query = arena.take<typename N::Query>(N::depth(p.D) * kRows);
    scores = arena.take<float>(kTile * kRows);
    sums = arena.take<float>(kRange * W);
    row_max = arena.take<float>(kRows);
    largest = arena.take<float>(kRows);
    mass = arena.take<double>(kRange);
    count = arena.take<int64_t>(kRange);
    for (float*& copy : key_copy) copy = arena.take<float>(kTile * pitch_of(p.D));
    spare = reinterpret_cast<char*>(arena.take<float>(W * round_up(p.D, W)));
    rows = arena.take<QueryRows>(1);
    tiles = arena.take<KeyTile>(kRange / kTile);
  }
};

// Adds sums[key][lane] += 2^(c (x - row_max)) * largest over the vectors of a block.
template <int NV>
static inline void add_weights(const float* x, int n, float c, const float* HW_RESTRICT row_max,
                               const float* HW_RESTRICT largest, float* HW_RESTRICT sums) {
  constexpr int R = NV * W;
  const F scale = set1(c);
  F peak[NV], factor[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    peak[v] = load(row_max + v * W);
    factor[v] = load(largest + v * W);
  }
  for (int j = 0; j < n; ++j) {
    F sum = load(sums + j * W);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const F weight = exp2<6>(mul(sub(load(x + j * R + v * W), peak[v]), scale));
      sum = fma(weight, factor[v], sum);
    }
    store(sums + j * W, sum);
  }
}

// Loads the rows' greatest scores and largest weights. A row without weight, or whose weight is NaN, gets the greatest
// score inf, which makes all its weights 0. Returns whether a weight is NaN.
static inline bool load_row_ends(const Call& p, const KeyMass& key_mass, int64_t b, const QueryRows& rows,
                                 float* row_max, float* largest) {
  bool bad = false;
  for (int r = 0; r < kRows; ++r) {
    row_max[r] = kInf;
    largest[r] = 0.0f;
    if (r >= rows.n) continue;
    const int64_t at = (b * p.H + rows.h[r]) * p.T + rows.t[r];
    bad |= key_mass.largest[at] != key_mass.largest[at];
    if (key_mass.largest[at] > 0.0f) {
      row_max[r] = key_mass.row_max[at];
      largest[r] = key_mass.largest[at];
    }
  }
  return bad;
}

// Computes a block of rows against the keys of a tile, which begins at `offset` in the range.
template <class N, int NV>
static inline void key_mass_tile(const Call& p, const KeyMass& key_mass, int64_t b, const KeySpan& span, int64_t offset,
                                 bool any_bad, KeyMassScratch<N>& s) {
  constexpr int R = NV * W;
  QueryRows& rows = *s.rows;
  const int n = span.n;
  const KeyTile& tile = s.tiles[offset / kTile];
  block_scores<N, NV>(p, b, tile, span, s.query, rows, false, s.scores);
  const int64_t at = offset + span.j0 - tile.j0;
  add_weights<NV>(s.scores, n, softmax_scale(p) * kLog2e, s.row_max, s.largest, s.sums + at * W);

  bool biased = false;
  for (int i = 0; i < p.n_dense; ++i) biased |= p.dense[i].dtype != Dtype::boolean;
  for (int j = 0; j < n; ++j) {
    int count = rows.n;
    if (span.kind == TileKind::mixed || biased) {
      count = 0;
      for (int r = 0; r < rows.n; ++r) count += s.scores[j * R + r] != -kInf;
    }
    s.count[at + j] += count;
  }
  for (int r = 0; any_bad && r < rows.n; ++r) {
    const float largest = key_mass.largest[(b * p.H + rows.h[r]) * p.T + rows.t[r]];
    for (int j = 0; largest != largest && j < n; ++j) {
      if (s.scores[j * R + r] != -kInf) s.mass[at + j] = NAN;
    }
  }
}

static inline void flush_sums(int keys, float* sums, double* mass) {
  for (int j = 0; j < keys; ++j) {
    double sum = 0.0;
    for (int lane = 0; lane < W; ++lane) {
      sum += static_cast<double>(sums[j * W + lane]);
      sums[j * W + lane] = 0.0f;
    }
    mass[j] += sum;
  }
}

template <class N>
static void run_key_mass_of(const Call& p, const KeyMass& key_mass, const ItemPlan& plan, int64_t item, char* scratch) {
  Arena arena{scratch};
  KeyMassScratch<N> s(arena, p);
  const int64_t size = plan.keys_per_item, ranges = (p.S + size - 1) / size, first = item % ranges * size;
  const int64_t b = item / ranges / p.H, h = item / ranges % p.H, kv_head = h / (p.H / p.K);
  const int keys = static_cast<int>(min(size, p.S - first));
  Call own = p;
  own.K = p.H;  // each head is a group of its own, so that all lanes of a block belong to one head

  memset(s.sums, 0, sizeof(float) * kRange * W);
  for (int j = 0; j < keys; ++j) {
    s.mass[j] = 0.0;
    s.count[j] = 0;
  }
  walk_tiles<1>(Reach(first, first + keys), kTile, [&](int64_t j0, int n) {
    const int64_t i = (j0 - first) / kTile;
    KeyTile& tile = s.tiles[i];
    tile.j0 = j0;
    tile.n = n;
    tile.bad.find(p, b, kv_head, j0, n);
    tile.key = tile_rows<N>(p.key, b, kv_head, tile, p.D, tile.bad, true, s.key_copy[i]);
  });
  for (int64_t t = 0; t < p.T; t += kRows) {
    if (t % (kFlush * kRows) == 0) flush_sums(keys, s.sums, s.mass);
    const int n = static_cast<int>(min(kRows, p.T - t));
    place_rows(own, b, h, t, n, static_cast<int>(round_up(n, W)), *s.rows);
    Reach rows_reach(p);
    rows_reach.add(*s.rows);
    const Reach reach = rows_reach.within(first, first + keys);
    if (reach.from >= reach.to || (reach.gap_min <= first && reach.gap_max >= first + keys)) continue;
    KeySpan spans[kRange / kTile];
    int attended = 0;
    walk_tiles<1>(reach, kTile, [&](int64_t j0, int tile_n) {
      spans[attended] = {j0, tile_n, tile_kind(own, b, *s.rows, j0, j0 + tile_n)};
      attended += spans[attended].kind != TileKind::empty;
    });
    bool bad = false;
    if (attended > 0) {
      HW_BY_VECTORS(n, pack_query, own, b, *s.rows, s.query, s.spare);
      bad = load_row_ends(own, key_mass, b, *s.rows, s.row_max, s.largest);
    }
    for (int i = 0; i < attended; ++i) {
      const int64_t offset = (spans[i].j0 - first) / kTile * kTile;
      HW_BY_VECTORS(n, key_mass_tile, own, key_mass, b, spans[i], offset, bad, s);
    }
  }
  flush_sums(keys, s.sums, s.mass);
  const int64_t at = (b * p.H + h) * p.S + first;
  for (int j = 0; j < keys; ++j) {
    key_mass.mass[at + j] = s.mass[j];
    key_mass.rows[at + j] = s.count[j];
  }
}

static void run_key_mass(const Call& p, const KeyMass& key_mass, const ItemPlan& plan, int64_t item, char* scratch) {
  const FlushDenormals flush;
  with_format(p, [&](auto format) { run_key_mass_of<decltype(format)>(p, key_mass, plan, item, scratch); });
}

static ItemPlan plan_key_mass(const Call& p) {
  Arena count{nullptr};
  KeyMassScratch<Float32>(count, p);
  return {p.B * p.H * ((p.S + kRange - 1) / kRange), kRange, kRows, count.used};
}

}  // namespace HW_ISA
}  // namespace headwise
