#include "fuzz/cases.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <numeric>

#include "fuzz/reference/packed.h"

namespace fuzz {
namespace {

constexpr double kInf = HUGE_VAL;

int64_t draw_length(Draw& draw, int64_t most) {
  const int64_t edge = draw.one_of<int64_t>({1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 1024, 2048});
  const int64_t n = draw.once_in(2) ? draw.between(1, 100) : edge + draw.between(-1, 1);
  return std::clamp<int64_t>(n, 1, most);
}

// Draws sizes with many rows that read few keys.
void draw_many_rows(Draw& draw, naive::Call& c) {
  const int64_t G = draw.one_of<int64_t>({8, 16});
  c.B = draw.between(1, 2);
  c.K = draw.between(1, 2);
  c.H = c.K * G;
  c.T = 4096 / G + draw.between(0, 40);
  c.S = draw.between(1, 12);
  c.D = draw.between(1, 20);
  c.V = draw.once_in(2) ? c.D : draw.between(1, 20);
  if (draw.once_in(4)) {
    c.B = c.K = 1;
    c.H = G;
    c.S = 1;
    c.D = draw.one_of<int64_t>({256, 512});
  }
}

void draw_sizes(Draw& draw, naive::Call& c, double most) {
  const int64_t width = draw.one_of<int64_t>({1, 7, 8, 16, 32, 40, 59, 64, 80, 96, 111, 128, 192, 320});
  c.B = draw.between(1, 3);
  c.K = draw.between(1, 3);
  c.H = c.K * draw.one_of<int64_t>({1, 1, 2, 3, 4, 5, 8, 9, 16});
  c.D = draw.once_in(4) ? draw.between(1, 130) : width;
  c.V = draw.once_in(3) ? draw.between(1, 130) : c.D;
  if (draw.once_in(40)) {
    c.D = 576;
    c.V = 512;
  }
  c.T = draw.once_in(3) ? draw.between(1, 3) : draw_length(draw, 300);
  c.S = draw_length(draw, 3000);
  // Reduces the sizes to few enough operations for many cases a second, and sometimes to enough for several threads.
  const double drawn = draw.once_in(12) ? 6e6 : 4e5;
  if (most == 0) most = drawn;
  const auto work = [&] { return static_cast<double>(c.B * c.H * c.T) * static_cast<double>(c.S * (c.D + c.V)); };
  while (work() > most) {
    if (c.B > 1) --c.B;
    else if (c.K > 1) {
      c.H = c.H / c.K * (c.K - 1);
      --c.K;
    } else if (c.T > 64 || (c.T > 1 && draw.once_in(2))) c.T = c.T * 3 / 4;
    else if (c.S > 64) c.S = c.S * 3 / 4;
    else if (c.H > 1) c.H = (c.H + 1) / 2;
    else {
      c.D = c.D * 3 / 4 + 1;
      c.V = c.V * 3 / 4 + 1;
    }
  }
}

void draw_band(Draw& draw, Case& k) {
  constexpr int64_t kFar = int64_t{1} << 40;
  naive::Call& c = k.call;
  c.low = -kFar;
  c.high = kFar;
  const int64_t kind = draw.below(6);
  if (kind == 1 || kind == 2) c.high = c.S - c.T + 1;
  if (kind == 2) c.low = c.high - draw.between(1, c.S + 2);
  if (kind == 3) {
    c.low = draw.between(-c.T - 2, c.S + 2);
    c.high = draw.between(-c.T - 2, c.S + 2);
  }
  if (kind == 4) {
    c.low = draw.one_of<int64_t>({INT64_MIN, INT64_MAX, 0});
    c.high = draw.one_of<int64_t>({INT64_MIN, INT64_MAX, 0});
  }
  if (k.plain || !draw.once_in(4)) return;
  const auto edge = [&] {
    return draw.once_in(10) ? draw.one_of<double>({-0x1p63, 0x1p62, 9223372036854774784.0})
                            : static_cast<double>(draw.between(-c.S - 2, c.S + 2));
  };
  const int64_t width = draw.once_in(2) ? 4 : 5;
  k.bounds = draw_tensor(draw, kLong, {draw.once_in(2) ? 1 : c.B, width}, false, edge);
  k.bounds.strides[1] = 1;
  k.bounds.strides[0] = width + draw.below(3);
  const std::vector<double> all = spread(k.bounds, {c.B, width});
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t n = 0; n < width; ++n)
      c.bounds.push_back(static_cast<int64_t>(all[static_cast<size_t>(b * width + n)]));
    if (width == 4) c.bounds.push_back(INT64_MIN);
  }
}

