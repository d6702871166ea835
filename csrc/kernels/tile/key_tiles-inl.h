// The scratch memory of a thread, and the keys and values of a tile in the layout that the micro-kernels read.
#pragma once

#include "kernels/tile/int8_tiles-inl.h"

namespace headwise {
namespace HW_ISA {

// Cuts a thread's scratch memory into aligned arrays. With a null base it only counts bytes.
struct Arena {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t n) {
    T* array = reinterpret_cast<T*>(base + used);
    used += round_up(n * static_cast<int64_t>(sizeof(T)), 64);
    return array;
  }
};

// Rows of keys or values as a kernel reads them, in the caller's memory or in a copy.
struct KeyRows {
  const char* data = nullptr;
  int64_t stride = 0;  // from key to key, in elements of the number format
};

// The call for one tile of keys. If keys are in pages, the pointers of keys and values are moved so that key j of the
// tile is at index j, as it is without pages.
class PageTable {
 public:
  explicit PageTable(const Call& p) : call_(p) {
    if (p.table != nullptr) memcpy(moved_, &p, sizeof(Call));
  }
  const Call& tile(int64_t b, int64_t j) {
    if (call_.table == nullptr) return call_;
    const int64_t page = call_.table[b * call_.table_stride + j / call_.page];
    const auto move = [&](Tensor4& to, const Tensor4& from) {
      const int64_t elements = (page - b) * from.stride[0] - j / call_.page * call_.page * from.stride[2];
      to.data = static_cast<char*>(from.data) + elements * size_of(from.dtype);
    };
    Call& moved = *reinterpret_cast<Call*>(moved_);
    move(moved.key, call_.key);
    move(moved.value, call_.value);
    if (call_.bytes()) {
      move(moved.key_scale, call_.key_scale);
      move(moved.value_scale, call_.value_scale);
    }
    return moved;
  }

 private:
  const Call& call_;
  alignas(Call) char moved_[sizeof(Call)];  // a copy of the call, filled only if there are pages
};

// False if keys and values are so few that they are taken to be in the L2 cache, where prefetching them takes longer
// than it saves. Only if they have been read recently they are, but so few take no longer without prefetching.
HW_INLINE bool keys_are_far(const Call& p) {
  return p.B * p.K * p.S * (p.D + p.V) * size_of(p.key.dtype) > int64_t{2} << 20;
}

// The keys of a tile that have a NaN or Inf, in themselves or in their value. Kernels read them as zeros from a copy:
// rows that may attend one become NaN, and no other row changes.
struct BadKeys {
  bool any = false;
  bool is[kTile];

  // For the keys j0 <= j < j0 + n.
  void find(const Call& p, int64_t b, int64_t kv_head, int64_t j0, int n) {
    if (p.bytes()) {  // an int8 is finite, but its product with a scale need not be
      any = false;
      for (int j = 0; j < n; ++j) {
        is[j] = !token_is_finite(p.key, p.key_scale, b, kv_head, j0 + j, p.D) ||
                !token_is_finite(p.value, p.value_scale, b, kv_head, j0 + j, p.V);
        any |= is[j];
      }
      return;
    }
    any = !rows_are_finite(at(p.key, b, kv_head, j0), p.dtype(), p.key.stride[2], n, p.key.stride[3], p.D) ||
          !rows_are_finite(at(p.value, b, kv_head, j0), p.dtype(), p.value.stride[2], n, p.value.stride[3], p.V);
    if (!any) return;
    for (int j = 0; j < n; ++j) {
      is[j] = !row_is_finite(at(p.key, b, kv_head, j0 + j), p.dtype(), p.key.stride[3], p.D) ||
              !row_is_finite(at(p.value, b, kv_head, j0 + j), p.dtype(), p.value.stride[3], p.V);
    }
  }

  // The flags of the keys behind the first `skip`; null if no key is bad.
  const bool* from(int64_t skip) const { return any ? is + skip : nullptr; }
};

// The distance between rows of a copy, in elements. Rows that are a power of two apart share a few lines of the L1
// cache, so that a micro-kernel that walks down a column of V would evict the lines it needs next.
HW_INLINE int64_t pitch_of(int64_t width) {
  const int64_t padded = round_up(width, W);
  return padded % 64 == 0 ? padded + 16 : padded;
}

HW_INLINE bool collides(const Tensor4& x) { return x.stride[2] * size_of(x.dtype) % 1024 == 0; }

// Returns rows of x as floats: in place if `in_place` allows it, x is float32 and no key is bad; otherwise in a copy.
static inline KeyRows float_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                                 const BadKeys& bad, bool in_place, float* copy) {
  if (in_place && x.dtype == Dtype::f32 && x.stride[3] == 1 && !bad.any) return {at(x, b, kv_head, j0), x.stride[2]};
  const int64_t pitch = pitch_of(width);
  for (int j = 0; j < n; ++j) {
    const bool drop = bad.any && bad.is[j];
    copy_floats(copy + j * pitch, at(x, b, kv_head, j0 + j), x.dtype, x.stride[3], drop ? 0 : width,
                round_up(width, W));
  }
  return {reinterpret_cast<const char*>(copy), pitch};
}

