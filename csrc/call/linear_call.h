// A linear layer for few rows, as decoding has them: out = x W^T + bias. R rows of x, of `width` elements; W has
// `count` rows.
#pragma once

#include "call/attention_call.h"

namespace headwise {

constexpr int64_t kLinearRows = 8;       // the most rows of x
constexpr int64_t kLinearOutputs = 256;  // the most outputs of an item

struct Linear {
  Dtype dtype = Dtype::f32;  // of x, weight, bias and out: f32, bf16 or f16
  int64_t R = 0, width = 0, count = 0;
  const char* x = nullptr;                  // (R, width)
  const char* weight = nullptr;             // (count, width)
  const char* bias = nullptr;               // (count); null if there is none
  char* out = nullptr;                      // (R, count), contiguous
  int64_t x_stride = 0, weight_stride = 0;  // elements from row to row; rows are contiguous
};

// Computes the layer on torch's threads, with the instruction set in use. The products of a row are summed in float32
// in an order that depends on `width` alone.
void linear(const Linear& layer);

}  // namespace headwise
