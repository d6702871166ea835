// Statistics of the weights in the pass that makes the output: the softmax of a tile adds up a few more sums while the
// weights are in registers as floats. One item has all keys of its rows, so nothing is merged.
#pragma once

#include "kernels/prefill.h"
#include "statistics_call.h"

namespace headwise {
namespace HW_ISA {

constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kFaintest = -200.0f;  // log2 of a weight that is 0 already: 0 times it is 0, where -inf would give NaN
constexpr int kGroup = 8;             // keys among which the largest is looked for by itself
constexpr float kUnseen = -1.0f;      // no weight

// What is carried on for the rows of a block, relative to their greatest score so far as O^T is.
struct Tally {
  float* bits;            // [row]: sum of weight * log2(weight)
  float* away;            // [row]: sum of weight * |pos - j|
  float* bin;             // [bin][row]: weight, relative to
  float* bin_top;         // [bin][row]: the greatest score when its last key was met
  float* picked;          // [pick][row]: masked scores; -inf = not seen
  float* features;        // [feature][row], as O^T: rows of as many lanes as the block has
  int32_t* largest_key;   // [row]
  int32_t* keys;          // [row]: how many may be attended; only where masks make them count
  int32_t* pos;           // [row]: the row's own place among the keys
  int32_t pos_min, pos_max;
  int32_t *pick_min, *pick_max;  // [pick]
  bool seen[kRows];       // a key with NaN or Inf may be attended
};

template <class N>
struct StatisticsScratch {
  BlockScratch<N> block;
  Tally* tally;

  StatisticsScratch(Arena& arena, const Problem& p, const Statistics& s, int blocks) : block(arena, p, blocks) {
    Tally* made = arena.take<Tally>(kMaxBlocks);
    const bool counts_only = arena.base == nullptr;
    Tally none;
    for (int i = 0; i < blocks; ++i) {
      Tally& t = counts_only ? none : made[i];
      t.bits = arena.take<float>(kRows), t.away = arena.take<float>(kRows);
      t.bin = arena.take<float>(s.bins * kRows), t.bin_top = arena.take<float>(s.bins * kRows);
      t.picked = arena.take<float>(s.n_picks * kRows);
      t.features = arena.take<float>(s.F * kRows);
      t.largest_key = arena.take<int32_t>(kRows), t.keys = arena.take<int32_t>(kRows);
      t.pos = arena.take<int32_t>(kRows);
      t.pick_min = arena.take<int32_t>(s.n_picks), t.pick_max = arena.take<int32_t>(s.n_picks);
    }
    tally = made;
  }
};

HW_INLINE int64_t pick_of(const Statistics& s, int64_t b, int64_t t, int64_t column) {
  return s.picks[b * s.picks_stride[0] + t * s.picks_stride[1] + column * s.picks_stride[2]];
}

static inline void clear_tally(const Problem& p, const Statistics& s, int64_t b, const Rows& rows, Tally& t) {
  for (int r = 0; r < kRows; ++r) {
    t.bits[r] = t.away[r] = 0.0f;
    t.largest_key[r] = -1, t.keys[r] = 0, t.seen[r] = false;
  }
  memset(t.bin, 0, static_cast<size_t>(s.bins * kRows) * sizeof(float));
  memset(t.features, 0, static_cast<size_t>(s.F * kRows) * sizeof(float));
  for (int64_t i = 0; i < s.bins * kRows; ++i) t.bin_top[i] = -kInf;
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
      low = least(low, pick), high = most(high, pick);
    }
    t.pick_min[c] = static_cast<int32_t>(low), t.pick_max[c] = static_cast<int32_t>(high);
  }
}

// Where a tile's keys lie for the distance: `edge` is the distance of the row to the tile's nearest key and steps[j]
// that of key j to it, where all keys lie on one side; else `edge` is pos - j0 and steps[j] is j.
struct Steps {
  bool across;
  float edge[kRows];
  float step[kTile];
};

