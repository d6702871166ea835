// New tokens for a cache in int8: what is written, and where. Letters as in attention_call.h.
#pragma once

#include "call/attention_call.h"

namespace headwise {

// Tokens next to each other: `count` of batch row `from_row`, from `from_place` on, go to row (or page) `to_row` of the
// cache, from `to_place` on.
struct AppendSpan {
  int64_t from_row, from_place, to_row, to_place, count;
};

// Keys or values. An element of the cache is data * scale, as in kernels/cache/quantize-inl.h.
struct AppendSide {
  Tensor4 from;   // (B, K, T, width) in any float dtype
  Tensor4 data;   // (rows, K, places, width) int8, its last axis contiguous
  Tensor4 scale;  // (rows, K, places) float32
  int64_t width = 0;
};

struct Append {
  AppendSide key, value;
  bool has_value = false;
  int64_t K = 0;
};

// Quantises on torch's threads with the instruction set in use. No two spans may have a place in common.
void append_int8(const Append& append, const AppendSpan* spans, size_t count);

}  // namespace headwise
