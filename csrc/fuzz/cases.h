// Random calls: sizes, masks and memory layouts from a seed, as tensors for the kernel and as numbers for the
// definition.
#pragma once

#include <string>
#include <vector>

#include "fuzz/drawn_tensor.h"
#include "fuzz/reference/naive.h"

namespace fuzz {

struct Case {
  naive::Call call;
  naive::Upstream upstream;
  DrawnTensor query, key, value, key_scale, value_scale, sinks, bounds, gate, grad_out, grad_lse;
  std::vector<DrawnTensor> segments, dense, alibi;
  std::vector<DrawnMap> maps;
  std::vector<DrawnTensor> relative;
  bool plain = false;      // the operator `attend` or `attend_stored`, without extras
  bool bytes = false;      // keys and values are codes with scales
  int bits = 8;            // of a code; 4 and 3 are packed
  bool paged = false;      // run a second time with keys and values in pages, for the same bits
  bool overflows = false;  // some scores are -inf in float32
  bool special = false;    // a bias has an element that is Inf or very large
  bool biases = false;     // with gradients of biases and slopes
  bool unchecked = false;  // outside the range of the definition: it must not crash
  bool far_apart = false;  // keys and values that many rows read lie so far apart that the kernel copies them
  // The position of this call in a larger one, from which dropout draws: the number of heads of the larger call, or 0,
  // and this call's first head, query and key. May be empty.
  std::vector<int64_t> places;
  uint64_t seed = 0;
  std::string describe() const;
};

Case draw_case(uint64_t seed, double most = 0);  // at most `most` multiply-adds; 0 for few enough to check

}  // namespace fuzz