static inline void place_steps(const Tally& t, const Rows& rows, int64_t j0, int n, Steps& steps) {
  const bool behind = j0 + n - 1 <= t.pos_min, ahead = j0 >= t.pos_max;
  steps.across = !behind && !ahead;
  const int32_t first = static_cast<int32_t>(j0), last = static_cast<int32_t>(j0 + n - 1);
  for (int r = 0; r < rows.padded; ++r) {
    steps.edge[r] = static_cast<float>(behind ? t.pos[r] - last : ahead ? first - t.pos[r] : t.pos[r] - first);
  }
  for (int j = 0; j < n; ++j) steps.step[j] = static_cast<float>(behind ? n - 1 - j : j);
}

// The greatest score of each row, and the first key that has it: a group of keys at a time, so that what it costs beside
// the maximum itself is for every kGroup-th key alone. `top` and `alpha` as in softmax_tile, before the weights are made;
// what the tally holds is brought to the new `top`, all but the bins.
template <int NV>
static inline void find_tops(const float* x, int n, float c, int64_t j0, float* HW_RESTRICT top,
                             const float* HW_RESTRICT total, float* HW_RESTRICT alpha, const Rows& rows, Tally& t) {
  constexpr int R = NV * W;
  F peak[NV], group[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) peak[v] = set1(-kInf), group[v] = zero();
  for (int g = 0; g < n; g += kGroup) {
    F best[NV];
    HW_UNROLL
    for (int v = 0; v < NV; ++v) best[v] = load(x + g * R + v * W);
    if (g + kGroup <= n) {
      HW_UNROLL
      for (int j = 1; j < kGroup; ++j) {
        HW_UNROLL
        for (int v = 0; v < NV; ++v) best[v] = max(best[v], load(x + (g + j) * R + v * W));
      }
    } else {
      for (int j = g + 1; j < n; ++j) {
        for (int v = 0; v < NV; ++v) best[v] = max(best[v], load(x + j * R + v * W));
      }
    }
    const F at = set1(static_cast<float>(g));
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      group[v] = select(not_less(peak[v], best[v]), group[v], at);
      peak[v] = max(peak[v], best[v]);
    }
  }
  float was[R], from[R];
  const F scale = set1(c), none = set1(-kInf), faintest = set1(kFaintest);
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F before = load(top + v * W), now = max(before, peak[v]);
    store(was + v * W, before), store(from + v * W, group[v]);
    store(top + v * W, now);
    const F lower = mul(sub(before, select(not_less(none, now), zero(), now)), scale), worth = exp2<6>(lower);
    store(alpha + v * W, worth);
    const F bits = fma(max(faintest, lower), load(total + v * W), load(t.bits + v * W));
    store(t.bits + v * W, mul(bits, worth));
    store(t.away + v * W, mul(load(t.away + v * W), worth));
  }
  // Which rows rose is chance, and so is where: without branches on either.
  int rose[R], count = 0;
  for (int r = 0; r < rows.n; ++r) rose[count] = r, count += was[r] < top[r];
  for (int i = 0; i < count; ++i) {
    const int r = rose[i], first = static_cast<int>(from[r]);
    int at = n - 1;
    for (int j = (first + kGroup < n ? first + kGroup : n) - 1; j >= first; --j) at = x[j * R + r] == top[r] ? j : at;
    t.largest_key[r] = static_cast<int32_t>(j0 + at);
  }
}

