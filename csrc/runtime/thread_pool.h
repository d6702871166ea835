// Runs items of work on torch's threads, the pool that torch.set_num_threads governs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "torch_abi/torch_abi.h"

namespace headwise {

inline int64_t thread_count() {
  uint32_t count = 1;
  return torch_get_num_threads(&count) == 0 ? count : 1;
}

// Calls body(worker) for 0 <= worker < workers, each number in the same thread as in the call before.
template <class Body>
void parallel(int64_t workers, Body body) {
  const Range range = [](int64_t first, int64_t last, void* context) {
    for (int64_t i = first; i < last; ++i) (*static_cast<Body*>(context))(i);
  };
  // A worker that fails (because memory is short) leaves its item undone.
  if (torch_parallel_for(0, workers, 1, range, &body) != 0) throw std::runtime_error("a worker of the kernel failed");
}

// Items that are next to each other: first <= i < last.
struct ItemRange {
  int64_t first = 0, last = 0;
};

// Deals the items of a call. If all cost about the same, each worker has a share, the same in every call: a core finds
// in its caches what it read before, and no other core touches the cache lines and pages next to that. A worker that
// has finished its share takes what is left of the others. Items of different cost are one share, taken in order.
class Shares {
 public:
  Shares(int64_t items, int64_t workers, bool uniform) : count_(uniform ? workers : 1), uniform_(uniform) {
    if (count_ > kFew) many_ = std::make_unique<Share[]>(static_cast<size_t>(count_));
    for (int64_t i = 0; i < count_; ++i) {
      share(i).next.store(items * i / count_, std::memory_order_relaxed);
      share(i).last = items * (i + 1) / count_;
    }
  }
  // The next items of a worker: some at first, and towards the end of a share one at a time, so that all workers end
  // together. An empty range if none is left.
  ItemRange take(int64_t worker) {
    for (int64_t i = 0; i < count_; ++i) {
      Share& from = share((worker + i) % count_);
      ItemRange range = {from.next.load(std::memory_order_relaxed), 0};
      while (range.first < from.last) {
        const int64_t some = uniform_ ? (from.last - range.first) / 4 : 1;
        range.last = range.first + (some > 1 ? some : 1);
        if (from.next.compare_exchange_weak(range.first, range.last, std::memory_order_relaxed)) return range;
      }
    }
    return {};
  }

 private:
  // With a cache line of its own, because threads read all the other data here from their caches.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t last = 0;
  };
  static constexpr int64_t kFew = 8;
  Share& share(int64_t i) { return count_ > kFew ? many_[static_cast<size_t>(i)] : few_[i]; }

  const int64_t count_;
  const bool uniform_;
  Share few_[kFew];
  std::unique_ptr<Share[]> many_;
};

// The items that one worker runs.
class Queue {
 public:
  Queue(Shares& shares, int64_t worker) : shares_(shares), worker_(worker) {}
  // The number of the item that `take` will return next, or -1.
  int64_t peek() {
    if (mine_.first == mine_.last) mine_ = shares_.take(worker_);
    return mine_.first < mine_.last ? mine_.first : -1;
  }
  int64_t take() {
    const int64_t number = peek();
    if (number >= 0) ++mine_.first;
    return number;
  }

 private:
  Shares& shares_;
  const int64_t worker_;
  ItemRange mine_;  // the items that this worker has taken
};

// Calls run(queue) in each worker. `uniform` means that no item costs much more than the others.
template <class Run>
void for_each_worker(int64_t workers, int64_t items, bool uniform, const Run& run) {
  if (workers > items) workers = items;
  Shares shares(items, workers, uniform);
  const auto work = [&](int64_t worker) {
    Queue queue(shares, worker);
    run(queue);
  };
  if (workers <= 1) {
    work(0);
  } else {
    parallel(workers, work);
  }
}

// Runs item(i, scratch) for 0 <= i < items.
template <class Item, class Scratch>
void for_each_item(int64_t workers, int64_t items, bool uniform, int64_t scratch_bytes, const Item& item,
                   const Scratch& scratch_of) {
  for_each_worker(workers, items, uniform, [&](Queue& queue) {
    char* scratch = scratch_of(scratch_bytes);
    for (int64_t i = queue.take(); i >= 0; i = queue.take()) item(i, scratch);
  });
}

}  // namespace headwise
