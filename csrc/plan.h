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
  bool by_row = false;        // by_row rows: the kernel whose lanes run along the head dim
  float* partial = nullptr;   // (B, K, rows, splits): a share each, where splits > 1

  // Of a row: its greatest score, scaled and not, the sum of the weights, and V sums.
  int64_t partial_floats(const Problem& p) const { return p.V + 3; }

  int64_t groups(const Problem& p) const { return p.B * p.K * row_items; }
};

// Where an item adds a gradient that several rows share: at `stride` steps of (batch, head, query, key), and `chunk`
// steps of its chunk, so that no two items ever add to one place. Data null = not wanted.
template <class T>
struct SharedGradient {
  T* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  int64_t chunk = 0;
};

// How a gradient is cut. An item: a chunk of the query rows of one key-value head of one batch row. It owns the gradients
// of its queries, and has sums of its own for those of keys and values: its thread's scratch where there is one chunk,
// else a share of `partial`, added up afterwards in order.
struct BackwardPlan {
  int64_t rows = 0;            // of a key-value head, as in Plan
  int64_t rows_per_chunk = 0;
  int64_t chunks = 0;
  int64_t rows_per_step = 0;   // that use a tile of keys while it is near
  int64_t padded_D = 0, padded_V = 0;  // floats from row to row of the sums
  int64_t scratch_bytes = 0;
  bool by_row = false;             // rows whose scores the forward adds up in another order (lines.h)
  bool keeps_products = false;            // and whose products with all keys a thread's scratch holds
  bool has_partial = false;
  float* partial = nullptr;    // (B, K, chunks): a share of (S, padded_D) and (S, padded_V) each
  // Biases whose gradient has queries and keys but is summed over batch or heads: found by items of their own, which
  // walk through what is summed. An item: `queries_per_bias_item` queries.
  int64_t queries_per_bias_item = 0;
  SharedGradient<double> sinks, slopes[kMaxAlibi];  // one number of very many rows
  SharedGradient<float> dense[kMaxDense];
  bool summed[kMaxDense] = {false};  // such a bias

  int64_t partial_floats(const Problem& p) const { return p.S * (padded_D + padded_V); }
};

struct Statistics;
struct Received;

// Items that need no merging, and a thread's scratch.
struct ItemPlan {
  int64_t items;
  int64_t scratch_bytes;
};

struct Kernels {
  const char* name;
  Plan (*plan)(const Problem&);
  // One item: group (batch, key-value head, rows) and split.
  void (*run)(const Problem&, const Plan&, int64_t group, int64_t split, char* scratch);
  // Rows first <= row < last of (batch, key-value head), from their splits' partial results.
  void (*merge)(const Problem&, const Plan&, int64_t batch, int64_t kv_head, int64_t first, int64_t last);
  BackwardPlan (*plan_backward)(const Problem&);
  void (*backward)(const Problem&, const Gradients&, const BackwardPlan&, int64_t item, char* scratch);
  // Sums of the keys first <= j < last over the chunks, scaled, rounded and written.
  void (*merge_backward)(const Problem&, const Gradients&, const BackwardPlan&, int64_t batch, int64_t kv_head,
                         int64_t first, int64_t last);
  // Those biases alone, one of them, for an item's queries and whatever of batch and heads they are summed over.
  void (*backward_bias)(const Problem&, const Gradients&, const BackwardPlan&, int dense, int64_t item, char* scratch);
  void (*round)(const float* x, int64_t n, Dtype dtype, void* out);  // to another float dtype
  // Statistics (statistics_call.h): no splits, so an item is a group alone.
  Plan (*plan_statistics)(const Problem&, const Statistics&);
  void (*run_statistics)(const Problem&, const Plan&, const Statistics&, int64_t group, char* scratch);
  ItemPlan (*plan_received)(const Problem&);
  void (*run_received)(const Problem&, const Received&, int64_t item, char* scratch);
};

const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();

}  // namespace headwise
