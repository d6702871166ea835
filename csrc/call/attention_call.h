// One call of attention as plain data. The binding fills it in, and the kernels of every instruction set read it.
//
// The letters are those of src/headwise/shapes: B batch, H query heads, K key-value heads, G = H / K, T queries, S
// keys, D head dim of queries and keys, V head dim of values. Strides count elements. No pointer here owns memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace headwise {

// i4 and i3 are codes of 4 and 3 bits, packed row by row (simd/packed-inl.h). Their tensors count bytes.
enum class Dtype : int32_t { f32, bf16, f16, f64, boolean, i8, i4, i3 };

// True for the codes of quantised keys and values, which have a scale for each token and head.
static inline bool is_code(Dtype dtype) { return dtype == Dtype::i8 || dtype == Dtype::i4 || dtype == Dtype::i3; }

// Bytes of an element. Static for the reason given at `bounds_of`.
static inline int64_t size_of(Dtype dtype) {
  const bool byte = dtype == Dtype::boolean || is_code(dtype);
  return dtype == Dtype::f32 ? 4 : dtype == Dtype::f64 ? 8 : byte ? 1 : 2;
}

// The elements of a row of `width` numbers: its bytes if it is packed.
static inline int64_t row_elements(Dtype dtype, int64_t width) {
  return dtype == Dtype::i4 ? width / 2 : dtype == Dtype::i3 ? width / 8 * 3 : width;
}

// A (B, H, T, S)-like tensor of four axes; a broadcast axis has stride 0.
struct Tensor4 {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  Dtype dtype = Dtype::f32;
};

// A query may attend the keys that have its id. Ids are (B|1, T) and (B|1, S), with a batch stride of 0 for one row.
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

// Any rule as a map of tiles. It has (B|1, H|1, ceil(T / 64), ceil(S / 64)) entries, each of them kNone, kAll, or kBits
// + n. The latter names the n-th block of 64 words, in which bit c of word r belongs to query r and key c of the tile.
struct MapRule {
  static constexpr int kSide = 64;
  static constexpr int64_t kNone = 0, kAll = 1, kBits = 2;
  const int64_t* index = nullptr;
  const uint64_t* bits = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

constexpr int64_t kPageStep = 128;  // a page has a multiple of this many keys, so that no tile is in two pages
constexpr int kMaxDense = 8;
constexpr int kMaxSegments = 4;
constexpr int kMaxAlibi = 4;
constexpr int kMaxMaps = 4;
constexpr int64_t kFar = int64_t{1} << 40;  // farther than any key
// bounds on the magnitude of scale and softcap, unless they are 0
constexpr double kMinFactor = 0x1p-100, kMaxFactor = 0x1p100;

// What dropout draws from: the seed, and the position of this call if it is a part of a larger one. `heads` is the
// number of heads of the larger call (0 if there is none); `head`, `query` and `key` are the positions there of this
// call's first head, query and key.
struct DropoutSeed {
  uint64_t value = 0;
  int64_t heads = 0, head = 0, query = 0, key = 0;
};

struct Call {
  int64_t B = 0, H = 0, K = 0, T = 0, S = 0, D = 0, V = 0;
  Tensor4 query, key, value, out;  // query (B, H, T, D), key (B, K, S, D), value (B, K, S, V), out (B, H, T, V)
  Tensor4 key_scale, value_scale;  // float32 (B, K, S) for keys and values of codes, whose elements are data * scale
  // With `table`, keys and values are in pages: key (P, K, page, D), value (P, K, page, V), and key j of batch b is in
  // page table[b * table_stride + j / page], at index j % page.
  const int64_t* table = nullptr;
  int64_t table_stride = 0, page = 0;
  Dtype dtype() const { return query.dtype; }  // of query, key, value and out, unless keys and values are codes
  bool bytes() const { return is_code(key.dtype); }
  float* lse = nullptr;  // (B, H, T) contiguous, or null
  // (2, B, H, T) contiguous, or null: each row's greatest score as the softmax gets it, and the weight of that key;
  // -inf and 0 in an empty row. The gradient recomputes the weights from these two, because the rounding of a large lse
  // would show in them.
  float* ends = nullptr;
  // The keys are a part of those of a larger call, to which the results `out` and `ends` belong. The gradient must then
  // use these results as they are.
  bool is_part = false;
  float scale = 1.0f;
  float softcap = 0.0f;          // 0 = none
  const float* sinks = nullptr;  // (H), or null

  // Row i of batch b may attend the keys max(start, i + low) <= j < min(stop, i + high). It may also attend the prefix
  // start <= j < always, up to the same end. With `bounds`, all five numbers come from there: int64 (B|1, 4 or 5) in
  // the order low, high, start, stop, always, with stride 0 for one row. Without, only `low` and `high` restrict.
  int64_t low = -kFar, high = kFar;
  const int64_t* bounds = nullptr;
  int64_t bounds_stride = 0, bounds_size = 4;

  SegmentRule segments[kMaxSegments];
  int n_segments = 0;
  Tensor4 dense[kMaxDense];  // Dtype::boolean: true = attend; else added to the scores, -inf forbids
  // Relative biases are among them. They are read along diagonals, with query i and key j at (B, H, T - 1 + j - i), so
  // that the stride along the queries is negative.
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

// The five bounds of a batch row, clamped so that sums with positions do not overflow.
struct RowBounds {
  int64_t low, high, start, stop, always;
};

// Static, like every function that the instruction sets share: otherwise the linker could keep one set's copy of it for
// every CPU.
static inline RowBounds bounds_of(const Call& p, int64_t b) {
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

// The gradient of a call. `out` and `ends` of the call are the results of the forward.
struct Gradients {
  Tensor4 grad_out;           // (B, H, T, V) in the query's dtype, any strides
  Tensor4 grad_lse;           // (B, H, T, 1) float32; data null = none
  Tensor4 query, key, value;  // results, in the query's dtype; their last axis is contiguous
  float* sinks = nullptr;     // (H), where the call has sinks
  // The gradient of each float mask, contiguous except for broadcast axes; of a relative bias (B|1, H|1, T + S - 1). A
  // mask with null data gets no gradient.
  Tensor4 dense[kMaxDense];
  float* slopes[kMaxAlibi] = {nullptr};  // of each rule, (B, H) or (1, H), contiguous; null = not computed
  bool slopes_batched[kMaxAlibi] = {false};
};

// Runs the call on torch's threads with the instruction set in use. B, T, S, D and V must be positive. The bits are the
// same for any number of threads.
void attend(const Call& call);

// Computes the gradient of the call. The bits are the same for any number of threads.
void attend_backward(const Call& call, const Gradients& gradients);

// Writes which weights dropout keeps when `attend` is called with this seed: bool (B, H, rows, S), contiguous, for the
// queries first <= i < first + rows.
void dropout_keep(bool* keep, int64_t B, int64_t H, int64_t first, int64_t rows, int64_t S, float dropout,
                  const DropoutSeed& seed);

// The name of the instruction set in use, which is the name of a file in isa/.
const char* isa();

// The names of the instruction sets that this CPU can run, best first, terminated by null.
const char* const* isas();

// Switches to this instruction set. Returns false if this CPU or this build does not have it. For tests and benchmarks.
bool use_isa(const char* name);

}  // namespace headwise
