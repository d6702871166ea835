// The number formats, and the micro-kernel of scores, S^T[key][row]. Its lanes are query rows: the softmax is vertical,
// and nothing is summed across lanes. Elements of K are broadcast from memory.
#pragma once

#include "kernels/mask/apply_masks-inl.h"
#include "kernels/tile/transpose_amx-inl.h"

namespace headwise {
namespace HW_ISA {

// float32: Q^T[d][row], rows of K and V as floats, weights [key][row].
struct Float32 {
  using Query = float;
  using Key = float;
  using Weight = float;
  using Value = float;
  static constexpr int kPair = 1;        // elements in a step of the depth
  static constexpr int kStep = 1;        // weights of keys are multiplied in groups of this many, from multiples of it
  static constexpr bool kTiles = false;  // products are computed by micro_amx-inl.h
  static constexpr int kDegree = 6;      // degree of the polynomial for 2^x

  HW_INLINE int64_t depth(int64_t D) { return D; }
  HW_INLINE F times(F acc, const float* lanes, F b) { return fma(load(lanes), b, acc); }
  HW_INLINE F broadcast(const float* p) { return set1(*p); }
};

// Pairs of bfloat16, multiplied and added in float32: Q^T[d / 2][row], rows of K as they are in memory,
// weights [key / 2][row], V as pairs of two keys' elements. Only where `kHasBf16`.
struct Bfloat16 {
  using Query = uint32_t;
  using Key = uint16_t;
  using Weight = uint32_t;
  using Value = uint32_t;
  static constexpr int kPair = 2;
  static constexpr int kStep = kHasAmx ? kTileStep : 2;
  static constexpr bool kTiles = kHasAmx;
  static constexpr int kDegree = 4;

  HW_INLINE int64_t depth(int64_t D) { return (D + 1) / 2; }
  HW_INLINE F times(F acc, const uint32_t* lanes, F b) { return dot_pairs(acc, load_words(lanes), b); }
  HW_INLINE F broadcast(const void* p) { return broadcast_pair(p); }
};

// Calls run(format) with the number format in which a call is computed.
template <class Run>
static inline void with_format(const Call& p, const Run& run) {
  if constexpr (kHasBf16) {
    if (p.dtype() == Dtype::bf16 && !p.bytes()) {
      [[maybe_unused]] const TileUnit tiles;
      return run(Bfloat16{});
    }
  }
  run(Float32{});
}

// A number that a function takes as a type.
template <int N>
struct Constant {
  static constexpr int value = N;
};

// The steps of the depth in an iteration of a loop. With 1, Intel's CPUs mispredict the end of so long a loop; with the
// narrow vectors of AVX2, more than 1 are slower.
constexpr int kDepthUnroll = W >= 16 ? 8 : 1;

// acc[u][lane] = sum over d of lanes[d][lane] * k[u][d], for U rows k and NV vectors of lanes, `pitch` apart. The
// distances of k[u][d] from u to u and from d to d are in elements.
template <class N, int NV, int U>
HW_INLINE void multiply(F acc[U][NV], const typename N::Query* HW_RESTRICT lanes, int64_t pitch, int64_t depth,
                        const typename N::Key* HW_RESTRICT k, int64_t stride, int64_t step = N::kPair) {
  HW_UNROLL
  for (int u = 0; u < U; ++u) {
    HW_UNROLL
    for (int v = 0; v < NV; ++v) acc[u][v] = zero();
  }
  const auto add = [&](int64_t d) HW_LAMBDA {
    HW_UNROLL
    for (int u = 0; u < U; ++u) {
      const F b = N::broadcast(k + u * stride + d * step);
      HW_UNROLL
      for (int v = 0; v < NV; ++v) acc[u][v] = N::times(acc[u][v], lanes + d * pitch + v * W, b);
    }
  };
  const int64_t whole = depth / kDepthUnroll * kDepthUnroll;
  for (int64_t d = 0; d < whole; d += kDepthUnroll) {
    HW_UNROLL
    for (int i = 0; i < kDepthUnroll; ++i) add(d + i);
  }
  for (int64_t d = whole; d < depth; ++d) add(d);
}

// Prefetches rows that are read next, a few lines with each few products. Many prefetches at once would wait for one
// another.
class RowPrefetcher {
 public:
  RowPrefetcher() = default;
  // The rows from <= j < to of x, prefetched in `steps` steps.
  RowPrefetcher(const Tensor4& x, int64_t b, int64_t kv_head, int64_t from, int64_t to, int64_t width, int64_t steps) {
    row_ = at(x, b, kv_head, from);
    pitch_ = x.stride[2] * size_of(x.dtype);
    lines_ = x.stride[3] == 1 ? (width * size_of(x.dtype) + 63) / 64 : 0;
    left_ = lines_ * max(to - from, 0);
    each_ = (left_ + steps - 1) / steps;
  }
  // Prefetches what is left of them in `steps` steps.
  void spread(int64_t steps) { each_ = (left_ + steps - 1) / steps; }
  HW_MEMBER void step() { prefetch(min(each_, left_)); }
  void rest() { prefetch(left_); }

