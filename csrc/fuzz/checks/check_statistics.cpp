// Checks the statistics of a case against their definition.
#include <math.h>

#include <algorithm>

#include "fuzz/calls.h"

namespace fuzz {
namespace {

constexpr double kUnit = 0x1p-24;

// The options of statistics, random from the seed of the case.
struct Options {
  int64_t bins, query_bins, sums, columns;
  std::vector<int64_t> picks, slots;  // (T, n), (n)
  std::vector<double> features;       // (S, columns)
  bool with_value;

  Options(const Case& k) {
    Draw draw(k.seed + 5);
    const naive::Call& c = k.call;
    bins = draw.one_of<int64_t>({0, 1, draw.between(1, c.S), std::min<int64_t>(c.S, 32), c.S});
    query_bins = draw.one_of<int64_t>({1, draw.between(1, c.T), std::min<int64_t>(c.T, 32), c.T});
    sums = draw.between(1, 3);
    columns = draw.between(0, 3);
    slots.resize(static_cast<size_t>(draw.between(0, 5)));
    for (int64_t& slot : slots) slot = draw.below(sums);
    picks.resize(slots.size() * static_cast<size_t>(c.T));
    for (int64_t& pick : picks) pick = draw.between(-1, c.S);
    features.resize(static_cast<size_t>(c.S * columns));
    for (double& x : features) x = static_cast<float>(draw.normal());
    with_value = draw.once_in(2);
  }

  int64_t width() const { return 2 * sums + columns; }  // of the sums of a head
};

fake::Tensor tensor_of(int32_t dtype, std::vector<int64_t> sizes, const std::vector<double>& x) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t axis = sizes.size(); axis-- > 0; step *= sizes[axis]) strides[axis] = step;
  fake::Tensor t = fake::make(dtype, sizes, strides, 0, 0);
  for (size_t n = 0; n < x.size(); ++n) write(*t, static_cast<int64_t>(n), x[n]);
  return t;
}

void push_rules(std::vector<StableIValue>& stack, const Case& k, const Tensors& t) {
  using namespace fake;
  const naive::Call& c = k.call;
  stack.insert(stack.end(),
               {give_number(c.scale), give_number(c.softcap), give_optional(t.sinks), static_cast<StableIValue>(c.low),
                static_cast<StableIValue>(c.high), give_optional(t.bounds), give_list(&t.segments), give_list(&t.dense),
                give_list(&t.alibi), give_list(&t.maps), give_list(&t.relative)});
}

// numbers (6, B, H, T), places (2, B, H, T), sums (B, H, width), map (B, H, query_bins, bins + 1), out; then mass and
// rows of (B, H, S).
struct Results {
  std::string error;
  std::vector<std::vector<double>> all;
};

enum { kNumbers, kPlaces, kSums, kMap, kOut, kMass, kRows };

Results call_statistics(const Case& k, const Tensors& t, const Options& a) {
  const naive::Call& c = k.call;
  const std::vector<double> picks(a.picks.begin(), a.picks.end()), slots(a.slots.begin(), a.slots.end());
  const auto n = static_cast<int64_t>(slots.size());
  std::vector<StableIValue> stack = {fake::give(t.query), fake::give(t.key),
                                     fake::give_optional(a.with_value ? t.value : nullptr)};
  push_rules(stack, k, t);
  stack.push_back(fake::give_optional(n > 0 ? tensor_of(kLong, {1, c.T, n}, picks) : nullptr));
  stack.push_back(fake::give_optional(n > 0 ? tensor_of(kLong, {n}, slots) : nullptr));
  stack.push_back(static_cast<StableIValue>(a.sums));
  stack.push_back(fake::give_optional(a.columns > 0 ? tensor_of(kFloat, {1, c.S, a.columns}, a.features) : nullptr));
  stack.push_back(static_cast<StableIValue>(a.bins));
  stack.push_back(static_cast<StableIValue>(a.query_bins));
  Results results;
  results.error = fake::call("attend_statistics", stack, 6);
  if (!results.error.empty()) return results;
  std::vector<fake::Tensor> tensors;
  for (int i = 0; i < 6; ++i) tensors.push_back(fake::take(stack[static_cast<size_t>(i)]));
  for (const int i : {2, 3, 4, 5, 0}) results.all.push_back(numbers(tensors[static_cast<size_t>(i)]));
  const size_t rows = static_cast<size_t>(c.B * c.H * c.T);
  if (results.all[kNumbers].size() != 6 * rows) return results;  // a corrupt call with other sizes
  const auto plane = [&](size_t which) {
    const auto from = results.all[kNumbers].begin() + static_cast<int64_t>(which * rows);
    return tensor_of(kFloat, {c.B, c.H, c.T}, {from, from + static_cast<int64_t>(rows)});
  };
  stack = {fake::give(t.query), fake::give(t.key), fake::give(plane(4)), fake::give(plane(5))};
  push_rules(stack, k, t);
  results.error = fake::call("attend_received", stack, 2);
  if (!results.error.empty()) return results;
  for (const size_t i : {0, 1}) results.all.push_back(numbers(fake::take(stack[i])));
  return results;
}

