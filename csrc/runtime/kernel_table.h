// How a call is cut into items of work, and the table of functions of an instruction set.
#pragma once

#include "call/attention_call.h"

namespace headwise {

// An item: one key-value head of one batch row, some of its query rows, some of the keys. The cut along the keys
// depends on lengths and head dims alone, never on batch, heads or threads, so that a row has the same bits in any
// batch. Along the rows an item is any number of blocks: a block has the same bits beside any others.
struct Plan {
  int64_t rows = 0;  // T * H / K: the rows of a key-value head
  int64_t rows_per_block = 0;
  int64_t rows_per_item = 0;
  int64_t row_items = 0;  // items along the rows
  int64_t keys_per_split = 0;
  int64_t splits = 0;         // items along the keys, merged afterwards
  int64_t scratch_bytes = 0;  // of a thread
  bool by_row = false;        // few rows: the decode kernel, whose lanes run along the head dim
  float* partial = nullptr;   // (B, K, splits, rows): partial results, where splits > 1

  void cut(int64_t rows_of_item) {
    rows_per_item = rows_of_item;
    row_items = (rows + rows_per_item - 1) / rows_per_item;
  }

  // Of a partial result: the greatest score, scaled and not, the sum of the weights, and V sums.
  int64_t partial_floats(const Problem& p) const { return p.V + 3; }

  // Of a split, in whole cache lines: no two items write to one.
  int64_t split_floats(const Problem& p) const { return (rows * partial_floats(p) + 15) / 16 * 16; }

  int64_t groups(const Problem& p) const { return p.B * p.K * row_items; }
};

// Where an item adds a gradient that several rows share: strides of (batch, head, query, key), and of its chunk. No two
// items add to one place. Data null = not computed.
template <class T>
struct SharedGradient {
  T* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  int64_t chunk = 0;
};

struct RowRange {
  int64_t first, last;  // first <= r < last
};

constexpr int64_t kBackwardKeys = 64;  // keys of a tile: scores and their gradients stay in the L1 cache

// How a gradient is cut: into chunks of the query rows of one key-value head of one batch row. The gradients of keys
// and values are summed over the rows of a chunk in order, and over the chunks in order, whichever items compute them.
struct BackwardPlan {
  int64_t rows = 0;  // of a key-value head, as in Plan
  int64_t rows_per_block = 0;
  int64_t chunks = 0;
  int64_t rows_per_step = 0;           // that share a tile of keys
  int64_t padded_D = 0, padded_V = 0;  // floats from row to row of the sums
  int64_t scratch_bytes = 0;
  int64_t whole_bytes = 0;      // more of it for items that have all chunks of a head, or 0: too much
  bool by_row = false;          // few rows: the forward was `decode-inl.h`, which sums in another order
  bool keeps_products = false;  // and the products with all keys fit into a thread's scratch
  bool has_partial = false;
  bool splits = true;        // a head may be computed in two passes: no gradient that rows share is wanted
  float* partial = nullptr;  // (B, K, chunks): sums of (S, padded_D) and (S, padded_V)
  // A bias with queries and keys that is summed over batch or heads has items of its own, of `queries_per_bias_item`
  // queries and all of batch and heads.
  int64_t queries_per_bias_item = 0;
  SharedGradient<double> sinks, slopes[kMaxAlibi];  // in float64, for very many rows add to one number
  SharedGradient<float> dense[kMaxDense];
  bool summed[kMaxDense] = {false};  // the biases with items of their own

  int64_t partial_floats(const Problem& p) const { return p.S * (padded_D + padded_V); }

