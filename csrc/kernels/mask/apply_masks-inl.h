// Applies scale, softcap, biases and masks to a tile of scores.
#pragma once

#include "kernels/mask/dense-inl.h"
#include "kernels/mask/key_spans-inl.h"

namespace headwise {
namespace HW_ISA {

// The layout of a tile's scores: row r and key j are at x[r * RowStep + j * KeyStep], and one of the two steps is 1.
template <int RowStep, int KeyStep>
struct ScoreLayout {
  static constexpr bool kRowLanes = RowStep == 1;  // otherwise the lanes are keys
  static constexpr int kRowStep = RowStep, kKeyStep = KeyStep;

  template <class Op>
  HW_INLINE void each(int rows, int keys, float* x, Op op) {
    if constexpr (kRowLanes) {
      for (int j = 0; j < keys; ++j) {
        for (int r = 0; r < rows; ++r) x[r + j * KeyStep] = op(r, j, x[r + j * KeyStep]);
      }
    } else {
      for (int r = 0; r < rows; ++r) {
        for (int j = 0; j < keys; ++j) x[r * RowStep + j] = op(r, j, x[r * RowStep + j]);
      }
    }
  }
};

// Writes -inf where a map forbids a pair.
template <class L>
static inline void forbid(const MapRule& map, int64_t b, const QueryRows& rows, int64_t j0, int n, float* x) {
  KeyBits bits;
  key_bits(map, b, rows, j0, n, bits);
  apply_bits<L>(bits, rows, n, x);
}

// Writes -inf where a boolean tensor forbids a pair. If the lanes are keys, rows of the tensor have the order of the
// scores.
template <class L>
static inline void forbid(const Tensor4& keep, int64_t b, const QueryRows& rows, int64_t j0, int n, float* x) {
  if constexpr (L::kRowLanes) {
    KeyBits bits;
    key_bits(keep, b, rows, j0, n, bits);
    apply_bits<L>(bits, rows, n, x);
  } else {
    const int64_t step = keep.stride[3];
    for (int r = 0; r < rows.padded; ++r) {
      const char* row = at(keep, b, rows.h[r], rows.t[r]) + j0 * step;
      float* to = x + r * L::kRowStep;
      if (step == 1) {  // a loop that compilers vectorise
        for (int j = 0; j < n; ++j) to[j] = row[j] != 0 ? to[j] : -kInf;
      } else {
        for (int j = 0; j < n; ++j) to[j] = row[j * step] != 0 ? to[j] : -kInf;
      }
    }
  }
}

// The keys of a tile that the bounds forbid to some row are the first and the last ones: j < to_first and from_last <=
// j, counted from the tile's first key. All rows may attend the keys between, which are most of a tile on the diagonal.
struct MaskedKeys {
  int64_t to_first, from_last;

