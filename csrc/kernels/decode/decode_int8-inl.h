// Decode with int8 keys and values in integer arithmetic (`kHasVnni`). Queries and weights are written in base 256, so
// that int8 elements are multiplied without conversion. A score is exact except for the last digit of the query.
#pragma once

#include "simd/numeric-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kDigitBytes = 4;  // bytes of the digits of a number, filler included
template <int Digits>
constexpr int64_t kQueryBytes = 4 * Digits;  // bytes of an element of a query: each digit four times over

// Rows that will be read next, to be prefetched between the products.
struct NextRows {
  const int8_t* rows;
  int64_t stride;

  HW_INLINE const int8_t* at(const NextRows& x, int64_t row) { return offset(x.rows, row * x.stride); }
};

// The greatest number with this many digits that rounding cannot make overflow.
HW_INLINE float largest_of(int digits) { return digits == 2 ? 127.0f * 256.0f : 127.0f * 65536.0f; }

HW_INLINE F abs_max(const float* x, int64_t n) {
  F peak = zero();
  for (int64_t i = 0; i < n; i += W) peak = max(peak, abs(load(x + i)));
  return peak;
}

// Writes n floats times `inverse` as digits. x must be readable to whole vectors, with zeros behind the last float.
// `bias` gets the negative of what the offset of 128 in the other factor adds to the products with each digit.
template <int Digits>
static inline void write_digits(int8_t* HW_RESTRICT digits, int32_t* bias, const float* HW_RESTRICT x, int64_t n,
                                float inverse) {
  I sum = set_int(0);
  for (int64_t i = 0; i < n; i += W) {
    store_digits<Digits>(digits + i * kDigitBytes, sum, mul(load(x + i), set1(inverse)));
  }
  sum_by_digit(bias, sum);
}

// The unit of the last digit of weights, and its inverse: both are 0 where no weight exceeds 1e-30.
struct WeightUnit {
  float unit = 0.0f, inverse = 0.0f;

  HW_MEMBER WeightUnit(int digits, float largest) {
    if (!(largest > 1e-30f)) return;
    unit = largest / largest_of(digits);
    inverse = largest_of(digits) / largest;
  }
};

// Writes the weights of a row as digits. Returns the unit of the last digit.
template <int Digits>
static inline float quantize_weights(int8_t* digits, int32_t* bias, const float* x, int64_t n) {
  const WeightUnit unit(Digits, reduce_max(abs_max(x, n)));
  write_digits<Digits>(digits, bias, x, n, unit.inverse);
  return unit.unit;
}

// The greatest power of two, at most 2^100, whose product with `largest` still fits into the digits.
HW_INLINE float power_for(int digits, float largest) {
  float inverse = largest_of(digits) / (largest > 1e-24f ? largest : 1e-24f);
  uint32_t bits;
  memcpy(&bits, &inverse, sizeof(bits));
  bits &= 0x7f800000u;
  memcpy(&inverse, &bits, sizeof(bits));
  return inverse;
}

// Writes a query of n floats (whole vectors) as digits and returns the unit of the last digit, a power of two.
// write(factor) writes the digits of x times this factor. Two digits represent a bfloat16 exactly down to a 128th of
// the largest element. `fits` is false if two digits lose more than 2^-16 of the query's norm, because a few elements
// are far larger than the others; such a query needs three digits. If `two` is set, the three digits of a query that
// fits have the same value as two, so that the bits of a row do not depend on the other rows.
template <int Digits, class Write>
HW_INLINE float quantize_query(float* x, int64_t n, bool two, bool& fits, const Write& write) {
  const float largest = reduce_max(abs_max(x, n)), inverse = power_for(2, largest);
  F lost = zero(), norm = zero();
  for (int64_t i = 0; i < n; i += W) {
    const F y = mul(load(x + i), set1(inverse)), rest = sub(y, round_to_int(y));
    lost = fma(rest, rest, lost);
    norm = fma(y, y, norm);
  }
  fits = reduce_add(lost) <= 0x1p-32f * reduce_add(norm);
  if (Digits == 2) {
    write(inverse);
    return 1.0f / inverse;
  }
  if (two && fits) {
    for (int64_t i = 0; i < n; i += W) store(x + i, round_to_int(mul(load(x + i), set1(inverse))));
    write(256.0f);
    return 1.0f / 256.0f / inverse;
  }
  const float finer = power_for(3, largest);
  write(finer);
  return 1.0f / finer;
}

