// Decode by matrix instructions. An item has so few keys that all their scores fit into the L1 cache. So it has three
// phases: all scores, their maxima, and then weights and products with the values, tile by tile. In the first and the
// last phase the vector instructions of a tile come after the matrix instructions of another one, so that the CPU
// computes both at a time.
#pragma once

#include "kernels/decode/decode_amx-inl.h"
#include "kernels/decode/decode_softmax-inl.h"
#include "kernels/tile/dropout-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int kScorePitch = static_cast<int>(kSplitKeys) + W;  // floats from row to row of the scores

// W times 0, then W times 1.
struct ZerosAndOnes {
  float x[2 * W];
  constexpr ZerosAndOnes() : x() {
    for (int i = W; i < 2 * W; ++i) x[i] = 1.0f;
  }
};
constexpr ZerosAndOnes kZerosAndOnes;

struct SplitScratch {
  float* lines;       // [row][D or V up to a step]
  float* scores;      // [row][key of the item], then weights
  uint32_t* query;    // [part][word][column], W columns of which Shape::kColumns are used
  float* key_sums;    // of two tiles of keys
  uint32_t* weights;  // first factors for every 16 keys of two tiles, with a line of zeros before each tile
  float* value_sums;  // tiles: [kSteps of columns][kAtOnce factors], and in these [step][factor]
  char* copy;         // of keys or values
  QueryRows* rows;
  float row_max[kDecodeRows], row_sum[kDecodeRows], query_unit[kDecodeRows];

  SplitScratch(Arena& arena, const Call& p) {
    const int64_t padded_D = round_up(p.D, kMaxStep), padded = max(padded_D, round_up(p.V, kMaxStep));
    lines = arena.take<float>(kDecodeRows * padded);
    scores = arena.take<float>(kDecodeRows * kScorePitch);
    query = arena.take<uint32_t>(padded_D / 2 * W);  // pairs of bfloat16, or two parts of four bytes
    key_sums = arena.take<float>(2 * 2 * kInt8Tile * W);
    weights = arena.take<uint32_t>(2 * (kInt8Tile + 1) * W);
    value_sums = arena.take<float>((round_up(p.V, 4 * kTileStep) / kTileStep + kSums) * 2 * kTileWords);
    copy = arena.take<char>(kInt8Tile * padded * 2);
    rows = arena.take<QueryRows>(1);
  }
};

// One pass over the keys of an item. If `careful`, keys with NaN or Inf are searched and left out. Otherwise `run`
// returns false if one shows.
template <class Read, int R>
class SplitPass {
 public:
  SplitPass(const Call& p, int64_t b, int64_t kv_head, const Reach& reach, const NextItemKeys& next_item, bool careful,
            SplitScratch& s)
      : p_(p), b_(b), kv_head_(kv_head), next_item_(next_item), careful_(careful), pages_(p), s_(s) {
    walk_tiles<1>(reach, Read::kTile, [&](int64_t j0, int n) {
      const TileKind kind = tile_kind(p, b, *s.rows, j0, j0 + n);
      if (kind != TileKind::empty) tiles_[count_++] = {j0, n, kind};
    });
    for (int r = 0; r < R; ++r) {
      peak_[r] = set1(-kInf);
      sum_[r] = zero();
    }
  }

  // Leaves V sums of each row in s.lines.
  bool run() {
    if (Shape::kParts == 1) load_query(s_.query, key_steps());
    for (int t = 0; t <= count_; ++t) {
      const auto between = [&](int j) HW_LAMBDA {
        if (has(t - 1, j)) Shape::kBytes ? read_digits(t - 1, j) : read_scores(t - 1, j);
      };
      if (t < count_) multiply_keys_of(t, between);
      for (int j = t < count_ ? tiles_[t].n : 0; j < Read::kTile; j += W) between(round_up(j, W));
      if (t > 0) finish_scores(t - 1);
    }
    if (!finite()) return false;
    for (int t = 0; t < 2; ++t) memset(weights(t) - W, 0, W * sizeof(uint32_t));
    for (int r = 0; r < R; ++r) {
      s_.row_max[r] = reduce_max(peak_[r]);
      shift_[r] = s_.row_max[r] == -kInf ? 0.0f : s_.row_max[r];  // without a key x is -inf and its weight 0
    }
    if (Shape::kBytes || count_ == 0) memset(s_.lines, 0, static_cast<size_t>(R * pitch()) * sizeof(float));
    for (int t = 0; t < count_ + 2; ++t) {
      if (t < count_) begin_weights(t);
      const auto between = [&](int j) HW_LAMBDA {
        if (has(t, j)) write_weights(t, j);
        if (has(t - 1, j)) split(t - 1, j);
      };
      if (t > 1) multiply_values_of(t - 2, between);
      for (int j = t > 1 ? tiles_[t - 2].n : 0; j < Read::kTile; j += W) between(round_up(j, W));
      if (t < count_) finish_weights(t);
    }
    for (int r = 0; r < R; ++r) s_.row_sum[r] = reduce_add(sum_[r]);
    if (count_ > 0) read_sums();
    return finite();
  }

