// Packed rows of codes of 4 or 3 bits, of quantised keys and values. Code c of b bits is the odd level 2 c + 1 - 2^b;
// so levels are symmetric, and a level times the scale of its token is an element.
//
// The codes of a row are in planes, so that a vector of bytes gives vectors of codes. 4 bits: byte i has code i in its
// low half and code i + width / 2 in its high half. 3 bits: byte i < width / 4 has the low two bits of the codes i, i +
// width / 4, i + width / 2 and i + 3 width / 4, from its low bits to its high bits, and byte width / 4 + i has the
// third bits of the codes i, i + width / 8, ..., i + 7 width / 8. The width is a multiple of 8.
#pragma once

#include "call/attention_call.h"
#include "simd/inline.h"

namespace headwise {
namespace HW_ISA {

static inline void unpack_4_bits(int8_t* HW_RESTRICT out, const uint8_t* HW_RESTRICT row, int64_t width) {
  const int64_t half = width / 2;
  int8_t* HW_RESTRICT high = out + half;
  for (int64_t i = 0; i < half; ++i) {
    out[i] = static_cast<int8_t>(2 * (row[i] & 15) - 15);
    high[i] = static_cast<int8_t>(2 * (row[i] >> 4) - 15);
  }
}

static inline void unpack_3_bits(int8_t* HW_RESTRICT out, const uint8_t* HW_RESTRICT row, int64_t width) {
  const int64_t eighth = width / 8;
  const uint8_t* HW_RESTRICT third = row + 2 * eighth;
  HW_UNROLL
  for (int part = 0; part < 8; ++part) {
    const uint8_t* HW_RESTRICT low = row + part % 2 * eighth;
    for (int64_t i = 0; i < eighth; ++i) {
      const int code = (low[i] >> (part / 2 * 2) & 3) | (third[i] >> part & 1) << 2;
      out[part * eighth + i] = static_cast<int8_t>(2 * code - 7);
    }
  }
}

// Writes the levels of a packed row.
static inline void unpack(int8_t* HW_RESTRICT out, const char* row, Dtype dtype, int64_t width) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(row);
  dtype == Dtype::i4 ? unpack_4_bits(out, bytes, width) : unpack_3_bits(out, bytes, width);
}

// The level of element i of a packed row.
static inline int packed_level(const char* row, Dtype dtype, int64_t width, int64_t i) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(row);
  if (dtype == Dtype::i4) return 2 * (bytes[i % (width / 2)] >> (i < width / 2 ? 0 : 4) & 15) - 15;
  const int low = bytes[i % (width / 4)] >> (i / (width / 4) * 2) & 3;
  const int third = bytes[width / 4 + i % (width / 8)] >> (i / (width / 8)) & 1;
  return 2 * (low | third << 2) - 7;
}

}  // namespace HW_ISA
}  // namespace headwise
