// Decides how finely a call is cut for a number of threads, and in which order threads take the items.
#include "runtime/schedule.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>

#include "runtime/thread_pool.h"

namespace headwise {
namespace {

constexpr int64_t kLanes = 16;       // rows are computed in vectors of this many
constexpr float kBlockKeys = 16.0f;  // the cost of packing a block of rows, as a number of keys
constexpr int kClasses = 16;

float padded(int64_t rows) { return static_cast<float>((rows + kLanes - 1) / kLanes * kLanes); }

struct Order {
  std::vector<int32_t> places;
  double imbalance = 1.0;  // time of the busiest thread over the mean; an upper bound if there are many items
  double time = 0.0;       // of the busiest thread
  bool uniform = true;     // no item costs more than 1.2 times the mean
};

// Sorts items by the power of two of their cost, the most expensive first. Items of one power keep their order, so that
// neighbours share keys in a cache. If there are few items, they are sorted by their exact costs.
Order longest_first(const std::vector<float>& costs, int64_t workers, bool timed = true) {
  Order order;
  double sum = 0.0;
  float largest = 0.0f;
  for (const float cost : costs) {
    sum += static_cast<double>(cost);
    largest = std::max(largest, cost);
  }
  order.places.resize(costs.size());
  const double mean = sum / static_cast<double>(workers);
  order.uniform = static_cast<double>(largest) * static_cast<double>(costs.size()) <= 1.2 * sum;
  if (timed && mean < static_cast<double>(largest) * static_cast<double>(kEnoughItems)) {
    std::iota(order.places.begin(), order.places.end(), 0);
    const auto cost = [&](int32_t place) { return costs[static_cast<size_t>(place)]; };
    std::stable_sort(order.places.begin(), order.places.end(), [&](int32_t a, int32_t b) { return cost(a) > cost(b); });
    std::vector<float> ordered(costs.size());
    std::transform(order.places.begin(), order.places.end(), ordered.begin(), cost);
    order.imbalance = load_imbalance(ordered, workers, order.uniform);
    order.time = order.imbalance * mean;
    return order;
  }
  const auto class_of = [&](float cost) {
    return cost <= 0.0f ? kClasses - 1 : std::min(kClasses - 1, std::ilogb(largest / cost));
  };
  std::vector<int32_t> first(kClasses + 1, 0);
  for (const float cost : costs) ++first[static_cast<size_t>(class_of(cost)) + 1];
  for (int i = 0; i < kClasses; ++i) first[static_cast<size_t>(i) + 1] += first[static_cast<size_t>(i)];
  for (size_t i = 0; i < costs.size(); ++i) {
    int32_t& place = first[static_cast<size_t>(class_of(costs[i]))];
    order.places[static_cast<size_t>(place++)] = static_cast<int32_t>(i);
  }
  order.imbalance = mean > 0.0 ? 1.0 + static_cast<double>(largest) / mean : 1.0;  // an upper bound for any order
  order.time = order.imbalance * mean;
  return order;
}

// Whether all rows of the batch have the same masks, and so all heads have the same costs.
bool batch_is_uniform(const Call& p) {
  bool uniform = p.bounds_stride == 0;
  for (int i = 0; i < p.n_segments; ++i)
    uniform &= p.segments[i].query_stride[0] == 0 && p.segments[i].key_stride[0] == 0;
  return uniform || p.B == 1;
}

// The keys that blocks of rows of a batch row reach according to bounds and segments.
class Reaches {
 public:
  Reaches(const Call& p, int64_t b) : p_(p), b_(b) {
    if (p.T == 1) return;  // for a single row, looking at the segments would take longer than it saves
    for (int i = 0; i < p.n_segments; ++i) {
      const SegmentRule& rule = p.segments[i];
      for (int64_t first = 0; first < p.S; first += kTile) {
        tiles_.push_back(
            ids_of(rule.key_ids + b * rule.key_stride[0], rule.key_stride[1], first, std::min(first + kTile, p.S)));
      }
    }
  }

  KeyReach of(int64_t first, int64_t last) const {
    KeyReach reach = reach_of(p_, b_, first, last);
    const int64_t G = p_.H / p_.K, tiles = (p_.S + kTile - 1) / kTile;
    for (int i = 0; i < p_.n_segments && !tiles_.empty(); ++i) {
      const SegmentRule& rule = p_.segments[i];
      const int64_t* ids = rule.query_ids + b_ * rule.query_stride[0];
      const Ids rows = ids_of(ids, rule.query_stride[1], first / G, (last - 1) / G + 1);
      const auto meets = [&](int64_t key) {
        const Ids& keys = tiles_[static_cast<size_t>(i * tiles + key / kTile)];
        return keys.least <= rows.most && rows.least <= keys.most;
      };
      const auto narrow = [&](int64_t& from, int64_t& to) {
        while (from < to && !meets(from)) from = std::min((from / kTile + 1) * kTile, to);
        while (from < to && !meets(to - 1)) to = std::max((to - 1) / kTile * kTile, from);
      };
      narrow(reach.first, reach.last);
      narrow(reach.prefix_first, reach.prefix_last);
    }
    return reach;
  }

