// Few rows against int8 keys and values in whole numbers: queries and weights become digits to the base 256, so that
// bytes are multiplied as they lie, and a score is exact but for the last digit of the query.
#pragma once

#include "simd/numeric.h"

namespace headwise {
namespace HW_ISA {

// Rows that will be read soon, for a kernel to ask for while it works.
struct Ahead {
  const int8_t* rows;
  int64_t stride;

  HW_INLINE const int8_t* at(const Ahead& x, int64_t row) {
    return reinterpret_cast<const int8_t*>(reinterpret_cast<uintptr_t>(x.rows) + static_cast<uintptr_t>(row * x.stride));
  }
};

#if HW_BF16

constexpr int kDigitBytes = 4;  // of a number's digits, with fillers

// What fits in so many digits, and one rounding more.
HW_INLINE float most_of(int digits) { return digits == 2 ? 127.0f * 256.0f : 127.0f * 65536.0f; }

HW_INLINE F peak_of(const float* x, int64_t n) {
  F peak = zero();
  for (int64_t i = 0; i < n; i += W) peak = max(peak, abs(load(x + i)));
  return peak;
}

// n floats times `inverse` as digits, n up to the next W readable and 0 behind the last, with what the bias of the other
// factor adds to the products with each digit.
template <int Digits>
static inline void put_digits(int8_t* HW_RESTRICT digits, int32_t* bias, const float* HW_RESTRICT x, int64_t n,
                              float inverse) {
  I sum = set_whole(0);
  for (int64_t i = 0; i < n; i += W) store_digits<Digits>(digits + i * kDigitBytes, sum, mul(load(x + i), set1(inverse)));
  sum_fours(bias, sum);
}

// The weights of a row as digits. Gives the worth of the last digit, 0 where all are 0 (and 1e-30 is nothing).
template <int Digits>
static inline float put_weights(int8_t* digits, int32_t* bias, const float* x, int64_t n) {
  const float top = reduce_max(peak_of(x, n));
  const bool none = !(top > 1e-30f);
  put_digits<Digits>(digits, bias, x, n, none ? 0.0f : most_of(Digits) / top);
  return none ? 0.0f : top / most_of(Digits);
}

// The greatest power of two, at most 2^100, that leaves numbers up to `top` room in so many digits.
HW_INLINE float power_for(int digits, float top) {
  float inverse = most_of(digits) / (top > 1e-24f ? top : 1e-24f);
  uint32_t bits;
  memcpy(&bits, &inverse, sizeof(bits));
  bits &= 0x7f800000u;
  memcpy(&inverse, &bits, sizeof(bits));
  return inverse;
}

// A query of n floats (whole vectors), as digits in units of a power of two: two of them hold numbers of bfloat16 exactly,
// down to a 128th of the greatest. Where what they leave over is more than 2^-16 of the whole (some numbers are far greater
// than the others), three are needed; `fits` says so. Three digits say the same as two where two are enough and `two`
// asks for it: what other rows need changes no bit of this one.
template <int Digits>
static inline float put_query(int8_t* digits, int32_t* bias, float* x, int64_t n, bool two, bool& fits) {
  const float top = reduce_max(peak_of(x, n)), inverse = power_for(2, top);
  F over = zero(), whole = zero();
  for (int64_t i = 0; i < n; i += W) {
    const F y = mul(load(x + i), set1(inverse)), rest = sub(y, rounded(y));
    over = fma(rest, rest, over), whole = fma(y, y, whole);
  }
  fits = reduce_add(over) <= 0x1p-32f * reduce_add(whole);
  if (Digits == 2) {
    put_digits<2>(digits, bias, x, n, inverse);
    return 1.0f / inverse;
  }
  if (two && fits) {
    for (int64_t i = 0; i < n; i += W) store(x + i, rounded(mul(load(x + i), set1(inverse))));
    put_digits<3>(digits, bias, x, n, 256.0f);
    return 1.0f / 256.0f / inverse;
  }
  const float finer = power_for(3, top);
  put_digits<3>(digits, bias, x, n, finer);
  return 1.0f / finer;
}

// Whole numbers from the sums of their digits, the lowest first.
template <int Digits>
HW_INLINE F joined(const I* digit) {
  F sum = floats_of(digit[Digits - 1]);
  HW_UNROLL
  for (int i = Digits - 2; i >= 0; --i) sum = fma(sum, set1(256.0f), floats_of(digit[i]));
  return sum;
}

// Asks for the line at p. In words of the assembler, so that it stays between the products where it stands: many at once
// would wait for one another.
HW_INLINE void prefetch_line(const int8_t* p) {
#if defined(__GNUC__)
  asm volatile("prefetchnta %0" : : "m"(*p));
#else
  HW_PREFETCH_ONCE(p);
#endif
}

// Scores of R rows and the n <= W keys of a vector, times the rows' units and the keys' scales: out[row][key].
template <int Digits, int R, int Tile>
static HW_APART void score_digits(const int8_t* HW_RESTRICT query, const int32_t* bias, const float* unit, int64_t pitch,
                                  int64_t D, const int8_t* HW_RESTRICT key, int64_t stride, int n,
                                  const float* HW_RESTRICT scale, Ahead ahead, float* HW_RESTRICT out) {
  I acc[R * Digits];
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    HW_UNROLL
    for (int i = 0; i < Digits; ++i) acc[r * Digits + i] = set_whole(bias[r * 4 + i]);
  }
  for (int64_t d = 0; d < D; d += kBytes) {
    I k[W];
    HW_UNROLL
    for (int u = 0; u < W; ++u) {
      k[u] = load_bytes(key + (u < n ? u : 0) * stride + d, D - d);
    }
    fours_of_rows(k);
    HW_UNROLL
    for (int u = 0; u < W; ++u) {
      const I x = biased(k[u]);
      prefetch_line(Ahead::at(ahead, u) + d);
      HW_UNROLL
      for (int i = 0; i < R * Digits; ++i) {
        acc[i] = dot_bytes(acc[i], x, query + i / Digits * pitch + (d + 4 * u) * kDigitBytes + i % Digits * 4);
      }
    }
  }
  const F of_key = load(scale);
  HW_UNROLL
  for (int r = 0; r < R; ++r) store(out + r * Tile, mul(mul(joined<Digits>(acc + r * Digits), set1(unit[r])), of_key));
}

// sums[row][columns] = sums * alpha + weights V for Count of the four vectors of a vector of bytes, from First on.
template <int Digits, int R, int First, int Count, int Tile>
static HW_APART void mix_digits(const int8_t* HW_RESTRICT digits, const int32_t* bias, const float* unit, int n,
                                const int8_t* HW_RESTRICT value, int64_t stride, int64_t columns, Ahead ahead, const float* alpha,
                                float* HW_RESTRICT sums, int64_t wide) {
  I acc[R * Count * Digits];
  HW_UNROLL
  for (int r = 0; r < R; ++r) {
    HW_UNROLL
    for (int x = 0; x < Count; ++x) {
      HW_UNROLL
      for (int i = 0; i < Digits; ++i) acc[(r * Count + x) * Digits + i] = set_whole(bias[r * 4 + i]);
    }
  }
  for (int j = 0; j < n; j += 4) {
    I row[4], v[Count];
    HW_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int8_t* from = value + (j + i < n ? j + i : j) * stride;  // beyond the last key the weight is 0
      row[i] = load_bytes(from, columns);
    }
    fours_of_columns<First, Count>(row, v);
    HW_UNROLL
    for (int x = 0; x < Count; ++x) v[x] = biased(v[x]);
    HW_UNROLL
    for (int r = 0; r < R; ++r) {
      if (r < Count) prefetch_line(Ahead::at(ahead, j + First + r));
      HW_UNROLL
      for (int i = 0; i < Digits; ++i) {
        const I w = four_bytes(digits + (r * Tile + j) * kDigitBytes + i * 4);
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
    const F worth = set1(alpha[r]), scale = set1(unit[r]);
    HW_UNROLL
    for (int x = 0; x < Count; ++x) {
      float* to = sums + r * wide + (First + x) * W;
      store(to, fma(load(to), worth, mul(joined<Digits>(acc + (r * Count + x) * Digits), scale)));
    }
  }
}

#endif

}  // namespace HW_ISA
}  // namespace headwise
