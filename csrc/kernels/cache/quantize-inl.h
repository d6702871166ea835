// Quantises new tokens for an int8 cache, bit for bit like `rounded` in src/headwise/cache/quantize.py: the scale is
// the largest element over 127, and elements are rounded to nearest, ties to even. Not to be called under
// FlushDenormals, because a token of tiny numbers has a denormal scale.
#pragma once

#include "call/append_call.h"
#include "simd/numeric-inl.h"

namespace headwise {
namespace HW_ISA {

// Writes n floats as int8 and returns their scale: NaN where one of them is NaN or Inf. `row` has zeros behind the
// floats up to whole vectors, and is overwritten.
static inline float quantize_floats(float* HW_RESTRICT row, int64_t n, int8_t* HW_RESTRICT out) {
  const int64_t padded = round_up(n, W);
  F peak = zero();
  for (int64_t i = 0; i < padded; i += W) peak = max(peak, abs(load(row + i)));
  float scale = reduce_max(peak) / 127.0f, unit = scale > 0.0f ? scale : 1.0f;
  // with a NaN the unit is 1 and each NaN becomes 0; with only Inf the unit is Inf and all elements become 0
  if (!floats_are_finite(row, padded)) {
    scale = __builtin_nanf("");
    unit = kInf;
    for (int64_t i = 0; i < n; ++i) {
      if (row[i] != row[i]) {
        row[i] = 0.0f;
        unit = 1.0f;
      }
    }
    for (int64_t i = 0; i < n && unit == kInf; ++i) row[i] = 0.0f;
  }
  // Adding 1.5 * 2^23 rounds to an integer. The bounds do not change the result.
  const F units = set1(unit), most = set1(127.0f), least = set1(-127.0f), whole = set1(12582912.0f);
  for (int64_t i = 0; i < padded; i += W) {
    const F x = div(load(row + i), units);
    store(row + i, sub(add(max(select(not_less(x, most), most, x), least), whole), whole));
  }
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int8_t>(row[i]);
  return scale;
}

// The same for n elements of any float dtype, `stride` apart. `row` needs room for whole vectors.
static inline float quantize_row(const char* from, Dtype dtype, int64_t stride, int64_t n, float* row, int8_t* out) {
  if (dtype == Dtype::f64) {
    for (int64_t i = 0; i < round_up(n, W); ++i) row[i] = i < n ? element(from, dtype, i * stride) : 0.0f;
  } else {
    copy_floats(row, from, dtype, stride, n, round_up(n, W));
  }
  return quantize_floats(row, n, out);
}

// Appends one head of the tokens of a span. `row` needs room for the wider of keys and values.
static void append_span(const Append& append, const AppendSpan& span, int64_t head, float* row) {
  const auto quantize = [&](const AppendSide& side) {
    for (int64_t i = 0; i < span.count; ++i) {
      const char* from = at(side.from, span.from_row, head, span.from_place + i);
      const char* data = at(side.data, span.to_row, head, span.to_place + i);
      const char* scale = at(side.scale, span.to_row, head, span.to_place + i);
      *reinterpret_cast<float*>(const_cast<char*>(scale)) =
          quantize_row(from, side.from.dtype, side.from.stride[3], side.width, row,
                       reinterpret_cast<int8_t*>(const_cast<char*>(data)));
    }
  };
  quantize(append.key);
  if (append.has_value) quantize(append.value);
}

}  // namespace HW_ISA
}  // namespace headwise