void draw_segments(Draw& draw, Case& k) {
  naive::Call& c = k.call;
  const int pairs = draw.once_in(4) ? static_cast<int>(draw.between(1, 4)) : 0;
  const int64_t ids = draw.between(1, 4);
  const bool sorted = draw.once_in(2);
  for (int pair = 0; pair < pairs; ++pair) {
    naive::Segments rule;
    for (const int64_t size : {c.T, c.S}) {
      int64_t place = 0;
      const auto id = [&] {
        const int64_t n = sorted ? place++ * ids / (size + 1) : draw.below(ids);
        return n == 3 ? -0x1p63 : static_cast<double>(n);
      };
      const bool one = draw.once_in(2);
      std::vector<int64_t> sizes =
          one && draw.once_in(2) ? std::vector<int64_t>{size} : std::vector<int64_t>{one ? 1 : c.B, size};
      k.segments.push_back(draw_tensor(draw, kLong, sizes, true, id));
      DrawnTensor rows = k.segments.back();
      if (rows.sizes.size() == 1) rows.sizes.insert(rows.sizes.begin(), 1);
      std::vector<int64_t>& to = size == c.T && rule.query.empty() ? rule.query : rule.key;
      for (double x : spread(rows, {c.B, size})) to.push_back(static_cast<int64_t>(x));
    }
    c.segments.push_back(rule);
  }
}

// Draws a bias that is NaN, Inf or very large. It must reach the rows that may attend its key, and no others.
void draw_special(Draw& draw, Case& k, DrawnTensor& bias) {
  if (!draw.once_in(8) || bias.aliased()) return;
  k.special = true;
  const double large = bias.dtype == kHalf ? 0x1p15 : 0x1p99;
  bias.x[static_cast<size_t>(draw.below(static_cast<int64_t>(bias.x.size())))] =
      draw.one_of<double>({NAN, kInf, large, -large});
}

void draw_dense(Draw& draw, Case& k) {
  naive::Call& c = k.call;
  const int masks = draw.once_in(3) ? static_cast<int>(draw.between(1, 3)) : draw.once_in(30) ? 8 : 0;
  for (int n = 0; n < masks; ++n) {
    const std::vector<int64_t> full = {c.B, c.H, c.T, c.S};
    std::vector<int64_t> sizes = full;
    for (int64_t& size : sizes) {
      if (draw.once_in(3)) size = 1;
    }
    const bool boolean = draw.once_in(2);
    const int32_t dtype = boolean ? kBool : draw.one_of<int32_t>({kFloat, kDouble, kBfloat, kHalf});
    const double density = draw.one_of<double>({0.02, 0.5, 0.95, 1.0});
    const double size = draw.one_of<double>({1.0, 10.0});
    k.dense.push_back(draw_tensor(draw, dtype, sizes, true, [&] {
      const bool on = draw.unit() < density;
      return boolean ? (on ? 1.0 : 0.0) : on || density < 0.5 ? draw.normal() * size : -kInf;
    }));
    if (!boolean) draw_special(draw, k, k.dense.back());
    c.dense.push_back({boolean, spread(k.dense.back(), full)});
  }
}

// Draws full tiles, empty tiles and words. Bits behind the last query or key are random.
void draw_maps(Draw& draw, Case& k) {
  naive::Call& c = k.call;
  for (int64_t n = draw.once_in(4) ? draw.between(1, 4) : 0; n > 0; --n) {
    DrawnMap map;
    const int64_t blocks = draw.below(5);
    const double density = draw.one_of<double>({0.1, 0.5, 0.9});
    for (int64_t word = 0; word < blocks * 64; ++word) {
      map.words.push_back(0);
      for (int bit = 0; bit < 64; ++bit) map.words.back() |= uint64_t{draw.unit() < density} << bit;
    }
    map.index = draw_tensor(draw, kLong,
                            {draw.once_in(2) ? 1 : c.B, draw.once_in(2) ? 1 : c.H, (c.T + 63) / 64, (c.S + 63) / 64},
                            false, [&] { return static_cast<double>(draw.below(2 + blocks)); });
    int64_t step = 1;
    for (size_t axis = 4; axis-- > 0; step *= map.index.sizes[axis]) map.index.strides[axis] = step;
    naive::Dense rule = {true, std::vector<double>(static_cast<size_t>(c.B * c.H * c.T * c.S))};
    const std::vector<double> entries = spread(map.index, {c.B, c.H, (c.T + 63) / 64, (c.S + 63) / 64});
    for (size_t at = 0; at < rule.x.size(); ++at) {
      const int64_t cell = static_cast<int64_t>(at), j = cell % c.S, i = cell / c.S % c.T, plane = cell / c.S / c.T;
      const auto entry = static_cast<int64_t>(
          entries[static_cast<size_t>((plane * ((c.T + 63) / 64) + i / 64) * ((c.S + 63) / 64) + j / 64)]);
      rule.x[at] = entry < 2
                       ? static_cast<double>(entry)
                       : static_cast<double>(map.words[static_cast<size_t>((entry - 2) * 64 + i % 64)] >> (j % 64) & 1);
    }
    c.dense.push_back(rule);
    k.maps.push_back(map);
  }
}