// The weights of the keys from <= j < to, in place of their scores, and their sums: `sum` is new, `bits` and `away` go on.
template <class N, int NV, bool Across, bool AsPairs>
static inline void weigh(float* x, int from, int to, float c, const float* HW_RESTRICT top, const Steps& steps,
                         float* HW_RESTRICT sum_of, float* HW_RESTRICT bits_of, float* HW_RESTRICT away_of) {
  constexpr int R = NV * W;
  const F scale = set1(c), none = set1(-kInf), faintest = set1(kFaintest);
  F peak[NV], sum[NV], bits[NV], away[NV];
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F now = load(top + v * W);
    peak[v] = select(not_less(none, now), zero(), now);  // nothing seen yet: x is -inf, its weight 0
    sum[v] = zero(), bits[v] = load(bits_of + v * W), away[v] = load(away_of + v * W);
  }
  const auto weight = [&](int j, int v, F step) {
    const F z = max(faintest, mul(sub(load(x + j * R + v * W), peak[v]), scale));
    const F w = exp2<N::kDegree>(z);
    sum[v] = add(sum[v], w);
    bits[v] = fma(w, z, bits[v]);
    away[v] = fma(w, Across ? abs(sub(load(steps.edge + v * W), step)) : step, away[v]);
    return w;
  };
#if HW_BF16
  if constexpr (AsPairs) {
    uint32_t* pairs = reinterpret_cast<uint32_t*>(x);  // of j lie before what is still to be read
    for (int j = from; j < to; j += 2) {
      const F step = set1(steps.step[j]), next = set1(steps.step[j + 1]);
      HW_UNROLL
      for (int v = 0; v < NV; ++v) {
        const F a = weight(j, v, step), b = weight(j + 1, v, next);
        store_pairs(pairs + j / 2 * R + v * W, a, b);
      }
    }
  }
#endif
  if constexpr (!AsPairs) {
    for (int j = from; j < to; ++j) {
      const F step = set1(steps.step[j]);
      HW_UNROLL
      for (int v = 0; v < NV; ++v) store(x + j * R + v * W, weight(j, v, step));
    }
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    store(sum_of + v * W, sum[v]), store(bits_of + v * W, bits[v]), store(away_of + v * W, away[v]);
  }
}

// A tile's keys, cut where the bins end.
struct Bins {
  int64_t n, S, j0;
  int keys;
  int64_t bin;
  int end;  // of the present bin, in keys of the tile

  void enter(int64_t b) {
    bin = b;
    end = n == 0 ? keys : static_cast<int>(least(keys, ((b + 1) * S + n - 1) / n - j0));
  }
};

// A stretch of a bin joins what the bin holds already, which is brought to the new greatest score.
template <int NV>
static inline void join_bin(const Bins& at, float c, const float* HW_RESTRICT top, const float* HW_RESTRICT sum,
                            float* HW_RESTRICT mass, Tally& t) {
  const F scale = set1(c), none = set1(-kInf);
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F now = load(top + v * W), peak = select(not_less(none, now), zero(), now);
    store(mass + v * W, add(load(mass + v * W), load(sum + v * W)));
    if (at.n == 0) continue;
    float* held = t.bin + at.bin * kRows + v * W;
    float* held_top = t.bin_top + at.bin * kRows + v * W;
    store(held, fma(load(held), exp2<6>(mul(sub(load(held_top), peak), scale)), load(sum + v * W)));
    store(held_top, now);
  }
}

// Weights of two keys next to each other, or of one, from floats to pairs; `to` may be the first of them.
template <int NV>
static inline void pack_pair(const float* first, bool two, float* to) {
#if HW_BF16
  constexpr int R = NV * W;
  for (int v = 0; v < NV; ++v) {
    const F a = load(first + v * W), b = two ? load(first + R + v * W) : zero();
    store_pairs(reinterpret_cast<uint32_t*>(to) + v * W, a, b);
  }
#else
  (void)first, (void)two, (void)to;
#endif
}

