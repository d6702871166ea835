// Random decode steps. Queries and keys must be rotated bit for bit as the definition does it, the cache must be
// written only at its place, and the output must be that of the definition for the content of the cache, on any number
// of threads.
#include <math.h>

#include <algorithm>

#include "fuzz/checks/drawn_step.h"

namespace fuzz {
namespace {

// The cache after the step, and the call that the queries make on it.
struct Expected {
  std::vector<double> keys, values, key_scale, value_scale;
  Case k;

  Expected(const DrawnStep& drawn, uint64_t seed) {
    keys = numbers(drawn.keys);
    if (drawn.bytes) key_scale = numbers(drawn.key_scale);
    if (!drawn.shared) values = numbers(drawn.values);
    if (!drawn.shared && drawn.bytes) value_scale = numbers(drawn.value_scale);
    naive::Call& c = k.call;
    c.B = drawn.B;
    c.H = drawn.H;
    c.K = drawn.K;
    c.T = 1;
    c.S = drawn.longest();
    c.D = drawn.D;
    c.V = drawn.V;
    for (int64_t b = 0; b < c.B; ++b) {
      for (int64_t h = 0; h < c.H; ++h) {
        for (const float x : rotate(drawn, *drawn.query, b, h, c.H)) c.query.push_back(x);
      }
      for (int64_t head = 0; head < c.K; ++head) place(drawn, b, head);
    }
    for (int64_t n = 0; n < c.B * c.K * c.S; ++n) {
      const int64_t at = drawn.row(n / c.S / c.K, n / c.S % c.K, n % c.S);
      const std::vector<double>&from = drawn.shared ? keys : values, &of = drawn.shared ? key_scale : value_scale;
      const auto unit = [&](const std::vector<double>& scales) {
        return drawn.bytes ? scales[static_cast<size_t>(at)] : 1.0;
      };
      const int64_t width = drawn.shared ? c.D : c.V;
      for (int64_t d = 0; d < c.D; ++d) c.key.push_back(keys[static_cast<size_t>(at * c.D + d)] * unit(key_scale));
      for (int64_t d = 0; d < c.V; ++d) c.value.push_back(from[static_cast<size_t>(at * width + d)] * unit(of));
      if (drawn.bytes) c.value_scale.push_back(unit(of));
    }
    c.bytes = !drawn.bytes ? 0 : drawn.dtype == kBfloat ? 2 : 3;
    c.scale = drawn.scale;
    c.softcap = drawn.softcap;
    c.low = drawn.low;
    c.high = drawn.high;
    if (drawn.sinks != nullptr) c.sinks = numbers(drawn.sinks);
    for (int64_t n = 0; drawn.gate != nullptr && n < c.B * c.H * c.V; ++n) c.gate.push_back(drawn.factor(n));
    for (int64_t n = 0; drawn.bounds != nullptr && n < c.B * 5; ++n)
      c.bounds.push_back(n % 5 == 4 ? INT64_MIN : static_cast<int64_t>(read(*drawn.bounds, n / 5 * 4 + n % 5)));
    k.query.dtype = drawn.dtype;
    k.seed = seed;
  }

