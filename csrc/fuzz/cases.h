// Random calls: sizes, masks and memory layouts from a seed, as tensors for the kernel and as numbers for the
// definition.
#pragma once

#include <math.h>

#include <string>
#include <vector>

#include "fuzz/fake_torch.h"
#include "fuzz/reference/naive.h"

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

// A tensor's layout in memory, and its numbers in logical order.
struct DrawnTensor {
  int32_t dtype = kFloat;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  std::vector<double> x;  // rounded to dtype
  bool present = false;

  bool aliased() const;  // several elements at one address
  fake::Tensor tensor(unsigned char fill) const;
};

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

struct Case {
  naive::Call call;
  naive::Upstream upstream;
  DrawnTensor query, key, value, key_scale, value_scale, sinks, bounds, gate, grad_out, grad_lse;
  std::vector<DrawnTensor> segments, dense, alibi;
  std::vector<DrawnMap> maps;
  std::vector<DrawnTensor> relative;
  bool plain = false;      // the operator `attend`, without extras
  bool bytes = false;      // int8 keys and values with their scales: `attend_held`
  bool paged = false;      // run again with keys and values in pages, for the same bits
  bool overflows = false;  // some scores are -inf in float32
  bool special = false;    // a bias has an element that is Inf or very large
  bool biases = false;     // with gradients of biases and slopes
  bool unchecked = false;  // outside the range of the definition: it must not crash
  bool far_apart = false;  // keys and values that many rows read lie so far apart that the kernel copies them
  // Where dropout draws in a larger call: its number of heads, or 0; this call's first head, query and key. Or empty.
  std::vector<int64_t> places;
  uint64_t seed = 0;
  std::string describe() const;
};

Case draw_case(uint64_t seed, double most = 0);  // `most` multiply-adds, or 0 for few enough to check

}  // namespace fuzz