  MaskedKeys(const QueryRows& rows, int64_t j0, int n)
      : to_first(min(max(rows.lo_max - j0, 0), n)), from_last(max(min(rows.hi_min - j0, n), to_first)) {}
};

// Writes -inf where the bounds forbid a pair.
template <class L>
static inline void apply_bounds(const QueryRows& rows, int64_t j0, int n, float* x) {
  const auto mask = [&](int64_t from, int64_t to) {
    const int32_t at0 = static_cast<int32_t>(j0 + from);
    L::each(rows.padded, static_cast<int>(to - from), x + from * L::kKeyStep,
            [&](int r, int j, float s) { return in_bounds(rows, r, at0 + j) ? s : -kInf; });
  };
  const MaskedKeys masked(rows, j0, n);
  mask(0, masked.to_first);
  if constexpr (L::kRowLanes) {  // only the end of a row forbids these keys
    const auto* hi = reinterpret_cast<const uint32_t*>(rows.hi);
    for (int64_t j = masked.from_last; j < n; ++j) {
      const U key = set_words(static_cast<uint32_t>(j0 + j));
      for (int r = 0; r < rows.padded; r += W) {
        float* score = x + j * L::kKeyStep + r;
        store(score, select(below(key, words_at(hi + r)), load(score), set1(-kInf)));
      }
    }
  } else {
    mask(masked.from_last, n);
  }
}

// The position of a row relative to a tile's first key. A position beyond 2^30 is clamped to it, and the distances to
// the keys are multiplied by `factor`: float32 cannot distinguish such distances anyway.
struct KeyDistance {
  int32_t pos;
  float factor;
};

HW_INLINE KeyDistance key_distance(int64_t pos) {
  constexpr int64_t kNear = 1 << 30;
  const int64_t near = max(min(pos, kNear), -kNear);
  return {static_cast<int32_t>(near), near == pos ? 1.0f : static_cast<float>(pos) / static_cast<float>(near)};
}

// Adds biases to the scores of a tile and writes -inf where a row may not attend. Marks the rows that may attend one of
// the `bad` keys. If `scales_first`, `x` has been scaled and softcapped before.
template <class L>
static inline void mask_tile(const Call& p, int64_t b, QueryRows& rows, int64_t j0, int n, float* x, TileKind tile,
                             const bool* bad) {
  for (int i = 0; i < p.n_alibi; ++i) {
    const AlibiRule& rule = p.alibi[i];
    const int64_t offset = max(min(rule.offsets[b * rule.offsets_stride], kFar), -kFar);
    float slope[kRows];
    int32_t pos[kRows];
    for (int r = 0; r < rows.padded; ++r) {
      const KeyDistance from = key_distance(rows.t[r] + offset - j0);
      slope[r] = rule.slopes[b * rule.slopes_stride[0] + rows.h[r] * rule.slopes_stride[1]] * from.factor;
      pos[r] = from.pos;
    }
    L::each(rows.padded, n, x, [&](int r, int j, float s) {
      const int32_t far = pos[r] > j ? pos[r] - j : j - pos[r];
      return s - slope[r] * static_cast<float>(far);
    });
  }
  for (int i = 0; i < p.n_dense; ++i) {
    if (p.dense[i].dtype != Dtype::boolean) add_bias<L>(p.dense[i], b, rows, j0, n, x);
  }
  if (tile == TileKind::mixed) {
    for (int i = 0; i < p.n_segments; ++i) {
      const SegmentRule& rule = p.segments[i];
      int64_t ids[kTile];
      for (int j = 0; j < n; ++j) ids[j] = rule.key_ids[b * rule.key_stride[0] + (j0 + j) * rule.key_stride[1]];
      L::each(rows.padded, n, x, [&](int r, int j, float s) { return rows.ids[i][r] == ids[j] ? s : -kInf; });
    }
    for (int i = 0; i < p.n_maps; ++i) forbid<L>(p.maps[i], b, rows, j0, n, x);
    for (int i = 0; i < p.n_dense; ++i) {
      if (p.dense[i].dtype == Dtype::boolean) forbid<L>(p.dense[i], b, rows, j0, n, x);
    }
    if (bounds_kind(rows, j0, j0 + n) != TileKind::full) apply_bounds<L>(rows, j0, n, x);
  }
  if (bad == nullptr) return;
  L::each(rows.padded, n, x, [&](int r, int j, float s) {
    rows.key_bad[r] |= bad[j] && s != -kInf;
    return s;
  });
}

// True if row r may attend any of the keys from <= j < to. Needed only if the greatest score is -inf, because then the
// row is empty or its scores overflowed.
static inline bool attends_any(const Call& p, int64_t b, const QueryRows& rows, int r, int64_t from, int64_t to) {
  for (int64_t j = max(from, rows.lo_min); j < min(to, rows.hi[r]); ++j) {
    bool allowed = in_bounds(rows, r, static_cast<int32_t>(j));
    for (int i = 0; i < p.n_segments; ++i) {
      const SegmentRule& rule = p.segments[i];
      allowed &= rule.key_ids[b * rule.key_stride[0] + j * rule.key_stride[1]] == rows.ids[i][r];
    }
    for (int i = 0; i < p.n_dense && allowed; ++i) {
      const Tensor4& dense = p.dense[i];
      const char* row = at(dense, b, rows.h[r], rows.t[r]);
      const float x = element(row, dense.dtype, j * dense.stride[3]);
      allowed = dense.dtype == Dtype::boolean ? x != 0.0f : x != -kInf;
    }
    for (int i = 0; i < p.n_maps && allowed; ++i) {
      allowed = word_of(p.maps[i], b, rows, r, j / MapRule::kSide) >> (j % MapRule::kSide) & 1;
    }
    if (allowed) return true;
  }
  return false;
}

// True if only bounds restrict rows. The bounds of a row then give the number of its keys.
HW_INLINE bool only_bounds(const Call& p) { return p.n_segments == 0 && p.n_dense == 0 && p.n_maps == 0; }

// True if scores are scaled before the softmax, because a softcap or a bias comes between. Otherwise the scale is
// applied inside the exponential.
HW_INLINE bool scales_first(const Call& p) {
  bool biased = p.n_alibi > 0;
  for (int i = 0; i < p.n_dense; ++i) biased |= p.dense[i].dtype != Dtype::boolean;
  // times log2(e) and a score, a smaller scale would underflow
  return biased || p.softcap > 0.0f || !(p.scale > 1e-30f);
}

// The factor that the softmax applies to the scores.
HW_INLINE float softmax_scale(const Call& p) { return scales_first(p) ? 1.0f : p.scale; }

// Applies scale and softcap to n contiguous scores. n must be a multiple of W.
static inline void scale_scores(const Call& p, float* x, int64_t n) {
  const F scale = set1(p.scale);
  if (p.softcap > 0.0f) {
    const F cap = set1(p.softcap);
    for (int64_t i = 0; i < n; i += W) store(x + i, mul(cap, tanh(div(mul(load(x + i), scale), cap))));
  } else {
    for (int64_t i = 0; i < n; i += W) store(x + i, mul(load(x + i), scale));
  }
}

}  // namespace HW_ISA
}  // namespace headwise
