// Quantises new tokens for a cache of codes.
//
// int8, bit for bit like `rounded` in src/headwise/cache/quantize.py: the scale is the largest element over 127, and
// elements are rounded to nearest, ties to even. 4 and 3 bits, like `encoded` in src/headwise/ops/storage/packed.py but
// for the order of the sums of a rotation: a code next to the middle of two levels may be the other one.
//
// Not to be called under FlushDenormals, because a token of tiny numbers has a denormal scale.
#pragma once

#include <math.h>

#include "call/append_call.h"
#include "simd/numeric-inl.h"
#include "simd/packed-inl.h"

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

// Rotates N rows of n floats, `pitch` apart: out[j] = sum over i of row[i] * rotation[i][j], in the order of i. So the
// bits of a row do not depend on the rows beside it. n is a multiple of 8; rows and their results are padded to
// vectors.
template <int N>
HW_INLINE void rotate_rows(const float* HW_RESTRICT rows, int64_t pitch, const Rotation& rotation, int64_t n,
                           float* HW_RESTRICT out) {
  constexpr int kVectors = 2;
  for (int64_t j = 0; j < n; j += kVectors * W) {
    // the second vector of the last step is the first again where the row ends there
    const int64_t column[kVectors] = {j, j + W < n ? j + W : j};
    F sum[N][kVectors];
    for (auto& row : sum) row[0] = row[1] = zero();
    for (int64_t i = 0; i < n; ++i) {
      const float* line = rotation.data + i * rotation.pitch;
      const F a = load(line + column[0]), b = load(line + column[1]);
      HW_UNROLL
      for (int r = 0; r < N; ++r) {
        const F x = set1(rows[r * pitch + i]);
        sum[r][0] = fma(x, a, sum[r][0]);
        sum[r][1] = fma(x, b, sum[r][1]);
      }
    }
    HW_UNROLL
    for (int r = 0; r < N; ++r) {
      store(out + r * pitch + column[1], sum[r][1]);
      store(out + r * pitch + column[0], sum[r][0]);
    }
  }
}

constexpr int kRotatedRows = 4;  // rows that are rotated together, so that the matrix is read once for all of them

// Rotates any number of rows.
static void rotate_rows(const float* rows, int64_t count, int64_t pitch, const Rotation& rotation, int64_t n,
                        float* out) {
  int64_t r = 0;
  for (; r + kRotatedRows <= count; r += kRotatedRows)
    rotate_rows<kRotatedRows>(rows + r * pitch, pitch, rotation, n, out + r * pitch);
  for (; r < count; ++r) rotate_rows<1>(rows + r * pitch, pitch, rotation, n, out + r * pitch);
}

// The distance of two levels over the root mean square of a token for which a Gaussian has the smallest error (Max
// 1960, table II).
static inline float gaussian_step(Dtype dtype) { return dtype == Dtype::i4 ? 0.3352f : 0.5860f; }

// Writes the codes of n rotated floats and returns their scale: NaN if the token was not finite. `row` has zeros behind
// the floats up to whole vectors, and is overwritten.
static inline float encode_floats(float* HW_RESTRICT row, int64_t n, bool finite, Dtype dtype, uint8_t* out) {
  const float most = dtype == Dtype::i4 ? 15.0f : 7.0f, half = most / 2.0f;
  const int64_t padded = round_up(n, W);
  F peaks = zero(), squares = zero();
  for (int64_t i = 0; i < padded; i += W) {
    const F x = load(row + i);
    peaks = max(peaks, abs(x));
    squares = fma(x, x, squares);
  }
  const float peak = reduce_max(peaks), size = sqrtf(reduce_add(squares) / static_cast<float>(n));
  float scale = peak / most;
  const float gaussian = size * (gaussian_step(dtype) / 2.0f);
  // Squares overflow before the elements do, and lose digits below this size; then the largest element decides.
  if (size > 0x1p-60f && gaussian < scale) scale = gaussian;
  if (!finite || !(scale < kInf)) {
    memset(out, 0, static_cast<size_t>(row_elements(dtype, n)));
    return __builtin_nanf("");
  }
  // Adding 1.5 * 2^23 rounds to an integer, ties to even.
  const F unit = set1(2.0f * (scale > 0.0f ? scale : 1.0f)), middle = set1(half), whole = set1(12582912.0f);
  for (int64_t i = 0; i < padded; i += W) {
    const F code = sub(add(add(div(load(row + i), unit), middle), whole), whole);
    store(row + i, max(select(not_less(code, set1(most)), set1(most), code), zero()));
  }
  const auto code = [&](int64_t i) { return static_cast<uint8_t>(row[i]); };
  if (dtype == Dtype::i4) {
    for (int64_t i = 0; i < n / 2; ++i) out[i] = static_cast<uint8_t>(code(i) | code(i + n / 2) << 4);
    return scale;
  }
  const int64_t quarter = n / 4, eighth = n / 8;
  for (int64_t i = 0; i < quarter; ++i) {
    int byte = 0;
    for (int part = 0; part < 4; ++part) byte |= (code(i + part * quarter) & 3) << 2 * part;
    out[i] = static_cast<uint8_t>(byte);
  }
  for (int64_t i = 0; i < eighth; ++i) {
    int byte = 0;
    for (int part = 0; part < 8; ++part) byte |= code(i + part * eighth) >> 2 << part;
    out[quarter + i] = static_cast<uint8_t>(byte);
  }
  return scale;
}

// Copies n elements of any float dtype, `stride` apart, and zeros up to `padded`.
static inline void copy_tokens(float* out, const char* from, Dtype dtype, int64_t stride, int64_t n, int64_t padded) {
  if (dtype != Dtype::f64) return copy_floats(out, from, dtype, stride, n, padded);
  for (int64_t i = 0; i < padded; ++i) out[i] = i < n ? element(from, dtype, i * stride) : 0.0f;
}

// Appends one head of the tokens of a span. `scratch` has room for `append_scratch_floats` of the wider of keys and
// values.
static void append_span(const Append& append, const AppendSpan& span, int64_t head, float* scratch) {
  const auto write = [&](const AppendSide& side) {
    const int64_t width = side.width, pitch = round_up(width, W);
    const int64_t step = side.rotation.data == nullptr ? 1 : kRotatedRows;
    float* const rotated = scratch + kRotatedRows * pitch;
    for (int64_t first = 0; first < span.count; first += step) {
      const int64_t count = min(step, span.count - first);
      for (int64_t n = 0; n < count; ++n)
        copy_tokens(scratch + n * pitch, at(side.from, span.from_row, head, span.from_place + first + n),
                    side.from.dtype, side.from.stride[3], width, pitch);
      if (side.rotation.data != nullptr) rotate_rows(scratch, count, pitch, side.rotation, width, rotated);
      for (int64_t n = 0; n < count; ++n) {
        float* const row = scratch + n * pitch;
        char* to = const_cast<char*>(at(side.data, span.to_row, head, span.to_place + first + n));
        char* scale = const_cast<char*>(at(side.scale, span.to_row, head, span.to_place + first + n));
        *reinterpret_cast<float*>(scale) =
            side.rotation.data == nullptr ? quantize_floats(row, width, reinterpret_cast<int8_t*>(to))
                                          : encode_floats(rotated + n * pitch, width, floats_are_finite(row, pitch),
                                                          side.data.dtype, reinterpret_cast<uint8_t*>(to));
      }
    }
  };
  write(append.key);
  if (append.has_value) write(append.value);
}

static int64_t append_scratch_floats(int64_t width) { return 2 * kRotatedRows * round_up(width, W); }

}  // namespace HW_ISA
}  // namespace headwise
