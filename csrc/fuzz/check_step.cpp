// Random decode steps. Queries and keys must be rotated bit for bit as the definition does it, the cache must be
// written only at its place, and the output must be that of the definition for the content of the cache, on any number
// of threads.
#include <math.h>

#include <algorithm>

#include "fuzz/calls.h"
#include "fuzz/reference/packed.h"

namespace fuzz {
namespace {

constexpr int64_t kFar = int64_t{1} << 40;

struct Drawn {
  int64_t B, K, H, D, V, first = 0, rotated = 0, page = 0, room, low = -kFar, high = kFar, value_dim;
  int32_t dtype;
  bool interleaved, bytes, shared;
  double scale, softcap = 0;
  fake::Tensor query, key, value, cos, sin, keys, values, key_scale, value_scale, table, sinks, bounds;
  fake::Tensor key_rotation, value_rotation;
  int bits = 8;
  std::vector<int64_t> places;

  explicit Drawn(uint64_t seed) {
    Draw draw(seed * 2 + 5);
    const auto width = [&] {
      return draw.once_in(2) ? draw.between(1, 130) : draw.one_of<int64_t>({8, 16, 32, 40, 64, 80, 96, 128});
    };
    B = draw.between(1, 3);
    K = draw.between(1, 3);
    H = K * draw.one_of<int64_t>({1, 1, 2, 3, 4, 8});
    D = width();
    dtype = draw.one_of<int32_t>({kFloat, kBfloat, kHalf});
    bytes = draw.once_in(2);
    if (bytes && draw.once_in(2)) bits = static_cast<int>(draw.between(3, 4));
    shared = bits == 8 && draw.once_in(4);
    if (bits < 8) D = (D + 7) / 8 * 8;
    interleaved = draw.once_in(2);
    V = shared ? draw.between(1, D) : draw.once_in(2) ? D : width();
    if (bits < 8) {
      V = (V + 7) / 8 * 8;
      key_rotation = rotation_of(D);
      value_rotation = rotation_of(V);
    }
    value_dim = V;
    scale = static_cast<float>(1 / sqrt(static_cast<double>(D)));
    const double size = draw.one_of<double>({1, 1, 0.01, 8});
    query = fresh(draw, {B, H, 1, D}, size);
    key = fresh(draw, {B, K, 1, D}, size);
    if (!shared) value = fresh(draw, {B, K, 1, V}, size);
    draw_turn(draw);
    draw_cache(draw, size);
    draw_rules(draw);
    poison();
  }

  int64_t longest() const { return *std::max_element(places.begin(), places.end()) + 1; }
  int64_t place(int64_t b) const { return places[places.size() == 1 ? 0 : static_cast<size_t>(b)]; }
  int64_t begin(int64_t b) const { return bounds == nullptr ? 0 : static_cast<int64_t>(read(*bounds, b * 4 + 2)); }

  // The row of `keys`, in logical order, that has key j.
  int64_t row(int64_t b, int64_t head, int64_t j) const {
    if (table == nullptr) return (b * K + head) * room + j;
    const auto at = static_cast<int64_t>(read(*table, b * table->sizes[1] + j / page));
    return (at * K + head) * page + j % page;
  }

  std::string run() const;

 private:
  fake::Tensor fresh(Draw& draw, const std::vector<int64_t>& sizes, double size) const {
    fake::Tensor t = draw_laid(draw, dtype, sizes, false);
    for (int64_t n = 0; n < t->numel(); ++n) write(*t, n, draw.once_in(20) ? 0 : draw.normal() * size);
    return t;
  }

  void draw_turn(Draw& draw) {
    if (D < 2 || draw.once_in(5)) return;
    rotated = 2 * (draw.once_in(2) ? D / 2 : draw.between(1, D / 2));
    first = draw.between(0, D - rotated);
    const int64_t n = draw.once_in(2) ? rotated : rotated / 2, rows = draw.once_in(2) ? 1 : B;
    const std::vector<int64_t> sizes[] = {{n}, {rows, n}, {rows, 1, n}};
    const std::vector<int64_t>& some = sizes[draw.below(3)];
    const int32_t of = draw.once_in(2) ? kFloat : dtype;
    cos = draw_laid(draw, of, some, false);
    sin = draw_laid(draw, of, some, false);
    for (int64_t at = 0; at < cos->numel(); ++at) {
      const double angle = draw.normal() * 30;
      write(*cos, at, ::cos(angle));
      write(*sin, at, ::sin(angle));
    }
  }

