// Torch's threads: a call runs on the pool that torch.set_num_threads governs.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

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
  // A worker that fails (no memory) leaves its item undone.
  if (torch_parallel_for(0, workers, 1, range, &body) != 0) throw std::runtime_error("a worker of the kernel failed");
}

// How many items of those left a worker takes. Where all cost alike, neighbours: no other worker then touches the lines
// and pages beside theirs. In the end one at a time, so that all workers end together.
inline int64_t items_to_take(int64_t left, int64_t workers, bool alike) {
  const int64_t some = alike ? left / (4 * workers) : 1;
  return some > 1 ? some : 1;
}

// The items as one worker takes them: the next ones that nobody has, when they are asked for.
class Queue {
 public:
  Queue(std::atomic<int64_t>& next, int64_t items, int64_t workers, bool alike)
      : next_(next), items_(items), workers_(workers), alike_(alike) {}
  // The number of the item that `take` will give, or -1.
  int64_t upcoming() {
    if (mine_ == end_ && mine_ < items_) {
      mine_ = next_.load(std::memory_order_relaxed);
      do {
        end_ = mine_ + items_to_take(items_ - mine_, workers_, alike_);
      } while (!next_.compare_exchange_weak(mine_, end_, std::memory_order_relaxed));
    }
    return mine_ < items_ ? mine_ : -1;
  }
  int64_t take() {
    const int64_t number = upcoming();
    if (number >= 0) ++mine_;
    return number;
  }

 private:
  std::atomic<int64_t>& next_;
  const int64_t items_, workers_;
  const bool alike_;
  int64_t mine_ = 0, end_ = 0;  // those that are its own
};

// Runs item(i, scratch) or item(i, scratch, queue) for 0 <= i < items, all of which cost `alike` or not. Each worker
// takes the next ones when it has finished its own.
template <class Item, class Scratch>
void share(int64_t workers, int64_t items, bool alike, int64_t scratch_bytes, const Item& item,
           const Scratch& scratch_of) {
  if (workers > items) workers = items;
  // In cache lines of its own: all else that threads read here stays in their caches.
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  } counter;
  const auto work = [&] {
    char* scratch = scratch_of(scratch_bytes);
    Queue queue(counter.next, items, workers, alike);
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