 private:
  using Shape = TileShape<Read, R>;
  static constexpr int64_t kColumns = Read::kStep, kSize = sizeof(typename Read::T);
  static constexpr int kTiles = Read::kTile / W;

  // Adds x - x of numbers that must be finite to a sum in memory. During its lifetime the sum is in a register: after
  // each store the compiler would have to load it again.
  class Finite {
   public:
    HW_MEMBER explicit Finite(F& rest) : all_(rest), rest_(rest) {}
    HW_MEMBER ~Finite() { all_ = rest_; }
    HW_MEMBER void add(F x) { rest_ = HW_ISA::add(rest_, sub(x, x)); }
    HW_MEMBER void put(float* to, F x) {
      store(to, x);
      add(x);
    }

   private:
    F& all_;
    F rest_;
  };

  struct KeyTile {
    int64_t j0;
    int n;
    TileKind kind;
  };

  HW_MEMBER bool has(int t, int64_t j) const { return t >= 0 && t < count_ && j < tiles_[t].n; }
  int64_t key_steps() const { return (p_.D + kColumns - 1) / kColumns; }
  int64_t pitch() const { return round_up(p_.V, kColumns); }
  bool finite() const { return careful_ || (finite_ && reduce_add(rest_) == 0.0f); }
  float* key_sums(int t, int part) const { return s_.key_sums + (t % 2 * Shape::kParts + part) * kTiles * kTileWords; }
  uint32_t* weights(int t) const { return s_.weights + t % 2 * (kTiles * Shape::kTerms * kTileWords + W) + W; }
  float* scores(int t) const { return s_.scores + t * Read::kTile; }
  const bool* bad(int t) const { return careful_ ? bad_[t % 3].from(0) : nullptr; }

  void search(int t) {
    const KeyTile& tile = tiles_[t];
    if (careful_) bad_[t % 3].find(pages_.tile(b_, tile.j0), b_, kv_head_, tile.j0, tile.n);
  }

  // The rows of a tile of keys or values: in place if they fill a register, their elements are contiguous and none is
  // left out, else in a copy. Of fewer rows than a register has the last one is repeated.
  TileRows rows_of(int t, bool values) {
    const KeyTile& tile = tiles_[t];
    const Call& p = pages_.tile(b_, tile.j0);
    const Tensor4& x = values ? p.value : p.key;
    const int64_t width = values ? p.V : p.D, padded = round_up(width, kColumns);
    const bool drops = careful_ && bad_[t % 3].any && !p.bytes();
    TileRows rows = {at(x, b_, kv_head_, tile.j0), x.stride[2] * kSize, tile.n, nullptr, 0};
    if (x.stride[3] != 1 || width < kColumns || drops || row_elements(x.dtype, 8) != 8 || tile.n < W) {
      for (int j = 0; j < max(tile.n, W); ++j) {
        const int64_t from = min(j, tile.n - 1);
        const char* row = at(x, b_, kv_head_, tile.j0 + from);
        const int64_t copied = drops && bad_[t % 3].is[from] ? 0 : width;
        if constexpr (Shape::kBytes) {
          copy_codes(reinterpret_cast<int8_t*>(s_.copy) + j * padded, row, x, copied, padded);
        } else {
          copy_halves(reinterpret_cast<uint16_t*>(s_.copy) + j * padded, row, x.stride[3], copied, padded);
        }
      }
      rows.data = s_.copy;
      rows.stride = padded * kSize;
    }
    if (prefetches_) prefetch_after(t, values, rows);
    return rows;
  }

  // What is read after tile t: the next tile, the first values, or the first keys of the next item.
  void prefetch_after(int t, bool values, TileRows& rows) {
    const bool last = t + 1 == count_;
    NextItemKeys::Place next = {b_, kv_head_, tiles_[last ? 0 : t + 1].j0};
    if (last && values) next = next_item_.first(p_, next);
    const Call& p = pages_.tile(next.b, next.j);
    const Tensor4& x = values != last ? p.value : p.key;
    rows.next = at(x, next.b, next.kv_head, next.j);
    rows.next_stride = x.stride[2] * kSize;
  }

  template <class Between>
  HW_MEMBER void multiply_keys_of(int t, const Between& between) {
    search(t);
    const TileRows keys = rows_of(t, false);
    for (int part = 0; part < Shape::kParts; ++part) {
      const uint32_t* query = s_.query + part * key_steps() * kTileWords;
      if (Shape::kParts == 2) load_query(query, key_steps());
      multiply_keys<Read>(query, p_.D, keys, key_sums(t, part), [&](int j) HW_LAMBDA {
        if (part == 0) between(j);
      });
    }
    if constexpr (Shape::kBytes) read_scales(t, false);
  }

