// The order in which the items of a call are dealt, and how finely a call is cut for a number of threads.
#include "runtime/schedule.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>

#include "runtime/thread_pool.h"

namespace headwise {
namespace {

constexpr int64_t kLanes = 16;       // rows are computed in vectors
constexpr float kBlockKeys = 16.0f;  // what packing a block of rows costs, in keys
constexpr int kClasses = 16;

float padded(int64_t rows) { return static_cast<float>((rows + kLanes - 1) / kLanes * kLanes); }

struct Order {
  std::vector<int32_t> places;
  double share = 1.0;  // the busiest thread's over the mean; an upper bound where items are many
  double time = 0.0;   // of the busiest thread
  bool alike = true;   // no item costs more than twice the mean
};

// Items by the power of two of their cost, the longest first; those of one power stay as they are, so that neighbours
// share keys in a cache. Where items are few, all are in the order of their costs.
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
  order.alike = static_cast<double>(largest) * static_cast<double>(costs.size()) <= 2.0 * sum;
  if (timed && mean < static_cast<double>(largest) * static_cast<double>(kEnoughItems)) {
    std::iota(order.places.begin(), order.places.end(), 0);
    const auto cost = [&](int32_t place) { return costs[static_cast<size_t>(place)]; };
    std::stable_sort(order.places.begin(), order.places.end(), [&](int32_t a, int32_t b) { return cost(a) > cost(b); });
    std::vector<float> dealt(costs.size());
    std::transform(order.places.begin(), order.places.end(), dealt.begin(), cost);
    order.share = largest_share(dealt, workers, order.alike);
    order.time = order.share * mean;
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
  order.share = mean > 0.0 ? 1.0 + static_cast<double>(largest) / mean : 1.0;  // in any order it is at most this
  order.time = order.share * mean;
  return order;
}

// Where batch rows are alike, and so the heads of all of them.
bool batch_is_alike(const Problem& p) {
  bool alike = p.bounds_stride == 0;
  for (int i = 0; i < p.n_segments; ++i)
    alike &= p.segments[i].query_stride[0] == 0 && p.segments[i].key_stride[0] == 0;
  return alike || p.B == 1;
}

// The keys that blocks of rows of a batch row reach by bounds and segments.
class Reaches {
 public:
  Reaches(const Problem& p, int64_t b) : p_(p), b_(b) {
    if (p.T == 1) return;  // a row: what segments leave out is not worth a look
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

  const Problem& p_;
  int64_t b_;
  std::vector<Ids> tiles_;  // of each rule, of the keys of each tile
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

// Of all items, from the last rows to the first.
std::vector<float> costs_of(const Problem& p, const Plan& plan) {
  const int64_t of_head = plan.row_items * plan.splits, alike = batch_is_alike(p) ? p.B * p.K : p.K;
  std::vector<float> costs, one(static_cast<size_t>(of_head));
  costs.reserve(static_cast<size_t>(plan.groups(p) * plan.splits));
  for (int64_t b = p.B * p.K / alike - 1; b >= 0; --b) {
    const Reaches reaches(p, b);
    for (int64_t i = 0; i < of_head; ++i) {
      const int64_t group = plan.row_items - 1 - i / plan.splits;
      one[static_cast<size_t>(i)] = rows_cost(reaches, plan, group, i % plan.splits);
    }
    for (int64_t head = 0; head < alike; ++head) costs.insert(costs.end(), one.begin(), one.end());
  }
  return costs;
}

// The ways in which a head's gradient is computed in two passes: rows of an item, in blocks, and keys of an item.
struct Passes {
  int64_t blocks, keys;
};
constexpr Passes kPasses[] = {{4, 512}, {2, 256}, {1, 128}, {1, kBackwardKeys}};

// Builds the items of a gradient with their costs: one product of a row and a key costs 1.
class BackwardItems {
 public:
  BackwardItems(const Problem& p, const BackwardPlan& plan) : p_(p), plan_(plan), alike_(batch_is_alike(p)) {
    for (int64_t b = 0; b < (alike_ ? 1 : p.B); ++b) {
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
  // Of rows and keys: what a pair costs, and what a row costs that reaches any of the keys.
  float cost(int64_t head, int64_t first, int64_t last, int64_t from, int64_t to, float pair, float row) const {
    const int64_t blocks = (plan_.rows + plan_.rows_per_block - 1) / plan_.rows_per_block;
    const KeyReach* reach = reach_.data() + (alike_ ? 0 : head / p_.K * blocks);
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

  const Problem& p_;
  const BackwardPlan& plan_;
  bool alike_;
  std::vector<KeyReach> reach_;  // of each block of rows
  std::vector<BackwardItem> items_;
  std::vector<float> costs_;
};

}  // namespace

int64_t KeyReach::within(int64_t from, int64_t to) const {
  const auto overlap = [&](int64_t a, int64_t b) { return std::max<int64_t>(0, std::min(b, to) - std::max(a, from)); };
  return overlap(prefix_first, prefix_last) + overlap(first, last);
}

KeyReach reach_of(const Problem& p, int64_t b, int64_t first, int64_t last) {
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

bool reaches_any(const Problem& p, int64_t b, int64_t first, int64_t last, int64_t from, int64_t to) {
  return reach_of(p, b, first, last).within(from, to) > 0;
}

double largest_share(const std::vector<float>& costs, int64_t workers, bool alike) {
  std::priority_queue<double, std::vector<double>, std::greater<>> busy(
      std::greater<>(), std::vector<double>(static_cast<size_t>(workers), 0.0));
  double sum = 0.0, most = 0.0;
  const auto items = static_cast<int64_t>(costs.size());
  for (int64_t i = 0, last; i < items; i = last) {
    last = i + items_to_take(items - i, workers, alike);
    const double cost = std::accumulate(costs.begin() + i, costs.begin() + last, 0.0), end = busy.top() + cost;
    busy.pop();
    busy.push(end);
    sum += cost;
    most = std::max(most, end);
  }
  return sum == 0.0 ? 1.0 : most * static_cast<double>(workers) / sum;
}

Deal deal_rows(const Problem& p, const Plan& plan, int64_t workers, bool finer) {
  Deal best(plan);
  // A call of few rows lasts so short that a model of its threads would take a part of its time.
  if (workers <= 1 || (plan.by_row && p.bounds == nullptr)) return best;
  if (plan.by_row) {
    Order order = longest_first(costs_of(p, plan), workers, false);
    best.order = std::move(order.places);
    best.alike = order.alike;
    return best;
  }
  double least = HUGE_VAL;
  for (int64_t blocks = plan.rows_per_item / plan.rows_per_block;; blocks = (blocks + 1) / 2) {
    Deal deal(plan);
    deal.plan.cut(blocks * plan.rows_per_block);
    Order order = longest_first(costs_of(p, deal.plan), workers);
    // Blocks that share a tile of keys read it once.
    const double time = order.time * (1.0 + 0.06 / static_cast<double>(blocks));
    const bool even = order.share <= kEvenShare;
    if (even || time < least) {
      least = time;
      deal.order = std::move(order.places);
      deal.alike = order.alike;
      best = std::move(deal);
    }
    if (even || blocks == 1 || !finer) return best;
  }
}

BackwardDeal deal_backward(const Problem& p, const BackwardPlan& plan, int64_t workers) {
  const int64_t heads = p.B * p.K;
  if (plan.whole_bytes > 0) {  // fresh memory for `partial` would cost a fifth of the whole
    BackwardItems whole(p, plan);
    for (int64_t head = 0; head < heads; ++head) whole.add_whole(head);
    const Order order = whole.order(workers);
    if (workers <= 1 || order.share <= kEvenShare) {
      BackwardDeal deal = {plan, whole.in(order), order.alike};
      deal.plan.has_partial = false;
      deal.plan.scratch_bytes += plan.whole_bytes + 64;  // sums of keys may end in a line, those of values begin one
      return deal;
    }
  }
  BackwardItems chunks(p, plan);
  for (int64_t head = 0; head < heads; ++head) chunks.add_chunks(head);
  Order best = chunks.order(workers);
  BackwardDeal deal = {plan, chunks.in(best), best.alike};
  if (workers <= 1 || best.share <= kEvenShare || !plan.splits) return deal;
  // So many heads in two passes that the chunks of the others are as many for each thread.
  const int64_t rest = (heads * plan.chunks % workers + plan.chunks - 1) / plan.chunks;
  for (const int64_t split : {rest, rest + (workers + plan.chunks - 1) / plan.chunks, heads}) {
    if (split > heads) continue;
    for (const Passes& passes : kPasses) {
      BackwardItems items(p, plan);
      for (int64_t head = heads - 1; head >= split; --head) items.add_chunks(head);
      for (int64_t head = split - 1; head >= 0; --head) items.add_passes(head, passes);
      Order order = items.order(workers);
      if (order.time >= best.time) continue;
      deal.items = items.in(order);
      deal.alike = order.alike;
      deal.plan.has_partial = true;
      best = std::move(order);
    }
  }
  return deal;
}

ReceivedDeal deal_received(const Problem& p, const ItemPlan& plan, int64_t workers) {
  Problem by_head = p;
  by_head.K = p.H;
  ReceivedDeal deal = {plan, {}, true};
  if (workers <= 1) return deal;
  double least = HUGE_VAL;
  const int64_t largest = plan.keys_per_item;
  for (int64_t keys = largest; keys >= largest / 4; keys /= 2) {
    const int64_t ranges = (p.S + keys - 1) / keys, alike = batch_is_alike(p) ? p.B * p.H : p.H;
    std::vector<float> costs;
    for (int64_t b = 0; b < p.B * p.H / alike; ++b) {
      std::vector<float> one(static_cast<size_t>(ranges), 0.0f);
      const Reaches reaches(by_head, b);
      for (int64_t row = 0; row < p.T; row += plan.rows_per_block) {
        const KeyReach reach = reaches.of(row, std::min(row + plan.rows_per_block, p.T));
        for (int64_t i = 0; i < ranges; ++i) {
          const int64_t n = reach.within(i * keys, (i + 1) * keys);
          if (n > 0) one[static_cast<size_t>(i)] += static_cast<float>(n) + kBlockKeys;
        }
      }
      for (int64_t head = 0; head < alike; ++head) costs.insert(costs.end(), one.begin(), one.end());
    }
    Order order = longest_first(costs, workers);
    const bool even = order.share <= kEvenShare;
    if (even || order.time < least) {
      least = order.time;
      deal.order = std::move(order.places);
      deal.alike = order.alike;
      deal.plan.keys_per_item = keys;
      deal.plan.items = p.B * p.H * ranges;
    }
    if (even) break;
  }
  return deal;
}

}  // namespace headwise
