#include "fuzz/drawn_tensor.h"

#include <string.h>

#include <algorithm>
#include <numeric>

namespace fuzz {
namespace {

constexpr double kInf = HUGE_VAL;

uint16_t half_bits(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7e00;
  x = fabs(x);
  if (x >= 65520) return sign | 0x7c00;
  const int exponent = std::max(x == 0 ? -14 : std::ilogb(x), -14);
  const int steps = static_cast<int>(nearbyint(ldexp(x, 10 - exponent)));  // 1024 .. 2048, less where denormal
  return static_cast<uint16_t>(sign + ((exponent + 14) << 10) + steps);    // a carry goes into the exponent
}

double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, steps = bits & 1023;
  const double x = exponent == 31 ? (steps != 0 ? NAN : kInf)
                                  : ldexp(exponent == 0 ? steps : steps + 1024, std::max(exponent, 1) - 25);
  return bits & 0x8000 ? -x : x;
}

// A memory layout: a permutation of axes, gaps, steps, and sometimes a stride of 0.
void draw_layout(Draw& draw, DrawnTensor& t, bool may_alias) {
  const int axes = static_cast<int>(t.sizes.size());
  std::vector<int> order(static_cast<size_t>(axes));
  std::iota(order.begin(), order.end(), 0);
  if (axes == 4 && draw.once_in(3)) std::swap(order[1], order[2]);  // (B, T, H, D) memory
  if (draw.once_in(8)) std::swap(order[draw.below(axes)], order[draw.below(axes)]);
  t.strides.assign(static_cast<size_t>(axes), 0);
  int64_t step = draw.once_in(6) ? draw.between(2, 3) : 1;
  for (int n = axes - 1; n >= 0; --n) {
    const size_t axis = static_cast<size_t>(order[static_cast<size_t>(n)]);
    t.strides[axis] = step;
    if (may_alias && draw.once_in(15)) t.strides[axis] = 0;
    else step *= t.sizes[axis];
    if (draw.once_in(4)) step += draw.between(1, 9);
  }
  t.offset = draw.once_in(2) ? draw.below(20) : 0;
}

}  // namespace

uint64_t Draw::bits() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double Draw::normal() {  // approximately normal, and within 6
  double sum = -6;
  for (int n = 0; n < 12; ++n) sum += unit();
  return sum;
}

DrawnTensor draw_tensor(Draw& draw, int32_t dtype, std::vector<int64_t> sizes, bool may_alias,
                        const std::function<double()>& element) {
  DrawnTensor t;
  t.present = true;
  t.dtype = dtype;
  t.sizes = std::move(sizes);
  draw_layout(draw, t, may_alias);
  t.x.resize(static_cast<size_t>(count_of(t.sizes)));
  for (double& x : t.x) x = element();
  const fake::Tensor rounded = t.tensor(0);
  for (size_t n = 0; n < t.x.size(); ++n) t.x[n] = read(*rounded, static_cast<int64_t>(n));
  return t;
}

int64_t count_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<int64_t>());
}

std::vector<double> spread(const DrawnTensor& t, const std::vector<int64_t>& full) {
  std::vector<double> all(static_cast<size_t>(count_of(full)));
  for (size_t n = 0; n < all.size(); ++n) {
    int64_t rest = static_cast<int64_t>(n), place = 0, step = 1;
    for (size_t axis = full.size(); axis-- > 0;) {
      const int64_t at = rest % full[axis];
      rest /= full[axis];
      place += (t.sizes[axis] == 1 ? 0 : at) * step;
      step *= t.sizes[axis];
    }
    all[n] = t.x[static_cast<size_t>(place)];
  }
  return all;
}

bool DrawnTensor::aliased() const {
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] > 1 && strides[axis] == 0) return true;
  }
  return false;
}

fake::Tensor DrawnTensor::tensor(unsigned char fill) const {
  fake::Tensor t = fake::make(dtype, sizes, strides, offset, fill);
  for (size_t n = 0; n < x.size(); ++n) write(*t, static_cast<int64_t>(n), x[n]);
  return t;
}

static char* address(const AtenTensorOpaque& t, int64_t element) {
  int64_t place = 0;
  for (size_t axis = t.sizes.size(); axis-- > 0;) {
    place += element % t.sizes[axis] * t.strides[axis];
    element /= t.sizes[axis];
  }
  return t.data() + place * code_size(t.dtype);
}

template <class T>
T loaded(const void* from) {
  T value;
  memcpy(&value, from, sizeof(value));
  return value;
}

double read(const AtenTensorOpaque& t, int64_t element) {
  const char* from = address(t, element);
  uint64_t bits = 0;
  memcpy(&bits, from, static_cast<size_t>(code_size(t.dtype)));
  switch (t.dtype) {
    case kLong: return static_cast<double>(static_cast<int64_t>(bits));
    case kBool: return bits != 0;
    case kByte: return static_cast<int8_t>(bits);
    case kPacked: return static_cast<double>(bits);
    case kHalf: return half_value(static_cast<uint16_t>(bits));
    case kDouble: return loaded<double>(from);
    case kFloat: return loaded<float>(from);
    default: {
      const uint32_t high = static_cast<uint32_t>(bits) << 16;
      return loaded<float>(&high);
    }
  }
}

void write(AtenTensorOpaque& t, int64_t element, double value) {
  char* to = address(t, element);
  const float single = static_cast<float>(value);
  uint64_t bits = 0;
  if (t.dtype == kLong) bits = static_cast<uint64_t>(static_cast<int64_t>(value));
  else if (t.dtype == kBool) bits = value != 0;
  else if (t.dtype == kByte) bits = static_cast<uint8_t>(static_cast<int8_t>(value));
  else if (t.dtype == kPacked) bits = static_cast<uint8_t>(value);
  else if (t.dtype == kHalf) bits = half_bits(value);
  else if (t.dtype == kDouble) memcpy(&bits, &value, 8);
  else memcpy(&bits, &single, 4);
  if (t.dtype == kBfloat) bits = std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  memcpy(to, &bits, static_cast<size_t>(code_size(t.dtype)));
}

fake::Tensor DrawnMap::bits() const {
  fake::Tensor t = fake::make(kLong, {static_cast<int64_t>(words.size()) / 64, 64}, {64, 1}, 0, 0);
  if (!words.empty()) memcpy(t->storage, words.data(), words.size() * 8);
  return t;
}

}  // namespace fuzz
