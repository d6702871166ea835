// torch.ops.headwise.attend_kept, which is attend_full for training, and its gradient attend_backward.
#include <algorithm>
#include <vector>

#include "binding/arguments.h"
#include "binding/operators.h"
#include "call/attention_call.h"
#include "torch_abi/torch_abi.h"

namespace headwise {
namespace {

void require_like(const View& view, const char* name, const View& query, const Call& p) {
  require_axes(view, name, 4);
  const int64_t sizes[4] = {p.B, p.H, p.T, p.V};
  if (!std::equal(sizes, sizes + 4, view.sizes)) fail(std::string(name) + " must be (B, H, T, V), got " + shape(view));
  if (view.torch_dtype != query.torch_dtype) fail(std::string(name) + " must have the query's dtype");
}

// A result of attend_kept.
void take_ends(Call& p, const Handle& ends) {
  const View view = read_view(ends, "ends");
  require_dtype(view, "ends", Dtype::f32);
  require_axes(view, "ends", 4);
  const int64_t sizes[4] = {2, p.B, p.H, p.T};
  if (!std::equal(sizes, sizes + 4, view.sizes)) fail("ends must be (2, B, H, T), got " + shape(view));
  int64_t step = 1;
  for (int axis = 3; axis >= 0; step *= sizes[axis--]) {
    if (view.strides[axis] != step && sizes[axis] > 1) fail("ends must be contiguous");
  }
  p.ends = const_cast<float*>(static_cast<const float*>(view.data));
}

void take_grad_lse(Gradients& g, const Call& p, const Handle& grad_lse) {
  if (!grad_lse) return;
  const View view = read_view(grad_lse, "grad_lse");
  require_dtype(view, "grad_lse", Dtype::f32);
  require_axes(view, "grad_lse", 3);
  if (view.sizes[0] != p.B || view.sizes[1] != p.H || view.sizes[2] != p.T) {
    fail("grad_lse must be (B, H, T), got " + shape(view));
  }
  g.grad_lse.data = const_cast<void*>(view.data);
  g.grad_lse.dtype = Dtype::f32;
  std::copy(view.strides, view.strides + 3, g.grad_lse.stride);
}

// Allocates a contiguous tensor for the gradient of a leaf, with its dtype and sizes.
Handle empty_like(const View& leaf, void** data) {
  int64_t strides[4] = {1, 1, 1, 1};
  for (int axis = leaf.axes - 2; axis >= 0; --axis) strides[axis] = strides[axis + 1] * leaf.sizes[axis + 1];
  return empty(leaf.axes, leaf.sizes, strides, leaf.torch_dtype, data);
}

Handle empty_bias(const Handle& bias, const Call& p, Tensor4& to) {
  const View view = read_view(bias, "dense");
  Handle grad = empty_like(view, &to.data);
  const int64_t sizes[4] = {p.B, p.H, p.T, p.S};
  int64_t step = 1;
  for (int axis = 3; axis >= 0; --axis) {  // an axis of length 1 is broadcast, also if the call has length 1 there
    const int64_t size = axis - (4 - view.axes) >= 0 ? view.sizes[axis - (4 - view.axes)] : 1;
    to.stride[axis] = size == sizes[axis] && size > 1 ? step : 0;
    step *= size;
  }
  to.dtype = view.dtype;
  return grad;
}

void attend_kept_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Handle query(stack[0]), key(stack[1]), value(stack[2]);
  const Rules rules(stack + 3);
  const Handle seed(optional(stack[4 + kRuleCount]));
  Call p;
  const View query_view = read_view(query, "query");
  fill_problem(p, query_view, read_view(key, "key"), read_view(value, "value"));
  rules.fill(p);
  take_dropout(p, read_dropout(stack[3 + kRuleCount]), seed);
  const int64_t sizes[4] = {2, p.B, p.H, p.T}, plane = multiply(p.H, p.T);
  const int64_t strides[4] = {multiply(p.B, plane), plane, p.T, 1};
  void* data = nullptr;
  Handle ends = empty(4, sizes, strides, aoti_torch_dtype_float32(), &data);
  p.ends = static_cast<float*>(data);
  attend(p, query_view.torch_dtype, stack);
  stack[2] = ends.release();
}

void backward_boxed(StableIValue* stack, bool is_part) {
  const Handle grad_out(stack[0]), grad_lse(optional(stack[1])), out(stack[2]), ends(stack[3]);
  const bool biases = stack[4] != 0;
  const Handle query(stack[5]), key(stack[6]), value(stack[7]);
  const Rules rules(stack + 8);
  const Handle seed(optional(stack[9 + kRuleCount]));
  Call p;
  p.is_part = is_part;
  Gradients g;
  const View query_view = read_view(query, "query");
  fill_problem(p, query_view, read_view(key, "key"), read_view(value, "value"));
  rules.fill(p);
  take_dropout(p, read_dropout(stack[8 + kRuleCount]), seed);
  const View grad_view = read_view(grad_out, "grad_out"), out_view = read_view(out, "out");
  require_like(grad_view, "grad_out", query_view, p);
  require_like(out_view, "out", query_view, p);
  g.grad_out = tensor4(grad_view);
  p.out = tensor4(out_view);
  take_ends(p, ends);
  take_grad_lse(g, p, grad_lse);

  std::vector<Handle> grads;
  const int32_t dtype = query_view.torch_dtype;
  grads.push_back(empty_heads(p.B, p.H, p.T, p.D, dtype, g.query));
  grads.push_back(empty_heads(p.B, p.K, p.S, p.D, dtype, g.key));
  grads.push_back(empty_heads(p.B, p.K, p.S, p.V, dtype, g.value));
  g.query.dtype = g.key.dtype = g.value.dtype = p.dtype();
  void* data = nullptr;
  if (p.sinks != nullptr) {
    grads.push_back(empty(1, &p.H, std::vector<int64_t>{1}.data(), aoti_torch_dtype_float32(), &data));
    g.sinks = static_cast<float*>(data);
  }
  const auto n_relative = static_cast<int>(rules.relative().size()), n_dense = p.n_dense - n_relative;
  for (int i = 0; biases && i < n_dense; ++i) {
    if (p.dense[i].dtype != Dtype::boolean) {
      grads.push_back(empty_bias(rules.dense()[static_cast<size_t>(i)], p, g.dense[i]));
    }
  }
  for (int i = 0; biases && i < p.n_alibi; ++i) {
    const View slopes = read_view(rules.alibi()[static_cast<size_t>(2 * i)], "alibi slopes");
    grads.push_back(empty_like(slopes, &data));
    g.slopes[i] = static_cast<float*>(data);
    g.slopes_batched[i] = slopes.axes == 2 && slopes.sizes[0] > 1;
  }
  for (int i = 0; biases && i < n_relative; ++i) {
    const View view = read_view(rules.relative()[static_cast<size_t>(i)], "relative");
    Tensor4& to = g.dense[n_dense + i];
    grads.push_back(empty_like(view, &to.data));
    to.stride[0] = view.sizes[0] > 1 ? view.sizes[1] * view.sizes[2] : 0;
    to.stride[1] = view.sizes[1] > 1 ? view.sizes[2] : 0;
    to.stride[2] = -1;
    to.stride[3] = 1;
  }
  attend_backward(p, g);
  stack[0] = list(grads);
}

void attend_backward_boxed(StableIValue* stack, uint64_t, uint64_t) { backward_boxed(stack, false); }

void attend_part_backward_boxed(StableIValue* stack, uint64_t, uint64_t) { backward_boxed(stack, true); }

#define HEADWISE_BACKWARD                                                                                \
  "(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor ends, bool biases, Tensor query, Tensor key, " \
  "Tensor value, " HEADWISE_RULES ", float dropout, Tensor? seed) -> Tensor[]"

}  // namespace

extern const Operator kBackward[3] = {
    {"attend_kept",
     "attend_kept(Tensor query, Tensor key, Tensor value, " HEADWISE_RULES
     ", float dropout, Tensor? seed) -> (Tensor, Tensor, Tensor)",
     "CPU", attend_kept_boxed},
    {"attend_backward", "attend_backward" HEADWISE_BACKWARD, "CPU", attend_backward_boxed},
    // The keys are a part of those to which the results `out` and `ends` belong.
    {"attend_part_backward", "attend_part_backward" HEADWISE_BACKWARD, "CPU", attend_part_backward_boxed},
};

}  // namespace headwise