 private:
  static constexpr int64_t kTile = 64;
  struct Ids {
    int64_t least, most;
  };
  static Ids ids_of(const int64_t* ids, int64_t stride, int64_t first, int64_t last) {
    Ids all = {ids[first * stride], ids[first * stride]};
    for (int64_t i = first + 1; i < last; ++i) {
      all = {std::min(all.least, ids[i * stride]), std::max(all.most, ids[i * stride])};
    }
    return all;
  }

  const Call& p_;
  int64_t b_;
  std::vector<Ids> tiles_;  // for each rule, the ids of the keys of each tile
};

float rows_cost(const Reaches& reaches, const Plan& plan, int64_t group, int64_t split) {
  const int64_t first = group * plan.rows_per_item, last = std::min(first + plan.rows_per_item, plan.rows);
  const int64_t from = split * plan.keys_per_split, to = from + plan.keys_per_split;
  float cost = 0.0f;
  for (int64_t row = first; row < last; row += plan.rows_per_block) {
    const int64_t end = std::min(row + plan.rows_per_block, last), keys = reaches.of(row, end).within(from, to);
    cost += (static_cast<float>(keys) + kBlockKeys) * padded(end - row);
  }
  return cost;
}

// The costs of all items in the order of `Schedule::item`.
std::vector<float> costs_of(const Call& p, const Plan& plan) {
  const int64_t of_head = plan.row_items * plan.splits, same = batch_is_uniform(p) ? p.B * p.K : p.K;
  std::vector<float> costs, one(static_cast<size_t>(of_head));
  costs.reserve(static_cast<size_t>(plan.groups(p) * plan.splits));
  for (int64_t b = 0; b < p.B * p.K / same; ++b) {
    const Reaches reaches(p, b);
    for (int64_t i = 0; i < of_head; ++i) {
      const int64_t group = plan.row_items - 1 - i / plan.splits;
      one[static_cast<size_t>(i)] = rows_cost(reaches, plan, group, i % plan.splits);
    }
    for (int64_t head = 0; head < same; ++head) costs.insert(costs.end(), one.begin(), one.end());
  }
  return costs;
}

// The ways to compute a head's gradient in two passes: the rows of an item, counted in blocks, and the keys of an item.
struct Passes {
  int64_t blocks, keys;
};
constexpr Passes kPasses[] = {{4, 512}, {2, 256}, {1, 128}, {1, kBackwardKeys}};

// Builds the items of a gradient with their costs: one product of a row and a key costs 1.
class BackwardItems {
 public:
  BackwardItems(const Call& p, const BackwardPlan& plan) : p_(p), plan_(plan), uniform_(batch_is_uniform(p)) {
    for (int64_t b = 0; b < (uniform_ ? 1 : p.B); ++b) {
      const Reaches reaches(p, b);
      for (int64_t row = 0; row < plan.rows; row += plan.rows_per_block) {
        reach_.push_back(reaches.of(row, std::min(row + plan.rows_per_block, plan.rows)));
      }
    }
  }

  void add_chunks(int64_t head) {
    for (int64_t chunk = 0; chunk < plan_.chunks; ++chunk) {
      items_.push_back({BackwardItem::chunk_rows, head, chunk, 0, p_.S});
      costs_.push_back(chunk_cost(head, chunk, 0, p_.S, 5.0f, 40.0f));
    }
  }

  void add_whole(int64_t head) {
    items_.push_back({BackwardItem::chunk_rows, head, 0, 0, p_.S, plan_.chunks});
    costs_.push_back(0.0f);
    for (int64_t chunk = 0; chunk < plan_.chunks; ++chunk) {
      costs_.back() += chunk_cost(head, chunk, 0, p_.S, 5.0f, 40.0f);
    }
  }

