// One call of attention as plain data: the binding fills it in, the kernels of every instruction set read it.
//
// Letters as in src/headwise/shapes: B batch, H query heads, K key-value heads, G = H / K, T queries, S keys,
// D head dim of queries and keys, V head dim of values. Strides count elements. No pointer here owns memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headwise {

enum class Dtype : int32_t { f32, bf16, f16, f64, boolean, i8 };

// Bytes of an element. Static, as `bounds_of` is.
static inline int64_t size_of(Dtype dtype) {
  const bool byte = dtype == Dtype::boolean || dtype == Dtype::i8;
  return dtype == Dtype::f32 ? 4 : dtype == Dtype::f64 ? 8 : byte ? 1 : 2;
}

// A (B, H, T, S)-like tensor of four axes; a broadcast axis has stride 0.
struct Tensor4 {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  Dtype dtype = Dtype::f32;
};

// A query attends the keys with its id: (B|1, T) and (B|1, S), with a batch stride of 0 for one row.
struct SegmentRule {
  const int64_t* query_ids = nullptr;
  const int64_t* key_ids = nullptr;
  int64_t query_stride[2] = {0, 0};
  int64_t key_stride[2] = {0, 0};
};

// Adds -slope * |i + offset - j|.
struct AlibiRule {
  const float* slopes = nullptr;     // (B|1, H)
  const int64_t* offsets = nullptr;  // (B|1)
  int64_t slopes_stride[2] = {0, 0};
  int64_t offsets_stride = 0;
};

// Any rule as a map of tiles: (B|1, H|1, ceil(T / 64), ceil(S / 64)) entries, each kNone, kAll, or kBits + n for the
// n-th block of 64 words, whose word r has bit c for query r and key c of the tile.
struct MapRule {
  static constexpr int kSide = 64;
  static constexpr int64_t kNone = 0, kAll = 1, kBits = 2;
  const int64_t* index = nullptr;
  const uint64_t* bits = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

constexpr int64_t kPageStep = 128;  // a page has a multiple of so many keys: no tile is in two pages
constexpr int kMaxDense = 8;
constexpr int kMaxSegments = 4;
constexpr int kMaxAlibi = 4;
constexpr int kMaxMaps = 4;
constexpr int64_t kFar = int64_t{1} << 40;                     // farther than any key
constexpr double kMinFactor = 0x1p-100, kMaxFactor = 0x1p100;  // of scale and softcap, in size, unless 0

// What dropout draws from: the seed, and where a call lies that is a part of a larger one: that one's number of heads
// (0 for the call's own), and the places there of this call's first head, query and key.
struct DropoutSeed {
  uint64_t value = 0;
  int64_t heads = 0, head = 0, query = 0, key = 0;
};

struct Problem {
  int64_t B = 0, H = 0, K = 0, T = 0, S = 0, D = 0, V = 0;
  Tensor4 query, key, value, out;  // query (B, H, T, D), key (B, K, S, D), value (B, K, S, V), out (B, H, T, V)
  Tensor4 key_scale, value_scale;  // float32 (B, K, S), where keys and values are int8: an element is data * scale
  // With `table`, keys and values are in pages: key (P, K, page, D), value (P, K, page, V), and key j of batch b is in
  // page table[b * table_stride + j / page], at index j % page.
  const int64_t* table = nullptr;
  int64_t table_stride = 0, page = 0;
  Dtype dtype() const { return query.dtype; }  // of all four, unless keys and values are int8
  bool bytes() const { return key.dtype == Dtype::i8; }
  float* lse = nullptr;  // (B, H, T) contiguous, or null
  // (2, B, H, T) contiguous, or null: each row's greatest score, as the softmax takes it, and the weight of that key;
  // -inf and 0 in an empty row. The gradient recomputes weights from them: a large lse would round them.
  float* ends = nullptr;
  // The keys are some of a larger call's, whose results `out` and `ends` are: the gradient must take them as they are.
  bool is_part = false;
  float scale = 1.0f;
  float softcap = 0.0f;          // 0 = none
  const float* sinks = nullptr;  // (H), or null