  HW_MEMBER void read_scores(int t, int j) {
    float* x = scores(t) + first_key(j, tiles_[t].n);
    Finite finite(rest_);
    HW_UNROLL
    for (int r = 0; r < R; r += 4) {
      F row[4];
      columns_of_sums(key_sums(t, 0) + j * W + r, row);
      HW_UNROLL
      for (int i = 0; i < (R < 4 ? R : 4); ++i) finite.put(x + (r + i) * kScorePitch, row[i]);
    }
  }

  HW_MEMBER void read_digits(int t, int j) {
    const int first = first_key(j, tiles_[t].n);
    const F scale = load(scales_[t % 2] + first);
    Finite finite(rest_);
    for (int part = 0; part < Shape::kParts; ++part) {
      for (int c = 0; c < Shape::kColumns; c += 4) {
        F digits[4];
        columns_of_sums(key_sums(t, part) + j * W + c, digits);
        HW_UNROLL
        for (int i = 0; i < (Shape::kColumns < 4 ? Shape::kColumns : 4); i += Shape::kWords) {
          F sum = floats_of_ints(digits[i + Read::kDigits - 1]);
          HW_UNROLL
          for (int d = Read::kDigits - 2; d >= 0; --d) sum = fma(sum, set1(256.0f), floats_of_ints(digits[i + d]));
          const int r = part * Shape::kRows + (c + i) / Shape::kWords;
          finite.put(scores(t) + r * kScorePitch + first, mul(mul(sum, set1(s_.query_unit[r])), scale));
        }
      }
    }
  }

  // Applies the masks to the scores of a tile, and takes its maxima.
  void finish_scores(int t) {
    const KeyTile& tile = tiles_[t];
    float* x = scores(t);
    const int64_t padded = round_up(tile.n, W);
    const KeySpan span = {tile.j0, tile.n, tile.kind};
    tile_scores<ScoreLayout<kScorePitch, 1>>(p_, b_, *s_.rows, span, bad(t), x, {padded, R, kScorePitch}, nullptr,
                                             [] {});
    for (int r = 0; r < R; ++r) {
      for (int64_t j = tile.n; j < padded; ++j) x[r * kScorePitch + j] = -kInf;
    }
    for (int64_t j = 0; j < padded; j += W) {
      HW_UNROLL
      for (int r = 0; r < R; ++r) peak_[r] = max(peak_[r], load(x + r * kScorePitch + j));
    }
  }

  void read_scales(int t, bool values) {
    const KeyTile& tile = tiles_[t];
    const Call& p = pages_.tile(b_, tile.j0);
    load_key_scales(values ? p.value_scale : p.key_scale, b_, kv_head_, tile.j0, tile.n, bad(t), scales_[t % 2]);
    finite_ &= careful_ || scales_are_safe(scales_[t % 2], tile.n);
  }

  void begin_weights(int t) {
    search(t);
    if constexpr (Shape::kBytes) read_scales(t, true);
    for (int r = 0; r < R; ++r) largest_[r] = zero();
  }

  HW_MEMBER void write_weights(int t, int64_t j) {
    const F scale = set1(softmax_scale_);
    Finite finite(rest_);
    HW_UNROLL
    for (int r = 0; r < R; ++r) {
      float* x = scores(t) + r * kScorePitch + j;
      F w = exp2<6>(mul(sub(load(x), set1(shift_[r])), scale));
      sum_[r] = add(sum_[r], w);
      if constexpr (Shape::kBytes) {
        w = mul(w, load(scales_[t % 2] + j));
        largest_[r] = max(largest_[r], abs(w));
        finite.add(w);
      }
      store(x, w);
    }
  }

  void finish_weights(int t) {
    const int n = tiles_[t].n;
    if (p_.dropout > 0.0f) drop_tile<kScorePitch, 1>(p_, b_, *s_.rows, tiles_[t].j0, n, scores(t));
    for (int r = 0; Shape::kBytes && r < R; ++r) {
      const float most =
          p_.dropout > 0.0f ? reduce_max(abs_max(scores(t) + r * kScorePitch, n)) : reduce_max(largest_[r]);
      const WeightUnit unit(2, most);
      inverse_[r] = unit.inverse;
      unit_[t % 2][r] = unit.unit;
    }
  }