// Draws a bias for each distance of a key from a query.
void draw_relative(Draw& draw, Case& k) {
  naive::Call& c = k.call;
  for (int64_t n = draw.once_in(6) && k.dense.size() < 4 ? draw.between(1, 2) : 0; n > 0; --n) {
    const double forbidden = draw.one_of<double>({0, 0, 0.2});
    const int64_t width = c.T + c.S - 1;
    k.relative.push_back(draw_tensor(draw, kFloat, {draw.once_in(2) ? 1 : c.B, draw.once_in(2) ? 1 : c.H, width}, true,
                                     [&] { return draw.unit() < forbidden ? -kInf : draw.normal(); }));
    draw_special(draw, k, k.relative.back());
    const std::vector<double> all = spread(k.relative.back(), {c.B, c.H, width});
    naive::Dense rule = {false, std::vector<double>(static_cast<size_t>(c.B * c.H * c.T * c.S))};
    for (size_t at = 0; at < rule.x.size(); ++at) {
      const int64_t cell = static_cast<int64_t>(at), j = cell % c.S, i = cell / c.S % c.T, plane = cell / c.S / c.T;
      rule.x[at] = all[static_cast<size_t>(plane * width + c.T - 1 - i + j)];
    }
    c.dense.push_back(rule);
  }
}

void draw_extras(Draw& draw, Case& k) {
  naive::Call& c = k.call;
  if (draw.once_in(4))
    c.softcap = static_cast<float>(draw.one_of<double>({0.5, 5.0, 50.0, 0x1p-100, 1e-20, 1e20, 0x1p100}));
  if (draw.once_in(4)) {
    k.sinks = draw_tensor(draw, kFloat, {c.H}, false, [&] { return draw.normal() * (draw.once_in(9) ? 100 : 3); });
    k.sinks.strides[0] = 1;
    c.sinks = k.sinks.x;
  }
  draw_segments(draw, k);
  draw_dense(draw, k);
  draw_maps(draw, k);
  draw_relative(draw, k);
  if (draw.once_in(5)) {
    k.alibi.push_back(draw_tensor(draw, kFloat, {draw.once_in(2) ? 1 : c.B, c.H}, true, [&] { return draw.unit(); }));
    const bool far = draw.once_in(10);
    k.unchecked |= far;
    k.alibi.push_back(draw_tensor(draw, kLong, {draw.once_in(2) ? 1 : c.B}, false, [&] {
      return far ? draw.one_of<double>({-0x1p40, 0x1p40, 0x1p30}) : static_cast<double>(draw.between(-c.T, c.S));
    }));
    naive::Alibi rule;
    rule.slopes = spread(k.alibi[0], {c.B, c.H});
    for (double x : spread(k.alibi[1], {c.B})) rule.offsets.push_back(static_cast<int64_t>(x));
    c.alibi.push_back(rule);
  }
  if (draw.once_in(5)) {
    std::vector<int64_t> sizes = {c.B, c.H, c.T, c.V};
    const int32_t dtype = draw.one_of<int32_t>({kFloat, kDouble, kBfloat, kHalf});
    k.gate = draw_tensor(draw, dtype, sizes, true, [&] { return draw.unit() * 2; });
    c.gate = k.gate.x;
  }
  if (draw.once_in(6)) c.dropout = static_cast<float>(draw.one_of<double>({0.1, 0.5, 0.9, 1.0}));
  if (c.dropout > 0 && draw.once_in(2)) {
    const int64_t heads = draw.once_in(3) ? 0 : c.H + draw.below(4);
    k.places = {heads, heads == 0 ? draw.below(3) : draw.below(heads - c.H + 1), draw.below(500), draw.below(500)};
    if (draw.once_in(4)) k.places[3] += int64_t{1} << draw.one_of<int64_t>({31, 34, 39});
  }
}

