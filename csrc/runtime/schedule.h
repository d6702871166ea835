// The schedule of a call: which items it is cut into, and in which order threads take them. A thread that has finished
// an item takes the next one. The items with the most work come first. If there are too few items for the number of
// threads, smaller ones are cut. The size of the items does not change any bit of the result.
#pragma once

#include <vector>

#include "runtime/kernel_table.h"

namespace headwise {

// With this many items of equal size for each thread, the busiest thread works at most 1.05 times as long as the mean.
constexpr int64_t kEnoughItems = 20;
constexpr double kMaxImbalance = 1.05;

// The keys that some rows reach according to their bounds: a prefix, and a window behind it.
struct KeyReach {
  int64_t prefix_first = 0, prefix_last = 0, first = 0, last = 0;
  int64_t within(int64_t from, int64_t to) const;  // the number of these keys in from <= j < to
};

// The keys that the rows first <= r < last of a key-value head reach.
KeyReach reach_of(const Call& p, int64_t b, int64_t first, int64_t last);

// The time of the busiest thread divided by the mean, if threads take items of these costs in this order.
double load_imbalance(const std::vector<float>& costs, int64_t workers, bool uniform);

// The items of `run` or `run_statistics`.
struct Schedule {
  Plan plan;
  std::vector<int32_t> order;  // positions of the items; empty = in their order
  bool uniform = true;         // no item costs more than 1.2 times the mean

  explicit Schedule(const Plan& cut) : plan(cut) {}
  // The item that is taken as number i: group * splits + split. Positions follow the heads in memory, upwards, because
  // the CPU's own prefetching is quicker so. Within a head they begin with the last rows, which have the most keys
  // under a causal mask; the splits of a group keep their order.
  int64_t item(int64_t i) const {
    const int64_t place = order.empty() ? i : order[static_cast<size_t>(i)], of_head = plan.row_items * plan.splits;
    if (of_head == 1) return place;
    const int64_t at = place % of_head;
    return place - at + (plan.row_items - 1 - at / plan.splits) * plan.splits + at % plan.splits;
  }
};
// Unless `finer`, the cut of the plan is kept.
Schedule schedule_rows(const Call& p, const Plan& plan, int64_t workers, bool finer = true);

// The items of `backward`: chunks, or whole heads if there are enough of them. If the chunks of all heads are too few
// for the threads, some heads are computed in two passes instead: dQ by rows, then dK and dV by keys. Two passes take
// seven products where a chunk takes five, and need `partial`.
struct BackwardSchedule {
  BackwardPlan plan;
  std::vector<BackwardItem> items;
  bool uniform = true;
};
BackwardSchedule schedule_backward(const Call& p, const BackwardPlan& plan, int64_t workers);

// The items of `run_key_mass`, numbered (batch, head, range of keys).
struct KeyMassSchedule {
  ItemPlan plan;
  std::vector<int32_t> order;
  bool uniform = true;
};
KeyMassSchedule schedule_key_mass(const Call& p, const ItemPlan& plan, int64_t workers);

}  // namespace headwise