  void draw_cache(Draw& draw, double size) {
    int64_t rows = B;
    if (draw.once_in(3)) {
      page = draw.one_of<int64_t>({128, 256});
      const int64_t wide = draw.between(1, 2), pages = B * wide + draw.below(3);
      table = fake::make(kLong, {B, wide}, {wide + draw.below(2), 1}, 0, 0);
      const int64_t shift = draw.below(pages);  // any order in which each row has pages of its own
      for (int64_t n = 0; n < B * wide; ++n) write(*table, n, static_cast<double>((n + shift) % pages));
      room = page * wide;
      rows = pages;
    } else {
      room = draw.between(1, 300);
    }
    const int64_t places_of_row = table == nullptr ? room : page;
    const auto side = [&](int64_t width, fake::Tensor& data, fake::Tensor& scales) {
      const int32_t of = !bytes ? dtype : bits < 8 ? kPacked : kByte;
      data = draw_laid(draw, of, {rows, K, places_of_row, width * (bytes ? bits : 8) / 8}, true);
      for (int64_t n = 0; n < data->numel(); ++n) {
        const int64_t byte = bits < 8 ? draw.below(256) : draw.between(-127, 127);
        write(*data, n, bytes ? static_cast<double>(byte) : draw.normal() * size);
      }
      if (!bytes) return;
      scales = draw_laid(draw, kFloat, {rows, K, places_of_row}, false);
      for (int64_t n = 0; n < scales->numel(); ++n) write(*scales, n, draw.unit() * size / 64);
    };
    side(D, keys, key_scale);
    if (!shared) side(V, values, value_scale);
    const bool even = draw.once_in(2);
    for (int64_t b = 0; b < (even ? 1 : B); ++b)
      places.push_back(draw.once_in(4) ? (draw.once_in(2) ? 0 : room - 1) : draw.below(room));
  }

  // Rows of other lengths have bounds; those of a rolling cache begin behind the first key.
  void draw_rules(Draw& draw) {
    if (places.size() > 1 || draw.once_in(3)) {
      bounds = fake::make(kLong, {B, 4}, {4 + draw.below(3), 1}, 0, 0);
      for (int64_t b = 0; b < B; ++b) {
        const int64_t start = draw.once_in(2) ? 0 : draw.below(place(b) + 1);
        const int64_t all[] = {-kFar, kFar, start, place(b) + 1};
        for (int64_t n = 0; n < 4; ++n) write(*bounds, b * 4 + n, static_cast<double>(all[n]));
      }
    } else if (draw.once_in(2)) {
      high = longest();
      low = high - draw.between(1, longest() + 2);
    }
    if (draw.once_in(4)) softcap = static_cast<float>(draw.one_of<double>({5.0, 50.0}));
    if (draw.once_in(4)) {
      sinks = fake::make(kFloat, {H}, {1}, 0, 0);
      for (int64_t h = 0; h < H; ++h) write(*sinks, h, draw.normal() * 3);
    }
  }