  // Writes the parts of weights as first factors: [part][place in a word][row]. Keys that are multiplied twice have the
  // weight 0 once.
  HW_MEMBER void split(int t, int j) {
    uint32_t* tile = weights(t) + j * W * Shape::kTerms;
    const int first = first_key(j, tiles_[t].n);
    const F once = load(kZerosAndOnes.x + W - (j - first));
    HW_UNROLL
    for (int r = 0; r < R; ++r) {
      const F w = mul(load(scores(t) + r * kScorePitch + first), once);
      if constexpr (Shape::kBytes) {
        split_digits<Shape::kPlaces>(mul(w, set1(inverse_[r])), tile + r * W, R * W);
      } else {
        split_weights(w, tile + r * W, R * W);
      }
    }
  }

  template <class Between>
  HW_MEMBER void multiply_values_of(int t, const Between& between) {
    const TileRows values = rows_of(t, true);
    const int64_t steps = (p_.V + kColumns - 1) / kColumns;
    const bool at_once = steps <= Shape::kSteps && Shape::kFactors == Shape::kAtOnce;
    float* sums = s_.value_sums;
    for (int64_t first = 0; first < steps; first += Shape::kSteps) {
      const int64_t last = min(first + Shape::kSteps, steps);
      for (int factor = 0; factor < Shape::kFactors; factor += Shape::kAtOnce, sums += kSums * kTileWords) {
        if (Shape::kBytes || t == 0) {
          clear_sums();
        } else if (!at_once) {
          load_sums(sums);
        }
        const auto* w = offset(weights(t), -factor * Shape::kPlaces * kSize);
        multiply_values<Read, Shape>(w, values, p_.V, first, last, [&](int j) HW_LAMBDA {
          if (first == 0 && factor == 0) between(j);
        });
        if (Shape::kBytes || !at_once || t + 1 == count_) store_sums(sums);
      }
      if constexpr (Shape::kBytes) join_digits(t, first, last);
    }
  }

  // The sums of row r for a place in the words of a step, by the first part of the weights. Those by the second part
  // are `kPartWords` behind them.
  static constexpr int kPartWords = Shape::kPlaces * R * W;
  HW_MEMBER const float* sums_of(int64_t step, int place, int r) const {
    constexpr int kSteps = Shape::kSteps, kAtOnce = Shape::kAtOnce, kPasses = Shape::kFactors / kAtOnce;
    const int factor = place / Shape::kPlaces;
    const int64_t pass = step / kSteps * kPasses + factor / kAtOnce;
    const int64_t tile = (pass * kSteps + step % kSteps) * kAtOnce + factor % kAtOnce;
    return s_.value_sums + tile * kTileWords + (place % Shape::kPlaces * R + r) * W;
  }

  // Adds the sums of a tile: [row][step][place in a word][word].
  void join_digits(int t, int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) {
      for (int r = 0; r < R; ++r) {
        const F unit = set1(unit_[t % 2][r]);
        HW_UNROLL
        for (int c = 0; c < 4; ++c) {
          const float* sums = sums_of(step, c, r);
          const F high = floats_of_ints(load(sums)), low = floats_of_ints(load(sums + kPartWords));
          float* to = s_.lines + r * pitch() + step * kColumns + c * W;
          store(to, fma(fma(high, set1(256.0f), low), unit, load(to)));
        }
      }
    }
  }

  // Brings the sums of a row into the order of its columns.
  void read_sums() {
    const int64_t steps = pitch() / kColumns;
    constexpr int N = static_cast<int>(kColumns) / W;
    Finite finite(rest_);
    for (int r = 0; r < R; ++r) {
      float* row = s_.lines + r * pitch();
      for (int64_t step = 0; step < steps; ++step) {
        F x[N];
        HW_UNROLL
        for (int i = 0; i < N; ++i) {
          x[i] = load(Shape::kBytes ? row + step * kColumns + i * W : sums_of(step, i, r));
          if (!Shape::kBytes && Shape::kTerms == 1) x[i] = add(x[i], load(sums_of(step, i, r) + kPartWords));
        }
        interleave_words<N>(x);
        float* to = row + first_column(step, p_.V, kColumns);
        HW_UNROLL
        for (int i = 0; i < N; ++i) finite.put(to + i * W, x[i]);
      }
    }
  }

  const Call& p_;
  const int64_t b_, kv_head_;
  const NextItemKeys& next_item_;
  const bool careful_;
  PageTable pages_;
  SplitScratch& s_;
  KeyTile tiles_[kSplitKeys / Read::kTile + 1];
  int count_ = 0;
  BadKeys bad_[3];  // of the tiles at work
  bool finite_ = true;
  F rest_ = zero();  // x - x of the numbers that must be finite
  F peak_[R], sum_[R];
  float shift_[R], inverse_[R], unit_[2][R];
  F largest_[R];
  float scales_[2][Shape::kBytes ? Read::kTile : 1];
  const float softmax_scale_ = softmax_scale(p_) * kLog2e;
  const bool prefetches_ = keys_are_far(p_);
};

}  // namespace HW_ISA
}  // namespace headwise