// Draws the upstream gradient, which is 0, NaN or Inf for some rows.
void draw_upstream(Draw& draw, Case& k, int32_t dtype) {
  const naive::Call& c = k.call;
  const double size = draw.one_of<double>({1, 1, 0.01, 8});
  // A score that a bias makes Inf has the weight NaN even if nothing depends on the row.
  const int64_t quiet = k.special ? int64_t{1} << 40 : draw.one_of<int64_t>({5, 1000000}), width = c.V;
  int64_t at = 0;
  bool silent = false;
  k.grad_out = draw_tensor(draw, dtype, {c.B, c.H, c.T, c.V}, true, [&] {
    if (at++ % width == 0) silent = draw.once_in(quiet);
    return silent ? 0.0 : draw.normal() * size;
  });
  if (draw.once_in(25) && !k.grad_out.aliased()) {
    k.grad_out.x[static_cast<size_t>(draw.below(static_cast<int64_t>(k.grad_out.x.size())))] =
        draw.one_of<double>({NAN, kInf});
  }
  k.upstream.out = k.grad_out.x;
  if (draw.once_in(3)) {
    k.grad_lse = draw_tensor(draw, kFloat, {c.B, c.H, c.T}, true, [&] { return draw.normal() * size; });
    k.upstream.lse = k.grad_lse.x;
  }
  k.biases = draw.once_in(2);
}

}  // namespace

// Makes scores of keys that may be attended -inf in float32: for ranges of an item's length, for some keys, or for all.
void draw_overflow(Draw& draw, Case& k) {
  const naive::Call& c = k.call;
  k.overflows = true;
  const int64_t column = draw.below(c.D), kind = draw.below(4), first = draw.below(c.S / 1024 + 1) * 1024;
  for (size_t row = 0; row < k.query.x.size(); row += static_cast<size_t>(c.D))
    k.query.x[row + static_cast<size_t>(column)] = 0x1p83;
  for (int64_t row = 0; row < c.B * c.K * c.S; ++row) {
    const int64_t j = row % c.S;
    const bool gone = kind == 0   ? j >= first && j < first + 1024
                      : kind == 1 ? j < first
                      : kind == 2 ? draw.once_in(3)
                                  : true;
    k.key.x[static_cast<size_t>(row * c.D + column)] = gone ? -0x1p83 : 0;
  }
}

// Lays the tensor out in the order (B, S, K, width), with 2 KiB or more from key to key. Sometimes its rows are not
// contiguous.
void lay_far_apart(Draw& draw, DrawnTensor& t) {
  const int64_t width = t.sizes[3], step = t.sizes[1] * width + 2048 / code_size(t.dtype) + draw.below(9);
  const int64_t column = draw.once_in(5) ? 2 : 1;
  t.strides = {column * t.sizes[2] * step, column * width, column * step, column};
}

// Draws keys or values of codes: int8 in any layout, or packed rows, which are contiguous.
DrawnTensor draw_codes(Draw& draw, const Case& k, int64_t width) {
  const naive::Call& c = k.call;
  const auto byte = [&] { return static_cast<double>(k.bits == 8 ? draw.between(-128, 127) : draw.below(256)); };
  DrawnTensor t = draw_tensor(draw, k.bits == 8 ? kByte : kPacked, {c.B, c.K, c.S, width * k.bits / 8}, true, byte);
  if (k.bits == 8) return t;
  const int64_t row = t.sizes[3] + draw.below(9), head = c.S * row;
  t.strides = draw.once_in(2) ? std::vector<int64_t>{c.K * head, head, row, 1}
                              : std::vector<int64_t>{c.K * head, row, c.K * row, 1};
  return t;
}

