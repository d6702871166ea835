// The softmax of one visit, overlapped with the products of the visits before and after it.
#pragma once

#include "kernels/prefill/prefill_amx_scratch-inl.h"

namespace headwise {
namespace HW_ISA {

// The greatest score of each row, and the sum of the scores of the first vector of rows, which is not finite if a key
// is not.
struct RowMaxima {
  static constexpr int NV = kAmxVectors;
  alignas(64) float top[NV * W], sum[W];

  RowMaxima() {
    for (int r = 0; r < W; ++r) sum[r] = 0.0f;
    clear();
  }
  void clear() {
    for (int r = 0; r < NV * W; ++r) top[r] = -kInf;
  }
  // Adds the keys from <= j < to. Multiplies their scores by `scales` first, unless that is null.
  HW_MEMBER void add(float* x, int64_t from, int64_t to, const float* scales, bool sums) {
    constexpr int R = NV * W;
    F best[NV], all = load(sum);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) best[v] = load(top + v * W);
    for (int64_t j = from; j < to; ++j) {
      HW_UNROLL
      for (int v = 0; v < NV; ++v) {
        F score = load(x + j * R + v * W);
        if (scales != nullptr) store(x + j * R + v * W, score = mul(score, set1(scales[j])));
        best[v] = headwise::HW_ISA::max(best[v], score);
        if (v == 0 && sums) all = headwise::HW_ISA::add(all, score);
      }
    }
    store(sum, all);
    HW_UNROLL
    for (int v = 0; v < NV; ++v) store(top + v * W, best[v]);
  }
};

// The degree of the polynomial for 2^x. The softmax is limited by the ports that multiply. A cubic would be accurate
// enough for weights, which bfloat16 rounds by up to 2^-8, and take 8 % less time, but lse would be off by 8e-5.
constexpr int kAmxExpDegree = 4;

// The weights of a row are relative to a score that the greatest score exceeds by at most this power of two, so that
// sums seldom have to be rescaled.
constexpr float kSlack = 2.0f;

// Computes the visits of an item one after the other. During the softmax of a visit, first the scores of the next visit
// are computed, and then the weighted values of the one before.
template <class N>
class OverlappedSoftmax {
 public:
  OverlappedSoftmax(const Call& p, int64_t b, PrefillAmxScratch<N>& s) : p_(p), b_(b), s_(s) {}
  // True if all scores were finite before masks.
  bool finite() const { return floats_are_finite(maxima_.sum, W); }

  // Computes the visits. With each of them, a part of the keys and values that are read later is prefetched.
  void run(const Visit* visits, int count, NextTile& later) {
    if (count == 0) return;
    overlap_ = Overlap();
    overlap_.next = visits;
    start(-1);
    finish(-1);
    for (int i = 0; i < count; ++i) {
      overlap_ = Overlap();
      if (i > 0) overlap_.before = visits + i - 1;
      if (i + 1 < count) overlap_.next = visits + i + 1;
      later.key.step();
      later.value.step();
      visit(visits[i], i);
    }
    overlap_ = Overlap();
    overlap_.before = visits + count - 1;
    start(count);
    finish(count);
    pipeline_.flush();
  }

 private:
  static constexpr int NV = kAmxVectors, R = kAmxRows;
  static constexpr int kGroupKeys = 8 / NV;  // keys of a group of the softmax: 8 vectors

  // The products that overlap with the softmax of visit i: the scores of `next`, then the values of `before`, unless
  // null.
  struct Overlap {
    const Visit *before = nullptr, *next = nullptr;
    bool in_values = false;
    bool rescales = false, updates_row_max = false;
    int64_t keys_in_max = 0, keys_per_update = 0;  // keys of `next` that row_max includes; keys added with each step
    // Columns of `before` that are rescaled; columns rescaled with each step.
    int64_t rescaled = 0, rescale_each = 0;
  };

  // True for a full tile whose scores need nothing but their maxima.
  bool is_plain(const Visit& v) const { return v.span.kind == TileKind::full && !scales_first(p_) && !v.tile->bad.any; }
  int64_t skip_of(const Visit& v) const { return v.span.j0 - v.tile->j0; }
  int64_t steps_of(const Visit& v) const { return (v.span.n + kTileStep - 1) / kTileStep; }
  const float* key_scales(const Visit& v) const { return kScaled<N> ? v.tile->key_scale + skip_of(v) : nullptr; }
  float* scores(int i) const { return s_.scores[i & 1]; }

  void start_scores(const Visit& v, int i) {
    const KeyRows& key = v.tile->key;
    TileProducts products;
    products.first = reinterpret_cast<const uint16_t*>(key.data) + skip_of(v) * key.stride;
    products.row = key.stride;
    products.chunk = kTileStep * key.stride;
    products.step = kTileStep;
    products.second = s_.query[v.block];
    products.steps = p_.D / kTileStep;
    products.chunks = steps_of(v);
    products.out = scores(i);
    pipeline_.start(products);
  }
  void start_values(const Visit& v, int i) {
    TileProducts products;
    products.first = reinterpret_cast<const uint16_t*>(v.tile->value.data) + skip_of(v) * p_.V;
    products.row = kTileStep;
    products.chunk = kTileStep * kTileStep;
    products.step = kTileStep * p_.V;
    products.second = s_.weights[i & 1];
    products.steps = steps_of(v);
    products.chunks = p_.V / kTileStep;
    products.out = s_.sums[v.block];
    products.adds = true;
    pipeline_.start(products);
  }

