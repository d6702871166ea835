#include <math.h>

#include <algorithm>

#include "fuzz/reference/naive.h"

namespace naive {
namespace {

constexpr double kUnit = 0x1p-24;         // float32, in which kernels accumulate
constexpr double kTinyWeight = 0x1p-120;  // a weight that small may be 0
constexpr double kMinProduct = 0x1p-125;  // a product that small may be 0

// A sum with a bound of its error, which comes from the errors of its terms and from adding them in any order.
struct Sum {
  double x = 0, size = 0, error = 0;
  int64_t terms = 0;

  void add(double term, double off) {
    x += term;
    size += fabs(term);
    error += off + kMinProduct;
    ++terms;
  }
  void into(Gradient& to, size_t at, double factor, double rounding, double smallest) const {
    to.x[at] = x * factor;
    const double off = error + kUnit * static_cast<double>(terms + 16) * size;
    to.error[at] = off * fabs(factor) + (rounding + 4 * kUnit) * fabs(to.x[at]) + smallest;
  }
};

struct Row {
  double lse, lse_error, delta, delta_error;
  bool bad, in_loss;
};

void resize(Gradient& g, int64_t n) {
  g.x.assign(static_cast<size_t>(n), 0);
  g.error.assign(static_cast<size_t>(n), 0);
}

Row row_of(const Call& c, const Result& forward, const Upstream& up, int64_t row) {
  Row r = {forward.lse[static_cast<size_t>(row)], forward.lse_error[static_cast<size_t>(row)], 0, 0, false, false};
  double size = 0;
  for (int64_t d = row * c.V; d < (row + 1) * c.V; ++d) {
    const auto at = static_cast<size_t>(d);
    const double g = up.out[at];
    r.in_loss |= g != 0;
    r.delta += g * forward.out[at];
    size += fabs(g * forward.out[at]);
    r.delta_error += fabs(g) * forward.out_error[at];
  }
  if (!up.lse.empty()) {
    const double g = up.lse[static_cast<size_t>(row)];
    r.in_loss |= g != 0;
    r.delta -= g;
    size += fabs(g);
  }
  r.delta_error += kUnit * static_cast<double>(c.V + 8) * size;
  r.bad = !std::isfinite(r.lse) || !std::isfinite(r.delta);
  return r;
}

}  // namespace

Gradients backward(const Call& c, const Rounding& unit, const Result& forward, const Upstream& up) {
  Gradients g;
  const int64_t G = c.H / c.K;
  resize(g.query, c.B * c.H * c.T * c.D);
  resize(g.key, c.B * c.K * c.S * c.D);
  resize(g.value, c.B * c.K * c.S * c.V);
  resize(g.scores, c.B * c.H * c.T * c.S);
  std::vector<Sum> query(g.query.x.size()), key(g.key.x.size()), value(g.value.x.size());
  std::vector<Sum> sinks(static_cast<size_t>(c.sinks.empty() ? 0 : c.H));
  std::vector<std::vector<Sum>> slopes(c.alibi.size(), std::vector<Sum>(static_cast<size_t>(c.B * c.H)));
  const double scale_up = c.dropout > 0 ? (c.dropout < 1 ? 1 / (1 - c.dropout) : 0) : 1;
  for (int64_t row = 0; row < c.B * c.H * c.T; ++row) {
    const int64_t i = row % c.T, h = row / c.T % c.H, b = row / c.T / c.H, head = b * c.K + h / G;
    const Row r = row_of(c, forward, up, row);
    if (r.lse == -HUGE_VAL || (r.bad && !r.in_loss)) continue;
    if (!c.sinks.empty()) {
      const double weight = r.bad ? NAN : exp(c.sinks[static_cast<size_t>(h)] - r.lse);
      const double off = error_of_weight(r.lse_error + 8 * kUnit * fabs(r.lse)) + 8 * kUnit;
      sinks[static_cast<size_t>(h)].add(
          -weight * r.delta, weight * (fabs(r.delta) * off + r.delta_error) + kTinyWeight * (1 + fabs(r.delta)));
    }
    for (int64_t j = 0; j < c.S; ++j) {
      const Score s = score_of(c, b, h, i, j);
      if (!s.attended) continue;
      const auto at = static_cast<size_t>(row * c.S + j);
      const double up_ij = c.dropout > 0 && !c.keep[at] ? 0 : scale_up;
      const double* v = &c.value[static_cast<size_t>((head * c.S + j) * c.V)];
      const double* dout = &up.out[static_cast<size_t>(row * c.V)];
      double dp = 0, dp_size = 0;
      for (int64_t d = 0; d < c.V; ++d) {
        dp += dout[d] * v[d];
        dp_size += fabs(dout[d] * v[d]);
      }
      dp *= up_ij;
      dp_size *= up_ij;
      const double largest = std::max(fabs(s.value), fabs(r.lse));
      const double off =
          error_of_weight(s.error + r.lse_error + 8 * kUnit * largest) + 4 * unit.exponential + 8 * kUnit;
      const double weight = r.bad ? NAN : exp(s.value - r.lse);
      const double weight_error = weight * off + kTinyWeight;
      const double apart = fabs(dp) + fabs(r.delta);
      const double dp_error = kUnit * static_cast<double>(c.V + 12) * dp_size + r.delta_error + 4 * kUnit * apart;
      const double score = weight * (dp - r.delta);
      const double score_error = weight_error * apart + weight * dp_error * (1 + off) + kMinProduct;
      g.scores.x[at] = score;
      g.scores.error[at] = score_error;
      for (size_t n = 0; n < slopes.size(); ++n) {
        const double away = fabs(static_cast<double>(i - j + c.alibi[n].offsets[static_cast<size_t>(b)]));
        slopes[n][static_cast<size_t>(b * c.H + h)].add(-score * away, (score_error + 4 * kUnit * fabs(score)) * away);
      }
      const double inner = score * s.slope;
      const double inner_error = score_error * (s.slope + s.slope_error) + fabs(score) * s.slope_error +
                                 (unit.weights + 4 * kUnit) * fabs(inner);
      const double after = weight * up_ij, after_error = weight_error * up_ij + (unit.weights + 2 * kUnit) * after;
      for (int64_t d = 0; d < c.D; ++d) {
        const auto of_query = static_cast<size_t>(row * c.D + d),
                   of_key = static_cast<size_t>((head * c.S + j) * c.D + d);
        const double q = r.bad ? 0 : c.query[of_query], k = c.key[of_key];
        query[of_query].add(inner * k, inner_error * fabs(k));
        key[of_key].add(inner * q, inner_error * fabs(q));
      }
      for (int64_t d = 0; d < c.V; ++d) {
        const double back = r.bad ? 0 : dout[d];
        value[static_cast<size_t>((head * c.S + j) * c.V + d)].add(after * back, after_error * fabs(back));
      }
    }
  }
  const auto finish = [&](const std::vector<Sum>& sums, Gradient& to, double factor, double rounding, double smallest) {
    resize(to, static_cast<int64_t>(sums.size()));
    for (size_t n = 0; n < sums.size(); ++n) sums[n].into(to, n, factor, rounding, smallest);
  };
  finish(query, g.query, c.scale, unit.out, unit.smallest);
  finish(key, g.key, c.scale, unit.out, unit.smallest);
  finish(value, g.value, 1, unit.out, unit.smallest);
  finish(sinks, g.sinks, 1, kUnit, 0x1p-126);
  g.slopes.resize(slopes.size());
  for (size_t n = 0; n < slopes.size(); ++n) finish(slopes[n], g.slopes[n], 1, kUnit, 0x1p-126);
  return g;
}

}  // namespace naive
