// A random decode step: its tensors, its call, and its queries and keys after their rotation.
#pragma once

#include <math.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fuzz/calls.h"
#include "fuzz/reference/packed.h"

namespace fuzz {

constexpr int64_t kFar = int64_t{1} << 40;

struct DrawnStep {
  int64_t B, K, H, D, V, first = 0, rotated = 0, page = 0, room, low = -kFar, high = kFar, value_dim;
  int32_t dtype;
  bool interleaved, bytes, shared;
  double scale, softcap = 0;
  fake::Tensor query, key, value, cos, sin, keys, values, key_scale, value_scale, table, sinks, bounds, gate;
  fake::Tensor key_rotation, value_rotation, output_rotation, out;
  int bits = 8;
  std::vector<int64_t> places;

  explicit DrawnStep(uint64_t seed) {
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
      output_rotation = rotation_of(V, true);
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
  // The factor of output n of (B, H, V).
  double factor(int64_t n) const {
    if (gate == nullptr) return 1;
    const std::vector<int64_t>& sizes = gate->sizes;
    const int64_t b = n / V / H % sizes[0], h = n / V % H % sizes[1];
    return read(*gate, (b * sizes[1] + h) * sizes[3] + n % V % sizes[3]);
  }
  int64_t begin(int64_t b) const { return bounds == nullptr ? 0 : static_cast<int64_t>(read(*bounds, b * 4 + 2)); }

  // The row of `keys`, in logical order, that has key j.
  int64_t row(int64_t b, int64_t head, int64_t j) const {
    if (table == nullptr) return (b * K + head) * room + j;
    const auto at = static_cast<int64_t>(read(*table, b * table->sizes[1] + j / page));
    return (at * K + head) * page + j % page;
  }

  std::string run();  // the error, or empty; the output is in `out`

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
    if (!draw.once_in(3)) return;
    const auto axis = [&](int64_t size) { return draw.once_in(2) ? size : 1; };
    gate = draw_laid(draw, draw.once_in(2) ? kFloat : dtype, {axis(B), axis(H), 1, axis(V)}, false);
    for (int64_t n = 0; n < gate->numel(); ++n) write(*gate, n, draw.unit() * 2);
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

inline std::string DrawnStep::run() {
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
  stack.push_back(give_optional(gate));
  stack.push_back(give_optional(key_rotation));
  stack.push_back(give_optional(value_rotation));
  stack.push_back(give_optional(output_rotation));
  std::string error = call("decode_step", stack, 1);
  out = error.empty() ? take(stack[0]) : nullptr;
  return error;
}

inline float rounded(int32_t dtype, float x) {
  static const fake::Tensor one = fake::make(kDouble, {1}, {1}, 0, 0);  // a new row has pages of its own
  one->dtype = dtype;
  write(*one, 0, static_cast<double>(x));
  return static_cast<float>(read(*one, 0));
}

// A head's elements, rotated: x cos + partner sin, where each product and the sum is rounded to the dtype of the
// angles.
inline std::vector<float> rotate(const DrawnStep& drawn, const AtenTensorOpaque& from, int64_t b, int64_t head,
                                 int64_t heads) {
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

}  // namespace fuzz
