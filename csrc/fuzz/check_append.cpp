// Random appends to a cache of codes. The codes must be those of the definition, be written only where the spans say,
// and be the same for any number of threads.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <numeric>

#include "fuzz/calls.h"
#include "fuzz/reference/packed.h"

namespace fuzz {

fake::Tensor draw_laid(Draw& draw, int32_t dtype, const std::vector<int64_t>& sizes, bool whole_rows) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (sizes.size() > 2 && draw.once_in(2)) std::swap(order[1], order[2]);
  if (sizes.size() > 1 && draw.once_in(4)) std::swap(order[0], order[1]);
  if (!whole_rows && draw.once_in(4)) std::swap(order.front(), order.back());
  std::vector<int64_t> strides(sizes.size());
  int64_t step = !whole_rows && draw.once_in(5) ? draw.between(2, 3) : 1;
  for (size_t n = sizes.size(); n-- > 0;) {
    strides[order[n]] = step;
    step *= sizes[order[n]];
    if (draw.once_in(4)) step += draw.between(1, 9);
  }
  return fake::make(dtype, sizes, strides, draw.once_in(2) ? draw.below(20) : 0, 0x5a);
}

namespace {

struct Drawn {
  fake::Tensor tokens[2], data[2], scale[2], rotation[2];  // of keys and values
  int bits;
  std::vector<int64_t> spans;

  explicit Drawn(uint64_t seed) {
    Draw draw(seed * 2 + 1);
    const int64_t B = draw.between(1, 3), K = draw.between(1, 3);
    const int64_t T = draw.once_in(3) ? draw.between(65, 140) : draw.between(1, 70);  // an item has 64
    const int64_t rows = draw.between(1, 4), places = draw.once_in(3) ? draw.between(130, 300) : draw.between(1, 150);
    const int32_t dtype = draw.one_of<int32_t>({kFloat, kBfloat, kHalf, kDouble});
    const int sides = draw.once_in(4) ? 1 : 2;
    bits = draw.once_in(2) ? 8 : draw.once_in(2) ? 4 : 3;
    for (int side = 0; side < sides; ++side) {
      int64_t width = draw.once_in(2) ? draw.between(1, 130) : draw.one_of<int64_t>({16, 32, 64, 128});
      if (bits < 8) {
        width = (width + 7) / 8 * 8;
        rotation[side] = rotation_of(width);
      }
      tokens[side] = draw_laid(draw, dtype, {B, K, T, width}, false);
      data[side] = draw_laid(draw, bits < 8 ? kPacked : kByte, {rows, K, places, width * bits / 8}, true);
      scale[side] = draw_laid(draw, kFloat, {rows, K, places}, false);
      const double size = draw.one_of<double>({1, 1, 1e-3, 300, 1e-38, 1e-41, 2e38, 1e39});
      const double special = draw.once_in(3) ? draw.one_of<double>({NAN, HUGE_VAL, -HUGE_VAL, 0}) : 1;
      for (int64_t n = 0; n < tokens[side]->numel(); ++n) {
        double x = draw.normal() * size;
        if (special != 1 && draw.once_in(9)) x = draw.once_in(4) ? -HUGE_VAL : special;
        write(*tokens[side], n, draw.once_in(20) ? 0 : draw.once_in(3) ? nearbyint(x * 20) / 2 : x);
      }
    }
    std::vector<int64_t> free(static_cast<size_t>(rows), 0);  // the first place of each row that is in no span
    for (int64_t n = draw.between(0, 5); n > 0; --n) {
      const int64_t row = draw.below(rows), from = draw.below(T);
      int64_t& place = free[static_cast<size_t>(row)];
      place += draw.below(4);
      const int64_t count = std::min(draw.between(0, T - from), places - place);
      if (count < 0) continue;
      spans.insert(spans.end(), {draw.below(B), from, row, place, count});
      place += count;
    }
  }

  std::string run() const {
    using namespace fake;
    std::vector<StableIValue> stack = {give(tokens[0]),      give_optional(tokens[1]),   give(data[0]),
                                       give(scale[0]),       give_optional(data[1]),     give_optional(scale[1]),
                                       give_integers(spans), give_optional(rotation[0]), give_optional(rotation[1])};
    return call("append_codes", stack, 0);
  }
};

}  // namespace

float quantise(const std::vector<float>& x, std::vector<double>& out) {
  float peak = 0;
  bool nan = false;
  for (const float one : x) {
    nan |= std::isnan(one);
    peak = std::max(peak, fabsf(one));
  }
  const float scale = nan ? NAN : peak / 127.0f, unit = scale > 0 ? scale : 1.0f;
  for (const float one : x) {
    const float y = nearbyintf(one / unit);
    out.push_back(std::isnan(y) ? 0 : std::clamp(y, -127.0f, 127.0f));
  }
  return std::isfinite(scale) ? scale : NAN;
}

