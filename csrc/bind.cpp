// The operators of torch.ops.headwise, through torch's stable ABI. Every argument is checked here, whatever Python has
// checked before: nothing that a tensor can be may crash the process.
//
// The functions are boxed by hand: `stack` holds the arguments and takes the results. It costs less than the templates
// of torch's headers (benchmarks/log.md has the figures), and a decode step lasts 30 us.
#include <string.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "problem.h"
#include "tensors.h"
#include "torch_abi.h"

namespace headwise {
namespace {

// Far beyond what computes in a lifetime, but a tensor of stride 0 can have it; the kernels' sizes must not overflow.
constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr int64_t kMaxWidth = int64_t{1} << 20;

// query, key, value, their sizes, and a fresh output.
void fill_problem(Problem& p, const View& query, const View& key, const View& value) {
  require_axes(query, "query", 4);
  require_axes(key, "key", 4);
  require_axes(value, "value", 4);
  p.B = query.sizes[0], p.H = query.sizes[1], p.T = query.sizes[2], p.D = query.sizes[3];
  p.K = key.sizes[1], p.S = key.sizes[2], p.V = value.sizes[3];
  const bool fits = key.sizes[0] == p.B && value.sizes[0] == p.B && value.sizes[1] == p.K && value.sizes[2] == p.S &&
                    key.sizes[3] == p.D;
  if (!fits) {
    fail("query (B, H, T, D), key (B, K, S, D) and value (B, K, S, V) do not fit: " + shape(query) + ", " +
         shape(key) + ", " + shape(value));
  }
  if (std::min({p.B, p.H, p.K, p.T, p.S, p.D, p.V}) < 1) fail("empty query, key or value: " + shape(query));
  if (p.H % p.K != 0) fail("query heads must be a multiple of key heads, got " + shape(query) + ", " + shape(key));
  if (p.T >= kMaxLength || p.S >= kMaxLength) fail("more queries or keys than 2**30");
  if (p.D > kMaxWidth || p.V > kMaxWidth) fail("a head dim above 2**20");
  if (key.torch_dtype != query.torch_dtype || value.torch_dtype != query.torch_dtype) {
    fail("query, key and value must have one dtype");
  }
  const bool half = query.dtype == Dtype::bf16 || query.dtype == Dtype::f16;
  if (query.int64 || (query.dtype != Dtype::f32 && !half)) {
    fail("query, key and value must be float32, bfloat16 or float16");
  }
  p.query = tensor4(query);
  p.key = tensor4(key);
  p.value = tensor4(value);
}

// The output: memory order (B, T, H, V), so that the heads of a position lie together for what follows.
Owned empty_out(Problem& p, int32_t torch_dtype) {
  const int64_t sizes[4] = {p.B, p.H, p.T, p.V};
  const int64_t position = multiply(p.H, p.V);
  const int64_t strides[4] = {multiply(p.T, position), p.V, position, 1};
  Owned out = empty(4, sizes, strides, torch_dtype, &p.out.data);
  std::copy(strides, strides + 4, p.out.stride);
  p.out.dtype = p.query.dtype;
  return out;
}

int64_t clamp_far(int64_t offset) { return std::min(std::max(offset, -kFar), kFar); }

void attend_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Owned query(stack[0]), key(stack[1]), value(stack[2]);
  Problem p;
  const View query_view = look(query, "query");
  fill_problem(p, query_view, look(key, "key"), look(value, "value"));
  p.scale = static_cast<float>(number(stack[3]));
  p.low = clamp_far(static_cast<int64_t>(stack[4]));
  p.high = clamp_far(static_cast<int64_t>(stack[5]));
  Owned out = empty_out(p, query_view.torch_dtype);
  attend(p);
  stack[0] = out.release();
}

void take_segments(Problem& p, const Tensors& ids) {
  if (ids.size() % 2 != 0 || ids.size() > 2 * kMaxSegments) fail("segments must be at most 4 pairs of tensors");
  for (size_t n = 0; n < ids.size(); n += 2) {
    SegmentRule& rule = p.segments[p.n_segments++];
    const View query = rows(look(ids[n], "segments"), "segments", p.B, p.T);
    const View key = rows(look(ids[n + 1], "segments"), "segments", p.B, p.S);
    require_int64(query, "segments");
    require_int64(key, "segments");
    rule.query_ids = static_cast<const int64_t*>(query.data);
    rule.key_ids = static_cast<const int64_t*>(key.data);
    std::copy(query.strides, query.strides + 2, rule.query_stride);
    std::copy(key.strides, key.strides + 2, rule.key_stride);
  }
}

void take_dense(Problem& p, const Tensors& masks) {
  if (masks.size() > kMaxDense) fail("at most 8 dense masks");
  for (const Owned& mask : masks) {
    const View view = look(mask, "dense");
    if (view.int64) fail("dense masks must be bool or floating point");
    p.dense[p.n_dense++] = broadcast4(view, "dense", p.B, p.H, p.T, p.S);
  }
}

void take_alibi(Problem& p, const Tensors& pairs) {
  if (pairs.size() % 2 != 0 || pairs.size() > 2 * kMaxAlibi) fail("alibi must be at most 4 pairs of tensors");
  for (size_t n = 0; n < pairs.size(); n += 2) {
    AlibiRule& rule = p.alibi[p.n_alibi++];
    const View slopes = rows(look(pairs[n], "alibi slopes"), "alibi slopes", p.B, p.H);
    const View offsets = look(pairs[n + 1], "alibi offsets");
    require_dtype(slopes, "alibi slopes", Dtype::f32);
    require_int64(offsets, "alibi offsets");
    require_axes(offsets, "alibi offsets", 1);
    if (offsets.sizes[0] != p.B && offsets.sizes[0] != 1) fail("alibi offsets must be (B) or (1), got " + shape(offsets));
    rule.slopes = static_cast<const float*>(slopes.data);
    rule.offsets = static_cast<const int64_t*>(offsets.data);
    std::copy(slopes.strides, slopes.strides + 2, rule.slopes_stride);
    rule.offsets_stride = offsets.sizes[0] == 1 ? 0 : offsets.strides[0];
  }
}

void take_sinks(Problem& p, const Owned& sinks) {
  if (!sinks) return;
  const View view = look(sinks, "sinks");
  require_dtype(view, "sinks", Dtype::f32);
  require_axes(view, "sinks", 1);
  if (view.sizes[0] != p.H) fail("sinks must be (H), got " + shape(view));
  if (view.strides[0] != 1 && p.H > 1) fail("sinks must be contiguous");
  p.sinks = static_cast<const float*>(view.data);
}

void take_bounds(Problem& p, const Owned& bounds) {
  if (!bounds) return;
  const View view = rows(look(bounds, "bounds"), "bounds", p.B, 4);
  require_int64(view, "bounds");
  if (view.strides[1] != 1) fail("the rows of bounds must be contiguous");
  p.bounds = static_cast<const int64_t*>(view.data);
  p.bounds_stride = view.strides[0];
}

void take_gate(Problem& p, const Owned& gate) {
  if (!gate) return;
  const View view = look(gate, "gate");
  if (view.int64 || view.dtype == Dtype::boolean) fail("the gate must be floating point");
  p.gate = broadcast4(view, "gate", p.B, p.H, p.T, p.V);
}

uint64_t read_seed(const Owned& seed) {
  const View view = look(seed, "seed");
  require_int64(view, "seed");
  int64_t count = 1;
  for (int axis = 0; axis < view.axes; ++axis) count *= view.sizes[axis];
  if (count != 1) fail("the seed must have one element, got " + shape(view));
  return static_cast<uint64_t>(*static_cast<const int64_t*>(view.data));
}

float read_dropout(StableIValue value) {
  const double dropout = number(value);
  if (!(dropout >= 0.0 && dropout <= 1.0)) fail("dropout must lie between 0 and 1");
  return static_cast<float>(dropout);
}

void attend_full_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Owned query(stack[0]), key(stack[1]), value(stack[2]), sinks(optional(stack[5])), bounds(optional(stack[8]));
  const Tensors segments(optional(stack[9])), dense(optional(stack[10])), alibi(optional(stack[11]));
  Owned gate(optional(stack[12])), seed(optional(stack[14]));
  Problem p;
  const View query_view = look(query, "query");
  fill_problem(p, query_view, look(key, "key"), look(value, "value"));
  p.scale = static_cast<float>(number(stack[3]));
  p.softcap = static_cast<float>(number(stack[4]));
  if (!(p.softcap >= 0.0f)) fail("softcap must not be negative");
  take_sinks(p, sinks);
  p.low = clamp_far(static_cast<int64_t>(stack[6]));
  p.high = clamp_far(static_cast<int64_t>(stack[7]));
  take_bounds(p, bounds);
  take_segments(p, segments);
  take_dense(p, dense);
  take_alibi(p, alibi);
  take_gate(p, gate);
  p.dropout = read_dropout(stack[13]);
  if (p.dropout > 0.0f) {
    if (!seed) fail("dropout needs a seed");
    p.seed = read_seed(seed);
  }
  Owned out = empty_out(p, query_view.torch_dtype);
  const int64_t lse_sizes[3] = {p.B, p.H, p.T};
  const int64_t lse_strides[3] = {multiply(p.H, p.T), p.T, 1};
  void* lse_data = nullptr;
  Owned lse = empty(3, lse_sizes, lse_strides, aoti_torch_dtype_float32(), &lse_data);
  p.lse = static_cast<float*>(lse_data);
  attend(p);
  stack[0] = out.release();
  stack[1] = lse.release();
}