  void add_passes(int64_t head, Passes passes) {
    const int64_t step = std::min(passes.blocks * plan_.rows_per_block, plan_.rows_per_step);
    for (int64_t i = (plan_.rows - 1) / step; i >= 0; --i) {
      const int64_t first = i * step, last = std::min(first + step, plan_.rows);
      items_.push_back({BackwardItem::queries, head, 0, first, last});
      costs_.push_back(cost(head, first, last, 0, p_.S, 3.0f, 40.0f));
    }
    for (int64_t chunk = 0; chunk < plan_.chunks; ++chunk) {
      for (int64_t first = 0; first < p_.S; first += passes.keys) {
        const int64_t last = std::min(first + passes.keys, p_.S);
        items_.push_back({BackwardItem::keys, head, chunk, first, last});
        costs_.push_back(chunk_cost(head, chunk, first, last, 4.0f, 30.0f));
      }
    }
  }

  Order order(int64_t workers) const { return longest_first(costs_, workers); }
  std::vector<BackwardItem> in(const Order& order) const {
    std::vector<BackwardItem> items;
    for (const int32_t place : order.places) items.push_back(items_[static_cast<size_t>(place)]);
    return items;
  }

 private:
  // For rows and keys: the cost of a pair, and the cost of a row that reaches any of the keys.
  float cost(int64_t head, int64_t first, int64_t last, int64_t from, int64_t to, float pair, float row) const {
    const int64_t blocks = (plan_.rows + plan_.rows_per_block - 1) / plan_.rows_per_block;
    const KeyReach* reach = reach_.data() + (uniform_ ? 0 : head / p_.K * blocks);
    float sum = 0.0f;
    for (int64_t at = first; at < last; at += plan_.rows_per_block) {
      const int64_t keys = reach[at / plan_.rows_per_block].within(from, to);
      if (keys == 0) continue;
      sum += (static_cast<float>(keys) * pair + row) * padded(std::min(plan_.rows_per_block, last - at));
    }
    return sum;
  }
  float chunk_cost(int64_t head, int64_t chunk, int64_t from, int64_t to, float pair, float row) const {
    float sum = 0.0f;
    for (int half = 0; half < 2; ++half) {
      const RowRange rows = plan_.range(chunk, half);
      sum += cost(head, rows.first, rows.last, from, to, pair, row);
    }
    return sum;
  }

