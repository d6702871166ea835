// Random numbers from a seed, and random tensors in memory, in every dtype and layout.
#pragma once

#include <math.h>

#include <functional>
#include <vector>

#include "fuzz/fake_torch.h"

namespace fuzz {

// splitmix64: a seed gives the same case on any machine.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool once_in(int64_t n) { return below(n) == 0; }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double normal();
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[below(static_cast<int64_t>(all.size()))];
  }

 private:
  uint64_t state_;
};

// The layout of a tensor in memory, and its numbers in logical order.
struct DrawnTensor {
  int32_t dtype = kFloat;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  std::vector<double> x;  // rounded to dtype
  bool present = false;

  bool aliased() const;  // several elements at one address
  fake::Tensor tensor(unsigned char fill) const;
};

// A tensor in a drawn layout, whose elements come from `element` and are rounded to the dtype.
DrawnTensor draw_tensor(Draw& draw, int32_t dtype, std::vector<int64_t> sizes, bool may_alias,
                        const std::function<double()>& element);

int64_t count_of(const std::vector<int64_t>& sizes);

// The numbers of a broadcast tensor, spread over all axes.
std::vector<double> spread(const DrawnTensor& t, const std::vector<int64_t>& full);

double read(const AtenTensorOpaque& tensor, int64_t element);  // logical order
void write(AtenTensorOpaque& tensor, int64_t element, double value);

// A rule as a map of tiles: an index and the words of its mixed tiles, which doubles cannot represent.
struct DrawnMap {
  DrawnTensor index;
  std::vector<uint64_t> words;
  fake::Tensor bits() const;
};

}  // namespace fuzz