// Makes the weights of a tile as softmax_tile does, after find_tops, and adds them up.
template <class N, int NV, bool Across>
static inline void tally_tile(float* x, int n, float c, bool as_pairs, const float* HW_RESTRICT top,
                              float* HW_RESTRICT total, const float* HW_RESTRICT alpha, const Steps& steps, Bins at,
                              Tally& t) {
  constexpr int R = NV * W;
  float sum[R], bits[R], away[R], mass[R];
  for (int r = 0; r < R; ++r) bits[r] = away[r] = mass[r] = 0.0f;
  for (int j = 0; j < n;) {
    if (!as_pairs) {
      weigh<N, NV, Across, false>(x, j, at.end, c, top, steps, sum, bits, away);
      j = at.end;
    } else {
      const int even = j + (at.end - j) / 2 * 2;
      if (even > j) {
        weigh<N, NV, Across, N::kPair == 2>(x, j, even, c, top, steps, sum, bits, away);
        j = even;
        if (j < at.end) join_bin<NV>(at, c, top, sum, mass, t);
      }
      if (j < at.end) {  // a pair across the border of two bins, or a last key by itself: floats first
        float* first = x + j * R;
        weigh<N, NV, Across, false>(x, j, j + 1, c, top, steps, sum, bits, away);
        const bool two = j + 1 < n;
        if (two) {
          join_bin<NV>(at, c, top, sum, mass, t);
          at.enter(at.bin + 1);
          weigh<N, NV, Across, false>(x, j + 1, j + 2, c, top, steps, sum, bits, away);
        }
        pack_pair<NV>(first, two, x + j / 2 * R);
        j += 2;
        if (j < at.end) {
          join_bin<NV>(at, c, top, sum, mass, t);
          continue;
        }
      }
    }
    join_bin<NV>(at, c, top, sum, mass, t);
    at.enter(at.bin + 1);
  }
  HW_UNROLL
  for (int v = 0; v < NV; ++v) {
    const F tile = load(mass + v * W), far = load(away + v * W);
    store(total + v * W, fma(load(total + v * W), load(alpha + v * W), tile));
    store(t.bits + v * W, add(load(t.bits + v * W), load(bits + v * W)));
    store(t.away + v * W, add(load(t.away + v * W), Across ? far : fma(tile, load(steps.edge + v * W), far)));
  }
}

// How many keys of a tile each row may attend, where the bounds alone do not say it.
static inline void count_keys(const Problem& p, const Rows& rows, int n, Tile kind, const float* x, int R, Tally& t) {
  bool biased = false;
  for (int i = 0; i < p.n_dense; ++i) biased |= p.dense[i].dtype != Dtype::boolean;
  if (kind == Tile::full && !biased) {
    for (int r = 0; r < rows.n; ++r) t.keys[r] += n;
    return;
  }
  for (int j = 0; j < n; ++j) {
    for (int r = 0; r < rows.n; ++r) t.keys[r] += x[j * R + r] != -kInf;
  }
}

// Scores of the tile that somebody asked for.
static inline void keep_picks(const Statistics& s, int64_t b, const Rows& rows, int64_t j0, int n, const float* x,
                              int R, Tally& t) {
  for (int64_t c = 0; c < s.n_picks; ++c) {
    if (t.pick_min[c] >= j0 + n || t.pick_max[c] < j0) continue;
    for (int r = 0; r < rows.n; ++r) {
      const int64_t j = pick_of(s, b, rows.t[r], c) - j0;
      if (j >= 0 && j < n) t.picked[c * kRows + r] = x[j * R + r];
    }
  }
}

// A NaN or Inf in a value says nothing of the weights: where there is one, keys are read again for what they are.
template <class N>
static inline void read_keys_alone(const Problem& p, int64_t b, int64_t kv_head, BlockScratch<N>& s, TileOfKeys& tile,
                                   BadKeys& bad_key) {
  bad_key.any = false;
  for (int j = 0; j < tile.n; ++j) {
    bad_key.is[j] = !row_is_finite(at(p.key, b, kv_head, tile.j0 + j), p.dtype(), p.key.stride[3], p.D);
    bad_key.any |= bad_key.is[j];
  }
  if constexpr (N::kPair == 2) {
#if HW_BF16
    tile.key = half_rows(p.key, b, kv_head, tile.j0, tile.n, p.D, bad_key, reinterpret_cast<uint16_t*>(s.key_copy));
#endif
  } else {
    tile.key = float_rows(p.key, b, kv_head, tile.j0, tile.n, p.D, bad_key, true, s.key_copy);
  }
}