 private:
  void place(const DrawnStep& drawn, int64_t b, int64_t head) {
    const auto put = [&](const std::vector<float>& x, std::vector<double>& data, std::vector<double>& scale) {
      const int64_t at = drawn.row(b, head, drawn.place(b));
      std::vector<double> stored(x.begin(), x.end());
      if (drawn.bytes) {
        stored.clear();
        scale[static_cast<size_t>(at)] = quantise(x, stored);
      }
      std::copy(stored.begin(), stored.end(), data.begin() + at * static_cast<int64_t>(x.size()));
    };
    put(rotate(drawn, *drawn.key, b, head, drawn.K), keys, key_scale);
    if (drawn.shared) return;
    std::vector<float> x;
    for (int64_t d = 0; d < drawn.V; ++d)
      x.push_back(static_cast<float>(read(*drawn.value, (b * drawn.K + head) * drawn.V + d)));
    put(x, values, value_scale);
  }
};

std::string compare_cache(const DrawnStep& drawn, const Expected& expected) {
  if (!same_numbers(numbers(drawn.keys), expected.keys)) return "other keys in the cache after a step";
  if (drawn.bytes && !same_numbers(numbers(drawn.key_scale), expected.key_scale)) return "other scales of keys";
  if (drawn.shared) return "";
  if (!same_numbers(numbers(drawn.values), expected.values)) return "other values in the cache after a step";
  if (drawn.bytes && !same_numbers(numbers(drawn.value_scale), expected.value_scale)) return "other scales of values";
  return "";
}

// A call that breaks one rule must be refused, whatever its other arguments are.
std::string accepts_wrong(uint64_t seed) {
  DrawnStep drawn(seed);
  switch (seed % 8) {
    case 0: drawn.places[0] = drawn.room; break;
    case 1: drawn.places[0] = -1; break;
    case 2: drawn.value_dim = drawn.shared ? drawn.D + 1 : drawn.V + 1; break;
    case 3: drawn.key->dtype = drawn.dtype == kBfloat ? kHalf : kBfloat; break;
    case 4:
      if (drawn.cos == nullptr) return "";
      drawn.sin = nullptr;
      break;
    case 5:
      if (drawn.cos == nullptr) return "";
      drawn.first = drawn.D - drawn.rotated + 1;
      break;
    case 6:  // keys that overlap
      if (drawn.keys->sizes[2] == 1) return "";
      drawn.keys->strides[2] = 0;
      break;
    default: {  // two rows that write one place
      if (drawn.table == nullptr || drawn.B == 1) return "";
      const int64_t place = drawn.place(0), at = place / drawn.page;
      drawn.places.assign(static_cast<size_t>(drawn.B), place);
      write(*drawn.table, drawn.table->sizes[1] + at, read(*drawn.table, at));
    }
  }
  if (seed % 8 == 3 && drawn.dtype == kFloat) drawn.key->dtype = kDouble;
  return drawn.run().empty() ? "a wrong step is not refused, kind " + std::to_string(seed % 8) : "";
}

// Keys or values after a step into packed codes: the new tokens have codes of theirs, and nothing else is written.
std::string compare_packed(const DrawnStep& drawn, const DrawnStep& fresh, bool is_key) {
  const fake::Tensor &data = is_key ? drawn.keys : drawn.values, &before = is_key ? fresh.keys : fresh.values;
  const fake::Tensor& scale = is_key ? drawn.key_scale : drawn.value_scale;
  const fake::Tensor& scale_before = is_key ? fresh.key_scale : fresh.value_scale;
  std::vector<double> got = numbers(data), units = numbers(scale);
  const std::vector<double> old = numbers(before);
  const int64_t bytes = data->sizes[3];
  for (int64_t n = 0; n < drawn.B * drawn.K; ++n) {
    const int64_t b = n / drawn.K, head = n % drawn.K;
    const auto at = static_cast<size_t>(drawn.row(b, head, drawn.place(b)));
    std::vector<float> x;
    for (int64_t d = 0; d < drawn.V && !is_key; ++d)
      x.push_back(static_cast<float>(read(*drawn.value, n * drawn.V + d)));
    if (is_key) x = rotate(drawn, *drawn.key, b, head, drawn.K);
    const std::string wrong = compare_token(x, &got[at * static_cast<size_t>(bytes)], units[at], drawn.bits);
    if (!wrong.empty()) return wrong;
    const auto place = static_cast<std::ptrdiff_t>(at) * bytes;
    std::copy_n(old.begin() + place, bytes, got.begin() + place);
    units[at] = read(*scale_before, static_cast<int64_t>(at));
  }
  const bool kept = same_numbers(got, old) && same_numbers(units, numbers(scale_before));
  return kept ? "" : "a step writes elsewhere";
}

// The outputs of a step into packed codes are those in the basis of the codes, rotated back and then gated.
std::string compare_rotated(uint64_t seed, const std::vector<double>& out) {
  DrawnStep plain(seed);
  for (int64_t i = 0; i < plain.V; ++i) {
    for (int64_t j = 0; j < plain.V; ++j)
      write(*plain.output_rotation, i * plain.output_rotation->sizes[1] + j, i == j);
  }
  plain.gate = nullptr;
  const DrawnStep drawn(seed);
  if (!plain.run().empty()) return "a step with another rotation of outputs is refused";
  const std::vector<double> x = numbers(plain.out);
  const naive::Rounding unit = rounding(plain.dtype);
  for (int64_t n = 0; n < static_cast<int64_t>(x.size()); ++n) {
    const int64_t row = n / plain.V * plain.V;
    double sum = 0, total = 0;
    for (int64_t i = 0; i < plain.V; ++i) {
      const double term = x[static_cast<size_t>(row + i)] *
                          read(*drawn.output_rotation, i * drawn.output_rotation->sizes[1] + n % plain.V);
      sum += term;
      total += fabs(term);
    }
    sum *= drawn.factor(n);
    total *= drawn.factor(n);
    const double got = out[static_cast<size_t>(n)];
    const bool near =
        fabs(got - sum) <= (2 * unit.out + 1e-5) * total + static_cast<double>(plain.V + 2) * unit.smallest;
    if (!near && !(std::isnan(got) && std::isnan(sum))) return "an output that is not rotated back";
  }
  return "";
}

// Runs the step on every instruction set and two numbers of threads, whose outputs must have the same bits, and checks
// each of them.
template <class Check>
std::string run_everywhere(uint64_t seed, const Check& check) {
  for (const std::string& isa : isas()) {
    use(isa);
    std::vector<double> one;
    for (const int threads : {1, static_cast<int>(2 + seed % 7)}) {
      fake::set_threads(threads);
      DrawnStep drawn(seed);
      const std::string error = drawn.run();
      if (!error.empty()) return isa + " refuses a step: " + error;
      const std::vector<double> out = numbers(drawn.out);
      if (threads == 1) one = out;
      if (!same_bits(one, out)) return isa + ": other bits of a step on more threads";
      const std::string wrong = check(drawn, out, isa);
      if (!wrong.empty()) return isa + ": " + wrong;
    }
  }
  return accepts_wrong(seed);
}

}  // namespace

std::string check_step(uint64_t seed) {
  const DrawnStep fresh(seed);
  if (fresh.bits < 8) {  // attention on the codes has its own cases, those of `attend_held`
    return run_everywhere(seed, [&](const DrawnStep& drawn, const std::vector<double>& out, const std::string&) {
      std::string wrong = compare_packed(drawn, fresh, true);
      if (wrong.empty()) wrong = compare_packed(drawn, fresh, false);
      return wrong.empty() ? compare_rotated(seed, out) : wrong;
    });
  }
  const Expected expected(fresh, seed);
  const naive::Result result = naive::attention(expected.k.call, rounding(expected.k.query.dtype));
  return run_everywhere(seed, [&](const DrawnStep& drawn, const std::vector<double>& out, const std::string& isa) {
    const std::string wrong = compare_cache(drawn, expected);
    return wrong.empty() ? compare("step", out, result.out, result.out_error, expected.k, isa) : wrong;
  });
}

// Runs a step with corrupt tensors or numbers, which must not crash.
std::string corrupt_step(uint64_t seed) {
  Draw draw(seed + 79);
  DrawnStep drawn(seed);
  fake::Tensor* const all[] = {&drawn.query,       &drawn.key,          &drawn.value,          &drawn.cos,
                               &drawn.sin,         &drawn.keys,         &drawn.values,         &drawn.key_scale,
                               &drawn.value_scale, &drawn.table,        &drawn.sinks,          &drawn.bounds,
                               &drawn.gate,        &drawn.key_rotation, &drawn.value_rotation, &drawn.output_rotation};
  const auto odd = [&](int64_t n) {
    const auto plus = [&](uint64_t more) { return static_cast<int64_t>(static_cast<uint64_t>(n) + more); };  // may wrap
    return draw.one_of<int64_t>({-1, 0, plus(1), plus(UINT64_MAX), plus(100), INT64_MAX, INT64_MIN, int64_t{1} << 62});
  };
  if (drawn.table != nullptr && draw.once_in(3)) {  // while its sizes are still those of its memory
    const double page = draw.one_of<double>({-1, -0x1p62, 0x1p20, 0x1p62});
    write(*drawn.table, draw.below(drawn.table->numel()), page);
  }
  for (int64_t times = draw.between(1, 2); times > 0; --times) {
    fake::Tensor& one = *all[draw.below(16)];
    if (draw.once_in(12)) one = nullptr;
    if (one != nullptr && draw.once_in(2)) corrupt(draw, *one);
    if (draw.once_in(10)) one = *all[draw.below(16)];
    if (draw.once_in(4)) drawn.places[draw.below(static_cast<int64_t>(drawn.places.size()))] = odd(drawn.room);
    if (draw.once_in(6)) drawn.first = odd(drawn.first);
    if (draw.once_in(6)) drawn.rotated = odd(drawn.rotated);
    if (draw.once_in(6)) drawn.value_dim = odd(drawn.V);
    if (draw.once_in(9)) drawn.places.push_back(0);
  }
  const bool missing = drawn.query == nullptr || drawn.key == nullptr || drawn.keys == nullptr;
  if (missing) return "";  // torch gives a tensor where the schema has one
  const std::string error = drawn.run();
  return error;
}

}  // namespace fuzz
