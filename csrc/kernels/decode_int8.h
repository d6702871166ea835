// Decode with int8 keys and values in integer arithmetic (`kHasVnni`): queries and weights are written to the base 256,
// so that bytes are multiplied as they are in memory, and a score is exact but for the last digit of the query.
#pragma once

#include "simd/numeric.h"

namespace headwise {
namespace HW_ISA {

constexpr int kDigitBytes = 4;  // of the digits of a number, filler included

// Rows that will be read next, to be prefetched between the products.
struct NextRows {
  const int8_t* rows;
  int64_t stride;

  HW_INLINE const int8_t* at(const NextRows& x, int64_t row) { return offset(x.rows, row * x.stride); }
};

// The greatest number of so many digits that a rounding cannot overflow.
HW_INLINE float largest_of(int digits) { return digits == 2 ? 127.0f * 256.0f : 127.0f * 65536.0f; }

HW_INLINE F abs_max(const float* x, int64_t n) {
  F peak = zero();
  for (int64_t i = 0; i < n; i += W) peak = max(peak, abs(load(x + i)));
  return peak;
}

// Writes n floats times `inverse` as digits. x is readable to whole vectors, with zeros behind the last float. `bias`
// gets what the offset of 128 in the other factor adds to the products with each digit, negated.
template <int Digits>
static inline void write_digits(int8_t* HW_RESTRICT digits, int32_t* bias, const float* HW_RESTRICT x, int64_t n,
                                float inverse) {
  I sum = set_int(0);
  for (int64_t i = 0; i < n; i += W) {
    store_digits<Digits>(digits + i * kDigitBytes, sum, mul(load(x + i), set1(inverse)));
  }
  sum_by_digit(bias, sum);
}

// Writes the weights of a row as digits. Returns the unit of the last digit, 0 where no weight exceeds 1e-30.
template <int Digits>
static inline float quantize_weights(int8_t* digits, int32_t* bias, const float* x, int64_t n) {
  const float largest = reduce_max(abs_max(x, n));
  const bool none = !(largest > 1e-30f);
  write_digits<Digits>(digits, bias, x, n, none ? 0.0f : largest_of(Digits) / largest);
  return none ? 0.0f : largest / largest_of(Digits);
}

// The greatest power of two, at most 2^100, whose product with `largest` has so many digits.
HW_INLINE float power_for(int digits, float largest) {
  float inverse = largest_of(digits) / (largest > 1e-24f ? largest : 1e-24f);
  uint32_t bits;
  memcpy(&bits, &inverse, sizeof(bits));
  bits &= 0x7f800000u;
  memcpy(&inverse, &bits, sizeof(bits));
  return inverse;
}

// Writes a query of n floats (whole vectors) as digits and returns the unit of the last digit, a power of two. Two
// digits hold a bfloat16 exactly down to a 128th of the largest element. `fits` is false where two digits lose more
// than 2^-16 of the query's norm, because a few elements are far larger than the others: such a query needs three.
// Three digits of a query that fits have the same value as two if `two` is set: the bits of a row do not depend on the
// other rows.
template <int Digits>
static inline float quantize_query(int8_t* digits, int32_t* bias, float* x, int64_t n, bool two, bool& fits) {
  const float largest = reduce_max(abs_max(x, n)), inverse = power_for(2, largest);
  F lost = zero(), norm = zero();
  for (int64_t i = 0; i < n; i += W) {
    const F y = mul(load(x + i), set1(inverse)), rest = sub(y, round_to_int(y));
    lost = fma(rest, rest, lost), norm = fma(y, y, norm);
  }
  fits = reduce_add(lost) <= 0x1p-32f * reduce_add(norm);
  if (Digits == 2) {
    write_digits<2>(digits, bias, x, n, inverse);
    return 1.0f / inverse;
  }
  if (two && fits) {
    for (int64_t i = 0; i < n; i += W) store(x + i, round_to_int(mul(load(x + i), set1(inverse))));
    write_digits<3>(digits, bias, x, n, 256.0f);
    return 1.0f / 256.0f / inverse;
  }
  const float finer = power_for(3, largest);
  write_digits<3>(digits, bias, x, n, finer);
  return 1.0f / finer;
}

// The value of sums by digit, the lowest digit first.
template <int Digits>
HW_INLINE F combine_digits(const I* digit) {
  F sum = floats_of(digit[Digits - 1]);
  HW_UNROLL
  for (int i = Digits - 2; i >= 0; --i) sum = fma(sum, set1(256.0f), floats_of(digit[i]));
  return sum;
}

// Scores of R rows and the n <= W keys of a vector, times the rows' units and the keys' scales: out[row][key].
template <int Digits, int R, int Pitch>
static HW_NOINLINE void products_int8(const int8_t* HW_RESTRICT query, const int32_t* bias, const float* unit,
                                      int64_t pitch, int64_t D, const int8_t* HW_RESTRICT key, int64_t stride, int n,
                                      const float* HW_RESTRICT scale, NextRows next, float* HW_RESTRICT out) {
  I acc[R * Digits];
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    HW_UNROLL
    for (int i = 0; i < Digits; ++i) acc[r * Digits + i] = set_int(bias[r * 4 + i]);
  }
  for (int64_t d = 0; d < D; d += kBytes) {
    I k[W];
    HW_UNROLL
    for (int u = 0; u < W; ++u) k[u] = load_bytes(key + (u < n ? u : 0) * stride + d, D - d);
    transpose_bytes(k);
    HW_UNROLL
    for (int u = 0; u < W; ++u) {
      const I x = add_128(k[u]);
      prefetch_here(NextRows::at(next, u) + d);
      HW_UNROLL
      for (int i = 0; i < R * Digits; ++i) {
        acc[i] = dot_bytes(acc[i], x, query + i / Digits * pitch + (d + 4 * u) * kDigitBytes + i % Digits * 4);
      }
    }
  }
  const F scales = load(scale);
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    store(out + r * Pitch, mul(mul(combine_digits<Digits>(acc + r * Digits), set1(unit[r])), scales));
  }
}

