// Runs items of work on torch's threads, the pool that torch.set_num_threads governs.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "torch_abi/torch_abi.h"

namespace headwise {

inline int64_t thread_count() {
  uint32_t count = 1;
  return torch_get_num_threads(&count) == 0 ? count : 1;
}

template <class Body>
void parallel(int64_t workers, Body body) {
  const Range range = [](int64_t first, int64_t last, void* context) {
    for (int64_t i = first; i < last; ++i) (*static_cast<Body*>(context))();
  };
  // A worker that fails (because memory is short) leaves its item undone.
  if (torch_parallel_for(0, workers, 1, range, &body) != 0) throw std::runtime_error("a worker of the kernel failed");
}

// How many of the remaining items a worker takes at once. If all cost about the same, it takes several neighbours, so
// that no other worker touches the cache lines and pages next to them. Towards the end it takes them one at a time, so
// that all workers end together.
inline int64_t items_to_take(int64_t left, int64_t workers, bool uniform) {
  const int64_t some = uniform ? left / (4 * workers) : 1;
  return some > 1 ? some : 1;
}

// The items that one worker runs. It takes the next ones from a counter that all workers share.
class Queue {
 public:
  Queue(std::atomic<int64_t>& next, int64_t items, int64_t workers, bool uniform)
      : next_(next), items_(items), workers_(workers), uniform_(uniform) {}
  // The number of the item that `take` will return next, or -1.
  int64_t peek() {
    if (mine_ == end_ && mine_ < items_) {
      mine_ = next_.load(std::memory_order_relaxed);
      do {
        end_ = mine_ + items_to_take(items_ - mine_, workers_, uniform_);
      } while (!next_.compare_exchange_weak(mine_, end_, std::memory_order_relaxed));
    }
    return mine_ < items_ ? mine_ : -1;
  }
  int64_t take() {
    const int64_t number = peek();
    if (number >= 0) ++mine_;
    return number;
  }

 private:
  std::atomic<int64_t>& next_;
  const int64_t items_, workers_;
  const bool uniform_;
  int64_t mine_ = 0, end_ = 0;  // the items that this worker has taken
};

// Calls run(queue) in each worker, which takes further items when it has finished its own. `uniform` means that no item
// costs much more than the others.
template <class Run>
void for_each_worker(int64_t workers, int64_t items, bool uniform, const Run& run) {
  if (workers > items) workers = items;
  // The counter has a cache line of its own, because threads read all the other data here from their caches.
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  } counter;
  const auto work = [&] {
    Queue queue(counter.next, items, workers, uniform);
    run(queue);
  };
  if (workers <= 1) {
    work();
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
