// Prefetches keys and values for decode while it multiplies others.
#pragma once

#include "kernels/decode/decode_formats-inl.h"
#include "kernels/tile/tile_scores-inl.h"

namespace headwise {
namespace HW_ISA {

// Finds the first keys of the item that the thread runs next, which are prefetched during the last products of the
// present item.
struct NextItemKeys {
  const Plan& plan;
  const Reach& all;  // of the present item; if the next one reaches fewer keys, some are prefetched in vain
  const Items& items;

  struct Place {
    int64_t b, kv_head, j;
  };
  // The first key of the next item, or `otherwise`.
  Place first(const Call& p, const Place& otherwise) const {
    const int64_t at = items.next();
    if (at < 0) return otherwise;
    const int64_t group = at / plan.splits, from = at % plan.splits * plan.keys_per_split;
    const Reach reach = all.within(from, from + plan.keys_per_split);
    return reach.from < reach.to ? Place{group / p.K, group % p.K, reach.from} : otherwise;
  }
};

// Rows of a tile of keys or values, in bytes.
template <int64_t Size>
struct PrefetchRows {
  const char* row = nullptr;
  int64_t pitch = 0, width = 0;

  PrefetchRows() = default;
  PrefetchRows(const Tensor4& x, int64_t b, int64_t kv_head, int64_t j, int64_t elements)
      : row(at(x, b, kv_head, j)), pitch(x.stride[2] * Size), width(row_elements(x.dtype, elements) * Size) {}
};

// Prefetches the tiles of keys and values that are read next, a few lines with each few products.
//
// Most lines must come by the CPU's own prefetching, which starts with the first few reads of a page and ends with the
// page, because prefetch instructions alone do not have enough lines in flight for the latency of memory. So a tile is
// prefetched alternately in two or four streams, each of which is a page if the tile is contiguous. Prefetching is some
// lines ahead: a tile is complete before it is multiplied, and the tile after it has begun, so that no product waits
// for a line that has just been requested.
template <class Read, bool InOrder = kInOrder<Read>>
class Prefetcher {
 public:
  static constexpr int64_t kSize = sizeof(typename Read::T), kStep = 2 * W * kSize;
  static constexpr int64_t kLines = kStep >= 128 ? 2 : 1;
  using Tile = PrefetchRows<kSize>;

  // Prefetches `tile` from here on, unless that has already begun, and then `next`.
  void target(const Tile& tile, const Tile& next) {
    const bool first = tile_.row == nullptr;
    if (tile_.row != tile.row) {
      begin(tile);
    } else if (done_) {
      begin(next);
    }
    next_ = next;
    for (int64_t i = 0; first && i < kLead; i += kLines) step();
  }
  // The next 2 W elements.
  HW_MEMBER void step(int = 0) {
    HW_UNROLL
    for (int64_t line = 0; line < kLines; ++line) HW_PREFETCH_ONCE(offset(row_, column_ + lag_ + line * part_));
    lag_ += kLines * part_;
    if (--phases_ > 0) return;
    lag_ = 0;
    phases_ = streams_ / kLines;
    column_ += kTurn;
    if (column_ >= tile_.width) next_row();
  }
  template <class Run>
  HW_MEMBER void in_registers(const Run& run) {
    run(*this);
  }

 private:
  static constexpr int64_t kLead = 48;                       // lines
  static constexpr int64_t kTurn = kStep > 64 ? 64 : kStep;  // bytes of a stream

  void begin(const Tile& tile) {
    const int64_t bytes = Read::kTile * tile.pitch;
    streams_ = bytes >= 4 * 4096 ? 4 : 2;
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
    if (--rows_ > 0) return;
    if (tile_.row == next_.row) {
      done_ = true;
    } else {
      begin(next_);
    }
  }

  Tile tile_, next_;
  const char* row_ = nullptr;
  int64_t part_ = 0, column_ = 0, lag_ = 0;  // in bytes
  // streams of a tile; what is left of a round of streams, and of a stream
  int64_t streams_ = 1, phases_ = 0, rows_ = 0;
  bool done_ = false;
};

// Prefetches in the order of memory, line by line, a tile while the one before it is multiplied. There are few cycles
// between the lines; if rows are contiguous, the only state is an address in a register.
template <class Read>
class Prefetcher<Read, true> {
 public:
  static constexpr int64_t kSize = sizeof(typename Read::T), kStep = 2 * W * kSize;
  using Tile = PrefetchRows<kSize>;

  void target(const Tile& tile, const Tile&) {
    line_ = offset(tile.row, lead<Read>(tile.pitch, tile.width));
    left_ = width_ = tile.width;
    gap_ = tile.pitch - tile.width;
  }
  // Calls run(prefetcher) with a prefetcher whose state a function can keep in registers.
  template <class Run>
  HW_MEMBER void in_registers(const Run& run) {
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
    HW_MEMBER explicit Local(Prefetcher& all) : all_(all), line_(all.line_), left_(all.left_) {}
    HW_MEMBER ~Local() {
      all_.line_ = line_;
      all_.left_ = left_;
    }
    // The next 2 W elements.
    HW_MEMBER void step(int i = 0) {
      constexpr int kSteps = kStep < kLine ? static_cast<int>(kLine / kStep) : 1;  // of a line
      if (i % kSteps == 0) {
        HW_UNROLL
        for (int64_t byte = 0; byte < kStep; byte += kLine) {
          prefetch_here<Read::kIntoL2>(reinterpret_cast<const int8_t*>(offset(line_, byte)));
        }
      }
      line_ = offset(line_, kStep);
      if (Contiguous || (left_ -= kStep) > 0) return;
      line_ = offset(line_, left_ + all_.gap_);
      left_ = all_.width_;
    }

   private:
    Prefetcher& all_;
    const char* line_;
    int64_t left_;
  };

  static constexpr int64_t kLine = 64;

  const char* line_ = nullptr;
  int64_t left_ = 0, width_ = 0, gap_ = 0;  // in bytes
};

}  // namespace HW_ISA
}  // namespace headwise
