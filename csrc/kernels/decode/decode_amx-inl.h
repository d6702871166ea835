// Decode's products by matrix instructions. Products by vector instructions would take longer than reading the keys and
// values; a matrix instruction takes one cycle for each line. Keys and values are not converted.
//
// A row of a tile has 64 bytes: 32 columns of bfloat16, or 64 of int8. Q K^T: 16 keys by a row's columns are a first
// factor, and words of neighbouring columns by rows of Q a second one. P V: 16 keys by a row's columns of V are a
// second factor, in which neighbours are columns and not keys. So a weight is paired with zeros: of two columns (w, 0)
// gives the sums of the first, and (0, w) those of the second. These rows, for all query rows and for both parts of a
// weight, fill a first factor of 16 rows. If they are more, bfloat16 has a factor for each part, whose products are
// added to the same sums. Of int8, only those for the first columns of a word are stored. Loaded from some bytes before
// their start, they are those for the next columns, because zeros stand behind each weight.
#pragma once

#include "kernels/tile/micro_amx-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kTileWords = W * W;
constexpr int64_t kTileRow = 64;               // bytes
constexpr int kKeys = 2, kQuery = 4;           // registers, of two and four
constexpr int kFirstWeights = 4, kValues = 6;  // of two each
constexpr int kSums = 4;                       // registers of sums, from 0 on

template <class Read>
constexpr int64_t kSize = sizeof(typename Read::T);  // of an element

// How R rows of the format `Read` fill tiles.
template <class Read, int R>
struct TileShape {
  static constexpr bool kBytes = Read::kScaled;
  static constexpr int kWords = !kBytes ? 1 : Read::kDigits == 2 ? 2 : 4;    // columns of a row of Q
  static constexpr int kParts = R * kWords > W ? 2 : 1, kRows = R / kParts;  // second factors of Q, their rows
  static constexpr int kColumns = kRows * kWords;
  // A word of values has `kInWord` columns. A first factor has the rows of both parts of the weights for `kPlaces` of
  // them, so values are multiplied by `kFactors` of them. In registers are `kAtOnce` factors by `kSteps` of columns.
  // Eight rows of bfloat16 have a factor for each part instead, `kTerms`, whose products are added to the same sums.
  static constexpr int kInWord = kBytes ? 4 : 2, kTerms = !kBytes && 2 * R * kInWord > W ? 2 : 1;
  static constexpr int kPlaces = 2 * R * kInWord <= W * kTerms ? kInWord : W / (2 * R);
  static constexpr int kFactors = kInWord / kPlaces, kAtOnce = kFactors < 2 ? 1 : 2, kSteps = kSums / kAtOnce;
};

// Keys or values of a tile: rows that are `stride` bytes apart, and those which are prefetched meanwhile, or null.
struct TileRows {
  const char* data;
  int64_t stride;
  int n;
  const char* next;
  int64_t next_stride;

  HW_INLINE TileRows behind(const TileRows& x, int64_t keys, int64_t bytes) {
    return {x.data + keys * x.stride + bytes, x.stride, x.n - static_cast<int>(keys),
            x.next == nullptr ? nullptr : offset(x.next, keys * x.next_stride + bytes), x.next_stride};
  }
};

// The first column of a step. The last step of a row ends with it, and so repeats columns of the step before it.
HW_INLINE int64_t first_column(int64_t step, int64_t width, int64_t columns) {
  return max(0, min(step * columns, width - columns));
}

// The first of the 16 keys that are multiplied for the keys from j on. The last ones of a tile are preceded by keys
// that are multiplied twice.
HW_INLINE int first_key(int j, int n) { return n < W || j + W <= n ? j : n - W; }

// Loads 16 rows into a register, and prefetches others.
template <int Tile>
HW_INLINE void load_rows(const TileRows& x) {
  tile_load<Tile>(x.data, x.stride);
  if (x.next == nullptr) return;
  HW_UNROLL
  for (int i = 0; i < W; ++i) HW_PREFETCH_NEAR(offset(x.next, i * x.next_stride));
}

template <class Read, int Sum, int First, int Second>
HW_INLINE void tile_times_of() {
  if constexpr (Read::kScaled) {
    tile_times_bytes<Sum, First, Second>();
  } else {
    tile_times<Sum, First, Second>();
  }
}

HW_INLINE void clear_sums() {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
}
HW_INLINE void load_sums(const float* from) {
  tile_load<0>(from, kTileRow);
  tile_load<1>(from + kTileWords, kTileRow);
  tile_load<2>(from + 2 * kTileWords, kTileRow);
  tile_load<3>(from + 3 * kTileWords, kTileRow);
}
HW_INLINE void store_sums(float* to) {
  tile_store<0>(to, kTileRow);
  tile_store<1>(to + kTileWords, kTileRow);
  tile_store<2>(to + 2 * kTileWords, kTileRow);
  tile_store<3>(to + 3 * kTileWords, kTileRow);
}

// Loads the first four steps of a second factor of Q.
HW_INLINE void load_query(const uint32_t* query, int64_t steps) {
  tile_load<kQuery>(query, kTileRow);
  if (steps > 1) tile_load<kQuery + 1>(query + kTileWords, kTileRow);
  if (steps > 2) tile_load<kQuery + 2>(query + 2 * kTileWords, kTileRow);
  if (steps > 3) tile_load<kQuery + 3>(query + 3 * kTileWords, kTileRow);
}

