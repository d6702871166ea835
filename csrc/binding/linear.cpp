// torch.ops.headwise.linear: a linear layer for few rows, as decoding has them.
#include <string>

#include "binding/operators.h"
#include "binding/tensors.h"
#include "call/linear_call.h"

namespace headwise {
namespace {

// Reads a matrix with contiguous rows.
View matrix(const Handle& tensor, const char* name) {
  const View view = read_view(tensor, name);
  require_axes(view, name, 2);
  if (view.int64 || view.dtype == Dtype::boolean || view.dtype == Dtype::f64) {
    fail(std::string(name) + " must be float32, bfloat16 or float16");
  }
  if (view.strides[1] != 1 && view.sizes[1] > 1) fail(std::string(name) + ": its rows must be contiguous");
  return view;
}

void linear_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Handle input(stack[0]), weight(stack[1]), bias(optional(stack[2]));
  const View x = matrix(input, "input"), w = matrix(weight, "weight");
  if (x.torch_dtype != w.torch_dtype) fail("input and weight must have one dtype");
  if (x.sizes[0] > kLinearRows) {
    fail("input has at most " + std::to_string(kLinearRows) + " rows, got " + shape(x));
  }
  if (x.sizes[1] != w.sizes[1]) fail("input (R, n) and weight (m, n) do not fit: " + shape(x) + ", " + shape(w));
  Linear layer;
  layer.dtype = x.dtype;
  layer.R = x.sizes[0];
  layer.width = x.sizes[1];
  layer.count = w.sizes[0];
  layer.x = static_cast<const char*>(x.data);
  layer.weight = static_cast<const char*>(w.data);
  layer.x_stride = x.strides[0];
  layer.weight_stride = w.strides[0];
  if (bias) {
    const View b = read_view(bias, "bias");
    require_axes(b, "bias", 1);
    if (b.torch_dtype != x.torch_dtype || b.sizes[0] != layer.count || (b.strides[0] != 1 && layer.count > 1)) {
      fail("bias must be (m), contiguous, in the dtype of weight (m, n) " + shape(w) + ", got " + shape(b));
    }
    layer.bias = static_cast<const char*>(b.data);
  }
  const int64_t sizes[2] = {layer.R, layer.count}, strides[2] = {layer.count, 1};
  void* data = nullptr;
  Handle out = empty(2, sizes, strides, x.torch_dtype, &data);
  layer.out = static_cast<char*>(data);
  if (layer.R > 0 && layer.count > 0) linear(layer);
  stack[0] = out.release();
}

}  // namespace

const Operator kLinear = {"linear", "linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor", "CPU", linear_boxed};

}  // namespace headwise