 private:
  HW_MEMBER void prefetch(int64_t n) {
    left_ -= n;
    for (; n > 0; --n) {
      HW_PREFETCH_NEAR(row_ + line_ * 64);
      if (++line_ == lines_) {
        line_ = 0;
        row_ = offset(row_, pitch_);
      }
    }
  }
  const char* row_ = nullptr;
  int64_t pitch_ = 0, lines_ = 0, line_ = 0, left_ = 0, each_ = 0;
};

constexpr int kGroup = 8;  // keys of a group, whose greatest score is recorded

// What is recorded of a tile's scores while they are in registers: each row's greatest score in each group of keys, and
// for W rows the sum over all keys, which is not finite if a key is not.
struct ScoreMaxima {
  alignas(64) float top[kTile / kGroup * kRows];  // [group][row]
  alignas(64) float sum[W];
  RowPrefetcher next;  // keys

  explicit ScoreMaxima(const RowPrefetcher& keys) : next(keys) {
    for (int r = 0; r < W; ++r) sum[r] = 0.0f;
  }
  bool finite() const { return floats_are_finite(sum, W); }
  // Recomputes the maxima of the groups with the keys from <= j < to, of `keys`, after a mask has changed stored
  // scores.
  template <int NV>
  void update(const float* x, int64_t from, int64_t to, int64_t keys) {
    for (int64_t g = from / kGroup; g * kGroup < to; ++g) {
      const float* first = x + g * kGroup * NV * W;
      for (int v = 0; v < NV; ++v) {
        F best = load(first + v * W);
        for (int64_t j = 1; j < min(kGroup, keys - g * kGroup); ++j) {
          best = headwise::HW_ISA::max(best, load(first + j * NV * W + v * W));
        }
        store(top + g * NV * W + v * W, best);
      }
    }
  }
  // Adds the scores of U keys from the j-th on, all in one group, and of NV vectors of rows from `Skip` on.
  template <int NV, int U, int Skip = 0>
  HW_MEMBER void add(int64_t j, const F (*x)[NV - Skip]) {
    F all = load(sum);
    HW_UNROLL
    for (int u = 0; u < U; ++u) all = headwise::HW_ISA::add(all, x[u][0]);
    store(sum, all);
    float* to = top + j / kGroup * (NV * W) + Skip * W;
    HW_UNROLL
    for (int v = 0; v < NV - Skip; ++v) {
      F best = j % kGroup == 0 ? x[0][v] : max(load(to + v * W), x[0][v]);
      HW_UNROLL
      for (int u = 1; u < U; ++u) best = max(best, x[u][v]);
      store(to + v * W, best);
    }
  }
};

// The same for scores that have been stored.
template <int NV>
static inline void add_stored_scores(const float* x, int64_t keys, ScoreMaxima& maxima) {
  constexpr int R = NV * W;
  int64_t j = 0;
  for (; j + kGroup <= keys; j += kGroup) {
    F rows[kGroup][NV];
    HW_UNROLL
    for (int i = 0; i < kGroup * NV; ++i) rows[i / NV][i % NV] = load(x + j * R + i * W);
    maxima.template add<NV, kGroup>(j, rows);
  }
  for (; j < keys; ++j) {
    F row[1][NV];
    for (int v = 0; v < NV; ++v) row[0][v] = load(x + j * R + v * W);
    maxima.template add<NV, 1>(j, row);
  }
}

// Computes x[u][row] = sum over d of Q^T[d][row] * k[u][d], for U keys from the j-th on and the NV vectors of rows from
// `Skip` on; added to x unless `First`. Records the maxima of x if `TrackMaxima`.
template <class N, int NV, int U, bool First, bool TrackMaxima, int Skip = 0>
static inline void qk(const typename N::Query* HW_RESTRICT q, int64_t depth, const typename N::Key* HW_RESTRICT k,
                      int64_t stride, float* HW_RESTRICT x, [[maybe_unused]] int64_t j,
                      [[maybe_unused]] ScoreMaxima* HW_RESTRICT maxima) {
  constexpr int R = NV * W, kLeft = NV - Skip;
  F acc[U][kLeft];
  multiply<N, kLeft, U>(acc, q + Skip * W, R, depth, k, stride);
  HW_UNROLL
  for (int u = 0; u < U; ++u) {
    HW_UNROLL
    for (int v = 0; v < kLeft; ++v) {
      float* to = x + u * R + (Skip + v) * W;
      if constexpr (!First) acc[u][v] = add(load(to), acc[u][v]);
      store(to, acc[u][v]);
    }
  }
  if constexpr (TrackMaxima) {
    constexpr int kEach = U < kGroup ? U : kGroup;
    HW_UNROLL
    for (int u = 0; u < U; u += kEach) maxima->template add<NV, kEach, Skip>(j + u, acc + u);
  }
}

// The ends of a tile's keys for the first vectors of a block of rows: none of the vectors 0 to v attends keys from
// end[v] on. In a tile on the diagonal of a causal mask these vectors attend fewer keys than the block.
struct VectorEnds {
  int64_t end[kVectors];
};

// Calls part(number of vectors left out, end of the keys of the next vector) in the order of the keys. Without `ends`,
// and for the last of NV vectors, that end is behind the last key.
template <int NV, int Skip = 0, class Part>
HW_INLINE void by_ends(const VectorEnds* ends, int64_t keys, const Part& part) {
  if (ends == nullptr) return part(Constant<Skip>{}, keys);
  part(Constant<Skip>{}, Skip == NV - 1 ? keys : ends->end[Skip]);
  if constexpr (Skip < NV - 1) by_ends<NV, Skip + 1>(ends, keys, part);
}

template <class N, int NV, bool First, bool TrackMaxima>
static inline void products_of_piece(const typename N::Query* q, int64_t depth, const typename N::Key* k,
                                     int64_t stride, int64_t keys, float* x, ScoreMaxima* maxima,
                                     const VectorEnds* ends) {
  constexpr int R = NV * W;
  const auto products = [&](auto u, int64_t j, auto skip) {
    if constexpr (TrackMaxima) maxima->next.step();
    qk<N, NV, decltype(u)::value, First, TrackMaxima, decltype(skip)::value>(q, depth, k + j * stride, stride,
                                                                             x + j * R, j, maxima);
  };
  int64_t j = 0;
  if constexpr (NV == 1 && kUnroll == kGroup) {  // as many sums as with more vectors
    for (; j + 2 * kUnroll <= keys; j += 2 * kUnroll) products(Constant<2 * kUnroll>{}, j, Constant<0>{});
  }
  by_ends<NV>(ends, keys, [&](auto skip, int64_t end) {
    const int64_t last = min(round_up(end, kUnroll), keys);
    for (; j + kUnroll <= last; j += kUnroll) products(Constant<kUnroll>{}, j, skip);
  });
  if constexpr (kUnroll > 4) {
    for (; j + 4 <= keys; j += 4) products(Constant<4>{}, j, Constant<0>{});
  }
  for (; j + 2 <= keys; j += 2) products(Constant<2>{}, j, Constant<0>{});
  if (j < keys) products(Constant<1>{}, j, Constant<0>{});
}

// The head dim is summed in pieces, because a long chain of additions rounds more and a piece of Q^T stays in the L1
// cache.
constexpr int64_t kPiece = 128;

template <class N, int NV>
static inline void key_products(const typename N::Query* q, int64_t depth, const typename N::Key* k, int64_t stride,
                                int64_t keys, float* x, int64_t piece = kPiece, ScoreMaxima* maxima = nullptr,
                                const VectorEnds* ends = nullptr) {
  if constexpr (N::kTiles) {
    tile_key_products<NV>(q, depth, k, stride, keys, x);
    if (maxima != nullptr) add_stored_scores<NV>(x, keys, *maxima);
    return;
  }
  const auto add_piece = [&](auto first, int64_t d) {
    constexpr bool kFirst = decltype(first)::value == 0;
    const int64_t n = min(depth - d, piece);
    if (maxima != nullptr && d + piece >= depth) {
      products_of_piece<N, NV, kFirst, true>(q + d * NV * W, n, k + d * N::kPair, stride, keys, x, maxima, ends);
    } else {
      products_of_piece<N, NV, kFirst, false>(q + d * NV * W, n, k + d * N::kPair, stride, keys, x, nullptr, ends);
    }
  };
  add_piece(Constant<0>{}, 0);
  for (int64_t d = piece; d < depth; d += piece) add_piece(Constant<1>{}, d);
}

}  // namespace HW_ISA
}  // namespace headwise