  // Writes NaN to what may not be attended: places after the new key, and places before the first key of a row.
  void poison() {
    for (int64_t n = 0; n < B * K * room; ++n) {
      const int64_t b = n / room / K, j = n % room;
      if (j >= begin(b) && j <= place(b)) continue;
      const int64_t at = row(b, n / room % K, j);
      for (int64_t d = 0; d < D && !bytes; ++d) write(*keys, at * D + d, NAN);
      for (int64_t d = 0; d < V && !bytes && !shared; ++d) write(*values, at * V + d, NAN);
      if (bytes) write(*key_scale, at, NAN);
      if (bytes && !shared) write(*value_scale, at, HUGE_VAL);
    }
  }
};

fake::Tensor last_out;

std::string Drawn::run() const {
  using namespace fake;
  std::vector<StableIValue> stack = {give(query),
                                     give(key),
                                     give_optional(value),
                                     give_optional(cos),
                                     give_optional(sin),
                                     static_cast<StableIValue>(first),
                                     static_cast<StableIValue>(rotated),
                                     static_cast<StableIValue>(interleaved),
                                     give(keys),
                                     give_optional(values),
                                     give_optional(key_scale),
                                     give_optional(value_scale),
                                     give_optional(table),
                                     give_integers(places),
                                     static_cast<StableIValue>(value_dim),
                                     give_number(scale),
                                     give_number(softcap),
                                     give_optional(sinks),
                                     static_cast<StableIValue>(low),
                                     static_cast<StableIValue>(high),
                                     give_optional(bounds)};
  for (int list = 0; list < 5; ++list) stack.push_back(give_list(nullptr));
  stack.push_back(give_optional(key_rotation));
  stack.push_back(give_optional(value_rotation));
  std::string error = call("decode_step", stack, 1);
  last_out = error.empty() ? take(stack[0]) : nullptr;
  return error;
}

float rounded(int32_t dtype, float x) {
  static const fake::Tensor one = fake::make(kDouble, {1}, {1}, 0, 0);  // a new row has pages of its own
  one->dtype = dtype;
  write(*one, 0, static_cast<double>(x));
  return static_cast<float>(read(*one, 0));
}

// A head's elements, rotated: x cos + partner sin, where each product and the sum is rounded to the dtype of the
// angles.
std::vector<float> rotate(const Drawn& drawn, const AtenTensorOpaque& from, int64_t b, int64_t head, int64_t heads) {
  std::vector<float> x;
  for (int64_t d = 0; d < drawn.D; ++d) x.push_back(static_cast<float>(read(from, (b * heads + head) * drawn.D + d)));
  if (drawn.cos == nullptr) return x;
  const AtenTensorOpaque &cos = *drawn.cos, &sin = *drawn.sin;
  const int64_t n = cos.sizes.back(), half = drawn.rotated / 2, line = cos.numel() == n ? 0 : b * n;
  const std::vector<float> before = x;
  for (int64_t d = 0; d < drawn.rotated; ++d) {
    const bool early = drawn.interleaved ? d % 2 == 0 : d < half;
    const int64_t other = drawn.interleaved ? d + (early ? 1 : -1) : d + (early ? half : -half);
    const int64_t pair = drawn.interleaved ? d / 2 : d % half, at = line + (n == half ? pair : d);
    const float partner = before[static_cast<size_t>(drawn.first + other)];
    const float here = before[static_cast<size_t>(drawn.first + d)] * static_cast<float>(read(cos, at));
    const float there = (early ? -partner : partner) * static_cast<float>(read(sin, at));
    const float sum = rounded(cos.dtype, here) + rounded(cos.dtype, there);
    x[static_cast<size_t>(drawn.first + d)] = rounded(drawn.dtype, sum);
  }
  return x;
}

// The cache after the step, and the call that the queries make on it.
struct Expected {
  std::vector<double> keys, values, key_scale, value_scale;
  Case k;

  Expected(const Drawn& drawn, uint64_t seed) {
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
    for (int64_t n = 0; drawn.bounds != nullptr && n < c.B * 5; ++n)
      c.bounds.push_back(n % 5 == 4 ? INT64_MIN : static_cast<int64_t>(read(*drawn.bounds, n / 5 * 4 + n % 5)));
    k.query.dtype = drawn.dtype;
    k.seed = seed;
  }

