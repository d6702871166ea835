// exp2 and tanh of vectors, and conversions of rows of any dtype and stride to and from floats.
#pragma once

#include "simd/packed-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kInf = __builtin_huge_valf();

// AMD's CPUs prefetch what is read in the order of memory, and little else.
constexpr bool kReadsInOrder = HW_PREFETCH_LOCALITY == 0;

HW_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
HW_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
HW_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Rounds numbers below 2^22 in magnitude to integers, ties to even.
HW_INLINE F round_to_int(F x) { return sub(add(x, set1(0x1.8p23f)), set1(0x1.8p23f)); }

// 2^t with a relative error of 2e-9 (degree 6) or 2.6e-6 (degree 4, enough for bfloat16) before rounding, by minimax
// polynomials on [0, 1] from Remez's exchange. The result is 0 below 2^-126, so that products never have a denormal
// factor, and NaN stays NaN. N vectors are computed together, step by step: computed one after the other, each would
// wait for its own chain of operations, which is too long for a CPU to start the next vector meanwhile.
template <int Degree, int N>
HW_INLINE void exp2_each(F* t) {
  F f[N], p[N];
  const auto step = [&](float coefficient) HW_LAMBDA {
    HW_UNROLL
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], f[i], set1(coefficient));
  };
  HW_UNROLL
  for (int i = 0; i < N; ++i) f[i] = fraction(t[i]);
  if constexpr (Degree == 6) {
    HW_UNROLL
    for (int i = 0; i < N; ++i) p[i] = fma(set1(0x1.c72118p-13f), f[i], set1(0x1.461954p-10f));
    step(0x1.3d28p-7f);
    step(0x1.c685p-5f);
    step(0x1.ebfd9ep-3f);
    step(0x1.62e42ap-1f);
    step(1.0f);
  } else {
    static_assert(Degree == 4, "only degrees 4 and 6");
    HW_UNROLL
    for (int i = 0; i < N; ++i) p[i] = fma(set1(0x1.bb7cd4p-7f), f[i], set1(0x1.aa13fp-5f));
    step(0x1.ee798ap-3f);
    step(0x1.62d166p-1f);
    step(0x1.00002cp+0f);
  }
  HW_UNROLL
  for (int i = 0; i < N; ++i) t[i] = scale2(p[i], t[i]);
}

template <int Degree>
HW_INLINE F exp2(F t) {
  exp2_each<Degree, 1>(&t);
  return t;
}

// Computes 1 - 2 / (e^2|x| + 1), and near 0, where that difference would cancel, x times its Taylor series in x^2.
HW_INLINE F tanh(F x) {
  const F a = abs(x), y = mul(x, x);
  F series = fma(set1(-1382.0f / 155925.0f), y, set1(62.0f / 2835.0f));
  series = fma(series, y, set1(-17.0f / 315.0f));
  series = fma(series, y, set1(2.0f / 15.0f));
  series = fma(series, y, set1(-1.0f / 3.0f));
  series = fma(mul(series, y), a, a);
  const F e = exp2<6>(mul(a, set1(-2.0f * kLog2e)));
  const F far = div(sub(set1(1.0f), e), add(set1(1.0f), e));
  return with_sign(select(not_less(a, set1(0.3f)), far, series), x);
}

HW_INLINE const char* at(const Tensor4& x, int64_t a, int64_t b, int64_t c) {
  return static_cast<const char*>(x.data) + (a * x.stride[0] + b * x.stride[1] + c * x.stride[2]) * size_of(x.dtype);
}

// One element as a float.
static inline float element(const char* row, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return reinterpret_cast<const float*>(row)[i];
  if (dtype == Dtype::f64) return static_cast<float>(reinterpret_cast<const double*>(row)[i]);
  if (dtype == Dtype::boolean) return row[i] != 0 ? 1.0f : 0.0f;
  if (dtype == Dtype::i8) return static_cast<float>(reinterpret_cast<const int8_t*>(row)[i]);
  uint16_t lane[W] = {reinterpret_cast<const uint16_t*>(row)[i]};
  float out[W];
  store(out, dtype == Dtype::bf16 ? load_bf16(lane) : load_f16(lane));
  return out[0];
}

HW_INLINE F load_half(const uint16_t* p, Dtype dtype) { return dtype == Dtype::bf16 ? load_bf16(p) : load_f16(p); }