void dropout_keep_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Owned seed(stack[0]);
  const float dropout = read_dropout(stack[1]);
  int64_t n[5];  // B, H, first, rows, S
  for (int i = 0; i < 5; ++i) {
    n[i] = static_cast<int64_t>(stack[2 + i]);
    if (n[i] < 0 || n[i] > kFar) fail("dropout_keep: sizes must lie between 0 and 2**40");
  }
  const int64_t sizes[4] = {n[0], n[1], n[3], n[4]};
  const int64_t plane = multiply(n[3], n[4]);
  const int64_t strides[4] = {multiply(n[1], plane), plane, n[4], 1};
  void* data = nullptr;
  Owned keep = empty(4, sizes, strides, aoti_torch_dtype_bool(), &data);
  if (multiply(n[0], strides[0]) > 0) {
    dropout_keep(static_cast<bool*>(data), n[0], n[1], n[2], n[3], n[4], dropout, read_seed(seed));
  }
  stack[0] = keep.release();
}

void isa_boxed(StableIValue* stack, uint64_t, uint64_t) { stack[0] = text(isa()); }

void isas_boxed(StableIValue* stack, uint64_t, uint64_t) {
  std::string names;
  for (const char* const* name = isas(); *name; ++name) names += (names.empty() ? "" : ",") + std::string(*name);
  stack[0] = text(names);
}