// Returns rows of x as bfloat16 of even width: in place if they are contiguous, otherwise in a copy.
static inline KeyRows half_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                                const BadKeys& bad, uint16_t* copy) {
  if (x.stride[3] == 1 && width % 2 == 0 && !bad.any) return {at(x, b, kv_head, j0), x.stride[2]};
  const int64_t padded = round_up(width, 2);
  for (int j = 0; j < n; ++j) {
    const bool drop = bad.any && bad.is[j];
    copy_halves(copy + j * padded, at(x, b, kv_head, j0 + j), x.stride[3], drop ? 0 : width, padded);
  }
  return {reinterpret_cast<const char*>(copy), padded};
}

// Rows of x in pairs of keys: [key / 2][column], the even key in the low half. `spare` has room for two rows.
static inline KeyRows paired_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                                  const BadKeys& bad, uint32_t* copy, uint16_t* spare) {
  const int64_t padded = round_up(width, W), pitch = pitch_of(width);
  for (int j = 0; j < n; j += 2) {
    const uint16_t* row[2];
    for (int side = 0; side < 2; ++side) {
      const bool drop = j + side >= n || (bad.any && bad.is[j + side]);
      if (!drop && x.stride[3] == 1 && width % W == 0) {
        row[side] = reinterpret_cast<const uint16_t*>(at(x, b, kv_head, j0 + j + side));
        continue;
      }
      row[side] = spare + side * padded;
      copy_halves(spare + side * padded, drop ? nullptr : at(x, b, kv_head, j0 + j + side), x.stride[3],
                  drop ? 0 : width, padded);
    }
    for (int64_t d = 0; d < padded; d += W) interleave(copy + j / 2 * pitch + d, row[0] + d, row[1] + d);
  }
  return {reinterpret_cast<const char*>(copy), pitch};
}

// A tile of keys for all blocks of rows of an item.
struct KeyTile {
  int64_t j0;
  int n;
  KeyRows key, value;
  BadKeys bad;
  bool searched;                                             // true if bad keys were searched; otherwise none has shown
  const float *key_scale = nullptr, *value_scale = nullptr;  // only if `kScaled`
};

// Columns of x by keys, [column][key]. `spare` has room for W rows of floats.
static inline KeyRows key_columns(const Tensor4& x, int64_t b, int64_t kv_head, const KeyTile& tile, int64_t width,
                                  uint16_t* copy, uint16_t* spare) {
  const int64_t padded = round_up(width, W), pitch = column_pitch(tile.n);
  columns_of_keys(tile.n, width, pitch, copy, [&](int j, int place) -> const uint16_t* {
    if (tile.bad.any && tile.bad.is[j]) return nullptr;
    const char* row = at(x, b, kv_head, tile.j0 + j);
    if (x.stride[3] == 1) return reinterpret_cast<const uint16_t*>(row);
    copy_halves(spare + place * padded, row, x.stride[3], width, width);
    return spare + place * padded;
  });
  return {reinterpret_cast<const char*>(copy), pitch};
}

// The keys or values of a tile, a row each, in the format N.
template <class N>
static inline KeyRows tile_rows(const Tensor4& x, int64_t b, int64_t kv_head, const KeyTile& tile, int64_t width,
                                const BadKeys& bad, bool in_place, float* copy) {
  if constexpr (N::kPair == 2) {
    (void)in_place;
    return half_rows(x, b, kv_head, tile.j0, tile.n, width, bad, reinterpret_cast<uint16_t*>(copy));
  } else {
    return float_rows(x, b, kv_head, tile.j0, tile.n, width, bad, in_place, copy);
  }
}

// The same for a product that sums over keys: pairs of keys where N takes pairs.
template <class N>
static inline KeyRows tile_pairs(const Tensor4& x, int64_t b, int64_t kv_head, const KeyTile& tile, int64_t width,
                                 bool in_place, float* copy, char* spare) {
  if constexpr (N::kTiles) {
    return key_columns(x, b, kv_head, tile, width, reinterpret_cast<uint16_t*>(copy),
                       reinterpret_cast<uint16_t*>(spare));
  } else if constexpr (N::kPair == 2) {
    (void)in_place;
    return paired_rows(x, b, kv_head, tile.j0, tile.n, width, tile.bad, reinterpret_cast<uint32_t*>(copy),
                       reinterpret_cast<uint16_t*>(spare));
  } else {
    (void)spare;  // a row of less than a vector is padded
    return float_rows(x, b, kv_head, tile.j0, tile.n, width, tile.bad, in_place && width >= W, copy);
  }
}