bool same_numbers(const std::vector<double>& a, const std::vector<double>& b) {
  for (size_t n = 0; n < a.size(); ++n) {
    if (!(a[n] == b[n] || (std::isnan(a[n]) && std::isnan(b[n])))) return false;
  }
  return a.size() == b.size();
}

namespace {

// Puts the content of the cache after the append according to the definition into data and scales of one side. Packed
// codes have a little freedom: those of the append itself are put there if they are right. Returns what is wrong.
std::string expect(const Drawn& drawn, int side, std::vector<double>& data, std::vector<double>& scale) {
  const AtenTensorOpaque& from = *drawn.tokens[side];
  const int64_t K = from.sizes[1], T = from.sizes[2], width = from.sizes[3], places = drawn.scale[side]->sizes[2];
  const std::vector<double> got = numbers(drawn.data[side]), units = numbers(drawn.scale[side]);
  const int64_t row_bytes = width * drawn.bits / 8;
  for (size_t n = 0; n < drawn.spans.size(); n += 5) {
    const int64_t* span = &drawn.spans[n];
    for (int64_t head = 0; head < K; ++head) {
      for (int64_t i = 0; i < span[4]; ++i) {
        const int64_t row = (span[0] * K + head) * T + span[1] + i, to = (span[2] * K + head) * places + span[3] + i;
        std::vector<float> x;
        for (int64_t d = 0; d < width; ++d) x.push_back(static_cast<float>(read(from, row * width + d)));
        if (drawn.bits < 8) {
          const auto of = static_cast<size_t>(to);
          const std::string wrong = compare_token(x, &got[of * static_cast<size_t>(row_bytes)], units[of], drawn.bits);
          if (!wrong.empty()) return wrong;
          scale[of] = units[of];
          std::copy_n(got.begin() + to * row_bytes, row_bytes, data.begin() + to * row_bytes);
          continue;
        }
        std::vector<double> bytes;
        scale[static_cast<size_t>(to)] = quantise(x, bytes);
        std::copy(bytes.begin(), bytes.end(), data.begin() + to * width);
      }
    }
  }
  return "";
}

}  // namespace

std::string check_append(uint64_t seed) {
  const Drawn fresh(seed);
  std::vector<double> data[2], scale[2];
  for (int side = 0; side < 2 && fresh.tokens[side] != nullptr; ++side) {
    data[side] = numbers(fresh.data[side]);
    scale[side] = numbers(fresh.scale[side]);
  }
  for (const std::string& isa : isas()) {
    use(isa);
    std::vector<double> one[2];
    for (const int threads : {1, static_cast<int>(2 + seed % 7)}) {
      fake::set_threads(threads);
      const Drawn drawn(seed);
      const std::string error = drawn.run();
      if (!error.empty()) return isa + " refuses an append: " + error;
      for (int side = 0; side < 2 && drawn.tokens[side] != nullptr; ++side) {
        const char* what = side == 0 ? " keys" : " values";
        const std::string wrong = expect(drawn, side, data[side], scale[side]);
        if (!wrong.empty()) return isa + ": " + wrong + what;
        if (threads == 1) one[side] = numbers(drawn.data[side]);
        else if (numbers(drawn.data[side]) != one[side]) return isa + ": other bytes on more threads of" + what;
        if (!same_numbers(numbers(drawn.data[side]), data[side])) return isa + ": other bytes of" + what;
        if (!same_numbers(numbers(drawn.scale[side]), scale[side])) return isa + ": other scales of" + what;
      }
    }
  }
  return "";
}

// Appends corrupt tensors or spans, which must not crash.
std::string corrupt_append(uint64_t seed) {
  Draw draw(seed + 78);
  Drawn drawn(seed);
  for (int64_t times = draw.between(1, 2); times > 0; --times) {
    fake::Tensor* all[] = {&drawn.tokens[0], &drawn.tokens[1], &drawn.data[0],     &drawn.data[1],
                           &drawn.scale[0],  &drawn.scale[1],  &drawn.rotation[0], &drawn.rotation[1]};
    fake::Tensor& one = *all[draw.below(8)];
    if (draw.once_in(12)) one = nullptr;
    if (one != nullptr && draw.once_in(2)) corrupt(draw, *one);
    if (draw.once_in(10)) one = *all[draw.below(8)];
    if (!drawn.spans.empty() && draw.once_in(2)) {
      int64_t& number = drawn.spans[static_cast<size_t>(draw.below(static_cast<int64_t>(drawn.spans.size())))];
      const auto plus = [&](uint64_t n) {
        return static_cast<int64_t>(static_cast<uint64_t>(number) + n);
      };  // may wrap
      number = draw.one_of<int64_t>({-1, plus(1), plus(100), INT64_MAX, INT64_MIN, int64_t{1} << 62});
    }
    if (draw.once_in(9)) drawn.spans.push_back(0);
  }
  const bool missing = drawn.tokens[0] == nullptr || drawn.data[0] == nullptr || drawn.scale[0] == nullptr;
  return missing ? "" : drawn.run();  // torch gives a tensor where the schema has one
}

}  // namespace fuzz
