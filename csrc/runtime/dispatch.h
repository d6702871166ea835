// The instruction set in use, the number of threads, and the scratch memory. All kinds of calls share these.
#pragma once

#include <memory>

#include "runtime/kernel_table.h"
#include "runtime/thread_pool.h"

namespace headwise {

const Kernels& kernels();  // of the instruction set in use

// The number of threads for work that takes this many nanoseconds on one thread. It is 1 if waking other threads would
// take longer than it saves, and in a forked child, which has no thread pool.
int64_t workers_for(double nanoseconds);

// The calling thread's scratch memory, aligned to 64 bytes. It stays allocated, because fresh pages cost more than a
// decode step.
char* scratch_of(int64_t bytes);

// Memory for partial results, aligned to a cache line. It is not initialised, so that the operating system places each
// page near the thread that first writes to it.
struct Floats {
  explicit Floats(int64_t n);
  std::unique_ptr<float[]> memory;
  float* data;
};

// For the fuzzer: override what the CPU's family says, and set the least work for which threads are woken.
void set_l2_prefetch(bool is);
void set_parallel_threshold(double nanoseconds);

// A rough estimate of the nanoseconds that a call takes on one thread. Of the masks only the bounds low and high count.
double estimate(const Call& p);

}  // namespace headwise
