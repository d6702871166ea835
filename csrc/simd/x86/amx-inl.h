// Products of tiles of bfloat16: AMX. Instruction sets without them include amx_none-inl.h.
//
// A tile register has 16 rows of 64 bytes. As sums it has 16 x 16 floats, as a first factor 16 rows of 32 numbers, and
// as a second factor 16 rows of pairs for 16 columns. The instructions are inline assembly, because g++'s intrinsics do
// not declare that they read memory.
#pragma once

namespace headwise {
namespace HW_ISA {

constexpr bool kHasAmx = true;

// The tile registers are in use during the lifetime of this object. Its destructor releases them, so that the system
// need not save them when it switches threads, and other code may configure them.
class TileUnit {
 public:
  TileUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, unused[14] = {0};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
  }
  ~TileUnit() { asm volatile("tilerelease" : : : "memory"); }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;
};

template <int Tile>
HW_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
// Rows of a tile are `bytes` apart.
template <int Tile>
HW_INLINE void tile_load(const void* p, int64_t bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(bytes), "i"(Tile) : "memory");
}
// The same for data that is not read again soon: it does not push other data out of the L1 cache.
template <int Tile>
HW_INLINE void tile_load_once(const void* p, int64_t bytes) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(bytes), "i"(Tile) : "memory");
}
template <int Tile>
HW_INLINE void tile_store(void* p, int64_t bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(bytes), "i"(Tile) : "memory");
}
// Sum += First Second, in float32. Denormals count as 0. The products of a step are summed on their own first.
template <int Sum, int First, int Second>
HW_INLINE void tile_times() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(First), "i"(Second));
}
// The same for signed bytes, four instead of two in a word, in int32.
template <int Sum, int First, int Second>
HW_INLINE void tile_times_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(First), "i"(Second));
}