// One block of rows against one tile; `bad_key` where the tile has NaN or Inf.
template <class N, int NV>
static inline void statistics_tile(const Problem& p, const Statistics& s, int64_t b, const TileOfKeys& tile,
                                   const BadKeys& bad_key, bool general, int block, StatisticsScratch<N>& scratch) {
  constexpr int R = NV * W;
  BlockScratch<N>& own = scratch.block;
  Rows& rows = own.rows[block];
  Tally& t = scratch.tally[block];
  const Part part = part_of(p, b, rows, tile.j0, tile.n, N::kPair);
  if (part.kind == Tile::empty) return;
  const int64_t j0 = part.j0, skip = j0 - tile.j0;
  const int n = part.n;
  const Tile kind = part.kind;
  float* x = own.scores;
  score_part<N, NV>(p, b, tile, part, general, block, own);
  if (tile.bad.any) {
    for (int j = 0; j < n; ++j) {
      for (int r = 0; r < rows.n; ++r) t.seen[r] |= bad_key.is[skip + j] && x[j * R + r] != -kInf;
    }
  }
  if (!only_bands(p)) count_keys(p, rows, n, kind, x, R, t);
  keep_picks(s, b, rows, j0, n, x, R, t);

  float* top = own.top + block * kRows;
  float* total = own.total + block * kRows;
  const float c = unit_of(p) * kLog2e;
  const bool as_pairs = N::kPair == 2 && s.F == 0;
  Steps steps;
  place_steps(t, rows, j0, n, steps);
  Bins bins{s.bins, p.S, j0, n, 0, 0};
  bins.enter(j0 * s.bins / p.S);
  find_tops<NV>(x, n, c, j0, top, total, own.alpha, rows, t);
  if (steps.across) {
    tally_tile<N, NV, true>(x, n, c, as_pairs, top, total, own.alpha, steps, bins, t);
  } else {
    tally_tile<N, NV, false>(x, n, c, as_pairs, top, total, own.alpha, steps, bins, t);
  }
  if (s.F > 0) {
    const float* features = s.features + b * s.features_stride[0] + j0 * s.features_stride[1];
    values_of<Float32, NV>(x, n, features, s.features_stride[1], s.F, own.alpha, t.features);
    pack_weights<N, NV>(x, n);
  }
  if (p.V == 0) return;
  const auto* value = reinterpret_cast<const typename N::Value*>(tile.value.data) + skip / N::kPair * tile.value.stride;
  values_of<N, NV>(reinterpret_cast<const typename N::Weight*>(x), (n + N::kPair - 1) / N::kPair, value,
                   tile.value.stride, p.V, own.alpha, own.sums[block]);
}

// Scores that were asked for to 2^(c (x - top)), what is unseen to kUnseen; bins to the last greatest score.
template <int NV>
static inline void settle_tally(const Statistics& s, float c, const float* top, Tally& t) {
  const F scale = set1(c), none = set1(-kInf), faintest = set1(kFaintest);
  for (int v = 0; v < NV; ++v) {
    const F now = load(top + v * W), peak = select(not_less(none, now), zero(), now);
    for (int64_t i = 0; i < s.bins; ++i) {
      float* bin = t.bin + i * kRows + v * W;
      const F lower = mul(sub(load(t.bin_top + i * kRows + v * W), peak), scale);
      store(bin, mul(load(bin), exp2<6>(lower)));
    }
    for (int64_t i = 0; i < s.n_picks; ++i) {
      float* score = t.picked + i * kRows + v * W;
      const F weight = exp2<6>(max(faintest, mul(sub(load(score), peak), scale)));
      store(score, select(not_less(none, load(score)), set1(kUnseen), weight));
    }
  }
}

