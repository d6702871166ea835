// The instruction set, the number of threads and the scratch memory: shared by all kinds of calls.
#pragma once

#include <memory>

#include "runtime/kernel_table.h"
#include "runtime/thread_pool.h"

namespace headwise {

const Kernels& kernels();  // of the instruction set in use

// The number of threads for work of so many nanoseconds on one: 1 where waking others does not pay, and in a forked
// child, which has no pool.
int64_t workers_for(double nanoseconds);

// The calling thread's scratch, aligned to 64 bytes. It stays allocated: fresh pages cost more than a decode step.
char* scratch_of(int64_t bytes);

// Memory for partial results, aligned to a cache line. A page is first touched, and so placed, by the thread that
// writes there.
struct Floats {
  explicit Floats(int64_t n);
  std::unique_ptr<float[]> memory;
  float* data;
};

// For the fuzzer: in the place of what the CPU says, and the least work that wakes threads.
void prefetch_into_l2(bool is);
void run_parallel_from(double nanoseconds);

// A rough estimate, in nanoseconds on one thread, of a call with the bounds low and high alone.
double estimate(const Problem& p);

}  // namespace headwise