  // Row i of batch b may attend max(start, i + low) <= j < min(stop, i + high), and of the prefix start <= j < always
  // the keys below the same end. With `bounds` all five come from there (int64 (B|1, 4 or 5): low, high, start, stop,
  // always; stride 0 for one row), else `low` and `high` alone restrict.
  int64_t low = -kFar, high = kFar;
  const int64_t* bounds = nullptr;
  int64_t bounds_stride = 0, bounds_size = 4;

  SegmentRule segments[kMaxSegments];
  int n_segments = 0;
  Tensor4 dense[kMaxDense];  // Dtype::boolean: true = attend; else added to the scores, -inf forbids
  // Relative biases are among them. They are read along diagonals, query i and key j at (B, H, T - 1 + j - i): the
  // stride along the queries is negative.
  bool diagonal[kMaxDense] = {false};
  int n_dense = 0;
  AlibiRule alibi[kMaxAlibi];
  int n_alibi = 0;
  MapRule maps[kMaxMaps];
  int n_maps = 0;

  Tensor4 gate;  // (B, H, T, V) broadcast, in any float dtype; data null = none
  float dropout = 0.0f;
  DropoutSeed seed;
};

// The five bounds of a batch row, none farther than any number that is added to them may be.
struct RowBounds {
  int64_t low, high, start, stop, always;
};

// Static, as all that instruction sets share: the linker must not keep one of them for every CPU.
static inline RowBounds bounds_of(const Problem& p, int64_t b) {
  const auto clamp = [](int64_t x, int64_t least, int64_t most) { return x < least ? least : x > most ? most : x; };
  RowBounds row = {p.low, p.high, 0, p.S, 0};
  if (p.bounds != nullptr) {
    const int64_t* of_batch = p.bounds + b * p.bounds_stride;
    row = {of_batch[0], of_batch[1], of_batch[2], of_batch[3], p.bounds_size > 4 ? of_batch[4] : 0};
  }
  row.low = clamp(row.low, -kFar, kFar);
  row.high = clamp(row.high, -kFar, kFar);
  row.start = clamp(row.start, 0, p.S);
  row.stop = clamp(row.stop, 0, p.S);
  return row;
}

// The gradient of a call, whose `out` and `ends` are those of the forward.
struct Gradients {
  Tensor4 grad_out;           // (B, H, T, V) in the query's dtype, any strides
  Tensor4 grad_lse;           // (B, H, T, 1) float32; data null = none
  Tensor4 query, key, value;  // results, in the query's dtype; their last axis is contiguous
  float* sinks = nullptr;     // (H), where the call has sinks
  // Of each float mask, contiguous but for broadcast axes; of a relative bias (B|1, H|1, T + S - 1). Data null = not
  // computed.
  Tensor4 dense[kMaxDense];
  float* slopes[kMaxAlibi] = {nullptr};  // of each rule, (B, H) or (1, H), contiguous; null = not computed
  bool slopes_batched[kMaxAlibi] = {false};
};

// Runs the call on torch's threads with the instruction set in use. B, T, S, D, V > 0. Same bits for any thread count.
void attend(const Problem& problem);

// The gradient of the call. Same bits for any thread count.
void attend_backward(const Problem& problem, const Gradients& gradients);

// The weights that dropout keeps, as `attend` draws them from this seed: bool (B, H, rows, S), contiguous,
// for the queries first <= i < first + rows.
void dropout_keep(bool* keep, int64_t B, int64_t H, int64_t first, int64_t rows, int64_t S, float dropout,
                  const DropoutSeed& seed);

// The name of the instruction set in use, of those in isa/.
const char* isa();

// Names of those that this CPU can run, best first, terminated by null.
const char* const* isas();

// Switches to this instruction set; false where this CPU or this build lacks it. For tests and benchmarks.
bool use_isa(const char* name);

}  // namespace headwise
