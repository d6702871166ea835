#include "fuzz/reference/naive.h"

#include <math.h>

#include <algorithm>
#include <limits>

namespace naive {
namespace {

constexpr double kUnit = 0x1p-24;  // float32, in which kernels accumulate
constexpr double kMaxFloat = std::numeric_limits<float>::max();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kFar = int64_t{1} << 40;

bool finite(const std::vector<double>& x, int64_t row, int64_t width) {
  const auto begin = x.begin() + row * width;
  return std::all_of(begin, begin + width, [](double element) { return std::isfinite(element); });
}

}  // namespace

// A sum of n products has an error of at most n units of the sum of magnitudes, in any order and with or without fma.
// Everything after it adds a few units of its own magnitude.
Score score_of(const Call& c, int64_t b, int64_t h, int64_t i, int64_t j) {
  Score s;
  if (!may_attend(c, b, h, i, j)) return s;
  const double* q = &c.query[static_cast<size_t>(((b * c.H + h) * c.T + i) * c.D)];
  const double* k = &c.key[static_cast<size_t>(((b * c.K + h / (c.H / c.K)) * c.S + j) * c.D)];
  double sum = 0, size = 0;
  for (int64_t d = 0; d < c.D; ++d) {
    sum += q[d] * k[d];
    size += fabs(q[d] * k[d]);
  }
  double x = sum * c.scale;
  double error = kUnit * static_cast<double>(c.D + 8) * size * fabs(c.scale);
  if (c.bytes != 0) {  // the last of three digits is at most 2^-21 of the largest; two may lose 2^-16 of the norm
    double top = 0, total = 0, q2 = 0, k2 = 0;
    for (int64_t d = 0; d < c.D; ++d) {
      top = std::max(top, fabs(q[d]));
      total += fabs(k[d]);
      q2 += q[d] * q[d];
      k2 += k[d] * k[d];
    }
    error += (0x1p-22 * top * total + (c.bytes == 2 ? 0x1p-16 * sqrt(q2 * k2) : 0)) * fabs(c.scale);
  }
  if (c.softcap > 0) {
    const double t = tanh(x / c.softcap);
    x = c.softcap * t;
    s.slope = 1 - t * t;
    s.slope_error = 2 * fabs(t) * (error / c.softcap + 20 * kUnit * fabs(t)) + 4 * kUnit;
    // The error shrinks by the slope at the nearest score within it.
    const double least = std::max(fabs(sum * c.scale) - error, 0.0) / c.softcap,
                 steepest = 1 - tanh(least) * tanh(least);
    error = error * steepest + 16 * kUnit * fabs(x);
  }
  double passed = fabs(x);
  for (const Alibi& rule : c.alibi) {
    const double offset = static_cast<double>(rule.offsets[static_cast<size_t>(b)]);
    const double away = rule.slopes[static_cast<size_t>(b * c.H + h)] * fabs(static_cast<double>(i - j) + offset);
    x -= away;
    passed += fabs(away);
  }
  for (const Dense& rule : c.dense) {
    if (rule.boolean) continue;
    const double added = rule.x[static_cast<size_t>(((b * c.H + h) * c.T + i) * c.S + j)];
    if (added == -kInf) return Score();
    x += added;
    passed += fabs(added);
  }
  s.attended = true;
  s.value = x;
  s.error = error + kUnit * static_cast<double>(4 + 2 * c.alibi.size() + 2 * c.dense.size()) * passed;
  return s;
}

double error_of_weight(double error) { return std::min(expm1(error), 0x1p400); }

bool may_attend(const Call& c, int64_t b, int64_t h, int64_t i, int64_t j) {
  int64_t low = c.low, high = c.high;
  if (!c.bounds.empty()) {
    const int64_t* row = &c.bounds[static_cast<size_t>(b * 5)];
    low = row[0];
    high = row[1];
    if (j < row[2] || j >= row[3]) return false;
    if (j < row[4]) low = -kFar;
  }
  low = std::clamp(low, -kFar, kFar);
  high = std::clamp(high, -kFar, kFar);
  if (j < i + low || j >= i + high) return false;
  for (const Segments& rule : c.segments) {
    if (rule.query[static_cast<size_t>(b * c.T + i)] != rule.key[static_cast<size_t>(b * c.S + j)]) return false;
  }
  for (const Dense& rule : c.dense) {
    if (rule.boolean && rule.x[static_cast<size_t>(((b * c.H + h) * c.T + i) * c.S + j)] == 0) return false;
  }
  return true;
}

// The greatest weight of each tile, times the scale of its value: the unit of int8 decode's integers. The weight of a
// score s is exp(s - top) * factor. Empty for values that are not int8.
static std::vector<double> greatest_by_tile(const Call& c, const std::vector<Score>& scores, int64_t head, double top,
                                            double factor) {
  std::vector<double> tops(static_cast<size_t>(c.bytes != 0 ? c.S / 128 + 1 : 0));
  for (int64_t j = 0; j < c.S && c.bytes != 0; ++j) {
    const Score& s = scores[static_cast<size_t>(j)];
    if (!s.attended) continue;
    double& most = tops[static_cast<size_t>(j / 128)];
    most = std::max(most, exp(s.value - top) * factor * fabs(c.value_scale[static_cast<size_t>(head * c.S + j)]));
  }
  return tops;
}

Result attention(const Call& c, const Rounding& unit) {
  Result r;
  const size_t rows = static_cast<size_t>(c.B * c.H * c.T), width = static_cast<size_t>(c.V);
  r.out.assign(rows * width, 0);
  r.out_error.assign(rows * width, 0);
  r.lse.assign(rows, -kInf);
  r.lse_error.assign(rows, 0);
  std::vector<Score> scores(static_cast<size_t>(c.S));
  for (size_t row = 0; row < rows; ++row) {
    const int64_t n = static_cast<int64_t>(row), i = n % c.T, h = n / c.T % c.H, b = n / c.T / c.H;
    const int64_t head = b * c.K + h / (c.H / c.K);
    double top = -kInf, error = 0, largest = 0;
    bool alive = false, counts = false, bad = !finite(c.query, n, c.D);
    for (int64_t j = 0; j < c.S; ++j) {
      Score& s = scores[static_cast<size_t>(j)] = score_of(c, b, h, i, j);
      if (!s.attended) continue;
      alive = true;
      if (!finite(c.key, head * c.S + j, c.D) || !finite(c.value, head * c.S + j, c.V) || !std::isfinite(s.value)) {
        bad = true;
      }
      if (s.value < -kMaxFloat) {  // -inf in float32, which has no weight unless the row has no other score
        s.attended = false;
        continue;
      }
      counts = true;
      top = std::max(top, s.value);
    }
    for (const Score& s : scores) {
      if (!s.attended || s.value + s.error < top - 1000) continue;  // its weight is 0 whatever its error
      error = std::max(error, s.error);
      largest = std::max(largest, fabs(s.value));
    }
    if (!alive) continue;
    double* out = &r.out[row * width];
    double* out_error = &r.out_error[row * width];
    if (bad || !counts) {
      std::fill(out, out + c.V, NAN);
      r.lse[row] = NAN;
      continue;
    }
    const double sink = c.sinks.empty() ? -kInf : c.sinks[static_cast<size_t>(h)];
    top = std::max(top, sink);
    largest = std::max(largest, fabs(top));
    double total = sink == -kInf ? 0 : exp(sink - top);
    for (const Score& s : scores) total += !s.attended ? 0 : exp(s.value - top);
    error += 8 * kUnit * largest;  // from the factor log2(e) and the subtraction of the maximum
    const double summed = 2 * kUnit * static_cast<double>(c.S + 16);
    const double relative = error_of_weight(2 * error) + 4 * unit.exponential + unit.weights + 2 * summed;
    r.lse[row] = top + log(total);
    r.lse_error[row] = error + 2 * unit.exponential + summed + 4 * kUnit * fabs(r.lse[row]);
    const double up = c.dropout > 0 ? (c.dropout < 1 ? 1 / (1 - c.dropout) : 0) : 1;
    const std::vector<double> tops = greatest_by_tile(c, scores, head, top, up / total);
    for (int64_t j = 0; j < c.S; ++j) {
      const Score& s = scores[static_cast<size_t>(j)];
      if (!s.attended || (c.dropout > 0 && !c.keep[static_cast<size_t>(n * c.S + j)])) continue;
      const double weight = exp(s.value - top) / total * up;
      const double* value = &c.value[static_cast<size_t>((head * c.S + j) * c.V)];
      for (size_t d = 0; d < width; ++d) {
        out[d] += weight * value[d];
        out_error[d] += weight * fabs(value[d]) * relative + 0x1p-120 * fabs(value[d]) * up;
        out_error[d] += std::min(weight * fabs(value[d]), 0x1p-126 * up);  // a product below 2^-126 counts as 0
        if (c.bytes != 0) {
          const double half = c.bytes == 2 ? 0.5 / 32512 : 0.5 / 8323072;
          out_error[d] += 128 * (half * (1 + relative) * tops[static_cast<size_t>(j / 128)] + 1e-30 * up);
        }
      }
    }
    for (size_t d = 0; d < width; ++d) {
      const double gate = c.gate.empty() ? 1 : c.gate[row * width + d];
      out[d] *= gate;
      out_error[d] = out_error[d] * fabs(gate) + (unit.out + 4 * kUnit) * fabs(out[d]) + unit.smallest;
    }
  }
  return r;
}

}  // namespace naive
