// What decode prefetches while it multiplies.
#pragma once

#include "kernels/decode_formats.h"

namespace headwise {
namespace HW_ISA {

// A tile of keys or values that is read next, and the one after it: lines are prefetched beside the products.
//
// Most lines must come by the CPU's own prefetching, which the first few reads of a page set off and which ends with
// the page: what prefetch instructions alone have on their way is too little for the latency of memory. So a tile is
// prefetched in four streams by turns, a quarter of its rows each: for 32 keys of 128 floats, a page each. And the
// first lines of the streams of the tile after it are asked for early, so that its pages are known when it is read.
template <class Read>
class Ahead {
 public:
  Ahead(const Tensor4& x, const Tensor4& then, int64_t b, int64_t kv_head, int64_t j, int64_t next, int64_t width)
      : row_(at(x, b, kv_head, j)),
        then_(at(then, b, kv_head, next)),
        pitch_(x.stride[2] * kSize),
        width_(width * kSize),
        part_(kQuarter * x.stride[2] * kSize),
        then_part_(kQuarter * then.stride[2] * kSize),
        wait_(kQuarter * width_ / 128) {}
  // The next 2 W elements.
  HW_MEMBER void step() {
    HW_UNROLL
    for (int64_t line = 0; line < kLines; ++line) {
      HW_PREFETCH_ONCE(offset(row_, column_ + lag_ + line * (kStreams == 1 ? 64 : part_)));
    }
    if (kStreams > kLines) lag_ += kLines * part_;
    if (kStreams > kLines && ++phase_ < kStreams / kLines) return;
    lag_ = 0, phase_ = 0, next_turn();
  }
  // The next line of each stream.
  HW_MEMBER void turn() {
    HW_UNROLL
    for (int64_t stream = 0; stream < kStreams; ++stream) HW_PREFETCH_ONCE(offset(row_, column_ + stream * part_));
    next_turn();
  }

 private:
  static constexpr int64_t kSize = sizeof(typename Read::T);
  static constexpr int64_t kStep = 2 * W * kSize, kLines = kStep < 64 ? 1 : kStep / 64;
  static constexpr int64_t kStreams = HW_ONCE == 0 ? 1 : 4, kQuarter = Read::kTile / 4, kTouches = 16;

  HW_MEMBER void next_turn() {
    column_ += kStreams == 1 ? kStep : kStep < 64 ? kStep : 64;
    if (column_ >= width_) column_ = 0, row_ = offset(row_, pitch_);
    if (HW_ONCE != 0 && --wait_ == 0) {  // each second turn of the second half
      HW_PREFETCH_NEAR(offset(then_, touched_ % 4 * then_part_ + touched_ / 4 * 64));
      wait_ = ++touched_ < kTouches ? 2 : -1;
    }
  }

  const char *row_, *then_;
  int64_t pitch_, width_, part_, then_part_;  // in bytes
  int64_t wait_, column_ = 0, lag_ = 0, touched_ = 0;
  int phase_ = 0;
};

}  // namespace HW_ISA
}  // namespace headwise
