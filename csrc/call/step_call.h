// A decode step with one new token for each row of the batch: queries and keys are rotated by their rotary angles, and
// keys and values are written into a cache. The letters are those of attention_call.h.
#pragma once

#include "call/append_call.h"
#include "call/attention_call.h"

namespace headwise {

// The rotation of the elements first <= d < first + size of each head, in pairs: neighbours, or n and n + size / 2.
struct Rotary {
  // (B|1, size / 2) or (B|1, size): one angle for each pair, or one for each element. The dtype is float32 or that of
  // the rotated tensor; in the latter case each product and sum is rounded to it. Null data means no rotation.
  const void *cos = nullptr, *sin = nullptr;
  int64_t cos_stride[2] = {0, 0}, sin_stride[2] = {0, 0};  // batch, element
  Dtype dtype = Dtype::f32;
  int64_t first = 0, size = 0;
  bool by_number = false;
  bool interleaved = false;
};

struct Step {
  Rotary rotary;
  Tensor4 query, key, value;        // (B, H, 1, D), (B, K, 1, D), (B, K, 1, V); value data null = values are keys
  int64_t value_width = 0;          // of `value`
  char* rotated = nullptr;          // (B, H, D) contiguous in the query's dtype: where the rotated queries are written
  const int64_t* places = nullptr;  // (B): the index of the new key in its row
  Rotation key_rotation, value_rotation;  // of a cache of packed codes; the queries are rotated as the keys are
};

// Outputs in the basis of packed values, which are rotated back to that of the values.
struct RotatedOutput {
  const float* rows = nullptr;  // (B, H, rotation.pitch), contiguous
  Rotation rotation;            // the inverse of the values' rotation
};

// Writes the new keys and values into `cache`, whose key and value are the whole cache, and the rotated queries into
// `step.rotated`. A cache of codes gets them quantised; see kernels/cache/quantize-inl.h.
void place_step(const Call& cache, const Step& step);

// Rotates the results of a step into packed codes, multiplies them by the gate, and rounds them into `call.out`.
void rotate_output(const Call& call, const RotatedOutput& rotated);

}  // namespace headwise
