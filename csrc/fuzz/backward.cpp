// The backward of a case against its definition.
#include <string.h>

#include "fuzz/calls.h"

namespace fuzz {
namespace {

// What a bias of these sizes gets of the gradient of the scores, (B, H, T, S).
naive::Gradient reduced(const naive::Gradient& full, const naive::Call& c, const std::vector<int64_t>& sizes, int32_t dtype) {
  const int64_t all[4] = {c.B, c.H, c.T, c.S};
  const auto count = static_cast<size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]);
  naive::Gradient g;
  g.x.assign(count, 0), g.error.assign(count, 0);
  std::vector<double> size(count, 0);
  for (size_t n = 0; n < full.x.size(); ++n) {
    int64_t rest = static_cast<int64_t>(n), place = 0, step = 1;
    for (size_t axis = 4; axis-- > 0;) {
      place += (sizes[axis] == 1 ? 0 : rest % all[axis]) * step;
      rest /= all[axis], step *= sizes[axis];
    }
    const auto to = static_cast<size_t>(place);
    g.x[to] += full.x[n], g.error[to] += full.error[n], size[to] += fabs(full.x[n]);
  }
  const double terms = static_cast<double>(full.x.size() / count + 16);
  const naive::Rounding unit = rounding(dtype);
  for (size_t n = 0; n < count; ++n) {
    g.error[n] += 0x1p-24 * terms * size[n] + (unit.out + 0x1p-22) * fabs(g.x[n]) + unit.smallest;
  }
  return g;
}

naive::Gradient summed_over_batch(const naive::Gradient& each, const naive::Call& c) {
  naive::Gradient g;
  g.x.assign(static_cast<size_t>(c.H), 0), g.error = g.x;
  for (size_t n = 0; n < each.x.size(); ++n) {
    const size_t h = n % static_cast<size_t>(c.H);
    g.x[h] += each.x[n], g.error[h] += each.error[n] + 0x1p-24 * static_cast<double>(c.B + 1) * fabs(each.x[n]);
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
  std::vector<Expected> all = {{"gradient of query", g.query}, {"gradient of key", g.key}, {"gradient of value", g.value}};
  if (k.sinks.present) all.push_back({"gradient of sinks", g.sinks});
  if (!k.biases) return all;
  for (const Drawn& mask : k.dense) {
    if (mask.dtype != kBool) all.push_back({"gradient of a bias", reduced(g.scores, c, mask.sizes, mask.dtype), mask.dtype});
  }
  for (size_t n = 0; n < g.slopes.size(); ++n) {
    const bool batched = k.alibi[2 * n].sizes[0] != 1 || c.B == 1;
    all.push_back({"gradient of slopes", batched ? g.slopes[n] : summed_over_batch(g.slopes[n], c)});
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
  fake::set_threads(1);
  const Back one = run_backward(k, dirty, false), other = run_backward(k, clean, false);
  fake::set_threads(static_cast<int>(2 + k.seed % 7));
  const Back many = run_backward(k, dirty, false);
  if (!one.error.empty()) return "refuses the backward: " + one.error;
  if (!same(one, many)) return "other bits of a gradient on more threads";
  if (!same(one, other)) return "what must not matter does, in a gradient";
  if (k.wild) return "";
  const std::vector<Expected> all = expected(k);
  if (all.size() != one.grads.size()) return "another number of gradients";
  for (size_t n = 0; n < all.size(); ++n) {
    const naive::Gradient& wanted = all[n].gradient;
    if (wanted.x.size() != one.grads[n].size()) return all[n].what + ": another size";
    const std::string wrong = compare(all[n].what.c_str(), one.grads[n], wanted.x, wanted.error, k, isa, all[n].dtype);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace fuzz