// n <= 2 W numbers of 16 bits, then zeros. Behind the n-th nothing is read.
HW_INLINE F load_halves(const uint16_t* p, int64_t n) {
  const __mmask32 some = static_cast<__mmask32>((uint64_t{1} << n) - 1);
  return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(some, p));
}
// Turns pairs of columns, one in each lane of two keys, into pairs of the two keys: for the first columns, and for the
// second ones.
HW_INLINE void exchange_halves(F& first, F& second) {
  const __m512i a = _mm512_castps_si512(first), b = _mm512_castps_si512(second);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  first = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(high, _mm512_slli_epi32(b, 16), a, 0xCA));
  second = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(high, b, _mm512_srli_epi32(a, 16), 0xCA));
}
// Four columns of 16 x 16 sums: lane i of column c is x[i][c].
HW_INLINE void columns_of_sums(const float* x, F* column) {
  F z[4];  // in lane l, 128 bits each: row 4 l + i
  HW_UNROLL
  for (int i = 0; i < 4; ++i) {
    z[i] = _mm512_castps128_ps512(_mm_loadu_ps(x + i * W));
    z[i] = _mm512_insertf32x4(z[i], _mm_loadu_ps(x + (i + 4) * W), 1);
    z[i] = _mm512_insertf32x4(z[i], _mm_loadu_ps(x + (i + 8) * W), 2);
    z[i] = _mm512_insertf32x4(z[i], _mm_loadu_ps(x + (i + 12) * W), 3);
  }
  const auto pairs = [](F a, F b, bool high) HW_LAMBDA {
    return _mm512_castps_pd(high ? _mm512_unpackhi_ps(a, b) : _mm512_unpacklo_ps(a, b));
  };
  const __m512d a = pairs(z[0], z[1], false), b = pairs(z[2], z[3], false);
  const __m512d c = pairs(z[0], z[1], true), d = pairs(z[2], z[3], true);
  column[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
  column[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  column[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
  column[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
}
// Stores weights as sums of two bfloat16 numbers, each paired with 0: (first, 0), (0, first), and the same of the
// second number. These four vectors are `pitch` words apart.
HW_INLINE void split_weights(F weights, uint32_t* to, int64_t pitch) {
  const __m512i up = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  HW_UNROLL
  for (int part = 0; part < 2; ++part, to += 2 * pitch) {
    const __m512i rounded = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(weights), up), high);
    _mm512_storeu_si512(to, _mm512_srli_epi32(rounded, 16));
    _mm512_storeu_si512(to + pitch, rounded);
    weights = _mm512_sub_ps(weights, _mm512_castsi512_ps(rounded));
  }
}
// The same for integers below 2^15 in two digits from -128 to 127, the high one first: the c-th of `Places` vectors
// gets the digit as byte c of a word.
template <int Places>
HW_INLINE void split_digits(F x, uint32_t* to, int64_t pitch) {
  const __m512i all = _mm512_cvtps_epi32(x), up = _mm512_add_epi32(all, _mm512_set1_epi32(0x80));
  const __m512i byte = _mm512_set1_epi32(0xff),
                digits[2] = {_mm512_and_si512(_mm512_srli_epi32(up, 8), byte), _mm512_and_si512(all, byte)};
  HW_UNROLL
  for (int i = 0; i < 2 * Places; ++i) {
    _mm512_storeu_si512(to + i * pitch, _mm512_slli_epi32(digits[i / Places], static_cast<unsigned>(i % Places * 8)));
  }
}
// Rounds floats below 127.5 * 256^(Digits - 1) in magnitude to integers and stores their digits in base 256, from -128
// to 127: the lowest ones first, the others `pitch` bytes apart.
template <int Digits>
HW_INLINE void store_each_digit(int8_t* to, int64_t pitch, F x) {
  const __m512i middle = _mm512_set1_epi32(Digits == 2 ? 0x8080 : 0x808080);
  const __m512i digits = _mm512_xor_si512(_mm512_add_epi32(_mm512_cvtps_epi32(x), middle), middle);
  HW_UNROLL
  for (int i = 0; i < Digits; ++i) {
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_srli_epi32(digits, static_cast<unsigned>(8 * i)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * pitch), bytes);
  }
}
// int32 in the lanes as floats.
HW_INLINE F floats_of_ints(F x) { return _mm512_cvtepi32_ps(_mm512_castps_si512(x)); }
// Interleaves N vectors, a power of two: word i of vector r becomes word N i + r of all.
template <int N>
HW_INLINE void interleave_words(F* x) {
  if constexpr (N > 1) {
    F even[N / 2], odd[N / 2];
    HW_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      even[i] = x[2 * i];
      odd[i] = x[2 * i + 1];
    }
    interleave_words<N / 2>(even);
    interleave_words<N / 2>(odd);
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    HW_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      x[2 * i] = _mm512_permutex2var_ps(even[i], low, odd[i]);
      x[2 * i + 1] = _mm512_permutex2var_ps(even[i], high, odd[i]);
    }
  }
}
// Stores parts of N words, a power of two from 2 on, that are `pitch` words apart.
template <int N>
HW_INLINE void store_parts(uint32_t* to, int64_t pitch, F x) {
  if constexpr (N == W) {
    _mm512_storeu_ps(to, x);
  } else if constexpr (N == W / 2) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to), _mm512_castps512_ps256(x));
    _mm256_storeu_ps(reinterpret_cast<float*>(to + pitch), _mm512_extractf32x8_ps(x, 1));
  } else {
    const __m128 lanes[4] = {_mm512_castps512_ps128(x), _mm512_extractf32x4_ps(x, 1), _mm512_extractf32x4_ps(x, 2),
                             _mm512_extractf32x4_ps(x, 3)};
    HW_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (N == 4) {
        _mm_storeu_ps(reinterpret_cast<float*>(to + i * pitch), lanes[i]);
      } else {
        _mm_storel_pi(reinterpret_cast<__m64*>(to + 2 * i * pitch), lanes[i]);
        _mm_storeh_pi(reinterpret_cast<__m64*>(to + (2 * i + 1) * pitch), lanes[i]);
      }
    }
  }
}
// Two vectors rounded to bfloat16, to nearest even, the first in the low half; denormals become 0.
HW_INLINE F round_two(F first, F second) { return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(second, first)); }
HW_INLINE void store_two_rows(uint16_t* first, uint16_t* second, F two) {
  const __m512i x = _mm512_castps_si512(two);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm512_castsi512_si256(x));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), _mm512_extracti64x4_epi64(x, 1));
}
// Their pairs, one a lane.
HW_INLINE F pairs_of_two(F two) {
  const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i order =
      _mm512_add_epi32(_mm512_set1_epi32(0x00100000), _mm512_mullo_epi32(low, _mm512_set1_epi32(0x10001)));
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, _mm512_castps_si512(two)));
}

}  // namespace HW_ISA
}  // namespace headwise
