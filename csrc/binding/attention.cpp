// The operators of torch.ops.headwise, through torch's stable ABI. Every argument is checked here, even if Python has
// checked it before: no tensor may crash the process.
//
// The functions are boxed by hand: `stack` holds first the arguments and then the results. This is faster than the
// templates of torch's headers (benchmarks/log.md has the figures), which matters because a decode step takes only 30
// us.
#include <string.h>

#include <algorithm>
#include <string>

#include "binding/arguments.h"
#include "binding/operators.h"
#include "binding/tensors.h"
#include "call/attention_call.h"
#include "torch_abi/torch_abi.h"

namespace headwise {
namespace {

Handle empty_out(Call& p, int32_t torch_dtype) {
  Handle out = empty_heads(p.B, p.H, p.T, p.V, torch_dtype, p.out);
  p.out.dtype = p.query.dtype;
  return out;
}

void attend_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Handle query(stack[0]), key(stack[1]), value(stack[2]);
  Call p;
  const View query_view = read_view(query, "query");
  fill_problem(p, query_view, read_view(key, "key"), read_view(value, "value"));
  attend_band(p, query_view.torch_dtype, stack, 3);
}

void attend_full_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Handle query(stack[0]), key(stack[1]), value(stack[2]);
  const Rules rules(stack + 3);
  const Handle gate(optional(stack[3 + kRuleCount])), seed(optional(stack[5 + kRuleCount]));
  Call p;
  const View query_view = read_view(query, "query");
  fill_problem(p, query_view, read_view(key, "key"), read_view(value, "value"));
  rules.fill(p);
  take_gate(p, gate);
  take_dropout(p, read_dropout(stack[4 + kRuleCount]), seed);
  attend(p, query_view.torch_dtype, stack);
}

void dropout_keep_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Handle seed(stack[0]);
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
  Handle keep = empty(4, sizes, strides, aoti_torch_dtype_bool(), &data);
  const DropoutSeed places = read_seed(seed);
  multiply(n[0], places.heads);
  if (multiply(n[0], strides[0]) > 0) {
    dropout_keep(static_cast<bool*>(data), n[0], n[1], n[2], n[3], n[4], dropout, places);
  }
  stack[0] = keep.release();
}

void isa_boxed(StableIValue* stack, uint64_t, uint64_t) { stack[0] = text(isa()); }

void isas_boxed(StableIValue* stack, uint64_t, uint64_t) {
  std::string names;
  for (const char* const* name = isas(); *name; ++name) names += (names.empty() ? "" : ",") + std::string(*name);
  stack[0] = text(names);
}

void use_isa_boxed(StableIValue* stack, uint64_t, uint64_t) { stack[0] = use_isa(take_text(stack[0]).c_str()) ? 1 : 0; }

const Operator kAttend[] = {
    {"attend", "attend(Tensor query, Tensor key, Tensor value, float scale, SymInt low, SymInt high) -> Tensor", "CPU",
     attend_boxed},
    {"attend_full",
     "attend_full(Tensor query, Tensor key, Tensor value, " HEADWISE_RULES
     ", Tensor? gate, float dropout, Tensor? seed) -> (Tensor, Tensor)",
     "CPU", attend_full_boxed},
    {"dropout_keep",
     "dropout_keep(Tensor seed, float dropout, SymInt B, SymInt H, SymInt first, SymInt rows, SymInt S) -> Tensor",
     "CPU", dropout_keep_boxed},
    {"isa", "isa() -> str", "CompositeExplicitAutograd", isa_boxed},
    {"isas", "isas() -> str", "CompositeExplicitAutograd", isas_boxed},
    {"use_isa", "use_isa(str name) -> bool", "CompositeExplicitAutograd", use_isa_boxed},
};

bool define(TorchLibraryHandle definitions, const Operator& op) {
  TorchLibraryHandle library = nullptr;
  return aoti_torch_library_def(definitions, op.schema) == 0 &&
         aoti_torch_library_init_impl("headwise", op.key, __FILE__, __LINE__, &library) == 0 &&
         torch_library_impl(library, op.name, op.function, kTorchAbi) == 0;
}

// Runs when the library is loaded. It throws no exception, because that would end the process: after a failure, Python
// reports the missing operators. The libraries are never deleted, because the operators live as long as torch.
bool register_operators() {
  TorchLibraryHandle definitions = nullptr;
  if (aoti_torch_library_init_def("headwise", __FILE__, __LINE__, &definitions) != 0) return false;
  bool good = true;
  for (const Operator& op : kAttend) good = good && define(definitions, op);
  for (const Operator& op : kCache) good = good && define(definitions, op);
  for (const Operator& op : kBackward) good = good && define(definitions, op);
  for (const Operator& op : kStatistics) good = good && define(definitions, op);
  good = good && define(definitions, kStep);
  good = good && define(definitions, kLinear);
  return good;
}

const bool registered = register_operators();

}  // namespace

void attend(Call& p, int32_t torch_dtype, StableIValue* stack) {
  Handle out = empty_out(p, torch_dtype);
  Handle lse = empty_lse(p);
  attend(p);
  stack[0] = out.release();
  stack[1] = lse.release();
}

void attend_band(Call& p, int32_t torch_dtype, StableIValue* stack, int first) {
  p.scale = read_scale(number(stack[first]));
  p.low = clamp_far(static_cast<int64_t>(stack[first + 1]));
  p.high = clamp_far(static_cast<int64_t>(stack[first + 2]));
  Handle out = empty_out(p, torch_dtype);
  attend(p);
  stack[0] = out.release();
}

Handle empty_lse(Call& p) {
  const int64_t sizes[3] = {p.B, p.H, p.T};
  const int64_t strides[3] = {multiply(p.H, p.T), p.T, 1};
  void* data = nullptr;
  Handle lse = empty(3, sizes, strides, aoti_torch_dtype_float32(), &data);
  p.lse = static_cast<float*>(data);
  return lse;
}

Handle empty_heads(int64_t B, int64_t H, int64_t T, int64_t V, int32_t torch_dtype, Tensor4& to) {
  const int64_t sizes[4] = {B, H, T, V};
  const int64_t position = multiply(H, V);
  const int64_t strides[4] = {multiply(T, position), V, position, 1};
  Handle out = empty(4, sizes, strides, torch_dtype, &to.data);
  std::copy(strides, strides + 4, to.stride);
  return out;
}

}  // namespace headwise
