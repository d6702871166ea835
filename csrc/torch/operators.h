// An operator of torch.ops.headwise; each bind*.cpp has a table of its own, and bind.cpp registers them all.
#pragma once

#include "torch/tensors.h"

namespace headwise {

struct Operator {
  const char* name;
  const char* schema;
  const char* key;  // without a tensor among its arguments an operator has no device, hence no CPU key
  Boxed function;
};

extern const Operator kBackward[2];    // bind_backward.cpp
extern const Operator kHeld;           // bind_held.cpp
extern const Operator kStatistics[2];  // bind_statistics.cpp

// Runs the call; its results, out and lse, go to the first two places of the stack.
void attend(Problem& p, int32_t torch_dtype, StableIValue* stack);

Owned empty_lse(Problem& p);  // (B, H, T), and p.lse in it

// A fresh tensor in the memory order (B, T, H, V) for a result (B, H, T, V), so that the heads of a position lie
// together for what follows; `to` takes its place and strides, not its dtype.
Owned empty_heads(int64_t B, int64_t H, int64_t T, int64_t V, int32_t torch_dtype, Tensor4& to);

}  // namespace headwise
