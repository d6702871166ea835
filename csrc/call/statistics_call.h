// Options and results of a call that also computes statistics. The attention itself is described by a `Call`. The
// letters are those of attention_call.h.
#pragma once

#include "call/attention_call.h"

namespace headwise {

// Statistics of each query row, computed in the same pass as its output.
struct Statistics {
  // Picks are keys of a row whose weights are summed: (B|1, T, n), where -1 means none. Each column is added to a slot.
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
  float* lse = nullptr;      // (B, H, T)
  float* numbers = nullptr;  // (kNumbers, B, H, T)
  int64_t* places =
      nullptr;  // (2, B, H, T): the key of the largest weight (-1 in an empty row), and the number of keys
  // (B, H, sums_of_head()). For each slot: the sum of the weights of its picks. Then for each slot: the number of rows
  // that may attend one of its picks. Then for each feature: the sum of weight times feature.
  double* sums = nullptr;
  // (B, H, query_bins, map_sums()). For each bin of the keys: its share of the rows' weight on keys. Then: the number
  // of rows that have weight on keys.
  double* map = nullptr;

  // (B, K, items of a head, G): what the rows of an item add to `sums`, and to the first and the last row of the map
  // that they reach. Other items may reach those two rows as well, so parts are added in order: the bits do not depend
  // on the number of threads.
  double* parts = nullptr;

  int64_t sums_of_head() const { return 2 * n_slots + F; }
  int64_t map_sums() const { return bins + 1; }
  int64_t part_size() const { return sums_of_head() + 2 * map_sums(); }
};

// The planes of `numbers`. The weight of an unscaled score x is exp(scale * (x - kRowMax)) * kLargest.
enum RowStatistic { kEntropy, kDistance, kSink, kMass, kRowMax, kLargest, kNumbers };

// The sum of the weights that each key gets from all rows, and the number of rows that may attend it.
struct KeyMass {
  const float* row_max = nullptr;  // (B, H, T), as in `Statistics::numbers`
  const float* largest = nullptr;  // (B, H, T)
  double* mass = nullptr;          // (B, H, S)
  int64_t* rows = nullptr;         // (B, H, S)
};

// Both run on torch's threads with the instruction set in use, and give the same bits for any number of threads. For
// statistics without an output, `call.value` may have no columns (V = 0). There is no dropout and no gate.
void attend_statistics(const Call& call, Statistics statistics);
void attend_key_mass(const Call& call, const KeyMass& key_mass);

}  // namespace headwise
