// The formats in which decode reads keys and values: how two vectors of floats are made from 2 W elements of a row.
#pragma once

#include "kernels/decode/decode_int8-inl.h"

namespace headwise {
namespace HW_ISA {

// The most keys of a tile. The values of a tile are prefetched while its keys are multiplied, and the next keys while
// its values are multiplied, so both must fit into the L1 cache. In integer arithmetic a tile has a quarter of the
// bytes and more work for each of them; with matrix instructions it has half of the bytes and little work.
constexpr int kDecodeTile = 32, kHalfTile = 64, kInt8Tile = 128;

constexpr int kDecodeRows = W < 8 ? 4 : 8;  // the most rows

constexpr int64_t kSplitKeys = 1024;  // keys of an item, if a head has few rows

// True if keys and values are read in the order of memory: float32 only on AMD's CPUs, everything smaller on all.
template <class Read>
constexpr bool kInOrder = sizeof(typename Read::T) < 4 || kReadsInOrder;

// In this order, a tile has 16 KiB of keys or of values, because the work that is done once for a tile takes some 100
// cycles.
constexpr int64_t kTileBytes = 16 << 10;

// Returns the bits of a bfloat16 that is given as a float.
HW_INLINE uint16_t high_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

// Brings n floats into order, of which element i of a step is at place(i), together with the three behind it.
template <int64_t Step, class Place>
HW_INLINE void fours_in_order(float* HW_RESTRICT to, const float* HW_RESTRICT x, int64_t n, const Place& place) {
  for (int64_t d = 0; d < n; d += 4) {
    memcpy(to + d, x + d / Step * Step + place(static_cast<int>(d % Step)), 4 * sizeof(float));
  }
}

struct ReadF32 {
  using T = float;
  static constexpr bool kIntoL2 = false;   // lines are prefetched into the L2 cache, not the L1 cache
  static constexpr bool kPairs = false;    // values are multiplied as pairs of keys
  static constexpr bool kWords = false;    // int8 numbers are multiplied as words of 16 bits
  static constexpr bool kScaled = false;   // a token has a scale
  static constexpr int kDigits = 0;        // digits of a query in integer arithmetic; 0 for float arithmetic
  static constexpr bool kTiles = false;    // the item is computed by decode_split-inl.h
  static constexpr int64_t kStep = 2 * W;  // elements at a time
  static constexpr int kTile = kReadsInOrder ? kInt8Tile : kDecodeTile;
  HW_INLINE void load2(const float* p, F& a, F& b) {
    a = load(p);
    b = load(p + W);
  }
  // Brings elements of a row, a multiple of `kStep`, from the order in which `load2` returns them into their own.
  HW_INLINE void put_in_order(float* HW_RESTRICT to, const float* HW_RESTRICT x, int64_t n) {
    memcpy(to, x, static_cast<size_t>(n) * sizeof(float));
  }
  // Keys and queries, and their product.
  HW_INLINE void load_key(const float* p, F& a, F& b) { load2(p, a, b); }
  HW_INLINE void load_query(const float* q, int64_t i, F& a, F& b) {
    a = load(q + i);
    b = load(q + i + W);
  }
  HW_INLINE F times(F acc, F qa, F qb, F ka, F kb) { return fma(qb, kb, fma(qa, ka, acc)); }
  // The totals of W vectors of such sums. A vector of them as floats.
  HW_INLINE F total_each(const F* sums) { return reduce_each(sums); }
  HW_INLINE F floats_of(F sums) { return sums; }
  // Row r, of `padded` elements.
  HW_INLINE void store_query(float* HW_RESTRICT q, int64_t padded, int64_t r, const float* HW_RESTRICT x) {
    memcpy(q + r * padded, x, static_cast<size_t>(padded) * sizeof(float));
  }
};

struct ReadF16 : ReadF32 {
  using T = uint16_t;
  static constexpr int kTile = kInt8Tile;
  HW_INLINE void load2(const uint16_t* p, F& a, F& b) {
    a = load_f16(p);
    b = load_f16(p + W);
  }
  HW_INLINE void load_key(const uint16_t* p, F& a, F& b) { load2(p, a, b); }
};

// bfloat16 as floats: the even elements in one vector, the odd ones in the other.
struct ReadBf16 : ReadF32 {
  using T = uint16_t;
  static constexpr int kTile = ReadF16::kTile;
  HW_INLINE void load2(const uint16_t* p, F& a, F& b) { load_bf16_pairs(p, a, b); }
  HW_INLINE void put_in_order(float* HW_RESTRICT to, const float* HW_RESTRICT x, int64_t n) {
    for (; n > 0; n -= kStep, to += kStep, x += kStep) {
      for (int i = 0; i < W; ++i) {
        to[2 * i] = x[i];
        to[2 * i + 1] = x[W + i];
      }
    }
  }
  HW_INLINE void load_key(const uint16_t* p, F& a, F& b) { load2(p, a, b); }
  HW_INLINE void store_query(float* HW_RESTRICT q, int64_t padded, int64_t r, const float* HW_RESTRICT x) {
    for (int64_t d = 0; d < padded; d += kStep) {
      float* to = q + r * padded + d;
      for (int i = 0; i < W; ++i) {
        to[i] = x[d + 2 * i];
        to[W + i] = x[d + 2 * i + 1];
      }
    }
  }
};

// bfloat16 in pairs: only where `kHasBf16`.
struct ReadBf16Pairs : ReadBf16 {
  static constexpr bool kPairs = true;
  HW_INLINE void put_in_order(float* HW_RESTRICT to, const float* HW_RESTRICT x, int64_t n) {
    fours_in_order<kStep>(to, x, n, place_of_pair);
  }
  HW_INLINE void load_key(const uint16_t* p, F& a, F&) { a = load(reinterpret_cast<const float*>(p)); }
  HW_INLINE void load_query(const float* q, int64_t i, F& a, F&) {
    load_key(reinterpret_cast<const uint16_t*>(q) + i, a, a);
  }
  HW_INLINE F times(F acc, F qa, F, F ka, F) { return dot_pairs(acc, qa, ka); }
  // Two vectors of pairs of two rows of values. Pairs of the weights of n keys, in place; returns their unit.
  HW_INLINE void load_values(const uint16_t* first, const uint16_t* second, F& a, F& b) {
    load_pairs(first, second, a, b);
  }
  HW_INLINE float pair_weights(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += W) pair_neighbours(x + i);
    return 1.0f;
  }
  HW_INLINE void store_query(float* HW_RESTRICT q, int64_t padded, int64_t r, const float* HW_RESTRICT x) {
    for (int64_t d = 0; d < padded; ++d) reinterpret_cast<uint16_t*>(q)[r * padded + d] = high_half(x[d]);
  }
};

// bfloat16 in tiles of products: only if `kHasAmx`.
struct ReadBf16Tiles : ReadBf16 {
  static constexpr bool kTiles = true;
  static constexpr int kTile = kHalfTile;
};

struct ReadInt8 : ReadF32 {
  using T = int8_t;
  static constexpr bool kScaled = true;
  static constexpr int kTile = ReadF16::kTile;
  HW_INLINE void load2(const int8_t* p, F& a, F& b) {
    a = load_i8(p);
    b = load_i8(p + W);
  }
  HW_INLINE void load_key(const int8_t* p, F& a, F& b) { load2(p, a, b); }
};

constexpr int64_t kMaxWords = 1024;  // of a row, so that no sum of products overflows

// int8 in integer arithmetic as words: only where `kHasWords`. A query of two digits is a row of words. One of three
// digits is two rows: the upper two digits, and, `kDecodeRows` rows below, the lowest digit.
template <int Query>
struct ReadInt8Words : ReadInt8 {
  static constexpr bool kPairs = true, kWords = true;
  static constexpr int kDigits = Query, kWeightDigits = 2;
  using MoreDigits = ReadInt8Words<3>;
  HW_INLINE void put_in_order(float* HW_RESTRICT to, const float* HW_RESTRICT x, int64_t n) {
    fours_in_order<kStep>(to, x, n, place_of_word);
  }
  HW_INLINE void load_key(const int8_t* p, F& a, F&) { a = load_words(p); }
  HW_INLINE void load_query(const float* q, int64_t i, F& a, F&) {
    a = load(reinterpret_cast<const float*>(reinterpret_cast<const uint16_t*>(q) + i));
  }
  HW_INLINE F times(F acc, F qa, F, F ka, F) { return dot_words(acc, qa, ka); }
  HW_INLINE F total_each(const F* sums) { return total_of_words(sums); }
  HW_INLINE F floats_of(F sums) { return floats_of_words(sums); }
  HW_INLINE void load_values(const int8_t* first, const int8_t* second, F& a, F& b) {
    load_word_pairs(first, second, a, b);
  }
  HW_INLINE float pair_weights(float* x, int64_t n) {
    const WeightUnit unit(2, reduce_max(abs_max(x, n)));
    for (int64_t i = 0; i < n; i += W) store(x + i, pair_words(mul(load(x + i), set1(unit.inverse))));
    return unit.unit;
  }
  // Row r, times `factor`.
  HW_INLINE void store_digits(float* q, int64_t padded, int64_t r, const float* x, float factor) {
    uint16_t* to = reinterpret_cast<uint16_t*>(q) + r * padded;
    for (int64_t d = 0; d < padded; d += W) {
      F y = mul(load(x + d), set1(factor));
      if constexpr (Query == 3) {
        const F upper = round_to_int(mul(y, set1(0x1p-8f)));
        store_words(to + kDecodeRows * padded + d, fma(upper, set1(-256.0f), y));
        y = upper;
      }
      store_words(to + d, y);
    }
  }
};

// int8 in integer arithmetic: only where `kHasVnni`.
template <int Query, int Weight>
struct ReadInt8Dot : ReadInt8 {
  static constexpr int kDigits = Query, kWeightDigits = Weight;
  using MoreDigits = ReadInt8Dot<3, Weight>;  // for queries for which two digits are not enough
  static constexpr int64_t kStep = kBytes;
  HW_INLINE void put_in_order(float* HW_RESTRICT to, const float* HW_RESTRICT x, int64_t n) {
    fours_in_order<kStep>(to, x, n, place_of_column);
  }
};

// int8 in tiles of products, with queries and weights of bfloat16: only if `kHasAmx`.
template <int Query>
struct ReadInt8Tiles : ReadInt8 {
  static constexpr bool kTiles = true;
  static constexpr int kDigits = Query;
  using MoreDigits = ReadInt8Tiles<3>;
  static constexpr int64_t kStep = kBytes;
};

// True for int8 in integer arithmetic by dot products of bytes.
template <class Read>
constexpr bool kByteDots = Read::kDigits != 0 && !Read::kWords;

// Loads 2 W elements of a query that are multiplied by several keys. Unless they are opaque to the compiler, it loads
// them again for each product, and with vectors of 8 lanes the loads then take longer than the products.
template <class Read>
HW_INLINE void load_query_once(const float* q, int64_t i, F& a, F& b) {
  Read::load_query(q, i, a, b);
  keep_in_register(a);
  if constexpr (!Read::kPairs) keep_in_register(b);
}

// The same format, its lines prefetched into the L2 cache.
template <class Read>
struct IntoL2 : Read {
  static constexpr bool kIntoL2 = true;
};
template <int Query, int Weight>
struct IntoL2<ReadInt8Dot<Query, Weight>> : ReadInt8Dot<Query, Weight> {
  static constexpr bool kIntoL2 = true;
  using MoreDigits = IntoL2<ReadInt8Dot<3, Weight>>;
};

// The distance from the next tile to the prefetched lines, in bytes, if rows of this many bytes are contiguous.
template <class Read>
HW_INLINE int64_t lead(int64_t pitch, int64_t width) {
  return Read::kIntoL2 && pitch == width ? 2 << 10 : 0;
}

constexpr int64_t kMaxStep = kBytes;

// Keys of a tile, a power of two.
template <class Read>
HW_INLINE int keys_of_tile(const Call& p) {
  int keys = Read::kTile;
  if constexpr (kInOrder<Read> && !Read::kScaled) {
    const int64_t row = max(p.D, p.V) * static_cast<int64_t>(sizeof(typename Read::T));
    while (keys > kDecodeTile && keys * row > kTileBytes) keys /= 2;
  }
  return keys;
}

}  // namespace HW_ISA
}  // namespace headwise