void use_isa_boxed(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = use_isa(take_text(stack[0]).c_str()) ? 1 : 0;
}

struct Operator {
  const char* name;
  const char* schema;
  const char* key;  // without a tensor among its arguments an operator has no device, hence no CPU key
  Boxed function;
};

const Operator kOperators[] = {
    {"attend",
     "attend(Tensor query, Tensor key, Tensor value, float scale, SymInt low, SymInt high) -> Tensor", "CPU",
     attend_boxed},
    {"attend_full",
     "attend_full(Tensor query, Tensor key, Tensor value, float scale, float softcap, Tensor? sinks, SymInt low, "
     "SymInt high, Tensor? bounds, Tensor[]? segments, Tensor[]? dense, Tensor[]? alibi, Tensor? gate, float dropout, "
     "Tensor? seed) -> (Tensor, Tensor)",
     "CPU", attend_full_boxed},
    {"dropout_keep",
     "dropout_keep(Tensor seed, float dropout, SymInt B, SymInt H, SymInt first, SymInt rows, SymInt S) -> Tensor",
     "CPU", dropout_keep_boxed},
    {"isa", "isa() -> str", "CompositeExplicitAutograd", isa_boxed},
    {"isas", "isas() -> str", "CompositeExplicitAutograd", isas_boxed},
    {"use_isa", "use_isa(str name) -> bool", "CompositeExplicitAutograd", use_isa_boxed},
};

// Runs when the library is loaded. What fails is left out, without an exception, which would end the process here:
// Python then misses the operator, and says so. The libraries are never deleted: the operators live as long as torch.
bool register_operators() {
  TorchLibraryHandle definitions = nullptr;
  if (aoti_torch_library_init_def("headwise", __FILE__, __LINE__, &definitions) != 0) return false;
  for (const Operator& op : kOperators) {
    TorchLibraryHandle library = nullptr;
    if (aoti_torch_library_def(definitions, op.schema) != 0) return false;
    if (aoti_torch_library_init_impl("headwise", op.key, __FILE__, __LINE__, &library) != 0) return false;
    if (torch_library_impl(library, op.name, op.function, kTorchAbi) != 0) return false;
  }
  return true;
}

const bool registered = register_operators();

}  // namespace
}  // namespace headwise
