// Computes the gradient of a call on torch's threads: runs its items, sums over chunks, and finishes the gradients that
// several rows add to.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/dispatch.h"
#include "runtime/repack.h"
#include "runtime/schedule.h"

namespace headwise {
namespace {

// A gradient to which many rows add. Every item adds to sums of its own; these are then added up in order.
template <class T>
struct ItemSums {
  std::vector<T> sums;
  SharedGradient<T> place;
};

// The distance between rows of S sums each. A row takes whole cache lines, so that items do not write to one line; the
// rows of T need not, because one item has many of them.
template <class N>
int64_t pitch_of_sums(int64_t T, int64_t S) {
  constexpr int64_t line = 64 / sizeof(N);
  return T > 1 && S == 1 ? 1 : (S + line - 1) / line * line;
}

// Allocates sums of the shape (B, H, rows, S). If T > 1 there are T rows, else as many as chunks. T and S may be 1.
template <class N>
void allocate(ItemSums<N>& x, const Call& p, int64_t chunks, int64_t T, int64_t S) {
  const int64_t rows = T > 1 ? T : chunks, pitch = pitch_of_sums<N>(T, S);
  x.sums.assign(static_cast<size_t>(p.B * p.H * rows * pitch), N{0});
  x.place = {x.sums.data(), {p.H * rows * pitch, rows * pitch, T > 1 ? pitch : 0, S > 1 ? 1 : 0}, T > 1 ? 0 : pitch};
}

// Adds sums of (B, H, rows, S) to a result with the strides `to`, which are 0 where it is broadcast.
template <class N, class To>
void reduce(const ItemSums<N>& x, const Call& p, int64_t rows, int64_t S, int64_t pitch, To* out, const int64_t* to) {
  const N* from = x.sums.data();
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t i = 0; i < rows; ++i, from += pitch) {
        To* row = out + b * to[0] + h * to[1] + i * to[2];
        for (int64_t j = 0; j < S; ++j) row[j * to[3]] += from[j];
      }
    }
  }
}

// The number of elements of a tensor with broadcast axes.
int64_t count(const Call& p, const Tensor4& x) {
  const int64_t sizes[4] = {p.B, p.H, p.T, p.S};
  int64_t n = 1;
  for (int axis = 0; axis < 4; ++axis) n *= x.stride[axis] == 0 ? 1 : sizes[axis];
  return n;
}

struct BiasGradient {
  ItemSums<float> by_item;    // used if the bias has no query axis or no key axis
  std::vector<float> floats;  // used if it has both and is not float32
  float* out = nullptr;       // the gradient as floats
  bool rows = false, keys = false;
};

int64_t diagonals(const Call& p) { return p.T + p.S - 1; }

// For a relative bias, rows of different chunks add to the same diagonals. So each chunk gets sums of its own.
void place_diagonals(const Call& p, const Tensor4& to, BackwardPlan& plan, int i, BiasGradient& bias) {
  const int64_t n = diagonals(p), pitch = pitch_of_sums<float>(1, n), of_head = plan.chunks * pitch;
  const int64_t floats = (to.stride[0] == 0 ? 1 : p.B) * (to.stride[1] == 0 ? 1 : p.H) * n;
  bias.out = static_cast<float*>(to.data);
  std::memset(to.data, 0, static_cast<size_t>(floats) * sizeof(float));
  bias.by_item.sums.assign(static_cast<size_t>(p.B * p.H * of_head), 0.0f);
  plan.dense[i] = {bias.by_item.sums.data() + p.T - 1, {p.H * of_head, of_head, -1, 1}, pitch};
}

// Sets the place to which the items add the gradient of a bias.
void place_bias(const Call& p, const Gradients& g, BackwardPlan& plan, int i, BiasGradient& bias) {
  const Tensor4& to = g.dense[i];
  if (p.diagonal[i]) return place_diagonals(p, to, plan, i, bias);
  bias.rows = to.stride[2] != 0;
  bias.keys = to.stride[3] != 0;
  const auto n = static_cast<size_t>(count(p, to));
  if (to.dtype == Dtype::f32) {
    bias.out = static_cast<float*>(to.data);
    std::memset(to.data, 0, n * sizeof(float));
  } else {
    bias.floats.assign(n, 0.0f);
    bias.out = bias.floats.data();
  }
  if (!bias.rows || !bias.keys) {
    allocate(bias.by_item, p, plan.chunks, bias.rows ? p.T : 1, bias.keys ? p.S : 1);
    plan.dense[i] = bias.by_item.place;
    return;
  }
  plan.dense[i].data = bias.out;
  std::copy(to.stride, to.stride + 4, plan.dense[i].stride);
  plan.summed[i] = (to.stride[0] == 0 && p.B > 1) || (to.stride[1] == 0 && p.H > 1);
}