// Copies n elements of a row of f32, bf16, f16 or codes, `stride` apart, as floats, and then zeros up to `padded`. Of a
// packed row, n is its whole width, or 0.
static inline void copy_floats(float* out, const char* row, Dtype dtype, int64_t stride, int64_t n, int64_t padded) {
  int64_t i = 0;
  const auto by_vectors = [&](auto load_at) HW_LAMBDA {
    if (n < W) return;
    for (; i + W <= n; i += W) store(out + i, load_at(i));
    if (i < n) store(out + n - W, load_at(n - W));  // the last vector overlaps the one before it
    i = n;
  };
  if (n > 0 && (dtype == Dtype::i4 || dtype == Dtype::i3)) {
    // The levels are written to the last quarter of the floats' memory, and floats are written from its beginning: they
    // overwrite only levels that have been read.
    auto* levels = reinterpret_cast<int8_t*>(out) + 3 * n;
    unpack(levels, row, dtype, n);
    for (; i + W <= n; i += W) store(out + i, load_i8(levels + i));
    for (; i < n; ++i) out[i] = static_cast<float>(levels[i]);
  } else if (stride == 1 && dtype == Dtype::f32) {
    by_vectors([&](int64_t at) HW_LAMBDA { return load(reinterpret_cast<const float*>(row) + at); });
  } else if (stride == 1 && dtype == Dtype::i8) {
    by_vectors([&](int64_t at) HW_LAMBDA { return load_i8(reinterpret_cast<const int8_t*>(row) + at); });
  } else if (stride == 1) {
    by_vectors([&](int64_t at) HW_LAMBDA { return load_half(reinterpret_cast<const uint16_t*>(row) + at, dtype); });
  }
  for (; i < n; ++i) out[i] = element(row, dtype, i * stride);
  for (; i < padded; ++i) out[i] = 0.0f;
}

// The same for 16-bit elements, without conversion.
static inline void copy_halves(uint16_t* out, const char* row, int64_t stride, int64_t n, int64_t padded) {
  const uint16_t* in = reinterpret_cast<const uint16_t*>(row);
  if (stride == 1 && n > 0) {  // `row` is null where n is 0
    memcpy(out, in, static_cast<size_t>(n) * sizeof(uint16_t));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = in[i * stride];
  }
  for (int64_t i = n; i < padded; ++i) out[i] = 0;
}

// Writes n floats, times a factor, as f32, bf16 or f16, contiguous.
static inline void write_floats(char* out, Dtype dtype, const float* x, int64_t n, float factor = 1.0f) {
  const F by = set1(factor);
  int64_t i = 0;
  if (dtype == Dtype::f32) {
    float* floats = reinterpret_cast<float*>(out);
    for (; i + W <= n; i += W) store(floats + i, mul(load(x + i), by));
    for (; i < n; ++i) floats[i] = x[i] * factor;
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(out);
  for (; i + W <= n; i += W) {
    if (dtype == Dtype::bf16) {
      store_bf16(to + i, mul(load(x + i), by));
    } else {
      store_f16(to + i, mul(load(x + i), by));
    }
  }
  if (i == n) return;
  float rest[W] = {0};
  uint16_t packed[W];
  memcpy(rest, x + i, static_cast<size_t>(n - i) * sizeof(float));
  if (dtype == Dtype::bf16) {
    store_bf16(packed, mul(load(rest), by));
  } else {
    store_f16(packed, mul(load(rest), by));
  }
  memcpy(to + i, packed, static_cast<size_t>(n - i) * sizeof(uint16_t));
}

HW_INLINE uint32_t exponent_of(Dtype dtype) {
  return dtype == Dtype::f32 ? 0x7f800000u : dtype == Dtype::bf16 ? 0x7f80u : 0x7c00u;
}

// Adds the exponents of a contiguous row, of at least one vector, to those found so far.
template <class T>
HW_INLINE Peak peak_of_row(Peak peak, const T* row, int64_t n, uint32_t mask) {
  constexpr int64_t step = 4 * W / static_cast<int64_t>(sizeof(T));
  int64_t i = 0;
  for (; i + step <= n; i += step) peak = join_peak(peak, row + i, mask);
  return i < n ? join_peak(peak, row + n - step, mask) : peak;  // the last step overlaps the one before
}

// True if `rows` rows of n elements of f32, bf16 or f16, `pitch` apart, have no NaN or Inf.
static inline bool rows_are_finite(const char* first, Dtype dtype, int64_t pitch, int64_t rows, int64_t stride,
                                   int64_t n) {
  const int64_t size = size_of(dtype);
  const uint32_t mask = exponent_of(dtype);
  const bool wide = dtype == Dtype::f32;
  if (stride == 1 && n * size >= 4 * W) {
    Peak peak = no_peak();
    for (int64_t r = 0; r < rows; ++r) {
      const char* row = first + r * pitch * size;
      peak = wide ? peak_of_row(peak, reinterpret_cast<const float*>(row), n, mask)
                  : peak_of_row(peak, reinterpret_cast<const uint16_t*>(row), n, mask);
    }
    return is_finite(peak, mask, wide);
  }
  bool good = true;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits = 0;  // little endian, like all supported CPUs
      memcpy(&bits, first + (r * pitch + i * stride) * size, static_cast<size_t>(size));
      good &= (bits & mask) != mask;
    }
  }
  return good;
}

static inline bool row_is_finite(const char* row, Dtype dtype, int64_t stride, int64_t n) {
  return rows_are_finite(row, dtype, 0, 1, stride, n);
}

// True if n floats are finite. n must be a multiple of W.
HW_INLINE bool floats_are_finite(const float* x, int64_t n) {
  return n == 0 || is_finite(peak_of_row(no_peak(), x, n, 0x7f800000u), 0x7f800000u, true);
}

}  // namespace HW_ISA
}  // namespace headwise
