// Torch's threads: a call runs on the pool that torch.set_num_threads governs.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>

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

// Runs item(i, scratch) for 0 <= i < items. Each worker takes the next item when it has finished one.
template <class Item, class Scratch>
void share(int64_t workers, int64_t items, int64_t scratch_bytes, const Item& item, const Scratch& scratch_of) {
  if (workers > items) workers = items;
  // In cache lines of its own: all else that threads read here stays in their caches.
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  } counter;
  const auto work = [&] {
    char* scratch = scratch_of(scratch_bytes);
    const auto take = [&] { return counter.next.fetch_add(1, std::memory_order_relaxed); };
    for (int64_t i = take(); i < items; i = take()) item(i, scratch);
  };
  if (workers <= 1) {
    work();
  } else {
    parallel(workers, work);
  }
}

}  // namespace headwise
