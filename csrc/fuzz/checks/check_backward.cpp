// Checks the backward of a case against its definition.
#include <string.h>

#include "fuzz/calls.h"

namespace fuzz {
namespace {

// Sums the gradient of the scores, (B, H, T, S), to one of `count` elements: element n is added at place(n).
template <class Place>
naive::Gradient sum_places(const naive::Gradient& full, int64_t count, int32_t dtype, Place place) {
  naive::Gradient g;
  g.x.assign(static_cast<size_t>(count), 0);
  g.error = g.x;
  std::vector<double> size = g.x, terms = g.x;
  for (size_t n = 0; n < full.x.size(); ++n) {
    const size_t to = place(static_cast<int64_t>(n));
    g.x[to] += full.x[n];
    g.error[to] += full.error[n];
    size[to] += fabs(full.x[n]);
    ++terms[to];
  }
  const naive::Rounding unit = rounding(dtype);
  for (size_t n = 0; n < g.x.size(); ++n) {
    g.error[n] += 0x1p-24 * (terms[n] + 16) * size[n] + (unit.out + 0x1p-22) * fabs(g.x[n]) + unit.smallest;
  }
  return g;
}

// The same for a bias of these sizes, which is broadcast along axes of length 1.
naive::Gradient sum_axes(const naive::Gradient& full, const naive::Call& c, const std::vector<int64_t>& sizes,
                         int32_t dtype) {
  const int64_t all[4] = {c.B, c.H, c.T, c.S};
  return sum_places(full, count_of(sizes), dtype, [&](int64_t rest) {
    int64_t place = 0, step = 1;
    for (size_t axis = 4; axis-- > 0;) {
      place += (sizes[axis] == 1 ? 0 : rest % all[axis]) * step;
      rest /= all[axis];
      step *= sizes[axis];
    }
    return static_cast<size_t>(place);
  });
}

// The same for relative biases, (B or 1, H or 1, T + S - 1).
naive::Gradient sum_diagonals(const naive::Gradient& full, const naive::Call& c, const std::vector<int64_t>& sizes) {
  return sum_places(full, count_of(sizes), kFloat, [&](int64_t n) {
    const int64_t j = n % c.S, i = n / c.S % c.T, h = n / c.S / c.T % c.H, b = n / c.S / c.T / c.H;
    const int64_t plane = (sizes[0] == 1 ? 0 : b) * sizes[1] + (sizes[1] == 1 ? 0 : h);
    return static_cast<size_t>(plane * sizes[2] + c.T - 1 - i + j);
  });
}

naive::Gradient sum_batch(const naive::Gradient& each, const naive::Call& c) {
  naive::Gradient g;
  g.x.assign(static_cast<size_t>(c.H), 0);
  g.error = g.x;
  for (size_t n = 0; n < each.x.size(); ++n) {
    const size_t h = n % static_cast<size_t>(c.H);
    g.x[h] += each.x[n];
    g.error[h] += each.error[n] + 0x1p-24 * static_cast<double>(c.B + 1) * fabs(each.x[n]);
  }
  return g;
}

struct Expected {
  std::string what;
  naive::Gradient gradient;
  int32_t dtype = kFloat;
};

std::vector<Expected> expected(const Case& k) {
  naive::Call c = k.call;
  c.gate.clear();
  const naive::Rounding unit = rounding(k.query.dtype);
  const naive::Gradients g = naive::backward(c, unit, naive::attention(c, unit), k.upstream);
  std::vector<Expected> all = {
      {"gradient of query", g.query}, {"gradient of key", g.key}, {"gradient of value", g.value}};
  if (k.sinks.present) all.push_back({"gradient of sinks", g.sinks});
  if (!k.biases) return all;
  for (const DrawnTensor& mask : k.dense) {
    if (mask.dtype != kBool)
      all.push_back({"gradient of a bias", sum_axes(g.scores, c, mask.sizes, mask.dtype), mask.dtype});
  }
  for (size_t n = 0; n < g.slopes.size(); ++n) {
    const bool batched = k.alibi[2 * n].sizes[0] != 1 || c.B == 1;
    all.push_back({"gradient of slopes", batched ? g.slopes[n] : sum_batch(g.slopes[n], c)});
  }
  for (const DrawnTensor& bias : k.relative) {
    all.push_back({"gradient of relative biases", sum_diagonals(g.scores, c, bias.sizes)});
  }
  return all;
}

bool same(const Back& a, const Back& b) {
  if (a.grads.size() != b.grads.size()) return false;
  for (size_t n = 0; n < a.grads.size(); ++n) {
    if (!same_bits(a.grads[n], b.grads[n])) return false;
  }
  return true;
}

}  // namespace

std::string check_backward(const Case& k, const Tensors& dirty, const Tensors& clean, const std::string& isa) {
  const bool part = k.seed % 5 == 0;
  fake::set_threads(1);
  const Back one = run_backward(k, dirty, false, part), other = run_backward(k, clean, false, part);
  fake::set_threads(threads_of(k));
  const Back many = run_backward(k, dirty, false, part);
  if (!one.error.empty()) return "refuses the backward: " + one.error;
  if (!same(one, many)) return "other bits of a gradient on more threads";
  if (!same(one, other)) return "what may not be attended changes a gradient";
  if (k.unchecked) return "";
  const std::vector<Expected> all = expected(k);
  if (all.size() != one.grads.size()) return "another number of gradients";
  for (size_t n = 0; n < all.size(); ++n) {
    const naive::Gradient& expected_gradient = all[n].gradient;
    if (expected_gradient.x.size() != one.grads[n].size()) return all[n].what + ": another size";
    const std::string wrong =
        compare(all[n].what.c_str(), one.grads[n], expected_gradient.x, expected_gradient.error, k, isa, all[n].dtype);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace fuzz
