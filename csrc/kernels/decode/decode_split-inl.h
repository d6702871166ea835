// Items of few rows by matrix instructions: queries, a pass over the keys, and results.
#pragma once

#include "kernels/decode/split_pass-inl.h"
#include "kernels/tile/epilogue-inl.h"

namespace headwise {
namespace HW_ISA {

// Writes the digits of row r of a query, of `padded` columns: [row][digit][column], with zeros for unused digits.
// Returns false if two digits are not enough.
template <class Read, int R>
HW_INLINE bool write_query_digits(SplitScratch& s, int r, float* line, int64_t padded) {
  constexpr int kWords = TileShape<Read, R>::kWords, kDigits = Read::kDigits;
  auto* digits = reinterpret_cast<int8_t*>(s.copy) + r * kWords * padded;
  bool fits;
  s.query_unit[r] = quantize_query<kDigits>(line, padded, true, fits, [&](float factor) HW_LAMBDA {
    for (int64_t d = 0; d < padded; d += W)
      store_each_digit<kDigits>(digits + d, padded, mul(load(line + d), set1(factor)));
  });
  if (kWords > kDigits) memset(digits + kDigits * padded, 0, static_cast<size_t>(padded));
  return fits || kDigits > 2;
}

// Packs rows of words as the columns of second factors: a line of 64 bytes for each word. What is behind its columns
// does not count. Lines without gaps would be shorter, but a tile load that crosses lines takes 10 ns in place of 2.
template <int Columns>
HW_INLINE void pack_columns(const char* const* row, int64_t bytes, uint32_t* to) {
  for (int64_t at = 0; at < bytes; at += kTileRow, to += kTileWords) {
    F x[Columns];
    HW_UNROLL
    for (int c = 0; c < Columns; ++c) x[c] = load(reinterpret_cast<const float*>(row[c] + at));
    interleave_words<Columns>(x);
    HW_UNROLL
    for (int c = 0; c < Columns; ++c) store_parts<Columns>(to + c * W * W / Columns, W, x[c]);
  }
}

// Moves the columns of a line's last step. The step starts earlier, so that it ends with the row, and the columns that
// it repeats are multiplied by 0.
template <class T>
HW_INLINE void place_last_step(T* line, int64_t D, int64_t step) {
  const int64_t last = (D - 1) / step * step, first = first_column(last / step, D, step);
  if (first == last) return;
  memmove(line + last + (last - first), line + last, static_cast<size_t>(D - last) * sizeof(T));
  memset(line + last, 0, static_cast<size_t>(last - first) * sizeof(T));
}

// Packs the queries of an item. Returns false if two digits are not enough.
template <class Read, int R>
static inline bool pack_split_query(const Call& p, int64_t b, SplitScratch& s) {
  using Shape = TileShape<Read, R>;
  const int64_t padded = round_up(p.D, Read::kStep);
  QueryRows& rows = *s.rows;
  const char* words[Shape::kParts * Shape::kColumns];  // what is packed
  for (int r = 0; r < R; ++r) {
    float* line = s.lines + r * padded;
    const char* row = at(p.query, b, rows.h[r], rows.t[r]);
    const bool is = r < rows.n && row_is_finite(row, p.query.dtype, p.query.stride[3], p.D);
    rows.query_bad[r] = r < rows.n && !is;
    if constexpr (Shape::kBytes) {
      copy_floats(line, row, p.query.dtype, p.query.stride[3], is ? p.D : 0, padded);
      place_last_step(line, p.D, Read::kStep);
      if (!write_query_digits<Read, R>(s, r, line, padded)) return false;
      for (int i = r * Shape::kWords; i < (r + 1) * Shape::kWords; ++i) words[i] = s.copy + i * padded;
    } else if (is && p.query.stride[3] == 1 && padded == p.D) {
      words[r] = row;
    } else {
      auto* copy = reinterpret_cast<uint16_t*>(line);
      copy_halves(copy, row, p.query.stride[3], is ? p.D : 0, padded);
      place_last_step(copy, p.D, Read::kStep);
      words[r] = reinterpret_cast<const char*>(copy);
    }
  }
  const int64_t bytes = padded * kSize<Read>;
  for (int part = 0; part < Shape::kParts; ++part) {
    pack_columns<Shape::kColumns>(words + part * Shape::kColumns, bytes, s.query + part * bytes / 4 * W);
  }
  return true;
}

// Runs an item of few rows.
template <class Read, int R>
static void run_decode_split(const Call& p, const Plan& plan, int64_t group, int64_t split, char* scratch,
                             const Items& items) {
  Arena arena{scratch};
  SplitScratch s(arena, p);
  const int64_t b = group / p.K, kv_head = group % p.K;
  QueryRows& rows = *s.rows;
  const int n = static_cast<int>(plan.rows);
  place_rows(p, b, kv_head, 0, n, R, rows);
  if (!pack_split_query<Read, R>(p, b, s)) {
    if constexpr (Read::kDigits == 2) {
      return run_decode_split<typename Read::MoreDigits, R>(p, plan, group, split, scratch, items);
    }
  }
  Reach all(p);
  all.add(rows);
  const Reach reach = all.within(split * plan.keys_per_split, (split + 1) * plan.keys_per_split);
  const NextItemKeys next_item_keys = {plan, all, items};
  if (!SplitPass<Read, R>(p, b, kv_head, reach, next_item_keys, false, s).run()) {
    SplitPass<Read, R>(p, b, kv_head, reach, next_item_keys, true, s).run();
  }
  const int64_t pitch = round_up(p.V, Read::kStep);
  for (int r = 0; r < n; ++r) {
    const RowState state = row_state(p, b, rows, r, s.row_max[r], s.row_sum[r], reach.from, reach.to);
    finish_row(p, plan, b, kv_head, r, split, rows.h[r], rows.t[r], state, s.lines + r * pitch);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
