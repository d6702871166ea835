// Decode, and every other call of few rows. Lanes run along the head dim, and each key and value is read once, in
// place, for all rows. The speed is that of memory, so NaN and Inf are not searched in advance. They show in the scores
// or the sums, and the item is then computed again from clean copies.
#pragma once

#include "kernels/decode/decode_split-inl.h"

namespace headwise {
namespace HW_ISA {

// Prefetches the first keys of an item. Later keys are prefetched while the tile before them is computed.
static inline void prefetch_first(const Call& p, int64_t b, int64_t kv_head, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j) {
    const auto* row = reinterpret_cast<const int8_t*>(at(p.key, b, kv_head, j));
    for (int64_t d = 0; d < row_elements(p.key.dtype, p.D); d += kBytes) prefetch_here(row + d);
  }
}

// Computes one pass over the keys of an item. Returns false if it finds a NaN or Inf and `careful` is not set.
template <class Read, int R>
static inline bool decode_pass(const Call& call, int64_t b, int64_t kv_head, const Reach& reach,
                               const NextItemKeys& next_item_keys, bool careful, DecodeScratch& s) {
  const int64_t padded_D = round_up(call.D, Read::kStep), padded_V = round_up(call.V, Read::kStep);
  const float c = softmax_scale(call) * kLog2e;
  memset(s.sums, 0, static_cast<size_t>(R * padded_V) * sizeof(float));
  for (int r = 0; r < R; ++r) {
    s.row_max[r] = -kInf;
    s.row_sum[r] = 0.0f;
  }
  BadKeys bad;
  PageTable pages(call), next_pages(call);
  [[maybe_unused]] float scales[Read::kTile];
  if (kByteDots<Read> && reach.from < reach.to) {
    prefetch_first(pages.tile(b, reach.from), b, kv_head, reach.from, min(reach.from + Read::kTile, reach.to));
  }
  bool finite = true;
  [[maybe_unused]] Prefetcher<Read> prefetcher;
  walk_tiles<1>(reach, keys_of_tile<Read>(call), [&](int64_t j0, int n) {
    const KeySpan span = {j0, n, tile_kind(call, b, *s.rows, j0, j0 + n)};
    if (span.kind == TileKind::empty || !finite) return;
    const Call& p = pages.tile(b, j0);
    if (careful) bad.find(p, b, kv_head, j0, n);
    const KeyRows key = decode_rows(p.key, b, kv_head, j0, n, p.D, bad, s.key_copy, Read::kStep);
    const NextItemKeys::Place here = {b, kv_head, j0 + n};
    const NextItemKeys::Place next = here.j < reach.to ? here : next_item_keys.first(call, {b, kv_head, j0});
    const Call& then = next_pages.tile(next.b, next.j);
    [[maybe_unused]] const typename Prefetcher<Read>::Tile next_tile(then.key, next.b, next.kv_head, next.j, p.D);
    if constexpr (Read::kScaled) {
      load_key_scales(p.key_scale, b, kv_head, j0, n, bad.from(0), scales);
      finite = careful || scales_are_safe(scales, n);
      if (!finite) return;
    }
    const int64_t padded_n = round_up(n, W);
    const Cells cells = {padded_n, R, Read::kTile};
    tile_scores<ScoreLayout<Read::kTile, 1>>(p, b, *s.rows, span, bad.from(0), s.scores, cells, nullptr, [&] {
      if constexpr (kByteDots<Read>) {
        decode_products_int8<Read, R>(s, padded_D, p.D, key, n, scales, next_rows<Read>(p.value, b, kv_head, j0, p.V));
      } else {
        prefetcher.target({p.value, b, kv_head, j0, p.V}, next_tile);
        decode_products<Read, R>(s, padded_D, key, n, prefetcher);
        if constexpr (Read::kWords) {
          finish_words<Read, R>(s, padded_D, key, n, scales);
        } else if constexpr (Read::kScaled) {
          scale_keys<R, Read::kTile>(s.scores, scales, n);
        }
      }
      finite = careful || scores_are_finite<Read::kTile>(s.scores, R, n);
    });
    if (!finite) return;
    softmax_rows<R, Read::kTile>(s.scores, n, c, s.row_max, s.row_sum, s.rescale);
    if (p.dropout > 0.0f) drop_tile<Read::kTile, 1>(p, b, *s.rows, j0, n, s.scores);
    if constexpr (Read::kScaled) {
      load_key_scales(p.value_scale, b, kv_head, j0, n, bad.from(0), scales);
      finite = careful || scales_are_safe(scales, n);
      if (!finite) return;
      scale_keys<R, Read::kTile>(s.scores, scales, n);
    }
    const KeyRows value = decode_rows(p.value, b, kv_head, j0, n, p.V, bad, s.value_copy, Read::kStep);
    if constexpr (Read::kDigits != 0) {  // digits cannot represent NaN
      finite = careful || scores_are_finite<Read::kTile>(s.scores, R, n);
      if (!finite) return;
    }
    if constexpr (kByteDots<Read>) {
      const NextRows next_keys = next_rows<Read>(then.key, next.b, next.kv_head, next.j, p.D);
      decode_values_int8<Read, R>(s, n, value, p.V, padded_V, next_keys);
    } else {
      if constexpr (Read::kPairs) {
        for (int r = 0; r < R; ++r) {
          s.weight_unit[r] = Read::pair_weights(s.scores + r * Read::kTile, padded_n);
        }
      }
      prefetcher.target(next_tile, {then.value, next.b, next.kv_head, next.j, p.V});
      decode_values<Read, R>(s, n, value, padded_V, prefetcher);
    }
  });
  return finite && (careful || floats_are_finite(s.sums, R * padded_V));
}

template <class Read, int R>
static void run_decode(const Call& p, const Plan& plan, int64_t group, int64_t split, char* scratch,
                       const Items& items) {
  Arena arena{scratch};
  DecodeScratch s(arena, p);
  const int64_t b = group / p.K, kv_head = group % p.K;
  const int64_t padded_D = round_up(p.D, Read::kStep), padded_V = round_up(p.V, Read::kStep);
  QueryRows& rows = *s.rows;
  const int n = static_cast<int>(plan.rows);
  place_rows(p, b, kv_head, 0, n, R, rows);
  if constexpr (kByteDots<Read>) {
    memset(s.query_digits, 0, static_cast<size_t>(R * padded_D * kQueryBytes<Read::kDigits>));
  } else {
    memset(s.query, 0, static_cast<size_t>((Read::kWords ? kDecodeRows : R) * padded_D) * sizeof(float));
  }
  for (int r = 0; r < n; ++r) {
    const char* row = at(p.query, b, rows.h[r], rows.t[r]);
    rows.query_bad[r] = !row_is_finite(row, p.query.dtype, p.query.stride[3], p.D);
    if (rows.query_bad[r]) continue;
    copy_floats(s.line, row, p.query.dtype, p.query.stride[3], p.D, padded_D);
    if constexpr (Read::kDigits != 0) {
      bool fits;
      auto* digits = reinterpret_cast<int8_t*>(s.query);
      const auto write = [&](float factor) {
        if constexpr (Read::kWords) {
          Read::store_digits(s.query, padded_D, r, s.line, factor);
        } else {
          write_digits<Read::kDigits>(digits, s.query_bias + r * 4, s.line, padded_D, factor);
        }
      };
      s.query_unit[r] = quantize_query<Read::kDigits>(s.line, padded_D, Read::kWeightDigits == 2, fits, write);
      if constexpr (!Read::kWords) {
        constexpr int Some = kQueriesAtOnce<R>;
        int8_t* place = s.query_digits + r / Some * Some * padded_D * kQueryBytes<Read::kDigits> +
                        r % Some * kBytes * Read::kDigits;
        spread_digits<Read::kDigits, Some>(place, digits, padded_D);
      }
      if constexpr (Read::kDigits == 2) {
        if (!fits) return run_decode<typename Read::MoreDigits, R>(p, plan, group, split, scratch, items);
      }
    } else {
      Read::store_query(s.query, padded_D, r, s.line);
    }
  }
  Reach all(p);
  all.add(rows);
  const Reach reach = all.within(split * plan.keys_per_split, (split + 1) * plan.keys_per_split);
  const NextItemKeys next_item_keys = {plan, all, items};
  if (!decode_pass<Read, R>(p, b, kv_head, reach, next_item_keys, false, s)) {
    decode_pass<Read, R>(p, b, kv_head, reach, next_item_keys, true, s);
  }
  for (int r = 0; r < n; ++r) {
    Read::put_in_order(s.line, s.sums + r * padded_V, padded_V);
    const RowState state = row_state(p, b, rows, r, s.row_max[r], s.row_sum[r], reach.from, reach.to);
    finish_row(p, plan, b, kv_head, r, split, rows.h[r], rows.t[r], state, s.line);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