  // A chunk has two ranges of whole blocks, one as far from the first row as the other from the last: under a causal
  // mask, too, chunks have equally many keys.
  RowRange range(int64_t chunk, int half) const {
    if (chunks == 1) return {half == 0 ? 0 : rows, rows};
    const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block, ranges = 2 * chunks;
    const int64_t i = half == 0 ? chunk : ranges - 1 - chunk, last = blocks * (i + 1) / ranges * rows_per_block;
    return {blocks * i / ranges * rows_per_block, last < rows ? last : rows};
  }
};

// Some of the work of a gradient. `chunk_rows`: all of a chunk's, or of all chunks of a head, one after the other; it
// writes the gradients of its queries, and sums those of keys and values, in its thread's scratch where there is no
// `partial`. `queries`: the gradients of the
// queries first <= r < last alone. `keys`: the sums of a chunk for the keys first <= j < last alone.
struct BackwardItem {
  enum Kind { chunk_rows, queries, keys } kind;
  int64_t head, chunk, first, last;  // head: b * K + key-value head
  int64_t chunks = 1;                // from `chunk` on
};

struct Statistics;
struct Received;
struct Append;
struct AppendSpan;
struct Step;

// Items that need no merge, ranges of keys, and a thread's scratch.
struct ItemPlan {
  int64_t items;
  int64_t keys_per_item;
  int64_t rows_per_block;
  int64_t scratch_bytes;
};

// Whether the rows first <= r < last of a key-value head reach any of the keys from <= j < to, by their bounds.
bool reaches_any(const Problem& p, int64_t b, int64_t first, int64_t last, int64_t from, int64_t to);

// The item that a thread runs after this one, its own from when it is asked for: group * splits + split. -1: none.
struct Upcoming {
  int64_t (*ask)(void* queue) = nullptr;
  void* queue = nullptr;

  int64_t item() const { return ask == nullptr ? -1 : ask(queue); }
};

struct Kernels {
  const char* name;
  Plan (*plan)(const Problem&);
  // One item: group (batch, key-value head, rows) and split.
  void (*run)(const Problem&, const Plan&, int64_t group, int64_t split, char* scratch, const Upcoming&);
  // Merges the splits of the rows first <= row < last of (batch, key-value head).
  void (*merge)(const Problem&, const Plan&, int64_t batch, int64_t kv_head, int64_t first, int64_t last);
  BackwardPlan (*plan_backward)(const Problem&);
  void (*backward)(const Problem&, const Gradients&, const BackwardPlan&, const BackwardItem&, char* scratch);
  // Sums of the keys first <= j < last over the chunks, scaled, rounded and written.
  void (*merge_backward)(const Problem&, const Gradients&, const BackwardPlan&, int64_t batch, int64_t kv_head,
                         int64_t first, int64_t last);
  // An item of one of the biases with items of their own.
  void (*backward_bias)(const Problem&, const Gradients&, const BackwardPlan&, int dense, int64_t item, char* scratch);
  void (*round)(const float* x, int64_t n, Dtype dtype, void* out);  // to another float dtype
  // Statistics (call/statistics_call.h): no splits, so an item is a group; of the second pass it is (batch, head,
  // keys).
  Plan (*plan_statistics)(const Problem&, const Statistics&);
  void (*run_statistics)(const Problem&, const Plan&, const Statistics&, int64_t group, char* scratch);
  ItemPlan (*plan_received)(const Problem&);
  void (*run_received)(const Problem&, const Received&, const ItemPlan&, int64_t item, char* scratch);
  // Of an append in int8 (call/append_call.h): one head of a span. `row` has room for the wider of a key and a value.
  void (*append)(const Append&, const AppendSpan&, int64_t head, float* row);
  // A decode step (call/step_call.h): one row of the batch. The scratch is for heads of so many numbers.
  int64_t (*step_scratch_bytes)(int64_t width);
  void (*place_row)(const Problem&, const Step&, int64_t b, char* scratch);
};

// Whether lines from memory come quicker by prefetches into the L2 cache, on CPUs that read in the order of memory.
bool lines_go_into_l2();

const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_bf16_kernels();
const Kernels* neon_kernels();
const Kernels* neon_bf16_kernels();

}  // namespace headwise
