// How a call is cut into items of work, and the table of functions that an instruction set offers the driver.
#pragma once

#include "problem.h"

namespace headwise {

// An item: one key-value head of one batch row, some of its query rows, some of the keys. The cut depends on the
// lengths and head dims alone, never on batch, heads or threads, so that a row has the same bits in any company.
struct Plan {
  int64_t rows = 0;           // T * H / K: the rows of a key-value head
  int64_t rows_per_item = 0;
  int64_t row_items = 0;      // items side by side along the rows
  int64_t keys_per_split = 0;
  int64_t splits = 0;         // items side by side along the keys, merged afterwards
  int64_t scratch_bytes = 0;  // of a thread
  bool by_row = false;        // few rows: the kernel whose lanes run along the head dim
  float* partial = nullptr;   // (B, K, rows, splits, V + 2): sums, their maximum and total, where splits > 1

  int64_t groups(const Problem& p) const { return p.B * p.K * row_items; }
};

struct Kernels {
  const char* name;
  Plan (*plan)(const Problem&);
  // One item: group (batch, key-value head, rows) and split.
  void (*run)(const Problem&, const Plan&, int64_t group, int64_t split, char* scratch);
  // Rows first <= row < last of (batch, key-value head), from their splits' partial results.
  void (*merge)(const Problem&, const Plan&, int64_t batch, int64_t kv_head, int64_t first, int64_t last);
};

const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();

}  // namespace headwise