  const Call& p_;
  const BackwardPlan& plan_;
  bool uniform_;
  std::vector<KeyReach> reach_;  // for each block of rows
  std::vector<BackwardItem> items_;
  std::vector<float> costs_;
};

}  // namespace

int64_t KeyReach::within(int64_t from, int64_t to) const {
  const auto overlap = [&](int64_t a, int64_t b) { return std::max<int64_t>(0, std::min(b, to) - std::max(a, from)); };
  return overlap(prefix_first, prefix_last) + overlap(first, last);
}

KeyReach reach_of(const Call& p, int64_t b, int64_t first, int64_t last) {
  const int64_t G = p.H / p.K;
  const auto [low, high, start, stop, always] = bounds_of(p, b);
  KeyReach reach;
  const int64_t end = std::min(stop, (last - 1) / G + high);
  reach.first = std::max(start, first / G + low);
  reach.last = std::max(end, reach.first);
  reach.prefix_first = start;
  reach.prefix_last = std::max(start, std::min(std::min(always, end), reach.first));
  return reach;
}

bool reaches_any(const Call& p, int64_t b, int64_t first, int64_t last, int64_t from, int64_t to) {
  return reach_of(p, b, first, last).within(from, to) > 0;
}

double load_imbalance(const std::vector<float>& costs, int64_t workers, bool uniform) {
  const auto items = static_cast<int64_t>(costs.size());
  const int64_t busy = std::min(workers, items);
  Shares shares(items, busy, uniform);
  std::vector<Queue> queues;
  using Worker = std::pair<double, int64_t>;  // the time at which it is free, and its number
  std::priority_queue<Worker, std::vector<Worker>, std::greater<>> free;
  for (int64_t i = 0; i < busy; ++i) {
    queues.emplace_back(shares, i);
    free.emplace(0.0, i);
  }
  double sum = 0.0, most = 0.0;
  while (!free.empty()) {
    const auto [time, worker] = free.top();
    free.pop();
    const int64_t item = queues[static_cast<size_t>(worker)].take();
    if (item < 0) continue;
    const auto cost = static_cast<double>(costs[static_cast<size_t>(item)]);
    free.emplace(time + cost, worker);
    sum += cost;
    most = std::max(most, time + cost);
  }
  return sum == 0.0 ? 1.0 : most * static_cast<double>(workers) / sum;
}

Schedule schedule_rows(const Call& p, const Plan& plan, int64_t workers, bool finer) {
  Schedule best(plan);
  // A call of few rows is so short that simulating its threads would take a good part of its time.
  if (workers <= 1 || (plan.by_row && p.bounds == nullptr)) return best;
  if (plan.by_row) {
    Order order = longest_first(costs_of(p, plan), workers, false);
    best.order = std::move(order.places);
    best.uniform = order.uniform;
    return best;
  }
  double least = HUGE_VAL;
  for (int64_t blocks = plan.rows_per_item / plan.rows_per_block;; blocks = (blocks + 1) / 2) {
    Schedule schedule(plan);
    schedule.plan.cut(blocks * plan.rows_per_block);
    Order order = longest_first(costs_of(p, schedule.plan), workers);
    // Blocks of an item share each tile of keys, which is then read only once.
    const double time = order.time * (1.0 + 0.06 / static_cast<double>(blocks));
    const bool even = order.imbalance <= kMaxImbalance;
    if (even || time < least) {
      least = time;
      schedule.order = std::move(order.places);
      schedule.uniform = order.uniform;
      best = std::move(schedule);
    }
    if (even || blocks == 1 || !finer) return best;
  }
}

BackwardSchedule schedule_backward(const Call& p, const BackwardPlan& plan, int64_t workers) {
  const int64_t heads = p.B * p.K;
  if (plan.whole_bytes > 0) {  // because fresh memory for `partial` would cost a fifth of the total time
    BackwardItems whole(p, plan);
    for (int64_t head = 0; head < heads; ++head) whole.add_whole(head);
    const Order order = whole.order(workers);
    if (workers <= 1 || order.imbalance <= kMaxImbalance) {
      BackwardSchedule schedule = {plan, whole.in(order), order.uniform};
      schedule.plan.has_partial = false;
      schedule.plan.scratch_bytes +=
          plan.whole_bytes + 64;  // plus a cache line, because the sums of the values start on a line of their own
      return schedule;
    }
  }
  BackwardItems chunks(p, plan);
  for (int64_t head = 0; head < heads; ++head) chunks.add_chunks(head);
  Order best = chunks.order(workers);
  BackwardSchedule schedule = {plan, chunks.in(best), best.uniform};
  if (workers <= 1 || best.imbalance <= kMaxImbalance || !plan.splits) return schedule;
  // The number of heads in two passes, such that the chunks of the other heads are equally many for each thread.
  const int64_t rest = (heads * plan.chunks % workers + plan.chunks - 1) / plan.chunks;
  for (const int64_t split : {rest, rest + (workers + plan.chunks - 1) / plan.chunks, heads}) {
    if (split > heads) continue;
    for (const Passes& passes : kPasses) {
      BackwardItems items(p, plan);
      for (int64_t head = heads - 1; head >= split; --head) items.add_chunks(head);
      for (int64_t head = split - 1; head >= 0; --head) items.add_passes(head, passes);
      Order order = items.order(workers);
      if (order.time >= best.time) continue;
      schedule.items = items.in(order);
      schedule.uniform = order.uniform;
      schedule.plan.has_partial = true;
      best = std::move(order);
    }
  }
  return schedule;
}

KeyMassSchedule schedule_key_mass(const Call& p, const ItemPlan& plan, int64_t workers) {
  Call by_head = p;
  by_head.K = p.H;
  KeyMassSchedule schedule = {plan, {}, true};
  if (workers <= 1) return schedule;
  double least = HUGE_VAL;
  const int64_t largest = plan.keys_per_item;
  for (int64_t keys = largest; keys >= largest / 4; keys /= 2) {
    const int64_t ranges = (p.S + keys - 1) / keys, same = batch_is_uniform(p) ? p.B * p.H : p.H;
    std::vector<float> costs;
    for (int64_t b = 0; b < p.B * p.H / same; ++b) {
      std::vector<float> one(static_cast<size_t>(ranges), 0.0f);
      const Reaches reaches(by_head, b);
      for (int64_t row = 0; row < p.T; row += plan.rows_per_block) {
        const KeyReach reach = reaches.of(row, std::min(row + plan.rows_per_block, p.T));
        for (int64_t i = 0; i < ranges; ++i) {
          const int64_t n = reach.within(i * keys, (i + 1) * keys);
          if (n > 0) one[static_cast<size_t>(i)] += static_cast<float>(n) + kBlockKeys;
        }
      }
      for (int64_t head = 0; head < same; ++head) costs.insert(costs.end(), one.begin(), one.end());
    }
    Order order = longest_first(costs, workers);
    const bool even = order.imbalance <= kMaxImbalance;
    if (even || order.time < least) {
      least = order.time;
      schedule.order = std::move(order.places);
      schedule.uniform = order.uniform;
      schedule.plan.keys_per_item = keys;
      schedule.plan.items = p.B * p.H * ranges;
    }
    if (even) break;
  }
  return schedule;
}

}  // namespace headwise
