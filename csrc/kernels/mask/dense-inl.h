// Masks and biases that are tensors, as a block of query rows reads them. Rows of a tensor run along the keys, but
// vectors of scores run along the rows. So a boolean mask is converted to bits and a bias is transposed, both in
// registers.
#pragma once

#include "kernels/mask/tile_map-inl.h"

namespace headwise {
namespace HW_ISA {

// Converts eight bytes to eight bits, which are 1 for bytes that are not 0.
HW_INLINE uint32_t bits_of_bytes(const char* p) {
  constexpr uint64_t kOnes = 0x0101010101010101u, kLow = 0x7f * kOnes;
  uint64_t x;
  memcpy(&x, p, sizeof(x));
  x = (((x & kLow) + kLow) | x) >> 7 & kOnes;
  return static_cast<uint32_t>(x * 0x0102040810204080u >> 56);  // byte i goes to bit 56 + i
}

// The same of n <= 32 elements, `step` bytes apart.
HW_INLINE uint32_t bits_of_row(const char* row, int64_t step, int n) {
  uint32_t bits = 0;
  int i = 0;
  for (; step == 1 && i + 8 <= n; i += 8) bits |= bits_of_bytes(row + i) << i;
  for (; i < n; ++i) bits |= static_cast<uint32_t>(row[i * step] != 0) << i;
  return bits;
}

// The keys j0 <= j < j0 + n that a boolean mask lets each row attend.
static inline void key_bits(const Tensor4& keep, int64_t b, const QueryRows& rows, int64_t j0, int n, KeyBits bits) {
  const int64_t step = keep.stride[3];
  const char* before = nullptr;
  for (int r = 0; r < rows.padded; ++r) {
    const char* row = at(keep, b, rows.h[r], rows.t[r]) + j0 * step;
    for (int w = 0; w * kKeyBits < n; ++w) {  // rows of a group of heads often have the same mask
      const int keys = n - w * kKeyBits < kKeyBits ? n - w * kKeyBits : kKeyBits;
      bits[w][r] = row == before ? bits[w][r - 1] : bits_of_row(row + w * kKeyBits * step, step, keys);
    }
    before = row;
  }
}

// Writes -inf to the scores of the keys that the rows' bits forbid.
template <class L>
static inline void apply_bits(const KeyBits bits, const QueryRows& rows, int n, float* x) {
  if constexpr (L::kRowLanes) {
    const F none = set1(-kInf);
    for (int j = 0; j < n; ++j) {
      const uint32_t* of_rows = bits[j / kKeyBits];
      for (int r = 0; r < rows.padded; r += W) {
        float* to = x + j * L::kKeyStep + r;
        store(to, select(lanes_of_bit(of_rows + r, j % kKeyBits), load(to), none));
      }
    }
  } else {
    L::each(rows.padded, n, x,
            [&](int r, int j, float s) { return bits[j / kKeyBits][r] >> (j % kKeyBits) & 1 ? s : -kInf; });
  }
}

// Copies n elements of a bias as floats, then zeros up to whole vectors.
static inline void bias_row(const Tensor4& bias, const char* row, int n, float* out) {
  const int64_t padded = round_up(n, W);
  if (bias.dtype != Dtype::f64) return copy_floats(out, row, bias.dtype, bias.stride[3], n, padded);
  for (int j = 0; j < n; ++j) out[j] = element(row, bias.dtype, j * bias.stride[3]);
  for (int64_t j = n; j < padded; ++j) out[j] = 0.0f;
}

// Returns scores plus biases. -inf stays -inf, whatever is added.
HW_INLINE F biased(F x, F bias) {
  const F none = set1(-kInf);
  return select(equal(x, none), none, select(equal(bias, none), none, add(x, bias)));
}

// Adds a bias to the scores of a tile.
template <class L>
static HW_NOINLINE void add_bias(const Tensor4& bias, int64_t b, const QueryRows& rows, int64_t j0, int n, float* x) {
  const auto row_at = [&](int r) {
    return at(bias, b, rows.h[r], rows.t[r]) + j0 * bias.stride[3] * size_of(bias.dtype);
  };
  float of_keys[W][kTile];  // [row][key]
  if constexpr (!L::kRowLanes) {
    for (int r = 0; r < rows.padded; ++r) {
      float* to = x + r * L::kRowStep;
      bias_row(bias, row_at(r), n, of_keys[0]);
      for (int j = 0; j < n; j += W) store(to + j, biased(load(to + j), load(of_keys[0] + j)));
    }
  } else if (bias.stride[1] == 0 && bias.stride[2] == 0) {  // the same for all rows
    bias_row(bias, row_at(0), n, of_keys[0]);
    for (int j = 0; j < n; ++j) {
      float* to = x + j * L::kKeyStep;
      for (int r = 0; r < rows.padded; r += W) store(to + r, biased(load(to + r), set1(of_keys[0][j])));
    }
  } else {
    for (int r = 0; r < rows.padded; r += W) {
      for (int i = 0; i < W; ++i) bias_row(bias, row_at(r + i), n, of_keys[i]);
      for (int j = 0; j < n; j += W) {
        F of_rows[W];
        HW_UNROLL
        for (int i = 0; i < W; ++i) of_rows[i] = load(of_keys[i] + j);
        transpose(of_rows);
        HW_UNROLL
        for (int i = 0; i < W; ++i) {
          float* to = x + (j + i) * L::kKeyStep + r;
          if (j + i < n) store(to, biased(load(to), of_rows[i]));
        }
      }
    }
  }
}

}  // namespace HW_ISA
}  // namespace headwise
