// Prefill, and every other call of many rows. Blocks of NV vectors of rows are computed by the transposed
// micro-kernels. Several blocks share each tile of keys.
#pragma once

#include "kernels/tile/dropout-inl.h"
#include "kernels/tile/epilogue-inl.h"
#include "kernels/tile/tile_scores-inl.h"
#include "kernels/tile/tile_softmax-inl.h"

namespace headwise {
namespace HW_ISA {

// A thread's scratch memory for an item.
template <class N>
struct PrefillScratch {
  typename N::Query* query[kMaxBlocks];
  float* sums[kMaxBlocks];   // O[row][column] in whole vectors of columns, or O^T[column][row] where `kTiles`
  bool started[kMaxBlocks];  // whether there are sums
  float *row_max, *row_sum;  // [block][row]
  float* rescale;            // [row]
  float* scores;             // [key][row], then weights
  float *key_copy, *value_copy;
  float *key_scale, *value_scale;  // [key], where `kScaled`
  char* spare;
  float* out_rows;  // W rows of O
  QueryRows* rows;
  bool shared;  // several blocks use a tile, so that copying it pays off

  PrefillScratch(Arena& arena, const Call& p, int blocks) {
    const int64_t depth = N::depth(p.D), padded_V = round_up(p.V, W);
    for (int i = 0; i < blocks; ++i) {
      query[i] = arena.take<typename N::Query>(depth * kRows);
      sums[i] = arena.take<float>(padded_V * kRows);
      started[i] = false;
    }
    row_max = arena.take<float>(kMaxBlocks * kRows);
    row_sum = arena.take<float>(kMaxBlocks * kRows);
    rescale = arena.take<float>(kRows);
    scores = arena.take<float>(kTile * kRows);
    key_copy = arena.take<float>(kTile * pitch_of(p.D));
    value_copy = arena.take<float>(kTile * pitch_of(p.V));
    key_scale = arena.take<float>(kTile);
    value_scale = arena.take<float>(kTile);
    spare = reinterpret_cast<char*>(arena.take<float>(max(W * round_up(p.D, W), W * padded_V)));
    out_rows = arena.take<float>(W * padded_V);
    rows = arena.take<QueryRows>(kMaxBlocks);
    shared = blocks > 1;
  }
  // The sums of a block, to which the next tile is added.
  ValueSums next_sums(int block) {
    const bool first = !started[block];
    started[block] = true;
    return {sums[block], rescale, first};
  }
  // Clears the sums of a block that no tile was added to.
  void finish_sums(int block, int64_t V) {
    if (!started[block]) memset(sums[block], 0, static_cast<size_t>(round_up(V, W) * kRows) * sizeof(float));
  }
};

// Loads int8 keys and values as bfloat16, and their scales; the scales of bad keys are 0.
template <class N>
static inline void load_byte_tile(const Call& p, int64_t b, int64_t kv_head, PrefillScratch<N>& s, KeyTile& tile) {
  const int64_t j0 = tile.j0, pitch = N::kTiles ? column_pitch(tile.n) : pitch_of(p.V);
  uint16_t* keys = reinterpret_cast<uint16_t*>(s.key_copy);
  tile.key = {reinterpret_cast<const char*>(keys), bytes_to_rows(p.key, b, kv_head, j0, tile.n, p.D, keys, s.spare)};
  if constexpr (N::kTiles) {
    bytes_to_columns(p.value, b, kv_head, j0, tile.n, p.V, pitch, reinterpret_cast<uint16_t*>(s.value_copy), s.spare);
  } else {
    bytes_to_pairs(p.value, b, kv_head, j0, tile.n, p.V, reinterpret_cast<uint32_t*>(s.value_copy), pitch, s.spare);
  }
  tile.value = {reinterpret_cast<const char*>(s.value_copy), pitch};
  load_key_scales(p.key_scale, b, kv_head, j0, tile.n, tile.bad.from(0), s.key_scale);
  load_key_scales(p.value_scale, b, kv_head, j0, tile.n, tile.bad.from(0), s.value_scale);
  tile.key_scale = s.key_scale;
  tile.value_scale = s.value_scale;
}

template <class N>
static inline void read_tile(const Call& p, int64_t b, int64_t kv_head, PrefillScratch<N>& s, KeyTile& tile) {
  const int64_t j0 = tile.j0;
  const int n = tile.n;
  if constexpr (kScaled<N>) {
    load_byte_tile(p, b, kv_head, s, tile);
    return;
  }
  tile.key = tile_rows<N>(p.key, b, kv_head, tile, p.D, tile.bad, true, s.key_copy);
  tile.value = tile_pairs<N>(p.value, b, kv_head, tile, p.V, !(s.shared && collides(p.value)), s.value_copy, s.spare);
  if (p.bytes()) {
    scale_rows(s.key_copy, pitch_of(p.D), p.key_scale, b, kv_head, j0, n, p.D);
    scale_rows(s.value_copy, pitch_of(p.V), p.value_scale, b, kv_head, j0, n, p.V);
  }
}

// Loads a tile. Only if `careful`, it is searched for NaN and Inf, because that reads all of it once more.
template <class N>
static inline void load_tile(const Call& p, int64_t b, int64_t kv_head, int64_t j0, int n, bool careful,
                             PrefillScratch<N>& s, KeyTile& tile) {
  tile.j0 = j0;
  tile.n = n;
  tile.bad.any = false;
  tile.searched = careful || p.bytes();
  if (tile.searched) tile.bad.find(p, b, kv_head, j0, n);
  read_tile<N>(p, b, kv_head, s, tile);
}

// Reads a tile whose scores are not finite again, with zeros for bad keys. Returns false if no key is bad.
template <class N>
static inline bool search_tile(const Call& p, int64_t b, int64_t kv_head, PrefillScratch<N>& s, KeyTile& tile) {
  if (tile.searched) return false;
  tile.searched = true;
  tile.bad.find(p, b, kv_head, tile.j0, tile.n);
  if (tile.bad.any) read_tile<N>(p, b, kv_head, s, tile);
  return tile.bad.any;
}

// Fills `ends` with the ends of a span's keys for each vector of rows, according to the bounds alone. Returns null if
// no vector's keys end before those of the block. The scores that are left out are -inf, because the bounds forbid
// them.
template <int NV>
static inline const VectorEnds* find_ends(const QueryRows& rows, const KeySpan& span, VectorEnds& ends) {
  if (NV == 1 || span.kind != TileKind::mixed) return nullptr;
  int64_t hi = 0;
  for (int v = 0; v < NV; ++v) {
    for (int r = v * W; r < (v + 1) * W; ++r) hi = max(hi, rows.hi[r]);
    ends.end[v] = max(min(hi - span.j0, span.n), 0);
  }
  return ends.end[0] < span.n ? &ends : nullptr;
}

// Computes the scores of a block of rows, as the softmax takes them. If they are not finite, search() looks for bad
// keys and returns whether the tile has changed. Returns the greatest score of each group of keys, or null if more than
// products was applied to the scores.
template <class N, int NV, class Search>
static inline const float* searched_scores(const Call& p, int64_t b, const KeyTile& tile, const KeySpan& span,
                                           const typename N::Query* query, QueryRows& rows, float* x,
                                           ScoreMaxima& maxima, const VectorEnds* ends, const Search& search) {
  block_scores<N, NV>(p, b, tile, span, query, rows, true, x, nullptr, kPiece, &maxima, ends);
  if (!maxima.finite() && search()) {
    maxima = ScoreMaxima(maxima.next);
    block_scores<N, NV>(p, b, tile, span, query, rows, true, x, nullptr, kPiece, &maxima, ends);
  }
  if (scales_first(p) || kScaled<N> || (span.kind == TileKind::mixed && !only_bounds(p))) return nullptr;
  if (span.kind == TileKind::mixed) {  // on the diagonal the mask has changed the scores of a few keys
    const MaskedKeys masked(rows, span.j0, span.n);
    maxima.template update<NV>(x, 0, masked.to_first, span.n);
    maxima.template update<NV>(x, masked.from_last, span.n, span.n);
  }
  return maxima.top;
}

// Sets `finite` to false if the sums of a block's last row (where `kTiles`, of its last W rows) are not finite. If a
// value has a NaN or Inf, no row that reads it has finite sums, because a weight of 0 times NaN is NaN, and the last
// row reads all values that the block reads.
template <class N, int NV, int Vector = NV - 1>
static inline void check_sums(const float* sums, int64_t V, bool& finite) {
  if constexpr (!N::kTiles) {
    const int64_t padded = round_up(V, W);
    finite &= floats_are_finite(sums + (NV * W - 1) * padded, padded);
    return;
  }
  F sum[4] = {zero(), zero(), zero(), zero()};  // a single one would wait for each addition
  int64_t d = 0;
  for (; d + 4 <= V; d += 4) {
    HW_UNROLL
    for (int i = 0; i < 4; ++i) sum[i] = add(sum[i], load(sums + ((d + i) * NV + Vector) * W));
  }
  for (; d < V; ++d) sum[0] = add(sum[0], load(sums + (d * NV + Vector) * W));
  float of_rows[W];
  store(of_rows, add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  finite &= floats_are_finite(of_rows, W);
}

// Whether the rows of queries, keys and values are read once, in the order of memory, before they are used. It saves
// short items the time of waiting for them, where the CPU prefetches only such reads.
HW_INLINE bool reads_rows_first(const Call& p) {
  const bool contiguous = p.query.stride[3] == 1 && p.key.stride[3] == 1 && p.value.stride[3] == 1;
  return kReadsInOrder && p.S <= kTile && p.table == nullptr && !p.bytes() && contiguous && keys_are_far(p);
}

// Inlined, because a CPU follows the reads of each instruction by itself.
HW_INLINE void read_rows(const Tensor4& x, int64_t b, int64_t head, int64_t from, int64_t to, int64_t width) {
  const int64_t bytes = width * size_of(x.dtype);
  for (int64_t i = from; i < to; ++i) {
    const char* row = at(x, b, head, i);
    for (int64_t line = 0; line < bytes; line += 64) static_cast<void>(*static_cast<const volatile char*>(row + line));
  }
}

// Prefetches the memory of a block's results. A short item would end by waiting for it.
static inline void prefetch_results(const Call& p, int64_t b, const QueryRows& rows) {
  const int64_t bytes = p.V * size_of(p.out.dtype);
  for (int r = 0; r < rows.n; r += W) {
    char* row[W];
    find_rows(p.out, b, rows, r, row);
    for (int i = 0; i < min(W, rows.n - r); ++i) {
      for (int64_t line = 0; line < bytes; line += 64) HW_PREFETCH_TO_WRITE(row[i] + line);
    }
  }
}

// Places the rows of a block and packs its queries.
template <class N>
static inline void start_block(const Call& p, int64_t b, int64_t kv_head, int64_t first, int n, int block,
                               PrefillScratch<N>& s) {
  place_rows(p, b, kv_head, first, n, static_cast<int>(round_up(n, W)), s.rows[block]);
  HW_BY_VECTORS(n, pack_query, p, b, s.rows[block], s.query[block], s.spare);
  for (int r = block * kRows; r < block * kRows + s.rows[block].padded; ++r) {
    s.row_max[r] = -kInf;
    s.row_sum[r] = 0.0f;
  }
  if (p.S <= kTile) prefetch_results(p, b, s.rows[block]);
}

// Computes one block of rows against one tile.
template <class N, int NV, class Search>
static inline void prefill_tile(const Call& p, int64_t b, const KeyTile& tile, const KeySpan& span, int block,
                                PrefillScratch<N>& s, NextTile& next, const Search& search) {
  QueryRows& rows = s.rows[block];
  ScoreMaxima maxima(next.key);
  VectorEnds of_vectors;
  const VectorEnds* ends = find_ends<NV>(rows, span, of_vectors);
  const float* top = searched_scores<N, NV>(p, b, tile, span, s.query[block], rows, s.scores, maxima, ends, search);
  const bool drops = p.dropout > 0.0f;
  softmax_tile<N, NV>(s.scores, span.n, softmax_scale(p) * kLog2e, s.row_max + block * kRows, s.row_sum + block * kRows,
                      s.rescale, !drops && !kScaled<N>, top);
  if (drops) drop_tile<1, NV * W>(p, b, rows, span.j0, span.n, s.scores);
  if constexpr (kScaled<N>) {
    pack_scaled_weights<NV>(s.scores, tile.value_scale + (span.j0 - tile.j0), span.n);
  } else if (drops) {
    pack_weights<N, NV>(s.scores, span.n);
  }
  next.key = maxima.next;
  block_values<N, NV>(tile, span, tile.value, s.scores, p.V, s.next_sums(block), &next.value, ends);
}

// Writes n rows of sums, `pitch` apart, times the rows' factors, directly as rows of O.
template <class Store>
HW_INLINE void write_rows(const float* sums, int64_t pitch, int64_t V, const float* factor, int n, char* const* rows,
                          const Store& store_at) {
  for (int i = 0; i < n; ++i, sums += pitch) {
    const F times = set1(factor[i]);
    const M none = equal(times, zero());  // a row without keys is 0, whatever its sums are
    char* const row = rows[i];
    const auto vector = [&](int64_t d)
                            HW_LAMBDA { store_at(row, d, select(none, zero(), mul(load(sums + d), times))); };
    int64_t d = 0;
    for (; d + 4 * W <= V; d += 4 * W) {
      HW_UNROLL
      for (int j = 0; j < 4; ++j) vector(d + j * W);
    }
    for (; d + W <= V; d += W) vector(d);
    if (d < V) vector(V - W);
  }
}

static inline void write_rows(const Call& p, const float* sums, int64_t pitch, const float* factor, int n,
                              char* const* rows) {
  const auto half = [](char* row, int64_t d) HW_LAMBDA { return reinterpret_cast<uint16_t*>(row) + d; };
  switch (p.out.dtype) {
    case Dtype::f32:
      return write_rows(sums, pitch, p.V, factor, n, rows,
                        [](char* row, int64_t d, F x) HW_LAMBDA { store(reinterpret_cast<float*>(row) + d, x); });
    case Dtype::bf16:
      return write_rows(sums, pitch, p.V, factor, n, rows, [&](char* row, int64_t d, F x) HW_LAMBDA {
        if constexpr (kHasBf16) {  // the same bits: there are no denormals, and NaN has one form
          store_bf16_fast(half(row, d), select(equal(x, x), x, set1(NAN)));
        } else {
          store_bf16(half(row, d), x);
        }
      });
    default:
      return write_rows(sums, pitch, p.V, factor, n, rows,
                        [&](char* row, int64_t d, F x) HW_LAMBDA { store_f16(half(row, d), x); });
  }
}

// Computes the factors of W rows, from the r-th on, at once. Returns false if some of them need more than that.
HW_INLINE bool plain_factors(const Call& p, const QueryRows& rows, int r, const float* row_max, const float* row_sum,
                             float* factor) {
  bool bad = p.lse != nullptr || p.ends != nullptr || p.sinks != nullptr;
  for (int i = r; i < r + W; ++i) bad |= rows.query_bad[i] | rows.key_bad[i];
  const F scaled = mul(load(row_max), set1(softmax_scale(p))), factors = div(set1(1.0f), load(row_sum));
  store(factor, select(not_less(set1(-kInf), scaled), set1(NAN), factors));  // it has no key, or its scores overflow
  return !bad && floats_are_finite(factor, W);
}

// The sums of W rows of a block, from the r-th on, a row each.
template <class N, int NV, class Scratch>
static inline float* rows_of_sums(const Call& p, int block, int r, Scratch& s) {
  const int64_t padded_V = round_up(p.V, W);
  if constexpr (N::kTiles) {
    transpose_back(s.sums[block] + r, NV * W, p.V, s.out_rows, padded_V);
    return s.out_rows;
  }
  float* rows = s.sums[block] + r * padded_V;
  for (int i = 0; i < W && p.V < padded_V; ++i) close_gap(rows + i * padded_V, p.V);
  return rows;
}

template <class N, int NV, class Scratch>
static inline void finish_block(const Call& p, const Plan& plan, int64_t b, int64_t kv_head, int64_t first,
                                int64_t split, int block, const Reach& reach, Scratch& s) {
  const QueryRows& rows = s.rows[block];
  const int64_t padded_V = round_up(p.V, W);
  const bool whole = plan.splits == 1 && p.gate.data == nullptr && p.V >= W;
  for (int v = 0; v < NV && v * W < rows.n; ++v) {
    float* sums = rows_of_sums<N, NV>(p, block, v * W, s);
    const int n = static_cast<int>(min(W, rows.n - v * W));
    float factor[W];
    const int64_t of_block = block * kRows + v * W;
    const bool plain = whole && plain_factors(p, rows, v * W, s.row_max + of_block, s.row_sum + of_block, factor);
    for (int i = 0; i < n && !plain; ++i) {
      const int r = v * W + i;
      const int64_t h = rows.h[r], t = rows.t[r];
      const float raw_max = s.row_max[block * kRows + r], row_sum = s.row_sum[block * kRows + r];
      const RowState state = row_state(p, b, rows, r, raw_max, row_sum, reach.from, reach.to);
      if (whole) {
        factor[i] = write_softmax_state(p, b, h, t, state);
        continue;
      }
      finish_row(p, plan, b, kv_head, first + r, split, h, t, state, sums + i * padded_V);
    }
    if (!whole) continue;
    char* to[W];
    find_rows(p.out, b, rows, v * W, to);
    write_rows(p, sums, padded_V, factor, n, to);
  }
}

// Computes an item. Unless `careful`, it returns false without a result if a value may be bad.
template <class N>
static bool attend_item(const Call& p, const Plan& plan, int64_t group, int64_t split, char* scratch, bool careful) {
  Arena arena{scratch};
  const Item item(p, plan, group);
  const int64_t b = item.b, kv_head = item.kv_head;
  PrefillScratch<N> s(arena, p, static_cast<int>(plan.rows_per_item / kRows));
  if (reads_rows_first(p)) {
    const int64_t heads = p.H / p.K, from = item.first / heads, to = (item.last + heads - 1) / heads;
    for (int64_t h = kv_head * heads; h < (kv_head + 1) * heads; ++h) read_rows(p.query, b, h, from, to, p.D);
    read_rows(p.key, b, kv_head, 0, p.S, p.D);
    read_rows(p.value, b, kv_head, 0, p.S, p.V);
  }
  Reach all(p);
  for (int i = 0; i < item.blocks; ++i) {
    start_block<N>(p, b, kv_head, item.first + i * kRows, item.rows_of(i), i, s);
    all.add(s.rows[i]);
  }
  const Reach reach = all.within(split * plan.keys_per_split, (split + 1) * plan.keys_per_split);
  KeyTile tile;
  PageTable pages(p);
  walk_blocks<kTile, N::kStep>(
      p, b, kv_head, reach, item.blocks,
      [&](int i, int64_t j0, int n) { return attended_span(p, b, s.rows[i], j0, n, N::kStep); },
      [&](int64_t j0, int n) { load_tile<N>(pages.tile(b, j0), b, kv_head, j0, n, careful, s, tile); },
      [&](int i, const KeySpan& span, NextTile& next) {
        const auto search = [&] { return search_tile<N>(pages.tile(b, tile.j0), b, kv_head, s, tile); };
        HW_BY_VECTORS(s.rows[i].n, prefill_tile, p, b, tile, span, i, s, next, search);
      });
  bool finite = true;
  for (int i = 0; i < item.blocks; ++i) s.finish_sums(i, p.V);
  for (int i = 0; i < item.blocks && !careful; ++i) {
    HW_BY_VECTORS(s.rows[i].n, check_sums, s.sums[i], p.V, finite);
  }
  if (!finite) return false;
  for (int i = 0; i < item.blocks; ++i) {
    HW_BY_VECTORS(s.rows[i].n, finish_block, p, plan, b, kv_head, item.first + i * kRows, split, i, reach, s);
  }
  return true;
}

template <class N>
static void run_prefill(const Call& p, const Plan& plan, int64_t group, int64_t split, char* scratch) {
  if (!attend_item<N>(p, plan, group, split, scratch, false)) attend_item<N>(p, plan, group, split, scratch, true);
}

}  // namespace HW_ISA
}  // namespace headwise
