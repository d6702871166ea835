// What decode prefetches while it multiplies.
#pragma once

#include "kernels/decode_formats.h"

namespace headwise {
namespace HW_ISA {

// The tiles of keys and values that are read next: a few lines are prefetched beside each few products.
//
// Most lines must come by the CPU's own prefetching, which the first few reads of a page set off and which ends with
// the page: what prefetch instructions alone have on their way is too little for the latency of memory. So a tile is
// prefetched in four streams by turns, a quarter of its rows each: for 32 keys of 128 floats, a page each. It is done
// some turns before the tile is multiplied, and the tile after it begins: no product waits for the line just asked for.
template <class Read>
class Ahead {
 public:
  struct Tile {
    const char* row = nullptr;
    int64_t pitch = 0, width = 0;  // in bytes

    Tile() = default;
    Tile(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j, int64_t elements)
        : row(at(x, b, kv_head, j)), pitch(x.stride[2] * kSize), width(elements * kSize) {}
  };
  // `tile` is prefetched from here on, unless it has begun before, and then `next`.
  void aim(const Tile& tile, const Tile& next) {
    const bool first = tile_.row == nullptr;
    if (tile_.row != tile.row) {
      begin(tile);
    } else if (done_) {
      begin(next);
    }
    next_ = next;
    for (int64_t i = 0; first && i < kLead; ++i) turn();
  }
  // The next 2 W elements.
  HW_MEMBER void step() {
    HW_UNROLL
    for (int64_t line = 0; line < kLines; ++line) {
      HW_PREFETCH_ONCE(offset(row_, column_ + lag_ + line * (kStreams == 1 ? 64 : part_)));
    }
    lag_ += kLines * part_;
    if (++phase_ < kStreams / kLines) return;
    lag_ = 0, phase_ = 0;
    next_turn();
  }
  // The next line of each stream.
  HW_MEMBER void turn() {
    HW_UNROLL
    for (int64_t stream = 0; stream < kStreams; ++stream) HW_PREFETCH_ONCE(offset(row_, column_ + stream * part_));
    next_turn();
  }

 private:
  static constexpr int64_t kSize = sizeof(typename Read::T), kStep = 2 * W * kSize,
                           kLines = kStep < 64 ? 1 : kStep / 64;
  static constexpr int64_t kStreams = HW_ONCE == 0 ? 1 : 4, kLead = HW_ONCE == 0 ? 0 : 12;
  static constexpr int64_t kTurn = kStreams == 1 || kStep < 64 ? kStep : 64;  // bytes of a stream

  void begin(const Tile& tile) {
    tile_ = tile, row_ = tile.row, part_ = Read::kTile / kStreams * tile.pitch;
    column_ = 0, lag_ = 0, rows_ = 0, phase_ = 0, done_ = false;
  }
  HW_MEMBER void next_turn() {
    column_ += kTurn;
    if (column_ < tile_.width) return;
    column_ = 0, row_ = offset(row_, tile_.pitch);
    if (++rows_ < Read::kTile / kStreams) return;
    if (tile_.row == next_.row) {
      done_ = true;
    } else {
      begin(next_);
    }
  }

  Tile tile_, next_;
  const char* row_ = nullptr;
  int64_t part_ = 0, column_ = 0, lag_ = 0, rows_ = 0;  // in bytes, but for the rows
  int phase_ = 0;
  bool done_ = false;
};

}  // namespace HW_ISA
}  // namespace headwise