Case draw_case(uint64_t seed, double most) {
  Draw draw(seed * 0x2545f4914f6cdd1du + 1);
  Case k;
  k.seed = seed;
  k.plain = draw.once_in(3);
  naive::Call& c = k.call;
  k.far_apart = draw.once_in(40);
  k.far_apart ? draw_many_rows(draw, c) : draw_sizes(draw, c, most);
  draw_band(draw, k);
  if (k.far_apart) {
    c.low = -(int64_t{1} << 40);
    c.high = draw.once_in(2) ? c.S : draw.between(1 - c.T, c.S);
  }
  const int32_t dtype = draw.one_of<int32_t>({kFloat, kBfloat, kHalf});
  const double size = draw.one_of<double>({1, 1, 1, 0.01, 8});
  // Queries and keys are far from 1, but their products are not; values may be far from 1.
  const double power = dtype == kHalf ? 0x1p6 : 0x1p40;
  const double far = draw.one_of<double>({1, 1, 1, power, 1 / power}),
               high = draw.one_of<double>({1, 1, 1, power, 1 / power});
  const auto number = [&] { return draw.once_in(50) ? 0.0 : draw.normal() * size; };
  k.bytes = !k.far_apart && draw.once_in(4);
  if (k.bytes && draw.once_in(2)) {
    k.bits = static_cast<int>(draw.between(3, 4));
    c.D = (c.D + 7) / 8 * 8;
    c.V = (c.V + 7) / 8 * 8;
  }
  k.query = draw_tensor(draw, dtype, {c.B, c.H, c.T, c.D}, true, [&] { return number() * far; });
  k.paged = draw.once_in(3);
  if (k.bytes) {
    const double spread = draw.one_of<double>({0, 0, 3});
    const auto scale = [&] { return high * size / 64 * exp(spread * draw.normal()) * (draw.once_in(30) ? -1 : 1); };
    k.key = draw_codes(draw, k, c.D);
    k.value = draw_codes(draw, k, c.V);
    k.key_scale = draw_tensor(draw, kFloat, {c.B, c.K, c.S}, true, [&] { return draw.normal() * size / 64 / far; });
    k.value_scale = draw_tensor(draw, kFloat, {c.B, c.K, c.S}, true, scale);
  } else {
    k.key = draw_tensor(draw, dtype, {c.B, c.K, c.S, c.D}, true, [&] { return number() / far; });
    k.value = draw_tensor(draw, dtype, {c.B, c.K, c.S, c.V}, true, [&] { return number() * high; });
  }
  if (k.far_apart) {
    lay_far_apart(draw, k.key);
    lay_far_apart(draw, k.value);
  }
  DrawnTensor* const odd[] = {&k.query, k.bytes ? &k.key_scale : &k.key, k.bytes ? &k.value_scale : &k.value};
  for (DrawnTensor* t : odd) {  // a NaN or Inf that is attended must reach the result
    if (!draw.once_in(25) || t->aliased()) continue;
    t->x[static_cast<size_t>(draw.below(static_cast<int64_t>(t->x.size())))] = draw.one_of<double>({NAN, kInf, -kInf});
  }
  if (!k.bytes && dtype != kHalf && draw.once_in(12) && !k.query.aliased() && !k.key.aliased()) draw_overflow(draw, k);
  c.query = k.query.x;
  c.key = k.bits < 8 ? levels_of(k.key, k.bits, c.D) : k.key.x;
  c.value = k.bits < 8 ? levels_of(k.value, k.bits, c.V) : k.value.x;
  if (k.bytes) {
    for (size_t n = 0; n < c.key.size(); ++n) c.key[n] *= k.key_scale.x[n / static_cast<size_t>(c.D)];
    for (size_t n = 0; n < c.value.size(); ++n) c.value[n] *= k.value_scale.x[n / static_cast<size_t>(c.V)];
    c.bytes = dtype == kBfloat ? 2 : 3;
    c.value_scale = k.value_scale.x;
  }
  const double usual = 1 / sqrt(static_cast<double>(c.D));
  c.scale = static_cast<float>(draw.once_in(4) ? draw.one_of<double>({1.0, 0.0, -usual, 1e-3, 0x1p-100, 4.0}) : usual);
  if (k.overflows) c.scale = usual;  // other scales make the scores NaN or +inf
  if (!k.plain) draw_extras(draw, k);
  draw_upstream(draw, k, dtype);
  return k;
}

std::string Case::describe() const {
  const naive::Call& c = call;
  char text[400];
  snprintf(
      text, sizeof text,
      "case %llu: dtype %d B=%lld H=%lld K=%lld T=%lld S=%lld D=%lld V=%lld scale=%g softcap=%g low=%lld high=%lld "
      "bounds=%d segments=%zu dense=%zu maps=%zu relative=%zu alibi=%zu sinks=%d gate=%d dropout=%g plain=%d bits=%d "
      "paged=%d lost=%d far=%d",
      static_cast<unsigned long long>(seed), query.dtype, static_cast<long long>(c.B), static_cast<long long>(c.H),
      static_cast<long long>(c.K), static_cast<long long>(c.T), static_cast<long long>(c.S),
      static_cast<long long>(c.D), static_cast<long long>(c.V), c.scale, c.softcap, static_cast<long long>(c.low),
      static_cast<long long>(c.high), bounds.present, c.segments.size(), dense.size(), maps.size(), relative.size(),
      c.alibi.size(), sinks.present, gate.present, c.dropout, plain, bytes ? bits : 0, paged, overflows, far_apart);
  return text;
}

}  // namespace fuzz