void finish_bias(const Kernels& set, const Call& p, const Gradients& g, const BackwardPlan& plan, int i,
                 BiasGradient& bias) {
  const Tensor4& to = g.dense[i];
  if (p.diagonal[i]) {
    const int64_t strides[4] = {to.stride[0], to.stride[1], 0, 1};
    const int64_t n = diagonals(p);
    return reduce(bias.by_item, p, plan.chunks, n, pitch_of_sums<float>(1, n), bias.out, strides);
  }
  if (!bias.rows || !bias.keys) {
    const int64_t T = bias.rows ? p.T : 1, S = bias.keys ? p.S : 1, rows = T > 1 ? T : plan.chunks;
    reduce(bias.by_item, p, rows, S, pitch_of_sums<float>(T, S), bias.out, to.stride);
  }
  if (to.dtype != Dtype::f32) {
    set.round(bias.floats.data(), static_cast<int64_t>(bias.floats.size()), to.dtype, to.data);
  }
}

// Writes the gradient of sinks (H) or slopes (B or 1, H).
void finish_heads(const Call& p, const BackwardPlan& plan, const ItemSums<double>& x, float* out, bool batched) {
  const int64_t n = (batched ? p.B : 1) * p.H, to[4] = {batched ? p.H : 0, 1, 0, 0};
  std::vector<double> sums(static_cast<size_t>(n), 0.0);
  reduce(x, p, plan.chunks, 1, pitch_of_sums<double>(1, 1), sums.data(), to);
  std::transform(sums.begin(), sums.end(), out, [](double sum) { return static_cast<float>(sum); });
}

// Runs the items of a plan, then merges the chunks and computes the biases that are summed over batch or heads.
void run_items(const Kernels& set, const Call& p, const Gradients& g, BackwardSchedule& schedule, int64_t workers) {
  BackwardPlan& plan = schedule.plan;
  std::optional<Floats> partial;
  if (plan.has_partial) {
    partial.emplace(p.B * p.K * plan.chunks * plan.partial_floats(p));
    plan.partial = partial->data;
  }
  const auto run = [&](int64_t items, bool uniform, const auto& item) {
    for_each_item(workers, items, uniform, plan.scratch_bytes, item, scratch_of);
  };
  run(static_cast<int64_t>(schedule.items.size()), schedule.uniform,
      [&](int64_t i, char* scratch) { set.backward(p, g, plan, schedule.items[static_cast<size_t>(i)], scratch); });
  if (plan.partial != nullptr) {
    constexpr int64_t kKeys = 64;
    const int64_t parts = (p.S + kKeys - 1) / kKeys;
    const auto merge = [&](int64_t i, char*) {
      const int64_t head = i / parts, first = i % parts * kKeys;
      set.merge_backward(p, g, plan, head / p.K, head % p.K, first, std::min(first + kKeys, p.S));
    };
    for_each_item(workers, p.B * p.K * parts, true, 0, merge, scratch_of);
  }
  for (int i = 0; i < p.n_dense; ++i) {
    if (!plan.summed[i]) continue;
    const int64_t parts = (p.T + plan.queries_per_bias_item - 1) / plan.queries_per_bias_item;
    // The last rows come first, because under a causal mask they have the most keys.
    run(parts, false,
        [&](int64_t part, char* scratch) { set.backward_bias(p, g, plan, i, parts - 1 - part, scratch); });
  }
}

}  // namespace

void attend_backward(const Call& call, const Gradients& g) {
  const int64_t workers = workers_for(2.5 * estimate(call));
  const RepackedKeys packed(call, workers);
  const Call& p = packed.call();
  const Kernels& set = kernels();  // read once: another thread may switch the instruction set
  BackwardPlan plan = set.plan_backward(p);
  ItemSums<double> sinks, slopes[kMaxAlibi];
  BiasGradient bias[kMaxDense];
  if (g.sinks != nullptr) {
    allocate(sinks, p, plan.chunks, 1, 1);
    plan.sinks = sinks.place;
  }
  for (int i = 0; i < p.n_alibi; ++i) {
    if (g.slopes[i] == nullptr) continue;
    allocate(slopes[i], p, plan.chunks, 1, 1);
    plan.slopes[i] = slopes[i].place;
  }
  for (int i = 0; i < p.n_dense; ++i) {
    if (g.dense[i].data != nullptr) place_bias(p, g, plan, i, bias[i]);
  }
  // Gradients that several rows share are summed by chunk, so heads with them are not split into two passes.
  plan.splits &= g.sinks == nullptr;
  for (int i = 0; i < p.n_alibi; ++i) plan.splits &= g.slopes[i] == nullptr;
  for (int i = 0; i < p.n_dense; ++i) plan.splits &= g.dense[i].data == nullptr;
  BackwardSchedule schedule = schedule_backward(p, plan, workers);
  run_items(set, p, g, schedule, workers);
  if (g.sinks != nullptr) finish_heads(p, plan, sinks, g.sinks, false);
  for (int i = 0; i < p.n_alibi; ++i) {
    if (g.slopes[i] != nullptr) finish_heads(p, plan, slopes[i], g.slopes[i], g.slopes_batched[i]);
  }
  for (int i = 0; i < p.n_dense; ++i) {
    if (g.dense[i].data != nullptr) finish_bias(set, p, g, plan, i, bias[i]);
  }
}

}  // namespace headwise
