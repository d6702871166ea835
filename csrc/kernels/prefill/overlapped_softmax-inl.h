// The softmax of one visit beside the products of its neighbours.
#pragma once

#include "kernels/prefill/prefill_amx_scratch-inl.h"

namespace headwise {
namespace HW_ISA {

// The greatest score of each row, and the sum of the scores of the first rows, which is not finite where a key is not.
struct ChainPeaks {
  static constexpr int NV = kChainVectors;
  alignas(64) float top[NV * W], sum[W];

  ChainPeaks() {
    for (int r = 0; r < W; ++r) sum[r] = 0.0f;
    clear();
  }
  void clear() {
    for (int r = 0; r < NV * W; ++r) top[r] = -kInf;
  }
  // Adds the keys from <= j < to. Multiplies their scores by `scales` first, unless null.
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

// Of the polynomial for 2^x: the ports that multiply are what the softmax waits for. A cubic would do for weights,
// which bfloat16 rounds by up to 2^-8, and take 8 % less time; but lse would be off by 8e-5.
constexpr int kChainDegree = 4;

// The weights of a row are relative to a score that the greatest one exceeds by at most so much, as a power of two: so
// that sums are seldom rescaled.
constexpr float kSlack = 2.0f;

// The visits of an item, one after the other. Beside the softmax of a visit the scores of the next one are computed,
// and then the weighted values of the one before.
template <class N>
class Chains {
 public:
  Chains(const Problem& p, int64_t b, ChainScratch<N>& s) : p_(p), b_(b), s_(s) {}
  // Whether all scores were finite that a mask may have overwritten or not.
  bool finite() const { return floats_are_finite(peaks_.sum, W); }

  // Meanwhile a share of what is read later is prefetched with each visit.
  void run(const ChainVisit* visits, int count, NextTile& later) {
    if (count == 0) return;
    beside_ = Beside();
    beside_.next = visits;
    start(-1);
    finish(-1);
    for (int i = 0; i < count; ++i) {
      beside_ = Beside();
      if (i > 0) beside_.before = visits + i - 1;
      if (i + 1 < count) beside_.next = visits + i + 1;
      later.key.step();
      later.value.step();
      visit(visits[i], i);
    }
    beside_ = Beside();
    beside_.before = visits + count - 1;
    start(count);
    finish(count);
    unit_.flush();
  }

 private:
  static constexpr int NV = kChainVectors, R = kChainRows;
  static constexpr int kTurn = 8 / NV;  // keys of a turn of the softmax: 8 vectors

  // What is done beside the softmax of visit i: the scores of `next`, then the values of `before`, unless null.
  struct Beside {
    const ChainVisit *before = nullptr, *next = nullptr;
    bool in_values = false;
    bool rescales = false, notes = false;
    int64_t noted = 0, note_each = 0;        // keys of `next` whose peaks are known; a step's share of them
    int64_t rescaled = 0, rescale_each = 0;  // columns of `before`, multiplied by its factor
  };

  // A full tile whose scores need nothing but their peaks.
  bool is_plain(const ChainVisit& v) const {
    return v.span.kind == TileKind::full && !scales_first(p_) && !v.tile->bad.any;
  }
  int64_t skip_of(const ChainVisit& v) const { return v.span.j0 - v.tile->j0; }
  int64_t steps_of(const ChainVisit& v) const { return (v.span.n + kTileStep - 1) / kTileStep; }
  const float* key_scales(const ChainVisit& v) const { return kScaled<N> ? v.tile->key_scale + skip_of(v) : nullptr; }
  float* scores(int i) const { return s_.scores[i & 1]; }

  void start_scores(const ChainVisit& v, int i) {
    const KeyRows& key = v.tile->key;
    ProductChain chain;
    chain.first = reinterpret_cast<const uint16_t*>(key.data) + skip_of(v) * key.stride;
    chain.row = key.stride;
    chain.chunk = kTileStep * key.stride;
    chain.step = kTileStep;
    chain.second = s_.query[v.block];
    chain.steps = p_.D / kTileStep;
    chain.chunks = steps_of(v);
    chain.out = scores(i);
    unit_.start(chain);
  }
  void start_values(const ChainVisit& v, int i) {
    ProductChain chain;
    chain.first = reinterpret_cast<const uint16_t*>(v.tile->value.data) + skip_of(v) * p_.V;
    chain.row = kTileStep;
    chain.chunk = kTileStep * kTileStep;
    chain.step = kTileStep * p_.V;
    chain.second = s_.weights[i & 1];
    chain.steps = steps_of(v);
    chain.chunks = p_.V / kTileStep;
    chain.out = s_.sums[v.block];
    chain.adds = true;
    unit_.start(chain);
  }

