// int8 keys and values: an element is data * scale, one scale a token and head. The scale of a key multiplies its score,
// that of a value its weight, so that what is read is a byte an element.
#pragma once

#include "numeric.h"

namespace headwise {
namespace HW_ISA {

HW_INLINE float scale_at(const Tensor4& scale, int64_t b, int64_t kv_head, int64_t j) {
  return *reinterpret_cast<const float*>(at(scale, b, kv_head, j));
}

HW_INLINE bool is_number(float x) { return x - x == 0.0f; }

// n floats of a copy whose rows are padded to whole vectors.
HW_INLINE void scale_row(float* row, int64_t n, float scale) {
  for (int64_t i = 0; i < n; i += W) store(row + i, mul(load(row + i), set1(scale)));
}

// n bytes of a row, `stride` apart; zeros behind them up to `padded`.
static inline void copy_bytes(int8_t* out, const char* row, int64_t stride, int64_t n, int64_t padded) {
  if (stride == 1) {
    memcpy(out, row, static_cast<size_t>(n));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int8_t>(row[i * stride]);
  }
  memset(out + n, 0, static_cast<size_t>(padded - n));
}

// The scores or weights of R rows, Step apart, and n keys, times the keys' scales; 0 for `bad` ones.
template <int R, int Step>
static inline void scale_lines(float* HW_RESTRICT x, const Tensor4& scale, int64_t b, int64_t kv_head, int64_t j0,
                               int n, const bool* bad) {
  float of_key[Step];
  const char* from = at(scale, b, kv_head, j0);
  const int64_t step = scale.stride[2] * size_of(scale.dtype);
  if (step == static_cast<int64_t>(sizeof(float))) {
    memcpy(of_key, from, static_cast<size_t>(n) * sizeof(float));
  } else {
    for (int j = 0; j < n; ++j) memcpy(of_key + j, from + j * step, sizeof(float));
  }
  for (int j = 0; j < n && bad != nullptr; ++j) of_key[j] = bad[j] ? 0.0f : of_key[j];
  const int padded = static_cast<int>(round_up(n, W));
  for (int j = n; j < padded; ++j) of_key[j] = 0.0f;
  for (int j = 0; j < padded; j += W) {
    HW_UNROLL
    for (int r = 0; r < R; ++r) store(x + r * Step + j, mul(load(x + r * Step + j), load(of_key + j)));
  }
}

}  // namespace HW_ISA
}  // namespace headwise
