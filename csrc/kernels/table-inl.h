// The table of the kernels of an instruction set. Each file isa/*.cpp defines the name of its set, includes its vector
// layer, and then includes this file.
#pragma once

#include "kernels/backward/backward-inl.h"
#include "kernels/cache/quantize-inl.h"
#include "kernels/cache/rotary-inl.h"
#include "kernels/decode/decode-inl.h"
#include "kernels/linear/linear-inl.h"
#include "kernels/prefill/prefill_amx-inl.h"
#include "kernels/statistics/key_mass-inl.h"
#include "kernels/statistics/statistics-inl.h"

namespace headwise {
namespace HW_ISA {

constexpr int64_t kSplitRows = 4;           // an item has at least this many keys for each row of its head
constexpr int64_t kItemBytes = 320 * 1024;  // bytes of packed queries and sums, which then stay in a core's L2 cache

// The rows of an item of `run_prefill`: at most `most` whole blocks.
static int64_t rows_of_blocks(int64_t rows, int64_t block, int64_t most) {
  return min(most, (rows + block - 1) / block) * block;
}
static int64_t rows_per_item(const Call& p, int64_t rows) {
  const int64_t block_bytes = kRows * (p.D + p.V) * static_cast<int64_t>(sizeof(float));
  return rows_of_blocks(rows, kRows, max(1, min(kMaxBlocks, kItemBytes / block_bytes)));
}

// True if decode multiplies by matrix instructions. They fill only some of their 16 rows, and a single row of bfloat16
// takes longer than by vector instructions.
static bool uses_amx_decode(const Call& p) {
  return kHasAmx && p.dtype() == Dtype::bf16 && (p.bytes() || p.T * (p.H / p.K) > 1);
}

static Plan make_plan(const Call& p) {
  Plan plan;
  plan.rows = p.T * (p.H / p.K);
  plan.by_row = plan.rows <= kDecodeRows;
  const bool amx = uses_amx_prefill(p);
  plan.rows_per_block = plan.by_row ? plan.rows : amx ? kAmxRows : kRows;
  plan.cut(plan.by_row ? plan.rows
           : amx       ? rows_of_blocks(plan.rows, kAmxRows, kAmxBlocks)
                       : rows_per_item(p, plan.rows));
  // Many rows give enough items for the threads. For few rows the keys are split; partial results then take at most a
  // quarter of the memory of the values in float32.
  const int64_t keys = round_up(plan.rows * kSplitRows, kSplitKeys);
  plan.splits = (p.S + keys - 1) / keys;
  plan.keys_per_split = plan.splits > 1 ? keys : p.S;

  Arena count{nullptr};
  if (plan.by_row && uses_amx_decode(p)) {
    SplitScratch(count, p);
  } else if (plan.by_row) {
    DecodeScratch(count, p);
  } else if (amx) {
    PrefillAmxScratch<Float32>(count, p, static_cast<int>(plan.rows_per_item / kAmxRows));
  } else {
    PrefillScratch<Float32>(count, p, static_cast<int>(plan.rows_per_item / kRows));
  }
  plan.scratch_bytes = count.used;
  return plan;
}

static Plan plan_statistics(const Call& p, const Statistics& statistics) {
  Plan plan;
  plan.rows = p.T * (p.H / p.K);
  plan.rows_per_block = kRows;
  plan.cut(rows_per_item(p, plan.rows));
  plan.splits = 1;
  plan.keys_per_split = p.S;
  Arena count{nullptr};
  StatisticsScratch<Float32>(count, p, statistics, static_cast<int>(plan.rows_per_item / kRows));
  plan.scratch_bytes = count.used;
  return plan;
}

// Calls run(reader) with the format in which decode reads the keys and values of a call.
template <class Run>
static inline void with_reader(const Call& p, const Run& any) {
  const auto run = [&](auto reader) {
    if constexpr (kReadsInOrder) {
      if (prefers_l2_prefetch()) return any(IntoL2<decltype(reader)>{});
    }
    any(reader);
  };
  const bool bf16 = p.dtype() == Dtype::bf16;
  if constexpr (kHasAmx) {
    if (uses_amx_decode(p)) {
      const TileUnit tiles;
      return p.bytes() ? any(ReadInt8Tiles<2>{}) : any(ReadBf16Tiles{});  // two digits can hold a bfloat16
    }
  }
  if (p.bytes()) {
    if constexpr (kHasWords) {
      if (bf16 && p.D <= kMaxWords) return run(ReadInt8Words<2>{});
    }
    if constexpr (kHasVnni) {
      bf16 ? run(ReadInt8Dot<2, 2>{}) : run(ReadInt8Dot<3, 3>{});
    } else {
      run(ReadInt8{});
    }
  } else if (bf16) {
    if constexpr (kHasBf16 && !kHasAmx) {  // with AMX, a single row has the bits of the sets without bfloat16
      run(ReadBf16Pairs{});
    } else {
      run(ReadBf16{});
    }
  } else {
    p.dtype() == Dtype::f32 ? run(ReadF32{}) : run(ReadF16{});
  }
}

// Calls run(rows) with the number of rows that the kernel computes together, a constant.
template <class Run>
static inline void with_rows(int64_t rows, const Run& run) {
  if (rows == 1) {
    run(Constant<1>{});
  } else if (rows == 2) {
    run(Constant<2>{});
  } else if (rows <= 4) {
    run(Constant<4>{});
  } else {
    if constexpr (kDecodeRows == 8) run(Constant<8>{});
  }
}

// Runs an item of many rows in the number format N.
template <class N>
static void run_rows(const Call& p, const Plan& plan, int64_t group, int64_t split, char* scratch) {
  if constexpr (N::kTiles) {
    if (uses_amx_prefill(p)) return run_prefill_amx<N>(p, plan, group, split, scratch);
  }
  run_prefill<N>(p, plan, group, split, scratch);
}

static void run_item(const Call& p, const Plan& plan, int64_t group, int64_t split, char* scratch) {
  if constexpr (kHasBf16) {
    if (p.bytes() && p.dtype() == Dtype::bf16) {
      [[maybe_unused]] const TileUnit tiles;
      return run_rows<Int8AsBfloat16>(p, plan, group, split, scratch);
    }
  }
  with_format(p, [&](auto format) { run_rows<decltype(format)>(p, plan, group, split, scratch); });
}

static void run_items(const Call& p, const Plan& plan, char* scratch, const Items& items) {
  const FlushDenormals flush;
  const auto each = [&](auto run) {
    for (int64_t at = items.take(); at >= 0; at = items.take()) {
      const int64_t group = at / plan.splits, split = at % plan.splits;
      if (plan.splits > 1) {
        const Item item(p, plan, group);
        const int64_t from = split * plan.keys_per_split, to = from + plan.keys_per_split;
        if (!reaches_any(p, item.b, item.first, item.last, from, to)) {
          skip_split(p, plan, item.b, item.kv_head, item.first, item.last, split);
          continue;
        }
      }
      run(group, split);
    }
  };
  if (!plan.by_row) return each([&](int64_t group, int64_t split) { run_item(p, plan, group, split, scratch); });
  with_reader(p, [&](auto read) {
    with_rows(plan.rows, [&](auto rows) {
      using Read = decltype(read);
      constexpr int R = decltype(rows)::value;
      each([&](int64_t group, int64_t split) {
        if constexpr (Read::kTiles) {
          run_decode_split<Read, R>(p, plan, group, split, scratch, items);
        } else {
          run_decode<Read, R>(p, plan, group, split, scratch, items);
        }
      });
    });
  });
}

static const Kernels kernels = {HW_NAME,        make_plan,
                                run_items,      merge_rows,
                                plan_backward,  run_backward,
                                merge_backward, run_backward_bias,
                                round_floats,   plan_statistics,
                                run_statistics, plan_key_mass,
                                run_key_mass,   append_scratch_floats,
                                append_span,    step_scratch_bytes,
                                place_row,      rotate_output_row,
                                linear_padded,  pack_linear,
                                run_linear};

}  // namespace HW_ISA
}  // namespace headwise