// Arranges the digits of a query of n floats for the products: for each vector of columns and each u < 4, each digit of
// the fours 4 c + u of columns, four times over. `Rows` queries lie side by side.
template <int Digits, int Rows>
static inline void spread_digits(int8_t* HW_RESTRICT out, const int8_t* HW_RESTRICT digits, int64_t n) {
  for (int64_t d = 0; d < n; d += kBytes, out += 4 * Rows * Digits * kBytes) {
    for (int four = 0; four < W; ++four, digits += 4 * kDigitBytes) {
      for (int i = 0; i < Digits; ++i) {
        int32_t x[4];
        memcpy(x, digits + i * 4, 4);
        x[1] = x[2] = x[3] = x[0];
        memcpy(out + (four % 4 * Rows * Digits + i) * kBytes + four / 4 * 16, x, sizeof(x));
      }
    }
  }
}

// The value of sums by digit, the lowest digit first.
template <int Digits>
HW_INLINE F combine_digits(const I* digit) {
  F sum = floats_of(digit[Digits - 1]);
  HW_UNROLL
  for (int i = Digits - 2; i >= 0; --i) sum = fma(sum, set1(256.0f), floats_of(digit[i]));
  return sum;
}

template <int R>
constexpr int kQueriesAtOnce = R < 4 ? R : 4;  // the most rows that the registers hold

// Groups of four keys that are multiplied side by side: as many as fit into the registers with the sums of R rows.
template <int Digits, int R>
constexpr int kFoursAtOnce = R * Digits <= 3                 ? kFours
                             : R * Digits <= 8 && kFours > 1 ? 2
                                                             : 1;

// Adds the products of R rows with 4 N keys to `sums`, for a vector of columns. bytes(x, u) returns key u of the x-th
// group of four, and prefetches a later row.
template <int Digits, int R, int N, class Bytes>
HW_INLINE void add_products(const int8_t* HW_RESTRICT query, const Bytes& bytes, I* sums) {
  I k[4 * N];
  HW_UNROLL
  for (int x = 0; x < N; ++x) {
    HW_UNROLL
    for (int u = 0; u < 4; ++u) k[4 * x + u] = add_128(bytes(x, u));
    transpose_four(k + 4 * x);
  }
  HW_UNROLL
  for (int u = 0; u < 4; ++u) {
    HW_UNROLL
    for (int i = 0; i < R * Digits; ++i) {
      const I digits = load_all(query + (u * R * Digits + i) * kBytes);
      HW_UNROLL
      for (int x = 0; x < N; ++x) sums[i * N + x] = dot_bytes(sums[i * N + x], k[4 * x + u], digits);
    }
  }
}