struct Expected {
  std::vector<double> x, error;
  void resize(int64_t n) {
    x.assign(static_cast<size_t>(n), 0);
    error.assign(static_cast<size_t>(n), 0);
  }
  void set(int64_t at, double value, double off) {
    x[static_cast<size_t>(at)] = value;
    error[static_cast<size_t>(at)] = off + 0x1p-100;
  }
  void add(int64_t at, double value, double off) {
    x[static_cast<size_t>(at)] += value;
    error[static_cast<size_t>(at)] += off + 0x1p-100;
  }
};

struct Truth {
  Expected entropy, distance, largest, keys, sums, map, mass, rows;
};

bool finite(const std::vector<double>& x, int64_t row, int64_t width) {
  const auto begin = x.begin() + row * width;
  return std::all_of(begin, begin + width, [](double element) { return std::isfinite(element); });
}

// The weights of one row and their errors, and the statistics that follow from them.
void define_row(const Case& k, const Options& a, int64_t row, Truth& truth) {
  const naive::Call& c = k.call;
  const int64_t i = row % c.T, h = row / c.T % c.H, b = row / c.T / c.H, head = b * c.K + h / (c.H / c.K);
  const int64_t pos = i + c.S - c.T, plane = b * c.H + h, keys_at = plane * c.S;
  const int64_t sums_at = plane * a.width(), map_at = (plane * a.query_bins + i * a.query_bins / c.T) * (a.bins + 1);
  std::vector<naive::Score> scores;
  double top = -HUGE_VAL, error = 0, tall = 0, count = 0;
  bool bad = !finite(c.query, row, c.D);
  for (int64_t j = 0; j < c.S; ++j) {
    scores.push_back(naive::score_of(c, b, h, i, j));
    const naive::Score& s = scores.back();
    if (!s.attended) continue;
    bad |= !finite(c.key, head * c.S + j, c.D) || !std::isfinite(s.value);
    top = std::max(top, s.value);
    error = std::max(error, s.error);
    tall = std::max(tall, fabs(s.value));
    ++count;
  }
  truth.keys.set(row, count, 0);
  if (count == 0) return;
  const double sink = c.sinks.empty() ? -HUGE_VAL : c.sinks[static_cast<size_t>(h)];
  const double peak = std::max(top, sink), escaped = sink == -HUGE_VAL ? 0 : exp(sink - peak);
  double on_keys = 0;
  for (const naive::Score& s : scores) on_keys += s.attended ? exp(s.value - peak) : 0;
  const double whole = on_keys + escaped, mass = bad ? NAN : on_keys / whole;
  error += 8 * kUnit * std::max(tall, fabs(peak));
  const double terms = 4 * kUnit * static_cast<double>(c.S + 64);
  const double off = naive::error_of_weight(2 * error) + 4 * rounding(k.query.dtype).exponential + terms;
  const auto surprise = [](double p) { return p > 0 ? -p * log(p) : 0; };
  std::vector<bool> aimed(static_cast<size_t>(a.sums), false);
  double entropy = surprise(escaped / whole), entropy_off = off * (1 + entropy), away = 0, largest = 0;
  for (int64_t j = 0; j < c.S; ++j) {
    const naive::Score& s = scores[static_cast<size_t>(j)];
    if (!s.attended) continue;
    const double p = bad ? NAN : exp(s.value - peak) / whole, p_off = off * p;
    entropy += bad ? NAN : surprise(p);
    entropy_off += off * (p + surprise(p));
    away += p * fabs(static_cast<double>(pos - j));
    largest = bad ? NAN : std::max(largest, p);
    truth.mass.add(keys_at + j, p, p_off + kUnit * static_cast<double>(c.T + 64) * p);
    truth.rows.add(keys_at + j, 1, 0);
    if (a.bins > 0) truth.map.add(map_at + j * a.bins / c.S, p / mass, 2 * off * p / mass);
    for (int64_t f = 0; f < a.columns; ++f) {
      const double x = a.features[static_cast<size_t>(j * a.columns + f)];
      truth.sums.add(sums_at + 2 * a.sums + f, p * x, p_off * fabs(x));
    }
    for (size_t n = 0; n < a.slots.size(); ++n) {
      if (a.picks[static_cast<size_t>(i) * a.slots.size() + n] != j) continue;
      truth.sums.add(sums_at + a.slots[n], p, p_off);
      aimed[static_cast<size_t>(a.slots[n])] = true;
    }
  }
  if (bad) {  // in every bin, even if it holds none of the row's keys
    for (int64_t n = 0; n < a.bins; ++n) truth.map.add(map_at + n, NAN, 0);
  }
  for (int64_t n = 0; n < a.sums; ++n) truth.sums.add(sums_at + a.sums + n, aimed[static_cast<size_t>(n)] ? 1 : 0, 0);
  truth.map.add(map_at + a.bins, mass > 0 ? 1 : 0, 0);
  truth.entropy.set(row, entropy, entropy_off + terms * (1 + fabs(log(whole))));
  truth.distance.set(row, away / mass, 2 * off * away / mass);
  truth.largest.set(row, largest, off * largest);
}