  // Multiplies further columns of O^T of the visit before i by the factors of its rows.
  HW_MEMBER void rescale(int i, int64_t columns) {
    float* out = s_.sums[overlap_.before->block];
    const float* factors = rescale_[(i - 1) & 1];
    const int64_t to = min(overlap_.rescaled + columns, p_.V);
    for (int v = 0; v < NV; ++v) {
      if (!changes_[(i - 1) & 1][v]) continue;
      const F factor = load(factors + v * W);
      for (int64_t u = overlap_.rescaled; u < to; ++u)
        store(out + u * R + v * W, mul(load(out + u * R + v * W), factor));
    }
    overlap_.rescaled = to;
  }
  HW_MEMBER void update_row_max(int i, int64_t keys) {
    const Visit& next = *overlap_.next;
    const int64_t to = min(overlap_.keys_in_max + keys, next.span.n);
    maxima_.add(scores(i + 1), overlap_.keys_in_max, to, key_scales(next), true);
    overlap_.keys_in_max = to;
  }

  // Starts the products that overlap with visit i.
  void start(int i) {
    Overlap& it = overlap_;
    it.rescales = false;
    for (int v = 0; it.before != nullptr && v < NV; ++v) it.rescales |= changes_[(i - 1) & 1][v];
    it.updates_row_max = it.next != nullptr && is_plain(*it.next);
    const int64_t score_steps = it.next != nullptr ? p_.D / kTileStep * steps_of(*it.next) : 1;
    const int64_t value_steps = it.before != nullptr ? p_.V / kTileStep * steps_of(*it.before) : 1;
    it.rescale_each = (p_.V + score_steps - 1) / score_steps;
    if (it.updates_row_max) it.keys_per_update = round_up((it.next->span.n + value_steps - 1) / value_steps, 8);
    if (it.next != nullptr) start_scores(*it.next, i + 1);
  }
  // True if a step of products that overlap with visit i is left.
  HW_MEMBER bool has_step(int i) {
    if (pipeline_.left()) return true;
    if (overlap_.before == nullptr || overlap_.in_values) return false;
    start_later(i);
    return true;
  }
  HW_NOINLINE void start_later(int i) {
    if (overlap_.next == nullptr) pipeline_.flush();  // otherwise the first products of the scores have stored all sums
    if (overlap_.rescales) rescale(i, p_.V);
    overlap_.in_values = true;
    start_values(*overlap_.before, i - 1);
  }
  // The work that belongs to a step of products: some sums are rescaled, or some of the next scores are added to the
  // maxima.
  HW_MEMBER void after_step(int i) {
    if (!overlap_.in_values) {
      if (overlap_.rescales) rescale(i, overlap_.rescale_each);
    } else if (overlap_.updates_row_max) {
      update_row_max(i, overlap_.keys_per_update);
    }
  }
  void finish(int i) {
    while (has_step(i)) {
      pipeline_.whole_step();
      after_step(i);
    }
    if (overlap_.next != nullptr && !overlap_.in_values) pipeline_.flush();
    if (overlap_.updates_row_max) update_row_max(i, kVisitKeys);
  }

  // Applies scale, biases and mask to scores that are not plain, and finds their maxima.
  HW_NOINLINE void mask(const Visit& v, int i) {
    float* x = scores(i);
    const int n = v.span.n;
    if constexpr (kScaled<N>) scale_columns<NV>(x, key_scales(v), n);
    maxima_.add(x, 0, n, nullptr, true);
    tile_scores<ScoreLayout<1, R>>(p_, b_, s_.rows[v.block], v.span, v.tile->bad.from(skip_of(v)), x, {int64_t{n} * R},
                                   nullptr, [] {});
    maxima_.clear();
    maxima_.add(x, 0, n, nullptr, false);
  }

  // The state of a visit's softmax, in registers.
  struct Softmax {
    F peak[NV], sum[NV], scale;
    const float *x, *value_scale;
    uint32_t* weights;
  };