  // O^T of the visit before i times the factor of its rows, for some columns more.
  HW_MEMBER void rescale(int i, int64_t columns) {
    float* out = s_.sums[beside_.before->block];
    const float* factors = rescale_[(i - 1) & 1];
    const int64_t to = min(beside_.rescaled + columns, p_.V);
    for (int v = 0; v < NV; ++v) {
      if (!changes_[(i - 1) & 1][v]) continue;
      const F factor = load(factors + v * W);
      for (int64_t u = beside_.rescaled; u < to; ++u)
        store(out + u * R + v * W, mul(load(out + u * R + v * W), factor));
    }
    beside_.rescaled = to;
  }
  HW_MEMBER void note(int i, int64_t keys) {
    const ChainVisit& next = *beside_.next;
    const int64_t to = min(beside_.noted + keys, next.span.n);
    peaks_.add(scores(i + 1), beside_.noted, to, key_scales(next), true);
    beside_.noted = to;
  }

  // Starts what is beside visit i.
  void start(int i) {
    Beside& it = beside_;
    it.rescales = false;
    for (int v = 0; it.before != nullptr && v < NV; ++v) it.rescales |= changes_[(i - 1) & 1][v];
    it.notes = it.next != nullptr && is_plain(*it.next);
    const int64_t score_steps = it.next != nullptr ? p_.D / kTileStep * steps_of(*it.next) : 1;
    const int64_t value_steps = it.before != nullptr ? p_.V / kTileStep * steps_of(*it.before) : 1;
    it.rescale_each = (p_.V + score_steps - 1) / score_steps;
    if (it.notes) it.note_each = round_up((it.next->span.n + value_steps - 1) / value_steps, 8);
    if (it.next != nullptr) start_scores(*it.next, i + 1);
  }
  // Whether a step of products is left beside visit i.
  HW_MEMBER bool has_step(int i) {
    if (unit_.left()) return true;
    if (beside_.before == nullptr || beside_.in_values) return false;
    start_later(i);
    return true;
  }
  HW_NOINLINE void start_later(int i) {
    if (beside_.next == nullptr) unit_.flush();  // else the first products of the scores have stored all sums
    if (beside_.rescales) rescale(i, p_.V);
    beside_.in_values = true;
    start_values(*beside_.before, i - 1);
  }
  // What belongs to a step: a share of the sums is rescaled, or of the next scores is looked at.
  HW_MEMBER void after_step(int i) {
    if (!beside_.in_values) {
      if (beside_.rescales) rescale(i, beside_.rescale_each);
    } else if (beside_.notes) {
      note(i, beside_.note_each);
    }
  }
  void finish(int i) {
    while (has_step(i)) {
      unit_.whole_step();
      after_step(i);
    }
    if (beside_.next != nullptr && !beside_.in_values) unit_.flush();
    if (beside_.notes) note(i, kChainKeys);
  }

  // Scale, biases and mask of scores that are not plain, and their peaks.
  HW_NOINLINE void mask(const ChainVisit& v, int i) {
    float* x = scores(i);
    const int n = v.span.n;
    if constexpr (kScaled<N>) scale_columns<NV>(x, key_scales(v), n);
    peaks_.add(x, 0, n, nullptr, true);
    tile_scores<ScoreLayout<1, R>>(p_, b_, s_.rows[v.block], v.span, v.tile->bad.from(skip_of(v)), x, {int64_t{n} * R},
                                   nullptr, [] {});
    peaks_.clear();
    peaks_.add(x, 0, n, nullptr, false);
  }

  // The softmax's state of a visit, in registers.
  struct Softmax {
    F peak[NV], sum[NV], scale;
    const float *x, *value_scale;
    uint32_t* weights;
  };

