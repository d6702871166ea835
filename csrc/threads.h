// Torch's threads: a call runs on the pool that torch.set_num_threads governs.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "torch/torch_abi.h"

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
  // A worker that fails (no memory) leaves its item undone.
  if (torch_parallel_for(0, workers, 1, range, &body) != 0) throw std::runtime_error("a worker of the kernel failed");
}

// The items as one worker takes them: the next one that nobody has, when it is asked for.
class Queue {
 public:
  Queue(std::atomic<int64_t>& next, int64_t items) : next_(next), items_(items) {}
  // The number of the item that `take` will give, or -1.
  int64_t upcoming() {
    if (mine_ < 0) mine_ = next_.fetch_add(1, std::memory_order_relaxed);
    return mine_ < items_ ? mine_ : -1;
  }
  int64_t take() {
    const int64_t number = upcoming();
    mine_ = -1;
    return number;
  }

 private:
  std::atomic<int64_t>& next_;
  const int64_t items_;
  int64_t mine_ = -1;
};

// Runs item(i, scratch) or item(i, scratch, queue) for 0 <= i < items. Each worker takes the next item when it has
// finished one.
template <class Item, class Scratch>
void share(int64_t workers, int64_t items, int64_t scratch_bytes, const Item& item, const Scratch& scratch_of) {
  if (workers > items) workers = items;
  // In cache lines of its own: all else that threads read here stays in their caches.
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  } counter;
  const auto work = [&] {
    char* scratch = scratch_of(scratch_bytes);
    Queue queue(counter.next, items);
    for (int64_t i = queue.take(); i >= 0; i = queue.take()) {
      if constexpr (std::is_invocable_v<Item, int64_t, char*, Queue&>) {
        item(i, scratch, queue);
      } else {
        item(i, scratch);
      }
    }
  };
  if (workers <= 1) {
    work();
  } else {
    parallel(workers, work);
  }
}

}  // namespace headwise
