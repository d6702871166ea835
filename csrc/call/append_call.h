// New tokens for a cache of codes: what is written, and where. The letters are those of attention_call.h.
#pragma once

#include "call/attention_call.h"

namespace headwise {

// A run of consecutive tokens: `count` tokens of batch row `from_row`, starting at `from_place`, are written to row (or
// page) `to_row` of the cache, starting at `to_place`.
struct AppendSpan {
  int64_t from_row, from_place, to_row, to_place, count;
};

// The matrix by which tokens are rotated before they get codes of 4 and 3 bits: (n, pitch) floats, whose columns from n
// on are 0. Null data means no rotation.
struct Rotation {
  const float* data = nullptr;
  int64_t pitch = 0;
};

// Keys or values. An element of the cache, or of its rotation, is level * scale; see kernels/cache/quantize-inl.h.
struct AppendSide {
  Tensor4 from;   // (B, K, T, width) in any float dtype
  Tensor4 data;   // (rows, K, places, width) int8, or packed codes; its last axis is contiguous
  Tensor4 scale;  // (rows, K, places) float32
  int64_t width = 0;
  Rotation rotation;  // of packed codes
};

struct Append {
  AppendSide key, value;
  bool has_value = false;
  int64_t K = 0;
};

// Quantises and writes the tokens on torch's threads, with the instruction set in use. Spans must not overlap.
void append_codes(const Append& append, const AppendSpan* spans, size_t count);

}  // namespace headwise