  // The weights of an even number of keys from the j-th on, in pairs.
  template <int Keys, int Turn, int T>
  HW_MEMBER void weigh(Softmax& to, int64_t j) {
    F w[Keys * NV];
    beside<4 * Turn, T>();
    HW_UNROLL
    for (int m = 0; m < Keys * NV; ++m) {
      w[m] = mul(headwise::HW_ISA::sub(load(to.x + j * R + m * W), to.peak[m % NV]), to.scale);
    }
    beside<4 * Turn + 1, T>();
    exp2_each<kChainDegree, Keys * NV / 2>(w);
    beside<4 * Turn + 2, T>();
    exp2_each<kChainDegree, Keys * NV / 2>(w + Keys * NV / 2);
    beside<4 * Turn + 3, T>();
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
  // The product that stands at one of the 4 T places of a step's turns; none where T is 0.
  template <int Place, int T>
  HW_MEMBER void beside() {
    if constexpr (T > 0) {
      constexpr int kEach = 4 * T / ChainUnit::kProducts;
      if constexpr (Place % kEach == 0) unit_.product<Place / kEach>();
    }
  }
  // As many turns as there are steps beside them, T turns each.
  template <int T>
  int64_t turns(Softmax& state, int64_t n, int i) {
    Softmax to = state;
    int64_t j = 0;
    for (; j + T * kTurn <= n && has_step(i); j += T * kTurn) {
      unit_.begin_step();
      weigh<kTurn, 0, T>(to, j);
      if constexpr (T == 2) weigh<kTurn, 1, T>(to, j + kTurn);
      unit_.end_step();
      after_step(i);
    }
    state = to;
    return j;
  }

  void visit(const ChainVisit& v, int i) {
    if (!is_plain(v)) mask(v, i);
    const int n = v.span.n;
    float* factor = rescale_[i & 1];
    Softmax to;
    to.x = scores(i);
    to.weights = s_.weights[i & 1];
    to.scale = set1(softmax_scale(p_) * kLog2e);
    to.value_scale = kScaled<N> ? v.tile->value_scale + skip_of(v) : nullptr;
    begin_softmax(to, v.block, factor, changes_[i & 1]);
    peaks_.clear();
    start(i);
    int64_t j = p_.D + p_.V > 160 ? turns<1>(to, n, i) : turns<2>(to, n, i);
    for (; j + kTurn <= n; j += kTurn) weigh<kTurn, 0, 0>(to, j);
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
  // Takes the peaks of a visit. `factor` is that from the score which weights were relative to before; `changes` says
  // of each vector of rows whether any is not 1.
  void begin_softmax(Softmax& to, int block, float* factor, bool* changes) {
    float *row_max = s_.row_max + block * kRows, *row_ref = s_.row_ref + block * kRows;
    const F none = set1(-kInf), slack = set1(kSlack);
    for (int v = 0; v < NV; ++v) {
      const F now = headwise::HW_ISA::max(load(row_max + v * W), load(peaks_.top + v * W)),
              before = load(row_ref + v * W);
      const M stays = not_less(slack, mul(headwise::HW_ISA::sub(now, before), to.scale));
      const F ref = select(stays, before, now);
      store(row_max + v * W, now);
      store(row_ref + v * W, ref);
      to.peak[v] = select(not_less(none, ref), zero(), ref);  // no key so far: x is -inf, its weight 0
      to.sum[v] = zero();
      store(factor + v * W, exp2<6>(mul(headwise::HW_ISA::sub(before, to.peak[v]), to.scale)));
    }
    for (int v = 0; v < NV; ++v) {
      bool any = false;
      for (int r = 0; r < W; ++r) any |= factor[v * W + r] != 1.0f;
      changes[v] = any;
    }
  }
  // The last key of an odd number, paired with 0.
  HW_NOINLINE void weigh_last(Softmax& to, int64_t j) {
    for (int v = 0; v < NV; ++v) {
      F a = mul(headwise::HW_ISA::sub(load(to.x + j * R + v * W), to.peak[v]), to.scale);
      exp2_each<kChainDegree, 1>(&a);
      to.sum[v] = add(to.sum[v], a);
      if constexpr (kScaled<N>) a = mul(a, set1(to.value_scale[j]));
      store_pairs(to.weights + j / 2 * R + v * W, a, zero());
    }
  }

  const Problem& p_;
  int64_t b_;
  ChainScratch<N>& s_;
  ChainUnit unit_;
  ChainPeaks peaks_;
  Beside beside_;
  alignas(64) float rescale_[2][R];
  bool changes_[2][NV];
};

}  // namespace HW_ISA
}  // namespace headwise
