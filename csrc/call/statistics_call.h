// The options of a call for statistics, beside its `Problem`, and its results. Letters as in attention_call.h.
#pragma once

#include "call/attention_call.h"

namespace headwise {

// Statistics of each query row, in the pass that computes its output.
struct Statistics {
  // Picks: keys of a row whose weights are summed, (B|1, T, n), -1 = none. Each column goes into a slot.
  const int64_t* picks = nullptr;
  int64_t picks_stride[3] = {0, 0, 0};
  int64_t n_picks = 0;
  const int64_t* slots = nullptr;  // (n): the slot of each column of `picks`
  int64_t n_slots = 0;
  const float* features = nullptr;  // (B|1, S, F), numbers of each key
  int64_t features_stride[2] = {0, 0};
  int64_t F = 0;
  int64_t bins = 0;        // of the keys: key j falls into bin j * bins / S
  int64_t query_bins = 1;  // of the queries: query t falls into bin t * query_bins / T

  // Results, contiguous.
  float* lse = nullptr;       // (B, H, T)
  float* numbers = nullptr;   // (kNumbers, B, H, T)
  int64_t* places = nullptr;  // (2, B, H, T): the key of the largest weight, -1 in an empty row; how many keys
  // (B, H, sums_of_head()): for each slot the weights of its picks; for each slot how many rows may attend one of its
  // picks; for each feature weight times number.
  double* sums = nullptr;
  // (B, H, query_bins, map_sums()): for each bin of the keys its shares of the rows' weight on keys; how many rows
  // have weight on keys.
  double* map = nullptr;

  // (B, K, items of a head, G): what the rows of an item add to `sums`, and to the first and the last row of the map
  // that they reach. Other items may reach those too: parts are added in order, so that all bits are the same for any
  // number of threads.
  double* parts = nullptr;

  int64_t sums_of_head() const { return 2 * n_slots + F; }
  int64_t map_sums() const { return bins + 1; }
  int64_t part_size() const { return sums_of_head() + 2 * map_sums(); }
};

// The planes of `numbers`. The weight of an unscaled score x is exp(scale * (x - kRowMax)) * kLargest.
enum Number { kEntropy, kDistance, kSink, kMass, kRowMax, kLargest, kNumbers };

// The weight that each key receives from all rows, and how many rows may attend it.
struct Received {
  const float* row_max = nullptr;  // (B, H, T), as in `Statistics::numbers`
  const float* largest = nullptr;  // (B, H, T)
  double* mass = nullptr;          // (B, H, S)
  int64_t* rows = nullptr;         // (B, H, S)
};

// Both run on torch's threads with the instruction set in use. Same bits for any thread count. `problem.value` may be
// without columns (V = 0) for statistics alone. No dropout, no gate.
void attend_statistics(const Problem& problem, Statistics statistics);
void attend_received(const Problem& problem, const Received& received);

}  // namespace headwise
