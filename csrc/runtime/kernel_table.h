// How a call is cut into items of work, and the table of the functions that every instruction set has.
#pragma once

#include "call/attention_call.h"

namespace headwise {

// An item is one key-value head of one batch row, some of its query rows, and some of the keys. How the keys are cut
// depends only on lengths and head dims, never on batch, heads or threads, so that a row has the same bits in any
// batch. Along the rows, an item is any number of blocks, because the bits of a block do not depend on the other
// blocks.
struct Plan {
  int64_t rows = 0;  // T * H / K: the rows of a key-value head
  int64_t rows_per_block = 0;
  int64_t rows_per_item = 0;
  int64_t row_items = 0;  // items along the rows
  int64_t keys_per_split = 0;
  int64_t splits = 0;         // items along the keys, merged afterwards
  int64_t scratch_bytes = 0;  // of a thread
  bool by_row = false;        // few rows: use the decode kernel, whose lanes run along the head dim
  float* partial = nullptr;   // (B, K, splits, rows): partial results, if splits > 1

  void cut(int64_t rows_of_item) {
    rows_per_item = rows_of_item;
    row_items = (rows + rows_per_item - 1) / rows_per_item;
  }

  // The floats of a partial result: the greatest score with and without the scale, the sum of the weights, and V sums.
  int64_t partial_floats(const Call& p) const { return p.V + 3; }

  // The floats of a split, in whole cache lines, so that no two items write to one line.
  int64_t split_floats(const Call& p) const { return (rows * partial_floats(p) + 15) / 16 * 16; }

  int64_t groups(const Call& p) const { return p.B * p.K * row_items; }
};

// The place to which an item adds a gradient that several rows share: strides of (batch, head, query, key), and of the
// chunk. No two items add to one place. Null data means that the gradient is not computed.
template <class T>
struct SharedGradient {
  T* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  int64_t chunk = 0;
};

struct RowRange {
  int64_t first, last;  // first <= r < last
};

constexpr int64_t kBackwardKeys = 64;  // keys of a tile, so that scores and their gradients stay in the L1 cache

// How a gradient is cut: into chunks of the query rows of one key-value head of one batch row. The gradients of keys
// and values are summed over the rows of a chunk in order, and then over the chunks in order, no matter which items
// compute them.
struct BackwardPlan {
  int64_t rows = 0;  // of a key-value head, as in Plan
  int64_t rows_per_block = 0;
  int64_t chunks = 0;
  int64_t rows_per_step = 0;           // rows that share a tile of keys
  int64_t padded_D = 0, padded_V = 0;  // floats from row to row of the sums
  int64_t scratch_bytes = 0;
  int64_t whole_bytes = 0;  // additional scratch for items that have all chunks of a head; 0 if it would be too much
  bool by_row = false;      // few rows: the forward used `decode-inl.h`, which sums in another order
  bool keeps_products = false;  // few rows whose products with all keys fit into a thread's scratch
  bool has_partial = false;
  bool splits = true;        // a head may be computed in two passes, because no gradient that rows share is wanted
  float* partial = nullptr;  // (B, K, chunks): sums of (S, padded_D) and (S, padded_V)
  // A bias that has query and key axes and is summed over batch or heads has items of its own. Each of them computes
  // `queries_per_bias_item` queries for all of batch and heads.
  int64_t queries_per_bias_item = 0;
  SharedGradient<double> sinks, slopes[kMaxAlibi];  // in float64, because very many rows are added to one number
  SharedGradient<float> dense[kMaxDense];
  bool summed[kMaxDense] = {false};  // the biases with items of their own

  int64_t partial_floats(const Call& p) const { return p.S * (padded_D + padded_V); }

