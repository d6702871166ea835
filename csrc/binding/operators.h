// An operator of torch.ops.headwise. Each .cpp file in this folder has a table of its own; attention.cpp registers all
// of them.
#pragma once

#include "binding/tensors.h"

namespace headwise {

struct Operator {
  const char* name;
  const char* schema;
  const char* key;  // CPU, except for operators without tensor arguments, which have no device
  Boxed function;
};

extern const Operator kBackward[3];    // backward.cpp
extern const Operator kCache[3];       // cache.cpp
extern const Operator kStatistics[2];  // statistics.cpp
extern const Operator kStep;           // step.cpp
extern const Operator kLinear;         // linear.cpp

// Runs the call. The results out and lse become the first two entries of the stack.
void attend(Call& p, int32_t torch_dtype, StableIValue* stack);

// Runs a call whose other arguments are scale, low and high, from `first` on. Its only result is out.
void attend_band(Call& p, int32_t torch_dtype, StableIValue* stack, int first);

Handle empty_lse(Call& p);  // (B, H, T); sets p.lse

// Allocates a tensor (B, H, T, V) in the memory order (B, T, H, V), in which the heads of a position are contiguous for
// the output projection. Sets the data and strides of `to`, but not its dtype.
Handle empty_heads(int64_t B, int64_t H, int64_t T, int64_t V, int32_t torch_dtype, Tensor4& to);

}  // namespace headwise