// The numbers of one row at their place `at` among (B, H, T): what `Statistics` names of them, but for the picks, bins
// and features, which follow from the largest weight and the share.
static inline void write_numbers(const Problem& p, const Statistics& s, int64_t h, int64_t at, RowState row, float bits,
                                 float away) {
  const int64_t plane = p.B * p.H * p.T;
  float* to = s.numbers + at;
  to[kTop * plane] = row.raw;
  if (row.bad || row.lost || row.total != row.total) {
    for (int64_t i = 0; i < kNumbers; ++i) to[i * plane] = NAN;
    s.lse[at] = NAN;
    return;
  }
  if (row.top == -kInf) {
    for (int64_t i = 0; i < kTop; ++i) to[i * plane] = 0.0f;
    to[kLargest * plane] = 0.0f;
    s.lse[at] = -kInf;
    return;
  }
  float worth = 1.0f, peak = row.top, escaped = 0.0f, sunk = 0.0f;
  if (p.sinks != nullptr) {  // one more key, that is none
    const float sink = p.sinks[h];
    peak = sink > row.top ? sink : row.top;
    worth = expf(row.top - peak), escaped = expf(sink - peak);
    sunk = sink - peak > -1e30f ? sink - peak : -1e30f;
  }
  const float whole = row.total * worth + escaped, mass = row.total * worth / whole;
  const float lower = row.top - peak > -1e30f ? row.top - peak : -1e30f;
  const float log_whole = logf(whole);
  const float mean = (kLn2 * bits / row.total + lower) * mass + escaped / whole * sunk;
  to[kEntropy * plane] = log_whole - mean;
  to[kDistance * plane] = mass == 0.0f ? 0.0f : away / row.total;
  to[kSink * plane] = escaped / whole;
  to[kMass * plane] = mass;
  to[kLargest * plane] = worth / whole;
  s.lse[at] = peak + log_whole;
}

static inline void write_lists(const Statistics& s, int64_t at, int r, int R, float largest, float share,
                               const Tally& t) {
  float* picked = s.picked + at * s.n_slots;
  for (int64_t i = 0; i < s.n_slots; ++i) picked[i] = kUnseen;
  for (int64_t i = 0; i < s.n_picks; ++i) {
    const float weight = t.picked[i * kRows + r];
    float& slot = picked[s.slots[i]];
    if (weight != kUnseen) slot = (slot == kUnseen ? 0.0f : slot) + weight * largest;
  }
  float* binned = s.binned + at * s.bins;
  for (int64_t i = 0; i < s.bins; ++i) binned[i] = t.bin[i * kRows + r] * share;
  float* featured = s.featured + at * s.F;
  for (int64_t i = 0; i < s.F; ++i) featured[i] = t.features[i * R + r] * largest;
}

// How many keys bands and lengths let row r attend.
static inline int64_t keys_of(const Rows& rows, int r) {
  const int64_t first = least(least(rows.first_max, rows.hi[r]), rows.lo[r]) - rows.first_min;
  return most(0, int64_t{rows.hi[r]} - rows.lo[r]) + most(0, first);
}

template <class N, int NV>
static inline void finish_statistics(const Problem& p, const Plan& plan, const Statistics& s, int64_t b,
                                     int64_t kv_head, int64_t first, int block, int64_t from, int64_t to,
                                     StatisticsScratch<N>& scratch) {
  const Rows& rows = scratch.block.rows[block];
  Tally& t = scratch.tally[block];
  const float* top = scratch.block.top + block * kRows;
  settle_tally<NV>(s, unit_of(p) * kLog2e, top, t);
  for (int r = 0; r < rows.n; ++r) {
    const float total = scratch.block.total[block * kRows + r];
    RowState row = state_of(p, b, rows, r, top[r], total, from, to);
    row.bad = t.seen[r] || (rows.bad[r] && (row.lost || row.top != -kInf));
    const int64_t at = (b * p.H + rows.h[r]) * p.T + rows.t[r], plane = p.B * p.H * p.T;
    write_numbers(p, s, rows.h[r], at, row, t.bits[r], t.away[r]);
    const float largest = s.numbers[kLargest * plane + at], mass = s.numbers[kMass * plane + at];
    const bool empty = row.top == -kInf && largest == 0.0f;
    int64_t keys = t.keys[r];
    if (only_bands(p)) keys = keys_of(rows, r);
    s.places[at] = empty ? -1 : most(t.largest_key[r], 0);
    s.places[plane + at] = empty ? 0 : most(keys, 1);
    write_lists(s, at, r, NV * W, largest, empty || mass == 0.0f ? 0.0f : mass != mass ? NAN : 1.0f / total, t);
  }
  if (p.V > 0) finish_block<N, NV>(p, plan, b, kv_head, first, 0, block, from, to, scratch.block);
}

