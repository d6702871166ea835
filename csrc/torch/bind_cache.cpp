// torch.ops.headwise.attend_held: attention to the keys and values of a cache in place: contiguous or in pages, in the
// query's dtype or in int8 with a scale for each token and head.
#include "problem.h"
#include "torch/arguments.h"
#include "torch/operators.h"
#include "torch/tensors.h"

namespace headwise {
namespace {

void attend_held_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Handle query(stack[0]), key(stack[1]), key_scale(optional(stack[2]));
  const Handle value(stack[3]), value_scale(optional(stack[4])), table(optional(stack[5]));
  const auto length = static_cast<int64_t>(stack[6]);
  const Rules rules(stack + 7);
  const StableIValue* rest = stack + 7 + kRuleCount;
  const Handle gate(optional(rest[0])), seed(optional(rest[2]));
  Problem p;
  const View query_view = read_view(query, "query");
  fill_cache_problem(p, query_view, {key, key_scale}, {value, value_scale}, table, length);
  rules.fill(p);
  take_gate(p, gate);
  take_dropout(p, read_dropout(rest[1]), seed);
  attend(p, query_view.torch_dtype, stack);
}

}  // namespace

const Operator kCacheOperator = {
    "attend_held",
    "attend_held(Tensor query, Tensor key, Tensor? key_scale, Tensor value, Tensor? value_scale, Tensor? table, "
    "SymInt length, " HEADWISE_RULES ", Tensor? gate, float dropout, Tensor? seed) -> (Tensor, Tensor)",
    "CPU", attend_held_boxed};

}  // namespace headwise