 private:
  void place(const Drawn& drawn, int64_t b, int64_t head) {
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

std::string compare_cache(const Drawn& drawn, const Expected& expected) {
  if (!same_numbers(numbers(drawn.keys), expected.keys)) return "other keys in the cache after a step";
  if (drawn.bytes && !same_numbers(numbers(drawn.key_scale), expected.key_scale)) return "other scales of keys";
  if (drawn.shared) return "";
  if (!same_numbers(numbers(drawn.values), expected.values)) return "other values in the cache after a step";
  if (drawn.bytes && !same_numbers(numbers(drawn.value_scale), expected.value_scale)) return "other scales of values";
  return "";
}

// A call that breaks one rule must be refused, whatever its other arguments are.
std::string accepts_wrong(uint64_t seed) {
  Drawn drawn(seed);
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

}  // namespace

// A step into packed codes: the tokens get codes of theirs, nothing else is written, and the output has the same bits
// on any number of threads. What the output is follows from `attend_held`, which has its own cases.
static std::string check_packed_step(uint64_t seed) {
  const Drawn fresh(seed);
  for (const std::string& isa : isas()) {
    use(isa);
    std::vector<double> one;
    for (const int threads : {1, static_cast<int>(2 + seed % 7)}) {
      fake::set_threads(threads);
      const Drawn drawn(seed);
      const std::string error = drawn.run();
      if (!error.empty()) return isa + " refuses a step: " + error;
      const std::vector<double> out = numbers(last_out);
      last_out = nullptr;
      if (threads == 1) one = out;
      if (!same_bits(one, out)) return isa + ": other bits of a step on more threads";
      const auto check = [&](const fake::Tensor& data, const fake::Tensor& scale, const fake::Tensor& before,
                             const fake::Tensor& scale_before, bool is_key) -> std::string {
        std::vector<double> got = numbers(data), units = numbers(scale);
        const int64_t bytes = data->sizes[3];
        for (int64_t n = 0; n < drawn.B * drawn.K; ++n) {
          const int64_t b = n / drawn.K, head = n % drawn.K, width = is_key ? drawn.D : drawn.V;
          const auto at = static_cast<size_t>(drawn.row(b, head, drawn.place(b)));
          std::vector<float> x;
          for (int64_t d = 0; d < width && !is_key; ++d)
            x.push_back(static_cast<float>(read(*drawn.value, n * width + d)));
          if (is_key) x = rotate(drawn, *drawn.key, b, head, drawn.K);
          const std::string wrong = compare_token(x, &got[at * static_cast<size_t>(bytes)], units[at], drawn.bits);
          if (!wrong.empty()) return wrong;
          const std::vector<double> old = numbers(before);
          const auto place = static_cast<std::ptrdiff_t>(at) * bytes;
          std::copy_n(old.begin() + place, bytes, got.begin() + place);
          units[at] = read(*scale_before, static_cast<int64_t>(at));
        }
        const bool kept = same_numbers(got, numbers(before)) && same_numbers(units, numbers(scale_before));
        return kept ? "" : "a step writes elsewhere";
      };
      std::string wrong = check(drawn.keys, drawn.key_scale, fresh.keys, fresh.key_scale, true);
      if (wrong.empty()) wrong = check(drawn.values, drawn.value_scale, fresh.values, fresh.value_scale, false);
      if (!wrong.empty()) return isa + ": " + wrong;
    }
  }
  return accepts_wrong(seed);
}

std::string check_step(uint64_t seed) {
  if (Drawn(seed).bits < 8) return check_packed_step(seed);
  const Expected expected(Drawn(seed), seed);
  const naive::Result result = naive::attention(expected.k.call, rounding(expected.k.query.dtype));
  for (const std::string& isa : isas()) {
    use(isa);
    std::vector<double> one;
    for (const int threads : {1, static_cast<int>(2 + seed % 7)}) {
      fake::set_threads(threads);
      const Drawn drawn(seed);
      const std::string error = drawn.run();
      if (!error.empty()) return isa + " refuses a step: " + error;
      const std::vector<double> out = numbers(last_out);
      last_out = nullptr;
      std::string wrong = compare_cache(drawn, expected);
      if (!wrong.empty()) return isa + ": " + wrong;
      if (threads == 1) one = out;
      if (!same_bits(one, out)) return isa + ": other bits of a step on more threads";
      wrong = compare("step", out, result.out, result.out_error, expected.k, isa);
      if (!wrong.empty()) return wrong;
    }
  }
  return accepts_wrong(seed);
}

// Runs a step with corrupt tensors or numbers, which must not crash.
std::string corrupt_step(uint64_t seed) {
  Draw draw(seed + 79);
  Drawn drawn(seed);
  fake::Tensor* const all[] = {&drawn.query, &drawn.key,    &drawn.value,        &drawn.cos,           &drawn.sin,
                               &drawn.keys,  &drawn.values, &drawn.key_scale,    &drawn.value_scale,   &drawn.table,
                               &drawn.sinks, &drawn.bounds, &drawn.key_rotation, &drawn.value_rotation};
  const auto odd = [&](int64_t n) {
    const auto plus = [&](uint64_t more) { return static_cast<int64_t>(static_cast<uint64_t>(n) + more); };  // may wrap
    return draw.one_of<int64_t>({-1, 0, plus(1), plus(UINT64_MAX), plus(100), INT64_MAX, INT64_MIN, int64_t{1} << 62});
  };
  if (drawn.table != nullptr && draw.once_in(3)) {  // while its sizes are still those of its memory
    const double page = draw.one_of<double>({-1, -0x1p62, 0x1p20, 0x1p62});
    write(*drawn.table, draw.below(drawn.table->numel()), page);
  }
  for (int64_t times = draw.between(1, 2); times > 0; --times) {
    fake::Tensor& one = *all[draw.below(14)];
    if (draw.once_in(12)) one = nullptr;
    if (one != nullptr && draw.once_in(2)) corrupt(draw, *one);
    if (draw.once_in(10)) one = *all[draw.below(14)];
    if (draw.once_in(4)) drawn.places[draw.below(static_cast<int64_t>(drawn.places.size()))] = odd(drawn.room);
    if (draw.once_in(6)) drawn.first = odd(drawn.first);
    if (draw.once_in(6)) drawn.rotated = odd(drawn.rotated);
    if (draw.once_in(6)) drawn.value_dim = odd(drawn.V);
    if (draw.once_in(9)) drawn.places.push_back(0);
  }
  const bool missing = drawn.query == nullptr || drawn.key == nullptr || drawn.keys == nullptr;
  if (missing) return "";  // torch gives a tensor where the schema has one
  const std::string error = drawn.run();
  last_out = nullptr;
  return error;
}

}  // namespace fuzz
