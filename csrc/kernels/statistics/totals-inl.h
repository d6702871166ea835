// The totals of the rows of an item: weights on picks and features, and the pooled map, in float64.
#pragma once

#include "kernels/statistics/row_sums-inl.h"

namespace headwise {
namespace HW_ISA {

// The factors by which the sums of a block's rows are multiplied.
struct RowFactors {
  float largest[kRows];   // the largest weight, to which the weights of a row are relative
  float per_mass[kRows];  // the inverse of the weight on keys, relative to the largest weight
  bool on_keys[kRows];    // true if the row has weight on keys
};

// The places to which the rows of an item are added.
struct Totals {
  int64_t G, first_head, first, last;  // rows of the map; other items may add to the first and the last of them too
  double* part;                        // the sums of the first head of the group
  double* map;

  Totals(const Call& p, const Plan& plan, const Statistics& s, int64_t group) : G(p.H / p.K) {
    const Item item(p, plan, group);
    first_head = item.kv_head * G;
    first = item.first / G * s.query_bins / p.T;
    last = (item.last - 1) / G * s.query_bins / p.T;
    part = s.parts + group * G * s.part_size();
    map = s.map + (item.b * p.H + first_head) * s.query_bins * s.map_sums();
  }

  double* sums_of(const Statistics& s, int64_t h) const { return part + (h - first_head) * s.part_size(); }

  double* map_row(const Statistics& s, int64_t h, int64_t row) const {
    if (row == first) return sums_of(s, h) + s.sums_of_head();
    if (row == last) return sums_of(s, h) + s.sums_of_head() + s.map_sums();
    return map + ((h - first_head) * s.query_bins + row) * s.map_sums();
  }

  void clear(const Statistics& s) const {
    memset(part, 0, static_cast<size_t>(G * s.part_size()) * sizeof(double));
    for (int64_t g = 0; g < G && last - first > 1; ++g) {
      double* inner = map + (g * s.query_bins + first + 1) * s.map_sums();
      memset(inner, 0, static_cast<size_t>((last - first - 1) * s.map_sums()) * sizeof(double));
    }
  }
};

// Adds n numbers of a row, times a factor, to its sums.
static inline void add_row(const float* x, int64_t n, float times, double* HW_RESTRICT sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<double>(x[i] * times);
}

// Adds n columns [column][row] to the sums `to` of each row, times a factor of the row (1 if there is none).
static inline void add_columns(const float* columns, int64_t pitch, int64_t n, const float* factor, int rows,
                               double* const* to) {
  constexpr int64_t kStep = 8 * W;
  float by_row[W * kStep];
  for (int64_t c = 0; c < n; c += kStep) {
    const int64_t width = min(kStep, n - c);
    for (int r = 0; r < rows; ++r) {
      if (r % W == 0) transpose_back(columns + c * pitch + r, pitch, width, by_row, kStep);
      const float* x = by_row + r % W * kStep;
      add_row(x, width, factor == nullptr ? 1.0f : factor[r], to[r] + c);
    }
  }
}

// Sums the weights of the picks of each slot, and finds whether the row may attend any pick of the slot.
template <int NV>
static inline void sum_slots(const Statistics& s, const RowFactors& factors, const RowSums& t, float* slots) {
  memset(slots, 0, static_cast<size_t>(2 * s.n_slots * kRows) * sizeof(float));
  for (int64_t i = 0; i < s.n_picks; ++i) {
    float* sum = slots + s.slots[i] * kRows;
    float* any = sum + s.n_slots * kRows;
    for (int v = 0; v < NV; ++v) {
      const F weight = load(t.picked + i * kRows + v * W), now = load(sum + v * W);
      const M attended = not_less(weight, zero());
      const F more = add(now, mul(weight, load(factors.largest + v * W)));
      store(sum + v * W, select(attended, more, now));
      store(any + v * W, select(attended, set1(1.0f), load(any + v * W)));
    }
  }
}

template <int NV>
static inline void add_to_totals(const Call& p, const Statistics& s, const QueryRows& rows, RowFactors& factors,
                                 const RowSums& t, float* slots, const Totals& totals) {
  for (int r = rows.n; r < NV * W; ++r) factors.largest[r] = 0.0f;
  double *sums[kRows], *map[kRows];
  int64_t row = rows.t[0] * s.query_bins / p.T;
  for (int r = 0; r < rows.n; ++r) {
    while ((row + 1) * p.T <= rows.t[r] * s.query_bins) ++row;
    sums[r] = totals.sums_of(s, rows.h[r]);
    map[r] = totals.map_row(s, rows.h[r], row);
    map[r][s.bins] += factors.on_keys[r] ? 1.0 : 0.0;
  }
  sum_slots<NV>(s, factors, t, slots);
  add_columns(slots, kRows, 2 * s.n_slots, nullptr, rows.n, sums);
  for (int r = 0; r < rows.n && s.F > 0; ++r) {
    float* features = t.features + r * round_up(s.F, W);
    close_gap(features, s.F);
    add_row(features, s.F, factors.largest[r], sums[r] + 2 * s.n_slots);
  }
  add_columns(t.bin, kRows, s.bins, factors.per_mass, rows.n, map);
}

}  // namespace HW_ISA
}  // namespace headwise
