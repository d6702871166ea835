// Which items of a call threads take, and in which order. A thread that has finished an item takes the next one: the
// longest come first, and where there are too few for the number of threads, finer ones are cut. How fine changes no
// bit.
#pragma once

#include <vector>

#include "runtime/kernel_table.h"

namespace headwise {

// So many items of one size a thread are enough: then the busiest thread has at most 1.05 times the mean.
constexpr int64_t kEnoughItems = 20;
constexpr double kEvenShare = 1.05;

// The keys that some rows reach by their bounds: a prefix and a window behind it.
struct KeyReach {
  int64_t prefix_first = 0, prefix_last = 0, first = 0, last = 0;
  int64_t within(int64_t from, int64_t to) const;  // how many of the keys from <= j < to
};

// Of the rows first <= r < last of a key-value head.
KeyReach reach_of(const Problem& p, int64_t b, int64_t first, int64_t last);

// The time of the busiest thread over the mean, where threads take items of these costs in this order.
double largest_share(const std::vector<float>& costs, int64_t workers, bool alike);

// The items of `run` or `run_statistics`.
struct Deal {
  Plan plan;
  std::vector<int32_t> order;  // places among the items from the last rows to the first; empty = all of them in turn
  bool alike = true;           // no item costs more than twice the mean

  explicit Deal(const Plan& cut) : plan(cut) {}
  // The item that is dealt as number i, of so many: group * splits + split. Groups are counted from the last one, which
  // has the most keys under a causal mask; the splits of a group keep their order.
  int64_t item(int64_t i, int64_t items) const {
    const int64_t place = order.empty() ? i : order[static_cast<size_t>(i)];
    return items - plan.splits - place / plan.splits * plan.splits + place % plan.splits;
  }
};
// The cut stays as it is unless `finer`.
Deal deal_rows(const Problem& p, const Plan& plan, int64_t workers, bool finer = true);

// The items of `backward`: chunks, or heads where they are many enough. Where the chunks of all heads are too few for
// the threads, some heads are computed in two passes: dQ by rows, dK and dV by keys. It takes seven products where a
// chunk takes five, and needs `partial`.
struct BackwardDeal {
  BackwardPlan plan;
  std::vector<BackwardItem> items;
  bool alike = true;
};
BackwardDeal deal_backward(const Problem& p, const BackwardPlan& plan, int64_t workers);

// The items of `run_received`, numbered (batch, head, range of keys).
struct ReceivedDeal {
  ItemPlan plan;
  std::vector<int32_t> order;
  bool alike = true;
};
ReceivedDeal deal_received(const Problem& p, const ItemPlan& plan, int64_t workers);

}  // namespace headwise