// sums[row][columns] = sums * rescale + weights V, for Count of the four float vectors of a byte vector, from First on.
template <int Digits, int R, int First, int Count, int Pitch>
static HW_NOINLINE void values_int8(const int8_t* HW_RESTRICT digits, const int32_t* bias, const float* unit, int n,
                                    const int8_t* HW_RESTRICT value, int64_t stride, int64_t columns, NextRows next,
                                    const float* rescale, float* HW_RESTRICT sums, int64_t padded_V) {
  I acc[R * Count * Digits];
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    HW_UNROLL
    for (int x = 0; x < Count; ++x) {
      HW_UNROLL
      for (int i = 0; i < Digits; ++i) acc[(r * Count + x) * Digits + i] = set_int(bias[r * 4 + i]);
    }
  }
  for (int j = 0; j < n; j += 4) {
    I row[4], v[Count];
    HW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int8_t* from = value + (j + i < n ? j + i : j) * stride;  // beyond the last key the weight is 0
      row[i] = load_bytes(from, columns);
    }
    interleave_bytes<First, Count>(row, v);
    HW_UNROLL
    for (int x = 0; x < Count; ++x) v[x] = add_128(v[x]);
    // A line beside each row's products; those for which there is no row come before.
    HW_UNROLL
    for (int x = R; x < Count; ++x) prefetch_here(NextRows::at(next, j + First + x));
    HW_UNROLL
    for (int r = 0; r < R; ++r) {
      if (r < Count) prefetch_here(NextRows::at(next, j + First + r));
      HW_UNROLL
      for (int i = 0; i < Digits; ++i) {
        const I w = broadcast_bytes(digits + (r * Pitch + j) * kDigitBytes + i * 4);
        HW_UNROLL
        for (int x = 0; x < Count; ++x) {
          I& sum = acc[(r * Count + x) * Digits + i];
          sum = dot_bytes(sum, v[x], w);
        }
      }
    }
  }
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    const F factor = set1(rescale[r]), scale = set1(unit[r]);
    HW_UNROLL
    for (int x = 0; x < Count; ++x) {
      float* to = sums + r * padded_V + (First + x) * W;
      store(to, fma(load(to), factor, mul(combine_digits<Digits>(acc + (r * Count + x) * Digits), scale)));
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