Truth define(const Case& k, const Options& a) {
  const naive::Call& c = k.call;
  const int64_t rows = c.B * c.H * c.T;
  Truth truth;
  for (Expected* x : {&truth.entropy, &truth.distance, &truth.largest, &truth.keys}) x->resize(rows);
  truth.sums.resize(c.B * c.H * a.width());
  truth.map.resize(c.B * c.H * a.query_bins * (a.bins + 1));
  truth.mass.resize(c.B * c.H * c.S);
  truth.rows.resize(c.B * c.H * c.S);
  for (int64_t row = 0; row < rows; ++row) define_row(k, a, row, truth);
  return truth;
}

bool same(const Results& a, const Results& b) {
  for (size_t n = 0; n < a.all.size(); ++n) {
    if (!same_bits(a.all[n], b.all[n])) return false;
  }
  return a.all.size() == b.all.size();
}

}  // namespace

std::string corrupt_statistics(const Case& k, const Tensors& t) { return call_statistics(k, t, Options(k)).error; }

std::string check_statistics(const Case& k, const Tensors& dirty, const Tensors& clean, const std::string& isa) {
  const Options options(k);
  fake::set_threads(1);
  const Results one = call_statistics(k, dirty, options), other = call_statistics(k, clean, options);
  fake::set_threads(threads_of(k));
  const Results many = call_statistics(k, dirty, options);
  if (!one.error.empty()) return "refuses statistics: " + one.error;
  if (!same(one, many)) return "other bits of statistics on more threads";
  if (!same(one, other)) return "what may not be attended changes statistics";
  if (k.unchecked) return "";
  const Truth truth = define(k, options);
  const size_t rows = truth.keys.x.size();
  const auto part = [&](int which, size_t plane) {
    const auto from = one.all[static_cast<size_t>(which)].begin() + static_cast<int64_t>(plane * rows);
    return std::vector<double>(from, from + static_cast<int64_t>(rows));
  };
  // If the sink has all weight except what is too small for float32, distance and map have no meaning.
  std::vector<double> distance = part(kNumbers, 1), map = one.all[kMap];
  const std::vector<double> mass = part(kNumbers, 3);
  for (size_t row = 0; row < rows; ++row) {
    if (!(mass[row] < 0x1p-60)) continue;
    distance[row] = truth.distance.x[row];
    const auto T = static_cast<size_t>(k.call.T), query_bins = static_cast<size_t>(options.query_bins);
    const size_t width = static_cast<size_t>(options.bins) + 1;
    const size_t at = (row / T * query_bins + row % T * query_bins / T) * width;
    if (map.size() == truth.map.x.size()) std::copy_n(&truth.map.x[at], width, &map[at]);
  }
  const struct {
    const char* what;
    std::vector<double> x;
    const Expected& expected;
  } all[] = {{"entropy", part(kNumbers, 0), truth.entropy}, {"distance", distance, truth.distance},
             {"largest", part(kNumbers, 5), truth.largest}, {"keys", part(kPlaces, 1), truth.keys},
             {"sums", one.all[kSums], truth.sums},          {"map", map, truth.map},
             {"received", one.all[kMass], truth.mass},      {"rows", one.all[kRows], truth.rows}};
  for (const auto& each : all) {
    if (each.x.size() != each.expected.x.size()) return std::string(each.what) + ": another size";
    const std::string wrong = compare(each.what, each.x, each.expected.x, each.expected.error, k, isa);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace fuzz
