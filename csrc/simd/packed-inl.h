// Packed rows of codes of 4 or 3 bits, of quantised keys and values. Code c of b bits is the odd level 2 c + 1 - 2^b;
// so levels are symmetric, and a level times the scale of its token is an element.
//
// The codes of a row are in planes, so that a vector of bytes gives vectors of codes. 4 bits: byte i has code i in its
// low half and code i + width / 2 in its high half. 3 bits: byte i < width / 4 has the low two bits of the codes i, i +
// width / 4, i + width / 2 and i + 3 width / 4, from its low bits to its high bits, and byte width / 4 + i has the
// third bits of the codes i, i + width / 8, ..., i + 7 width / 8. The width is a multiple of 8.
#pragma once

#include <string.h>

#include "call/attention_call.h"
#include "simd/inline.h"

namespace headwise {
namespace HW_ISA {

// The level of element i of a packed row.
static inline int packed_level(const char* row, Dtype dtype, int64_t width, int64_t i) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(row);
  if (dtype == Dtype::i4) return 2 * (bytes[i % (width / 2)] >> (i < width / 2 ? 0 : 4) & 15) - 15;
  const int low = bytes[i % (width / 4)] >> (i / (width / 4) * 2) & 3;
  const int third = bytes[width / 4 + i % (width / 8)] >> (i / (width / 8)) & 1;
  return 2 * (low | third << 2) - 7;
}

// N bytes as a vector of GCC and Clang, which every instruction set has. Shifts are those of 16-bit lanes, because CPUs
// have no others; what moves from one byte to the next is masked.
template <int N>
struct ByteVector {
  typedef uint8_t Bytes __attribute__((vector_size(N)));
  typedef uint16_t Lanes __attribute__((vector_size(N)));
  Lanes x;

  HW_MEMBER explicit ByteVector(const uint8_t* p) { memcpy(&x, p, N); }
  // Writes levels: twice the codes, less a number.
  HW_MEMBER static void put(int8_t* to, Lanes twice, uint8_t least) {
    const Bytes levels = reinterpret_cast<Bytes>(twice) - least;
    memcpy(to, &levels, N);
  }
};

template <int N>
HW_INLINE void unpack_4_bits(int8_t* HW_RESTRICT out, const uint8_t* HW_RESTRICT row, int64_t half) {
  using V = ByteVector<N>;
  for (int64_t i = 0; i < half; i += N) {
    const int64_t at = i < half - N ? i : half - N;  // the last vector overlaps the one before it
    const V codes(row + at);
    V::put(out + at, (codes.x << 1) & 0x1e1e, 15);
    V::put(out + half + at, (codes.x >> 3) & 0x1e1e, 15);
  }
}

template <int N>
HW_INLINE void unpack_3_bits(int8_t* HW_RESTRICT out, const uint8_t* HW_RESTRICT row, int64_t eighth) {
  using V = ByteVector<N>;
  for (int64_t i = 0; i < eighth; i += N) {
    const int64_t at = i < eighth - N ? i : eighth - N;
    const V low[2] = {V(row + at), V(row + eighth + at)}, third(row + 2 * eighth + at);
    HW_UNROLL
    for (int part = 0; part < 8; ++part) {
      const auto two = (low[part % 2].x >> (part / 2 * 2)) & 0x0303, one = (third.x >> part) & 0x0101;
      V::put(out + part * eighth + at, (two << 1) | (one << 3), 7);
    }
  }
}

// Writes the levels of a packed row.
static inline void unpack(int8_t* HW_RESTRICT out, const char* row, Dtype dtype, int64_t width) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(row);
  const int64_t plane = dtype == Dtype::i4 ? width / 2 : width / 8;
  if (dtype == Dtype::i4) {
    if (plane >= 64) return unpack_4_bits<64>(out, bytes, plane);
    if (plane >= 32) return unpack_4_bits<32>(out, bytes, plane);
    if (plane >= 16) return unpack_4_bits<16>(out, bytes, plane);
    if (plane >= 8) return unpack_4_bits<8>(out, bytes, plane);
  } else if (plane >= 8) {
    return plane >= 16 ? unpack_3_bits<16>(out, bytes, plane) : unpack_3_bits<8>(out, bytes, plane);
  }
  for (int64_t i = 0; i < width; ++i) out[i] = static_cast<int8_t>(packed_level(row, dtype, width, i));
}

}  // namespace HW_ISA
}  // namespace headwise
