// What decode prefetches while it multiplies.
#pragma once

#include "kernels/decode_formats.h"

namespace headwise {
namespace HW_ISA {

// A tile of keys or values that is read next: a few lines are prefetched beside each few products, and, of tiles so
// small that memory could not answer in time, those of the tile after it into the second cache.
template <class T>
class Ahead {
 public:
  Ahead(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j, int64_t width)
      : row_(at(x, b, kv_head, j)), pitch_(x.stride[2] * kSize), width_(width * kSize) {}
  // The next 2 W elements, in the order of memory.
  HW_MEMBER void step() {
    prefetch(column_);
    column_ += 2 * W * kSize;
    if (column_ >= width_) column_ = 0, row_ = offset(row_, pitch_);
  }
  // The 2 W elements from column d, of the u-th of the next few rows; then those rows are done. Memory serves floats
  // faster from a few rows at a time, and halves, of which 2 W are one line, in order.
  HW_MEMBER void beside(int64_t u, int64_t d) { kByRows ? prefetch(u * pitch_ + d * kSize) : step(); }
  HW_MEMBER void pass(int64_t rows) { row_ = offset(row_, kByRows ? rows * pitch_ : 0); }

 private:
  static constexpr int64_t kSize = sizeof(T);
  static constexpr bool kByRows = kSize == 4;
  HW_MEMBER void prefetch(int64_t bytes) const {
    for (int64_t line = 0; line < 2 * W * kSize; line += 64) {
      HW_PREFETCH_ONCE(offset(row_, bytes + line));
      if constexpr (kSize == 2 && HW_ONCE != 0) HW_PREFETCH_NEAR(offset(row_, bytes + line + kDecodeTile * pitch_));
    }
  }
  const char* row_;
  int64_t pitch_, width_, column_ = 0;  // in bytes
};

}  // namespace HW_ISA
}  // namespace headwise
