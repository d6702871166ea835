// What the driver shares with the other kinds of call: which instruction set, how many threads, whose scratch.
#pragma once

#include "plan.h"
#include "threads.h"

namespace headwise {

const Kernels& kernels();  // of the instruction set in use

// Threads for work of so many nanoseconds on one: 1 where waking others does not pay, and in a forked child, whose pool
// is gone.
int64_t workers_for(double nanoseconds);

// A thread's scratch, aligned to 64 bytes: kept from call to call, for fresh pages cost more than a decoding step.
char* scratch_of(int64_t bytes);

// Nanoseconds, roughly, of scoring every query row against every key that a plain band lets it see: enough to say
// whether threads are worth waking.
double estimate(const Problem& p);

}  // namespace headwise