// Marks the rows of a block that have a NaN or Inf in x.
static inline void mark_bad(const Tensor4& x, int64_t b, QueryRows& rows, int64_t width) {
  for (int r = 0; r < rows.padded; ++r) {
    rows.query_bad[r] |= !row_is_finite(at(x, b, rows.h[r], rows.t[r]), x.dtype, x.stride[3], width);
  }
}

// True if n pairs of bfloat16 have no NaN or Inf. Looks at all rows of a block at once, without a sum for each.
static inline bool pairs_are_finite(const uint32_t* pairs, int64_t n) {
  const uint32_t mask = exponent_of(Dtype::bf16);
  return is_finite(peak_of_row(no_peak(), reinterpret_cast<const uint16_t*>(pairs), 2 * n, mask), mask, false);
}

// Computes X^T of a block's rows of x, and returns whether all of it is finite. W rows at a time are transposed: rows
// of whole vectors from their place, others from a copy. Bad rows become zeros.
template <class N, int NV>
static inline bool pack_transposed(const Tensor4& x, int64_t b, const QueryRows& rows, int64_t width,
                                   typename N::Query* out, char* spare) {
  constexpr int R = NV * W;
  const int64_t depth = N::depth(width), padded = round_up(depth, W);
  const bool as_they_are = (N::kPair == 2 || x.dtype == Dtype::f32) && x.stride[3] == 1;
  const bool in_place = as_they_are && width % (N::kPair * W) == 0;
  float* lanes = reinterpret_cast<float*>(spare);  // W rows of `padded` elements of 32 bits
  F zeros = zero();                                // NaN in the lanes that had a float that is not finite
  for (int v = 0; v < NV; ++v) {
    char* place[W];
    const float* from[W];
    find_rows(x, b, rows, v * W, place);
    for (int i = 0; i < W; ++i) {
      const int r = v * W + i;
      const char* row = place[i];
      const int64_t copied = r >= rows.n || rows.query_bad[r] ? 0 : width;
      from[i] = in_place && copied > 0 ? reinterpret_cast<const float*>(row) : lanes + i * padded;
      if (in_place && copied > 0) continue;
      if constexpr (N::kPair == 2) {
        copy_halves(reinterpret_cast<uint16_t*>(lanes + i * padded), row, x.stride[3], copied, 2 * padded);
      } else {
        copy_floats(lanes + i * padded, row, x.dtype, x.stride[3], copied, padded);
      }
    }
    for (int64_t d = 0; d < depth; d += W) {
      F y[W];
      HW_UNROLL
      for (int i = 0; i < W; ++i) y[i] = load(from[i] + d);
      HW_UNROLL
      for (int i = 0; N::kPair == 1 && i < W; ++i) zeros = fma(y[i], zero(), zeros);
      transpose(y);
      float* to = reinterpret_cast<float*>(out) + d * R + v * W;
      const int64_t last = depth - d;
      if (last >= W) {  // by an index known only at run time, y would not stay in registers
        HW_UNROLL
        for (int i = 0; i < W; ++i) store(to + i * R, y[i]);
      } else {
        HW_UNROLL
        for (int i = 0; i < W - 1; ++i) {
          if (i < last) store(to + i * R, y[i]);
        }
      }
    }
  }
  if constexpr (N::kPair == 2) return pairs_are_finite(out, depth * R);
  float sums[W];
  store(sums, zeros);
  return floats_are_finite(sums, W);
}

// Packs queries. Rows are searched one by one only if the block has a NaN or Inf.
template <class N, int NV>
static inline void pack_query(const Call& p, int64_t b, QueryRows& rows, typename N::Query* out, char* spare) {
  if (pack_transposed<N, NV>(p.query, b, rows, p.D, out, spare)) return;
  mark_bad(p.query, b, rows, p.D);
  pack_transposed<N, NV>(p.query, b, rows, p.D, out, spare);
}

// W rows of X^T, [column][row] with `pitch` from column to column, back to rows of `padded` columns.
static inline void transpose_back(const float* columns, int64_t pitch, int64_t width, float* rows, int64_t padded) {
  for (int64_t d = 0; d < width; d += W) {
    F x[W];
    const float* from = columns + d * pitch;
    if (width - d >= W) {
      HW_UNROLL
      for (int i = 0; i < W; ++i) x[i] = load(from + i * pitch);
    } else {
      for (int i = 0; i < W; ++i) x[i] = d + i < width ? load(from + i * pitch) : zero();
    }
    transpose(x);
    HW_UNROLL
    for (int i = 0; i < W; ++i) store(rows + i * padded + d, x[i]);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
