// What decode prefetches while it multiplies.
#pragma once

#include "kernels/decode/decode_formats-inl.h"

namespace headwise {
namespace HW_ISA {

// Rows of a tile of keys or values, in bytes.
template <int64_t Size>
struct TileAhead {
  const char* row = nullptr;
  int64_t pitch = 0, width = 0;

  TileAhead() = default;
  TileAhead(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j, int64_t elements)
      : row(at(x, b, kv_head, j)), pitch(x.stride[2] * Size), width(elements * Size) {}
};

// The tiles of keys and values that are read next: a few lines are prefetched beside each few products.
//
// Most lines must come by the CPU's own prefetching, which the first few reads of a page set off and which ends with
// the page: what prefetch instructions alone have on their way is too little for the latency of memory. So a tile is
// prefetched in two or four streams by turns, which are a page each where it is contiguous. And it is done some lines
// before the tile is multiplied, when the tile after it begins: no product waits for the line just asked for.
template <class Read, bool InOrder = kInOrder<Read>>
class Ahead {
 public:
  static constexpr int64_t kSize = sizeof(typename Read::T), kStep = 2 * W * kSize;
  static constexpr int64_t kLines = Read::kTiles || kStep >= 128 ? 2 : 1;
  using Tile = TileAhead<kSize>;

  // `tile` is prefetched from here on, unless it has begun before, and then `next`.
  void aim(const Tile& tile, const Tile& next) {
    const bool first = tile_.row == nullptr;
    if (tile_.row != tile.row) {
      begin(tile);
    } else if (done_) {
      begin(next);
    }
    next_ = next;
    for (int64_t i = 0; first && i < kLead; i += kLines) step();
  }
  // The next 2 W elements, or two lines for tiles of products.
  HW_MEMBER void step(int = 0) {
    HW_UNROLL
    for (int64_t line = 0; line < kLines; ++line) prefetch(column_ + lag_ + line * (kStreams ? part_ : 64));
    if constexpr (kStreams) {
      lag_ += kLines * part_;
      if (--phases_ > 0) return;
      lag_ = 0;
      phases_ = streams_ / kLines;
    }
    column_ += kTurn;
    if (column_ >= tile_.width) next_row();
  }
  template <class Run>
  HW_MEMBER void beside(const Run& run) {
    run(*this);
  }

 private:
  // Halves in tiles of 32 keys come faster in order, and their lines of the tile after the next into the L2 cache: they
  // are so small that memory could not answer in time.
  static constexpr bool kStreams = kSize >= 4 || Read::kTiles;
  static constexpr bool kNear = kSize == 2 && !kStreams;
  static constexpr int64_t kLead = kStreams ? 48 : 0;                    // lines
  static constexpr int64_t kTurn = kStreams && kStep > 64 ? 64 : kStep;  // bytes of a stream

  HW_MEMBER void prefetch(int64_t bytes) const {
    HW_PREFETCH_ONCE(offset(row_, bytes));
    if constexpr (kNear) HW_PREFETCH_NEAR(offset(row_, bytes + part_));
  }
  void begin(const Tile& tile) {
    const int64_t bytes = Read::kTile * tile.pitch;
    streams_ = !kStreams ? 1 : bytes >= 4 * 4096 ? 4 : 2;
    tile_ = tile;
    row_ = tile.row;
    part_ = bytes / streams_;
    column_ = 0;
    lag_ = 0;
    phases_ = streams_ / kLines;
    rows_ = Read::kTile / streams_;
    done_ = false;
  }
  HW_MEMBER void next_row() {
    column_ = 0;
    row_ = offset(row_, tile_.pitch);
    if (!kStreams || --rows_ > 0) return;
    if (tile_.row == next_.row) {
      done_ = true;
    } else {
      begin(next_);
    }
  }

  Tile tile_, next_;
  const char* row_ = nullptr;
  int64_t part_ = 0, column_ = 0, lag_ = 0;      // in bytes
  int64_t streams_ = 1, phases_ = 0, rows_ = 0;  // of a tile; that are left of a turn, and of a stream
  bool done_ = false;
};

// In the order of memory, a tile beside the one before it, line by line. Products have few cycles a line: where rows
// are contiguous, an address in a register is all that is kept.
template <class Read>
class Ahead<Read, true> {
 public:
  static constexpr int64_t kSize = sizeof(typename Read::T), kStep = 2 * W * kSize;
  using Tile = TileAhead<kSize>;

  void aim(const Tile& tile, const Tile&) {
    line_ = offset(tile.row, lead<Read>(tile.pitch, tile.width));
    left_ = width_ = tile.width;
    gap_ = tile.pitch - tile.width;
  }
  // Calls run(ahead) with what a function keeps in registers.
  template <class Run>
  HW_MEMBER void beside(const Run& run) {
    if (gap_ == 0) {
      Local<true> local(*this);
      run(local);
    } else {
      Local<false> local(*this);
      run(local);
    }
  }

 private:
  template <bool Contiguous>
  class Local {
   public:
    HW_MEMBER explicit Local(Ahead& all) : all_(all), line_(all.line_), left_(all.left_) {}
    HW_MEMBER ~Local() {
      all_.line_ = line_;
      all_.left_ = left_;
    }
    // The next 2 W elements.
    HW_MEMBER void step(int = 0) {
      HW_UNROLL
      for (int64_t byte = 0; byte < kStep; byte += kLine) {
        prefetch_here<Read::kIntoL2>(reinterpret_cast<const int8_t*>(offset(line_, byte)));
      }
      line_ = offset(line_, kStep);
      if (Contiguous || (left_ -= kStep) > 0) return;
      line_ = offset(line_, left_ + all_.gap_);
      left_ = all_.width_;
    }

   private:
    Ahead& all_;
    const char* line_;
    int64_t left_;
  };

  static constexpr int64_t kLine = 64;

  const char* line_ = nullptr;
  int64_t left_ = 0, width_ = 0, gap_ = 0;  // in bytes
};

}  // namespace HW_ISA
}  // namespace headwise
