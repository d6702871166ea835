// Keys and values of int8, or of packed codes that are unpacked to int8. An element is data * scale, with one scale for
// each token and head. The scale of a key multiplies its scores and that of a value its weights, so that an element
// costs one byte of memory traffic, or half of a byte.
#pragma once

#include "simd/numeric-inl.h"

namespace headwise {
namespace HW_ISA {

HW_INLINE float scale_at(const Tensor4& scale, int64_t b, int64_t kv_head, int64_t j) {
  return *reinterpret_cast<const float*>(at(scale, b, kv_head, j));
}

HW_INLINE bool is_number(float x) { return x - x == 0.0f; }

// True if no int8 times this scale overflows. A NaN is not safe.
constexpr float kTameScale = 0x1.fffffep+127f / 128.0f;

HW_INLINE bool is_safe_scale(float scale) { return -kTameScale <= scale && scale <= kTameScale; }

// Whether all elements of the token j are finite: data times scale, `width` of them.
static inline bool token_is_finite(const Tensor4& data, const Tensor4& scale, int64_t b, int64_t kv_head, int64_t j,
                                   int64_t width) {
  const float factor = scale_at(scale, b, kv_head, j);
  if (is_safe_scale(factor)) return true;
  const char* row = at(data, b, kv_head, j);
  int peak = 0;
  for (int64_t i = 0; i < width; ++i) {
    const int x = data.dtype == Dtype::i8 ? reinterpret_cast<const int8_t*>(row)[i * data.stride[3]]
                                          : packed_level(row, data.dtype, width, i);
    const int size = x < 0 ? -x : x;
    peak = size > peak ? size : peak;
  }
  return is_number(static_cast<float>(peak) * factor);
}

// Whether the scales of n keys, as `load_key_scales` wrote them, leave every element finite.
static inline bool scales_are_safe(const float* scales, int n) {
  F peak = zero(), sum = zero();  // a NaN shows in the sum, but not always in a maximum
  for (int j = 0; j < n; j += W) {
    const F x = abs(load(scales + j));
    peak = max(peak, x);
    sum = add(sum, x);
  }
  const float total = reduce_add(sum);
  return is_safe_scale(reduce_max(peak)) && total == total;
}

// Multiplies the rows of n keys by their scales. A scale that is NaN or Inf counts as 0. Rows are padded to vectors.
static inline void scale_rows(float* copy, int64_t pitch, const Tensor4& scale, int64_t b, int64_t kv_head, int64_t j0,
                              int n, int64_t width) {
  for (int j = 0; j < n; ++j) {
    const float key_scale = scale_at(scale, b, kv_head, j0 + j);
    const F factor = set1(is_number(key_scale) ? key_scale : 0.0f);
    for (int64_t i = 0; i < width; i += W) store(copy + j * pitch + i, mul(load(copy + j * pitch + i), factor));
  }
}

// n bytes of a row, `stride` apart, then zeros up to `padded`.
static inline void copy_bytes(int8_t* out, const char* row, int64_t stride, int64_t n, int64_t padded) {
  if (stride == 1) {
    memcpy(out, row, static_cast<size_t>(n));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int8_t>(row[i * stride]);
  }
  memset(out + n, 0, static_cast<size_t>(padded - n));
}

// A row of x, which has n codes, as int8, then zeros up to `padded`.
static inline void copy_codes(int8_t* out, const char* row, const Tensor4& x, int64_t n, int64_t padded) {
  if (x.dtype == Dtype::i8) return copy_bytes(out, row, x.stride[3], n, padded);
  unpack(out, row, x.dtype, n);
  if (padded > n) memset(out + n, 0, static_cast<size_t>(padded - n));
}

// The scales of n keys, contiguous and padded with zeros to whole vectors; 0 for `bad` keys.
static inline void load_key_scales(const Tensor4& scale, int64_t b, int64_t kv_head, int64_t j0, int n, const bool* bad,
                                   float* out) {
  const char* from = at(scale, b, kv_head, j0);
  const int64_t step = scale.stride[2] * size_of(scale.dtype);
  for (int64_t line = 0; line < n * step && step <= 64; line += 64) HW_PREFETCH_NEAR(offset(from, n * step + line));
  if (step == static_cast<int64_t>(sizeof(float))) {
    memcpy(out, from, static_cast<size_t>(n) * sizeof(float));
  } else {
    for (int j = 0; j < n; ++j) memcpy(out + j, from + j * step, sizeof(float));
  }
  for (int j = 0; j < n && bad != nullptr; ++j) out[j] = bad[j] ? 0.0f : out[j];
  for (int64_t j = n; j < round_up(n, W); ++j) out[j] = 0.0f;
}

// Multiplies the scores or weights of R rows, Step apart, and n keys by the scales of the keys.
template <int R, int Step>
static inline void scale_keys(float* HW_RESTRICT x, const float* HW_RESTRICT scales, int n) {
  for (int j = 0; j < n; j += W) {
    HW_UNROLL
    for (int r = 0; r < R; ++r) store(x + r * Step + j, mul(load(x + r * Step + j), load(scales + j)));
  }
}

}  // namespace HW_ISA
}  // namespace headwise
