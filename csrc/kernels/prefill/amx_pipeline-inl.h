// Computes tile products one at a time, so that each can stand between vector operations. Matrix and vector
// instructions run at the same time only if both are within the CPU's window of some hundred instructions.
#pragma once

#include "kernels/tile/transpose_amx-inl.h"

namespace headwise {
namespace HW_ISA {

// Describes the products out[chunk][u][row] = sum over the steps of first[chunk][u][step] * second[step][row], in
// chunks of 32 u and steps of 32 numbers; they are added to `out` if `adds`. The distances from u to u, chunk to chunk
// and step to step are in elements.
struct TileProducts {
  const uint16_t* first = nullptr;
  int64_t row = 0, chunk = 0, step = 0;
  const uint32_t* second = nullptr;  // pairs by rows, 32 of them
  int64_t steps = 0, chunks = 0;
  float* out = nullptr;
  bool adds = false;
};

constexpr int kAmxVectors = 2;  // vectors of rows of a block

// Computes `TileProducts` step by step. The sums of a chunk stay in registers until the first products of the next
// chunk, so that their stores do not have to wait for products.
class AmxPipeline {
 public:
  static constexpr int kProducts = 4;  // products of a step

  void start(const TileProducts& products) {
    products_ = products;
    at_chunk_ = at_step_ = 0;
  }
  bool left() const { return at_chunk_ < products_.chunks; }
  HW_MEMBER void begin_step() {
    first_ = products_.first + at_chunk_ * products_.chunk + at_step_ * products_.step;
    second_ = products_.second + at_step_ * W * R;
  }
  template <int I>
  HW_MEMBER void product() {
    constexpr int kRow = I / 2, kColumn = kRow == 0 ? I : 3 - I, kSum = kRow * 2 + kColumn;
    constexpr int64_t kPlace = kRow * W * R + kColumn * W;
    if (at_step_ == 0) {
      if (unstored_ != nullptr) tile_store<kSum>(unstored_ + kPlace, R * 4);
      if (products_.adds) {
        tile_load<kSum>(products_.out + at_chunk_ * 2 * W * R + kPlace, R * 4);
      } else {
        tile_zero<kSum>();
      }
    }
    if constexpr (I % 2 == 0) tile_load_once<4 + kRow>(first_ + kRow * W * products_.row, products_.row * 2);
    if constexpr (kRow == 0) tile_load<6 + kColumn>(second_ + kColumn * W, R * 4);
    tile_times<kSum, 4 + kRow, 6 + kColumn>();
  }
  HW_MEMBER void end_step() {
    if (++at_step_ < products_.steps) return;
    unstored_ = products_.out + at_chunk_ * 2 * W * R;
    at_step_ = 0;
    ++at_chunk_;
  }
  HW_MEMBER void whole_step() {
    begin_step();
    product<0>();
    product<1>();
    product<2>();
    product<3>();
    end_step();
  }
  // Stores the sums that are still in registers.
  void flush() {
    if (unstored_ == nullptr) return;
    tile_store<0>(unstored_, R * 4);
    tile_store<1>(unstored_ + W, R * 4);
    tile_store<2>(unstored_ + W * R, R * 4);
    tile_store<3>(unstored_ + W * R + W, R * 4);
    unstored_ = nullptr;
  }

 private:
  static constexpr int R = kAmxVectors * W;
  TileProducts products_;
  int64_t at_chunk_ = 0, at_step_ = 0;
  const uint16_t* first_ = nullptr;
  const uint32_t* second_ = nullptr;
  float* unstored_ = nullptr;  // the place of the sums in registers
};

}  // namespace HW_ISA
}  // namespace headwise
