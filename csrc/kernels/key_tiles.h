// Scratch memory of a thread, and tiles of keys and values as the kernels take them.
#pragma once

#include "kernels/int8.h"
#include "kernels/micro.h"

namespace headwise {
namespace HW_ISA {

// Hands out aligned pieces of a thread's scratch; from null it only counts.
struct Arena {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t n) {
    T* piece = reinterpret_cast<T*>(base + used);
    used += round_up(n * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
};

// Rows of keys or values where a kernel can read them: the caller's own memory, or a clean copy.
struct RowsOf {
  const char* data = nullptr;
  int64_t stride = 0;  // elements of the number format from key to key
};

// The call as it looks to one tile of keys: where these lie in pages, with keys and values placed so that key j is found
// at j as everywhere else.
class Pages {
 public:
  explicit Pages(const Problem& p) : given_(p) {
    if (p.table != nullptr) memcpy(room_, &p, sizeof(Problem));
  }
  const Problem& turn(int64_t b, int64_t j) {
    if (given_.table == nullptr) return given_;
    const int64_t page = given_.table[b * given_.table_stride + j / given_.page];
    const auto place = [&](Tensor4& to, const Tensor4& from) {
      const int64_t elements = (page - b) * from.stride[0] - j / given_.page * given_.page * from.stride[2];
      to.data = static_cast<char*>(from.data) + elements * size_of(from.dtype);
    };
    Problem& here = *reinterpret_cast<Problem*>(room_);
    place(here.key, given_.key), place(here.value, given_.value);
    if (given_.bytes()) place(here.key_scale, given_.key_scale), place(here.value_scale, given_.value_scale);
    return here;
  }

 private:
  const Problem& given_;
  alignas(Problem) char room_[sizeof(Problem)];  // made only where there are pages
};

// Looks for NaN and Inf in the keys j0 <= j < j0 + n. What is bad is remembered, and read as 0 from a copy: rows that
// may attend it come out NaN, and the others are not touched by it.
struct BadKeys {
  bool any = false;
  bool is[kTile];

  void look(const Problem& p, int64_t b, int64_t kv_head, int64_t j0, int n) {
    if (p.bytes()) {  // an int8 is a number; a scale need not be
      any = false;
      for (int j = 0; j < n; ++j) {
        is[j] = !is_number(scale_at(p.key_scale, b, kv_head, j0 + j)) ||
                !is_number(scale_at(p.value_scale, b, kv_head, j0 + j));
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
};

// Elements from row to row of a copy. Rows a power of two apart would share a few lines of the first cache, and a
// micro-kernel that walks down a column of V would throw out what it needs next.
HW_INLINE int64_t pitch_of(int64_t width) {
  const int64_t padded = round_up(width, W);
  return padded % 64 == 0 ? padded + 16 : padded;
}

HW_INLINE bool collides(const Tensor4& x) { return x.stride[2] * size_of(x.dtype) % 1024 == 0; }

// Rows of x as floats: in place where that is wanted, they lie as floats and none is bad, else copied, `bad` ones as
// zeros.
static inline RowsOf float_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
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

#if HW_BF16
// Rows of keys as bfloat16 of even width, in place where they lie so.
static inline RowsOf half_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
                               const BadKeys& bad, uint16_t* copy) {
  if (x.stride[3] == 1 && width % 2 == 0 && !bad.any) return {at(x, b, kv_head, j0), x.stride[2]};
  const int64_t padded = round_up(width, 2);
  for (int j = 0; j < n; ++j) {
    const bool drop = bad.any && bad.is[j];
    copy_halves(copy + j * padded, at(x, b, kv_head, j0 + j), x.stride[3], drop ? 0 : width, padded);
  }
  return {reinterpret_cast<const char*>(copy), padded};
}

// Rows of values in pairs of keys: [key / 2][column], the even key in the low half. `spare` has two rows.
static inline RowsOf paired_rows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j0, int n, int64_t width,
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
#endif

// Marks the rows of a block that hold a NaN or Inf in x.
static inline void mark_bad(const Tensor4& x, int64_t b, Rows& rows, int64_t width) {
  for (int r = 0; r < rows.padded; ++r) {
    rows.bad[r] |= !row_is_finite(at(x, b, rows.h[r], rows.t[r]), x.dtype, x.stride[3], width);
  }
}

// X^T of a block's rows of x, W rows at a time copied side by side, then turned. Bad rows become zeros.
template <class N, int NV>
static inline void pack_turned(const Tensor4& x, int64_t b, const Rows& rows, int64_t width, typename N::Query* out,
                               char* spare) {
  constexpr int R = NV * W;
  const int64_t depth = N::depth(width), padded = round_up(depth, W);
  float* lanes = reinterpret_cast<float*>(spare);  // W rows of `padded` 32-bit elements
  for (int v = 0; v < NV; ++v) {
    for (int i = 0; i < W; ++i) {
      const int r = v * W + i;
      const char* row = at(x, b, rows.h[r], rows.t[r]);
      const int64_t kept = r >= rows.n || rows.bad[r] ? 0 : width;
      if constexpr (N::kPair == 2) {
        copy_halves(reinterpret_cast<uint16_t*>(lanes + i * padded), row, x.stride[3], kept, 2 * padded);
      } else {
        copy_floats(lanes + i * padded, row, x.dtype, x.stride[3], kept, padded);
      }
    }
    for (int64_t d = 0; d < depth; d += W) {
      F y[W];
      HW_UNROLL
      for (int i = 0; i < W; ++i) y[i] = load(lanes + i * padded + d);
      transpose(y);
      const int64_t last = least(W, depth - d);
      float* to = reinterpret_cast<float*>(out) + d * R + v * W;
      if (last == W) {
        HW_UNROLL
        for (int i = 0; i < W; ++i) store(to + i * R, y[i]);
      } else {
        for (int64_t i = 0; i < last; ++i) store(to + i * R, y[i]);
      }
    }
  }
}

template <class N, int NV>
static inline void pack_query(const Problem& p, int64_t b, Rows& rows, typename N::Query* out, char* spare) {
  mark_bad(p.query, b, rows, p.D);
  pack_turned<N, NV>(p.query, b, rows, p.D, out, spare);
}

}  // namespace HW_ISA
}  // namespace headwise