  // Computes the weights of an even number of keys from the j-th on, in pairs.
  template <int Keys, int Group, int T>
  HW_MEMBER void weigh(Softmax& to, int64_t j) {
    F w[Keys * NV];
    overlap_product<4 * Group, T>();
    HW_UNROLL
    for (int m = 0; m < Keys * NV; ++m) {
      w[m] = mul(headwise::HW_ISA::sub(load(to.x + j * R + m * W), to.peak[m % NV]), to.scale);
    }
    overlap_product<4 * Group + 1, T>();
    exp2_each<kAmxExpDegree, Keys * NV / 2>(w);
    overlap_product<4 * Group + 2, T>();
    exp2_each<kAmxExpDegree, Keys * NV / 2>(w + Keys * NV / 2);
    overlap_product<4 * Group + 3, T>();
    HW_UNROLL
    for (int k = 0; k < Keys; k += 2) {
      HW_UNROLL
      for (int v = 0; v < NV; ++v) {
        F a = w[k * NV + v], b = w[(k + 1) * NV + v];
        to.sum[v] = add(to.sum[v], add(a, b));
        if constexpr (kScaled<N>) {
          a = mul(a, set1(to.value_scale[j + k]));
          b = mul(b, set1(to.value_scale[j + k + 1]));
        }
        store_pairs(to.weights + (j + k) / 2 * R + v * W, a, b);
      }
    }
  }
  // Computes the product that belongs to one of the 4 T places of a step's groups; none if T is 0.
  template <int Place, int T>
  HW_MEMBER void overlap_product() {
    if constexpr (T > 0) {
      constexpr int kEach = 4 * T / AmxPipeline::kProducts;
      if constexpr (Place % kEach == 0) pipeline_.product<Place / kEach>();
    }
  }
  // Computes groups of weights, T for each step of products, as long as there are steps.
  template <int T>
  int64_t groups(Softmax& state, int64_t n, int i) {
    Softmax to = state;
    int64_t j = 0;
    for (; j + T * kGroupKeys <= n && has_step(i); j += T * kGroupKeys) {
      pipeline_.begin_step();
      weigh<kGroupKeys, 0, T>(to, j);
      if constexpr (T == 2) weigh<kGroupKeys, 1, T>(to, j + kGroupKeys);
      pipeline_.end_step();
      after_step(i);
    }
    state = to;
    return j;
  }

  void visit(const Visit& v, int i) {
    if (!is_plain(v)) mask(v, i);
    const int n = v.span.n;
    float* factor = rescale_[i & 1];
    Softmax to;
    to.x = scores(i);
    to.weights = s_.weights[i & 1];
    to.scale = set1(softmax_scale(p_) * kLog2e);
    to.value_scale = kScaled<N> ? v.tile->value_scale + skip_of(v) : nullptr;
    begin_softmax(to, v.block, factor, changes_[i & 1]);
    maxima_.clear();
    start(i);
    int64_t j = p_.D + p_.V > 160 ? groups<1>(to, n, i) : groups<2>(to, n, i);
    for (; j + kGroupKeys <= n; j += kGroupKeys) weigh<kGroupKeys, 0, 0>(to, j);
    for (; j + 2 <= n; j += 2) weigh<2, 0, 0>(to, j);
    if (j < n) weigh_last(to, j);
    const int64_t pairs = (n + 1) / 2, padded = round_up(pairs, W);
    memset(to.weights + pairs * R, 0, static_cast<size_t>((padded - pairs) * R) * sizeof(uint32_t));
    float* sum = s_.row_sum + v.block * kRows;
    for (int k = 0; k < NV; ++k) {
      store(sum + k * W, fma(load(sum + k * W), load(factor + k * W), to.sum[k]));
    }
    finish(i);
  }
  // Takes the maxima of a visit. `factor` rescales from the score to which the weights were relative before. `changes`
  // tells for each vector of rows whether any factor is not 1.
  void begin_softmax(Softmax& to, int block, float* factor, bool* changes) {
    float* row_max = s_.row_max + block * kRows;
    const F none = set1(-kInf), slack = set1(kSlack);
    for (int v = 0; v < NV; ++v) {
      const F now = load(maxima_.top + v * W), before = load(row_max + v * W);
      const M stays = not_less(slack, mul(headwise::HW_ISA::sub(now, before), to.scale));
      const F ref = select(stays, before, now);
      store(row_max + v * W, ref);
      to.peak[v] = select(not_less(none, ref), zero(), ref);  // there was no key so far: x is -inf and its weight 0
      to.sum[v] = zero();
      store(factor + v * W, exp2<6>(mul(headwise::HW_ISA::sub(before, to.peak[v]), to.scale)));
    }
    for (int v = 0; v < NV; ++v) {
      int any = 0;
      for (int r = 0; r < W; ++r) any |= factor[v * W + r] != 1.0f;
      changes[v] = any != 0;
    }
  }
  // Computes the last key of an odd number of keys, paired with 0.
  HW_NOINLINE void weigh_last(Softmax& to, int64_t j) {
    for (int v = 0; v < NV; ++v) {
      F a = mul(headwise::HW_ISA::sub(load(to.x + j * R + v * W), to.peak[v]), to.scale);
      exp2_each<kAmxExpDegree, 1>(&a);
      to.sum[v] = add(to.sum[v], a);
      if constexpr (kScaled<N>) a = mul(a, set1(to.value_scale[j]));
      store_pairs(to.weights + j / 2 * R + v * W, a, zero());
    }
  }

  const Call& p_;
  int64_t b_;
  PrefillAmxScratch<N>& s_;
  AmxPipeline pipeline_;
  RowMaxima maxima_;
  Overlap overlap_;
  alignas(64) float rescale_[2][R];
  bool changes_[2][NV];
};

}  // namespace HW_ISA
}  // namespace headwise
