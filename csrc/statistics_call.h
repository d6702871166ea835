// The options of a call for statistics, beside its `Problem`, and its results. Letters as in problem.h.
#pragma once

#include "problem.h"

namespace headwise {

// Statistics of each query row, in the pass that computes its output.
struct Statistics {
  // Picks: keys of a row whose weights are returned, (B|1, T, n), -1 = none. The weights of a slot are summed.
  const int64_t* picks = nullptr;
  int64_t picks_stride[3] = {0, 0, 0};
  int64_t n_picks = 0;
  const int64_t* slots = nullptr;  // (n): the slot of each column of `picks`
  int64_t n_slots = 0;
  const float* features = nullptr;  // (B|1, S, F), numbers of each key
  int64_t features_stride[2] = {0, 0};
  int64_t F = 0;
  int64_t bins = 0;  // of the keys: key j falls into bin j * bins / S

  // Results, contiguous.
  float* lse = nullptr;       // (B, H, T)
  float* numbers = nullptr;   // (kNumbers, B, H, T)
  int64_t* places = nullptr;  // (2, B, H, T): the key of the largest weight, -1 in an empty row; how many keys
  float* picked = nullptr;    // (B, H, T, slots): weights; -1 where the row may attend none of a slot's keys
  float* binned = nullptr;    // (B, H, T, bins), shares of the weight on keys
  float* featured = nullptr;  // (B, H, T, F), sums of weight times number
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
void attend_statistics(const Problem& problem, const Statistics& statistics);
void attend_received(const Problem& problem, const Received& received);

}  // namespace headwise