template <class N>
static void run_statistics_of(const Problem& p, const Plan& plan, const Statistics& s, int64_t group, char* memory) {
  Arena arena{memory};
  const int64_t b = group / plan.row_items / p.K, kv_head = group / plan.row_items % p.K;
  const int64_t first = group % plan.row_items * plan.rows_per_item;
  const int64_t last = least(first + plan.rows_per_item, plan.rows);
  const int blocks = static_cast<int>((last - first + kRows - 1) / kRows);
  StatisticsScratch<N> scratch(arena, p, s, static_cast<int>(plan.rows_per_item / kRows));
  BlockScratch<N>& own = scratch.block;

  int64_t from = p.S, to = 0, gap = p.S;
  for (int i = 0; i < blocks; ++i) {
    Rows& rows = own.rows[i];
    const int n = static_cast<int>(least(kRows, last - first - i * kRows));
    place_rows(p, b, kv_head, first + i * kRows, n, static_cast<int>(round_up(n, W)), rows);
    HW_BY_VECTORS(n, pack_query, p, b, rows, own.query[i], reinterpret_cast<char*>(own.spare));
    from = least(from, rows.lo_min), to = most(to, rows.hi_max), gap = least(gap, rows.gap_max);
    memset(own.sums[i], 0, static_cast<size_t>(p.V * kRows) * sizeof(float));
    for (int r = 0; r < kRows; ++r) own.top[i * kRows + r] = -kInf, own.total[i * kRows + r] = 0.0f;
    clear_tally(p, s, b, rows, scratch.tally[i]);
  }
  const bool general = is_general(p);
  TileOfKeys tile;
  BadKeys bad_key;
  for (int64_t j = from / kTile * kTile; j < to; j += kTile) {
    const int64_t j0 = most(j, from / 2 * 2), j1 = least(j + kTile, to);
    if (j0 >= own.rows[0].gap_min && j1 <= gap) continue;  // between the first keys and the window
    load_tile<N>(p, b, kv_head, j0, static_cast<int>(j1 - j0), own, tile);
    if (tile.bad.any) read_keys_alone<N>(p, b, kv_head, own, tile, bad_key);
    for (int i = 0; i < blocks; ++i) {
      const int64_t next = least(j + kTile + i * kTile / blocks, to);
      const int64_t end = least(j + kTile + (i + 1) * kTile / blocks, to);
      prefetch_rows(p.key, b, kv_head, next, end, p.D);
      prefetch_rows(p.value, b, kv_head, next, end, p.V);
      HW_BY_VECTORS(own.rows[i].n, statistics_tile, p, s, b, tile, bad_key, general, i, scratch);
    }
  }
  for (int i = 0; i < blocks; ++i) {
    HW_BY_VECTORS(own.rows[i].n, finish_statistics, p, plan, s, b, kv_head, first + i * kRows, i, from, to, scratch);
  }
}

static void run_statistics(const Problem& p, const Plan& plan, const Statistics& s, int64_t group, char* scratch) {
  const FlushDenormals flushed;
  (void)flushed;
#if HW_BF16
  if (p.dtype() == Dtype::bf16) {
    run_statistics_of<Bfloat16>(p, plan, s, group, scratch);
    return;
  }
#endif
  run_statistics_of<Float32>(p, plan, s, group, scratch);
}

}  // namespace HW_ISA
}  // namespace headwise