// Computes the scores of R rows and n keys, times the rows' units and the keys' scales: out[row][key]. n must be a
// multiple of W, or, if not `Whole`, less than W.
template <int Digits, int R, int Pitch, bool IntoL2, bool Whole>
static HW_NOINLINE void products_int8(const int8_t* HW_RESTRICT query, const int32_t* bias, const float* unit,
                                      int64_t D, const int8_t* HW_RESTRICT key, int64_t stride, int n,
                                      const float* HW_RESTRICT scale, NextRows next, float* HW_RESTRICT out) {
  constexpr int N = kFoursAtOnce<Digits, R>;
  const int64_t three = 3 * stride, next_three = 3 * next.stride;
  const auto row = [](const int8_t* from, int u, int64_t one, int64_t other)
                       HW_LAMBDA { return u < 3 ? offset(from, u * one) : offset(from, other); };
  for (int j = 0; j < n; j += W) {
    I sums[R * Digits][kFours];
    HW_UNROLL
    for (int first = 0; first < kFours; first += N) {
      I acc[R * Digits * N];
      HW_UNROLL
      for (int i = 0; i < R * Digits * N; ++i) acc[i] = set_int(0);
      const int8_t *digits = query, *from[N], *ahead[N];
      HW_UNROLL
      for (int x = 0; x < N; ++x) {
        from[x] = offset(key, (j + 4 * (first + x)) * stride);
        ahead[x] = next.at(next, j + 4 * (first + x));
      }
      const auto columns = [&](int64_t left, auto load) HW_LAMBDA {
        add_products<Digits, R, N>(
            digits,
            [&](int x, int u) HW_LAMBDA {
              prefetch_here<IntoL2>(row(ahead[x], u, next.stride, next_three));
              const bool is = Whole || 4 * (first + x) + u < n;
              return load(is ? row(from[x], u, stride, three) : offset(key, D - left));
            },
            acc);
        digits += 4 * R * Digits * kBytes;
        HW_UNROLL
        for (int x = 0; x < N; ++x) {
          from[x] = offset(from[x], kBytes);
          ahead[x] = offset(ahead[x], kBytes);
          opaque_address(from[x]);
          opaque_address(ahead[x]);
        }
      };
      int64_t left = D;
      for (; left >= kBytes; left -= kBytes) columns(left, [](const int8_t* p) HW_LAMBDA { return load_all(p); });
      if (left > 0) columns(left, [left](const int8_t* p) HW_LAMBDA { return load_bytes(p, left); });
      HW_UNROLL
      for (int i = 0; i < R * Digits; ++i) {
        HW_UNROLL
        for (int x = 0; x < N; ++x) sums[i][first + x] = acc[i * N + x];
      }
    }
    const F scales = load(scale + j);
    HW_UNROLL
    for (int r = 0; r < R; ++r) {
      I digit[Digits];
      HW_UNROLL
      for (int i = 0; i < Digits; ++i) digit[i] = add_int(sum_fours(sums[r * Digits + i]), set_int(bias[r * 4 + i]));
      store(out + r * Pitch + j, mul(mul(combine_digits<Digits>(digit), set1(unit[r])), scales));
    }
  }
}

// Computes sums[row][columns] = sums * rescale + weights V, for `Count` of the four float vectors of a byte vector,
// from `First` on.
template <int Digits, int R, int First, int Count, int Pitch, bool IntoL2>
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
  const int8_t* ahead = next.rows;
  const int64_t next_three = 3 * next.stride;
  const auto four = [&](int j, auto load) HW_LAMBDA {
    I row[4], v[Count];
    HW_UNROLL
    for (int i = 0; i < 4; ++i) row[i] = load(i);
    interleave_bytes<First, Count>(row, v);
    HW_UNROLL
    for (int x = 0; x < Count; ++x) v[x] = add_128(v[x]);
    HW_UNROLL
    for (int x = First; x < First + Count; ++x)
      prefetch_here<IntoL2>(x < 3 ? offset(ahead, x * next.stride) : offset(ahead, next_three));
    ahead = offset(ahead, 4 * next.stride);
    opaque_address(ahead);
    HW_UNROLL
    for (int r = 0; r < R; ++r) {
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
  };
  int j = 0;
  const auto fours = [&](auto load) HW_LAMBDA {
    const int8_t* from = value;
    const int64_t three = 3 * stride;
    for (; j + 4 <= n; j += 4, from = offset(from, 4 * stride)) {
      opaque_address(from);
      four(j, [&](int i) HW_LAMBDA { return load(offset(from, i < 3 ? i * stride : three)); });
    }
  };
  if (columns >= kBytes) {
    fours([](const int8_t* p) HW_LAMBDA { return load_all(p); });
  } else {
    fours([columns](const int8_t* p) HW_LAMBDA { return load_bytes(p, columns); });
  }
  if (j < n) {  // beyond the last key the weight is 0
    four(j, [&](int i) HW_LAMBDA { return load_bytes(value + (j + i < n ? j + i : j) * stride, columns); });
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