  // A chunk has two ranges of whole blocks. One is as far from the first row as the other is from the last row, so that
  // chunks have equally many keys under a causal mask, too.
  RowRange range(int64_t chunk, int half) const {
    if (chunks == 1) return {half == 0 ? 0 : rows, rows};
    const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block, ranges = 2 * chunks;
    const int64_t i = half == 0 ? chunk : ranges - 1 - chunk, last = blocks * (i + 1) / ranges * rows_per_block;
    return {blocks * i / ranges * rows_per_block, last < rows ? last : rows};
  }
};

// An item of a gradient. `chunk_rows`: all rows of a chunk, or of all chunks of a head one after the other. The item
// writes the gradients of its queries. It sums those of keys and values in its thread's scratch if there is no
// `partial`. `queries`: only the gradients of the queries first <= r < last. `keys`: only a chunk's sums for the keys
// first <= j < last.
struct BackwardItem {
  enum Kind { chunk_rows, queries, keys } kind;
  int64_t head, chunk, first, last;  // head: b * K + key-value head
  int64_t chunks = 1;                // the number of chunks, starting with `chunk`
};

struct Statistics;
struct KeyMass;
struct Append;
struct AppendSpan;
struct RotatedOutput;
struct Step;
struct Linear;

// A cut into ranges of keys whose results need no merge, and a thread's scratch.
struct ItemPlan {
  int64_t items;
  int64_t keys_per_item;
  int64_t rows_per_block;
  int64_t scratch_bytes;
};

// Whether the bounds let the rows first <= r < last of a key-value head reach any of the keys from <= j < to.
bool reaches_any(const Call& p, int64_t b, int64_t first, int64_t last, int64_t from, int64_t to);

// The items that a thread runs one after the other: group * splits + split, and -1 behind the last one. `next` returns
// what `take` will return, and reserves it for this thread.
struct Items {
  int64_t (*get)(void* queue, bool takes);
  void* queue;

  int64_t take() const { return get(queue, true); }
  int64_t next() const { return get(queue, false); }
};

struct Kernels {
  const char* name;
  Plan (*plan)(const Call&);
  // Runs the items of a thread. An item is a group (batch, key-value head, rows) and a split.
  void (*run)(const Call&, const Plan&, char* scratch, const Items&);
  // Merges the splits of the rows first <= row < last of (batch, key-value head).
  void (*merge)(const Call&, const Plan&, int64_t batch, int64_t kv_head, int64_t first, int64_t last);
  BackwardPlan (*plan_backward)(const Call&);
  void (*backward)(const Call&, const Gradients&, const BackwardPlan&, const BackwardItem&, char* scratch);
  // Sums the gradients of the keys first <= j < last over the chunks, and scales, rounds and writes them.
  void (*merge_backward)(const Call&, const Gradients&, const BackwardPlan&, int64_t batch, int64_t kv_head,
                         int64_t first, int64_t last);
  // Runs an item of a bias that has items of its own.
  void (*backward_bias)(const Call&, const Gradients&, const BackwardPlan&, int dense, int64_t item, char* scratch);
  void (*round)(const float* x, int64_t n, Dtype dtype, void* out);  // rounds to another float dtype
  // Statistics (call/statistics_call.h). Keys are not split, so that an item is a group; an item of the second pass is
  // (batch, head, range of keys).
  Plan (*plan_statistics)(const Call&, const Statistics&);
  void (*run_statistics)(const Call&, const Plan&, const Statistics&, int64_t group, char* scratch);
  ItemPlan (*plan_key_mass)(const Call&);
  void (*run_key_mass)(const Call&, const KeyMass&, const ItemPlan&, int64_t item, char* scratch);
  // Appends one head of a span to a cache of codes (call/append_call.h). The scratch is for the wider of a key and a
  // value.
  int64_t (*append_scratch_floats)(int64_t width);
  void (*append)(const Append&, const AppendSpan&, int64_t head, float* scratch);
  // Rotates and writes one batch row of a decode step (call/step_call.h). The scratch is for heads of `width` elements.
  int64_t (*step_scratch_bytes)(int64_t width);
  void (*place_row)(const Call&, const Step&, int64_t b, char* scratch);
  void (*rotate_output_row)(const Call&, const RotatedOutput&, int64_t b, char* scratch);
  // A linear layer (call/linear_call.h): the floats of a packed row, packing, and the outputs first <= n < last.
  int64_t (*linear_padded)(int64_t width);
  void (*pack_linear)(const Linear&, float* packed, float* row);
  void (*run_linear)(const Linear&, const float* packed, int64_t first, int64_t last);
};

// True if prefetching into the L2 cache is faster than into the L1 cache on this CPU. Applies to CPUs whose kernels
// read in the order of memory.
bool prefers_l2_prefetch();

const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_bf16_kernels();
const Kernels* neon_kernels();
const Kernels* neon_bf16_kernels();

}  // namespace headwise