// Adds the U-th step of columns of 16 keys.
template <class Read, int Sum, int U>
HW_INLINE void add_step(const TileRows& keys, int64_t D) {
  load_rows<kKeys + U % 2>(TileRows::behind(keys, 0, first_column(U, D, Read::kStep) * kSize<Read>));
  tile_times_of<Read, Sum, kKeys + U % 2, kQuery + U>();
}

// The products of 16 keys, in a register.
template <class Read, int Sum>
HW_INLINE void multiply_16_keys(const uint32_t* query, int64_t D, int64_t steps, const TileRows& keys) {
  tile_zero<Sum>();
  add_step<Read, Sum, 0>(keys, D);
  if (steps > 1) add_step<Read, Sum, 1>(keys, D);
  if (steps > 2) add_step<Read, Sum, 2>(keys, D);
  if (steps > 3) add_step<Read, Sum, 3>(keys, D);
  for (int64_t step = 4; step < steps; ++step) {
    tile_load<kKeys + 1>(query + step * kTileWords, kTileRow);
    load_rows<kKeys>(TileRows::behind(keys, 0, first_column(step, D, Read::kStep) * kSize<Read>));
    tile_times_of<Read, Sum, kKeys, kKeys + 1>();
  }
}

// The products of n keys with `query`, whose first four steps are in registers: 16 keys by 16 columns at a time. Calls
// between(j) behind the products of the keys from j on.
template <class Read, class Between>
HW_INLINE void multiply_keys(const uint32_t* query, int64_t D, const TileRows& keys, float* sums,
                             const Between& between) {
  const int64_t steps = (D + Read::kStep - 1) / Read::kStep;
  const auto some = [&](int j) HW_LAMBDA { return TileRows::behind(keys, first_key(j, keys.n), 0); };
  // Two at a time, because a load whose address ends with the same 12 bits as that of a store waits for it.
  for (int j = 0; j < keys.n; j += 2 * W, sums += 2 * kTileWords) {
    const bool both = j + W < keys.n;
    multiply_16_keys<Read, 0>(query, D, steps, some(j));
    if (both) multiply_16_keys<Read, 1>(query, D, steps, some(j + W));
    tile_store<0>(sums, kTileRow);
    if (both) tile_store<1>(sums + kTileWords, kTileRow);
    between(j);
    if (both) between(j + W);
  }
}

// Loads a first factor of the weights of 16 keys: the one for the columns of a word from `Factor` times `Places` on.
template <class Read, int Tile, int Factor, int Places>
HW_INLINE void load_weights(const uint32_t* weights) {
  tile_load<Tile>(offset(weights, -Factor * Places * kSize<Read>), kTileRow);
}

// Adds the products of 16 keys' weights, in `Factors` first factors, with the G-th row of columns.
template <class Read, int Factors, int G>
HW_INLINE void add_columns(const TileRows& values) {
  load_rows<kValues + G % 2>(values);
  tile_times_of<Read, G * Factors, kFirstWeights, kValues + G % 2>();
  if constexpr (Factors > 1) tile_times_of<Read, G * Factors + 1, kFirstWeights + 1, kValues + G % 2>();
}

// Adds the products of the second terms with the G-th row of columns, which is in a register.
template <class Read, int G>
HW_INLINE void add_second_terms() {
  tile_times_of<Read, G, kFirstWeights + 1, kValues + G % 2>();
}

// Adds weights times values to the sums in the registers, for the steps first <= step < last of columns. Calls
// between(j) behind the products of the keys from j on.
template <class Read, class Shape, class Between>
HW_INLINE void multiply_values(const uint32_t* weights, const TileRows& values, int64_t V, int64_t first, int64_t last,
                               const Between& between) {
  constexpr int Factors = Shape::kAtOnce, Places = Shape::kPlaces;
  constexpr bool kTwoTerms = Shape::kTerms == 2;
  for (int j = 0; j < values.n; j += W, weights += Shape::kTerms * kTileWords) {
    load_weights<Read, kFirstWeights, 0, Places>(weights);
    if constexpr (kTwoTerms) load_weights<Read, kFirstWeights + 1, 0, Places>(weights + kTileWords);
    if constexpr (Factors > 1) load_weights<Read, kFirstWeights + 1, 1, Places>(weights);
    const auto columns = [&](int64_t step) HW_LAMBDA {
      return TileRows::behind(values, first_key(j, values.n), first_column(step, V, Read::kStep) * kSize<Read>);
    };
    add_columns<Read, Factors, 0>(columns(first));
    if (first + 1 < last) add_columns<Read, Factors, 1>(columns(first + 1));
    if constexpr (kTwoTerms) {
      add_second_terms<Read, 0>();
      if (first + 1 < last) add_second_terms<Read, 1>();
    }
    if constexpr (Factors == 1) {
      if (first + 2 < last) add_columns<Read, Factors, 2>(columns(first + 2));
      if (first + 3 < last) add_columns<Read, Factors, 3>(columns(first + 3));
      if constexpr (kTwoTerms) {
        if (first + 2 < last) add_second_terms<Read, 2>();
        if (first + 3 < last) add_second_terms<Read, 3>();
      }
    }
    between(j);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
