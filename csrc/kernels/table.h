// An instruction set's kernels as a table. A file isa_*.cpp names the set, includes its vec_*.h and then this.
#pragma once

#include "kernels/backward.h"
#include "kernels/prefill.h"
#include "kernels/decode.h"
#include "kernels/received.h"
#include "kernels/statistics.h"

namespace headwise {
namespace HW_ISA {

constexpr int64_t kSplitKeys = 1024;         // keys of an item where the rows of a head are few
constexpr int64_t kItemBytes = 320 * 1024;  // of packed queries and sums that stay in a core's own cache

// Rows of an item of `run_blocks`.
static int64_t rows_per_item(const Problem& p, int64_t rows) {
  const int64_t block_bytes = kRows * (p.D + p.V) * static_cast<int64_t>(sizeof(float));
  const int64_t blocks = most(1, least(kMaxBlocks, kItemBytes / block_bytes));
  return least(blocks, (rows + kRows - 1) / kRows) * kRows;
}

static Plan make_plan(const Problem& p) {
  Plan plan;
  plan.rows = p.T * (p.H / p.K);
  plan.by_row = plan.rows <= kLineRows;
  plan.rows_per_item = plan.by_row ? plan.rows : rows_per_item(p, plan.rows);
  plan.row_items = (plan.rows + plan.rows_per_item - 1) / plan.rows_per_item;
  // Many rows give threads enough to share; few rows share the keys.
  const bool split = plan.rows <= kMaxBlocks * kRows && p.S > kSplitKeys;
  plan.splits = split ? (p.S + kSplitKeys - 1) / kSplitKeys : 1;
  plan.keys_per_split = split ? kSplitKeys : p.S;

  Arena count{nullptr};
  if (plan.by_row) {
    LineScratch(count, p);
  } else {
    BlockScratch<Float32>(count, p, static_cast<int>(plan.rows_per_item / kRows));
  }
  plan.scratch_bytes = count.used;
  return plan;
}

static Plan plan_statistics(const Problem& p, const Statistics& statistics) {
  Plan plan;
  plan.rows = p.T * (p.H / p.K);
  plan.rows_per_item = rows_per_item(p, plan.rows);
  plan.row_items = (plan.rows + plan.rows_per_item - 1) / plan.rows_per_item;
  plan.splits = 1, plan.keys_per_split = p.S;
  Arena count{nullptr};
  StatisticsScratch<Float32>(count, p, statistics, static_cast<int>(plan.rows_per_item / kRows));
  plan.scratch_bytes = count.used;
  return plan;
}

template <class Read>
static void run_lines_of(const Problem& p, const Plan& plan, int64_t group, int64_t split, char* scratch) {
  if (plan.rows == 1) {
    run_lines<Read, 1>(p, plan, group, split, scratch);
  } else if (plan.rows == 2) {
    run_lines<Read, 2>(p, plan, group, split, scratch);
  } else if (plan.rows <= 4) {
    run_lines<Read, 4>(p, plan, group, split, scratch);
  } else {
    if constexpr (kLineRows == 8) run_lines<Read, 8>(p, plan, group, split, scratch);
  }
}

static void run_item(const Problem& p, const Plan& plan, int64_t group, int64_t split, char* scratch) {
  const FlushDenormals flushed;
  (void)flushed;
  if (plan.by_row) {
    if (p.bytes()) {
#if HW_BF16
      if (p.dtype() == Dtype::bf16) {  // two digits hold what it holds
        run_lines_of<ReadDigits<2, 2>>(p, plan, group, split, scratch);
      } else {
        run_lines_of<ReadDigits<3, 3>>(p, plan, group, split, scratch);
      }
#else
      run_lines_of<ReadByte>(p, plan, group, split, scratch);
#endif
    } else if (p.dtype() == Dtype::f32) {
      run_lines_of<ReadFloat>(p, plan, group, split, scratch);
    } else if (p.dtype() == Dtype::bf16) {
      run_lines_of<ReadBfloat>(p, plan, group, split, scratch);
    } else {
      run_lines_of<ReadHalf>(p, plan, group, split, scratch);
    }
    return;
  }
#if HW_BF16
  if (p.dtype() == Dtype::bf16 && !p.bytes()) {
    run_blocks<Bfloat16>(p, plan, group, split, scratch);
    return;
  }
#endif
  run_blocks<Float32>(p, plan, group, split, scratch);
}

static const Kernels kernels = {HW_NAME,         make_plan,      run_item,       merge_rows,
                                plan_backward,   run_backward,   merge_backward, run_backward_bias,
                                round_floats,    plan_statistics, run_statistics, plan_received,
                                run_received};

}  // namespace HW_ISA
}  // namespace headwise
