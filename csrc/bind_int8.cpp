// The operator for int8 keys and values, with a scale a token and head.
#include "arguments.h"
#include "operators.h"
#include "problem.h"
#include "tensors.h"

namespace headwise {
namespace {

void attend_int8_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Owned query(stack[0]), key(stack[1]), key_scale(stack[2]), value(stack[3]), value_scale(stack[4]);
  const Rules rules(stack + 5);
  const StableIValue* rest = stack + 5 + kRuleCount;
  const Owned gate(optional(rest[0])), seed(optional(rest[2]));
  Problem p;
  const View query_view = look(query, "query");
  fill_int8(p, query_view, {look(key, "key", true), look(key_scale, "key_scale")},
            {look(value, "value", true), look(value_scale, "value_scale")});
  rules.fill(p);
  take_gate(p, gate);
  take_dropout(p, read_dropout(rest[1]), seed);
  Owned out = empty_heads(p.B, p.H, p.T, p.V, query_view.torch_dtype, p.out);
  p.out.dtype = p.query.dtype;
  const int64_t lse_sizes[3] = {p.B, p.H, p.T};
  const int64_t lse_strides[3] = {multiply(p.H, p.T), p.T, 1};
  void* lse_data = nullptr;
  Owned lse = empty(3, lse_sizes, lse_strides, aoti_torch_dtype_float32(), &lse_data);
  p.lse = static_cast<float*>(lse_data);
  attend(p);
  stack[0] = out.release();
  stack[1] = lse.release();
}

}  // namespace

const Operator kInt8 = {
    "attend_int8",
    "attend_int8(Tensor query, Tensor key, Tensor key_scale, Tensor value, Tensor value_scale, " HEADWISE_RULES
    ", Tensor? gate, float dropout, Tensor? seed) -> (Tensor, Tensor)",
    "CPU", attend_int8_boxed};

}  // namespace headwise
