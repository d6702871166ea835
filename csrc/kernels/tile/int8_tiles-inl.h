// Int8 keys and values for many rows of bfloat16 queries: tile by tile, int8 elements are converted to bfloat16, which
// holds them exactly. The scale of a key multiplies its scores, and that of a value multiplies its weights before these
// are rounded.
#pragma once

#include "kernels/tile/int8-inl.h"
#include "kernels/tile/micro-inl.h"

namespace headwise {
namespace HW_ISA {

// Only where `kHasBf16`.
struct Int8AsBfloat16 : Bfloat16 {};

template <class N>
constexpr bool kScaled = false;  // keys and values have scales, which the converted tiles do not include
template <>
constexpr bool kScaled<Int8AsBfloat16> = true;

// Returns a row of n codes that can be read up to `padded`: in place, or copied to `spare` with zeros behind it.
HW_INLINE const int8_t* padded_bytes(const char* row, const Tensor4& x, int64_t n, int64_t padded, char* spare) {
  if (x.dtype == Dtype::i8 && x.stride[3] == 1 && n == padded) return reinterpret_cast<const int8_t*>(row);
  copy_codes(reinterpret_cast<int8_t*>(spare), row, x, n, padded);
  return reinterpret_cast<const int8_t*>(spare);
}

// The rows of n keys as bfloat16, `width` rounded up to vectors from row to row.
static inline int64_t bytes_to_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                                    uint16_t* copy, char* spare) {
  const int64_t padded = round_up(width, W);
  for (int j = 0; j < n; ++j) {
    const int8_t* row = padded_bytes(at(x, b, kv_head, j0 + j), x, width, padded, spare);
    for (int64_t d = 0; d < padded; d += W) store_bf16_fast(copy + j * padded + d, load_i8(row + d));
  }
  return padded;
}

// The same for columns by keys.
static inline void bytes_to_columns(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                                    int64_t pitch, uint16_t* copy, char* spare) {
  const int64_t padded = round_up(width, W);
  columns_of_keys(n, width, pitch, copy, [&](int j, int place) -> const uint16_t* {
    uint16_t* to = reinterpret_cast<uint16_t*>(spare) + place * padded;
    // A copy of the codes is in the second half of the row, so that a step overwrites only codes that have been read.
    char* codes = reinterpret_cast<char*>(to) + padded;
    const int8_t* row = padded_bytes(at(x, b, kv_head, j0 + j), x, width, padded, codes);
    for (int64_t d = 0; d < padded; d += W) store_bf16_fast(to + d, load_i8(row + d));
    return to;
  });
}

// The rows of n values in pairs of keys: [key / 2][column], the even key in the low half. `spare` has room for two.
static inline void bytes_to_pairs(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                                  uint32_t* copy, int64_t pitch, char* spare) {
  const int64_t padded = round_up(width, W);
  for (int j = 0; j < n; j += 2) {
    const bool both = j + 1 < n;
    const int8_t* even = padded_bytes(at(x, b, kv_head, j0 + j), x, width, padded, spare);
    const char* next = at(x, b, kv_head, j0 + j + (both ? 1 : 0));
    const int8_t* odd = padded_bytes(next, x, width, padded, spare + padded);
    uint32_t* to = copy + j / 2 * pitch;
    for (int64_t d = 0; d < padded; d += W) store_pairs(to + d, load_i8(even + d), both ? load_i8(odd + d) : zero());
  }
}

// Multiplies the scores [key][row] of n keys by the scales of the keys.
template <int NV>
static inline void scale_columns(float* HW_RESTRICT x, const float* HW_RESTRICT scales, int n) {
  for (int j = 0; j < n; ++j) {
    const F scale = set1(scales[j]);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      float* at = x + (j * NV + v) * W;
      store(at, mul(load(at), scale));
    }
  }
}

// Multiplies the weights of n keys by the scales of their values, and packs them in pairs of keys, in place.
template <int NV>
static inline void pack_scaled_weights(float* x, const float* HW_RESTRICT scales, int n) {
  constexpr int R = NV * W;
  uint32_t* pairs = reinterpret_cast<uint32_t*>(x);
  for (int j = 0; j < n; j += 2) {
    const bool both = j + 1 < n;
    const F even = set1(scales[j]), odd = set1(both ? scales[j + 1] : 0.0f);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) {
      const F a = mul(load(x + j * R + v * W), even);
      const F b = both ? mul(load(x + (j + 1) * R + v * W), odd) : zero();
      store_pairs(pairs + j / 2 * R + v * W, a, b);
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
