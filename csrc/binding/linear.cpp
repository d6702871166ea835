// torch.ops.headwise.linear: a linear layer for few rows, as decoding has them.
#include <algorithm>
#include <string>
#include <vector>

#include "binding/operators.h"
#include "binding/tensors.h"
#include "call/linear_call.h"

namespace headwise {
namespace {

// Reads rows (..., n), which are contiguous.
View read_rows(const Handle& tensor, const char* name) {
  const View view = read_view(tensor, name);
  if (view.axes < 1) fail(std::string(name) + " must have an axis");
  if (view.int64 || view.dtype == Dtype::boolean || view.dtype == Dtype::f64) {
    fail(std::string(name) + " must be float32, bfloat16 or float16");
  }
  const int last = view.axes - 1;
  if (view.strides[last] != 1 && view.sizes[last] > 1) fail(std::string(name) + ": its rows must be contiguous");
  return view;
}

// Counts the rows of x, (..., n), and the elements from one to the next, which must be the same everywhere.
void take_input(Linear& layer, const View& x) {
  layer.R = 1;
  for (int axis = x.axes - 2; axis >= 0; --axis) {
    if (x.sizes[axis] == 1) continue;
    if (layer.R == 1) layer.x_stride = x.strides[axis];
    if (x.strides[axis] != multiply(layer.R, layer.x_stride))
      fail("input must have evenly spaced rows, got " + shape(x));
    layer.R = multiply(layer.R, x.sizes[axis]);
  }
  if (layer.R > kLinearRows) {
    fail("input has at most " + std::to_string(kLinearRows) + " rows, got " + shape(x));
  }
  layer.width = x.sizes[x.axes - 1];
  layer.x = static_cast<const char*>(x.data);
}

void linear_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Handle input(stack[0]), weight(stack[1]), bias(optional(stack[2]));
  const View x = read_rows(input, "input"), w = read_rows(weight, "weight");
  require_axes(w, "weight", 2);
  if (x.torch_dtype != w.torch_dtype) fail("input and weight must have one dtype");
  Linear layer;
  take_input(layer, x);
  if (layer.width != w.sizes[1]) fail("input (..., n) and weight (m, n) do not fit: " + shape(x) + ", " + shape(w));
  layer.dtype = x.dtype;
  layer.count = w.sizes[0];
  layer.weight = static_cast<const char*>(w.data);
  layer.weight_stride = w.strides[0];
  if (bias) {
    const View b = read_view(bias, "bias");
    require_axes(b, "bias", 1);
    if (b.torch_dtype != x.torch_dtype || b.sizes[0] != layer.count || (b.strides[0] != 1 && layer.count > 1)) {
      fail("bias must be (m), contiguous, in the dtype of weight (m, n) " + shape(w) + ", got " + shape(b));
    }
    layer.bias = static_cast<const char*>(b.data);
  }
  std::vector<int64_t> sizes(x.sizes, x.sizes + x.axes), strides(sizes.size(), 1);
  sizes.back() = layer.count;
  for (size_t axis = sizes.size() - 1; axis > 0; --axis)
    strides[axis - 1] = strides[axis] * std::max(sizes[axis], int64_t{1});
  void* data = nullptr;
  Handle out = empty(x.axes, sizes.data(), strides.data(), x.torch_dtype, &data);
  layer.out = static_cast<char*>(data);
  if (layer.R > 0 && layer.count > 0) linear(layer);
  stack[0] = out.release();
}

}  // namespace

const Operator kLinear = {"linear", "linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor", "CPU", linear_boxed};

}  // namespace headwise
