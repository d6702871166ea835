// One token a row on its way into a cache: queries and keys turn by their rotary angles, keys and values are placed.
// Letters as in attention_call.h.
#pragma once

#include "call/attention_call.h"

namespace headwise {

// The numbers first <= d < first + size of each head turn, in pairs: neighbours, or n and n + size / 2.
struct Turn {
  // (B|1, size / 2) or (B|1, size): an angle for each pair, or for each number. float32, or the dtype of what turns:
  // products and sums are then rounded to it, one by one. Data null = nothing turns.
  const void *cos = nullptr, *sin = nullptr;
  int64_t cos_stride[2] = {0, 0}, sin_stride[2] = {0, 0};  // batch, element
  Dtype dtype = Dtype::f32;
  int64_t first = 0, size = 0;
  bool by_number = false;
  bool interleaved = false;
};

struct Step {
  Turn turn;
  Tensor4 query, key, value;        // (B, H, 1, D), (B, K, 1, D), (B, K, 1, V); value data null = values are keys
  int64_t value_width = 0;          // of `value`
  char* turned = nullptr;           // (B, H, D) contiguous in the query's dtype: where the queries go
  const int64_t* places = nullptr;  // (B): the number of the new key among those of its row
};

// Writes the keys and values of the call, whose key and value are the whole cache, and the turned queries. Into int8
// they are quantised, as kernels/cache/quantize-inl.h does it.
void place_step(const Problem& cache, const Step& step);

}  // namespace headwise
