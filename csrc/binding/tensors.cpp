#include "binding/tensors.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>

namespace headwise {
namespace {

// torch's codes of devices, layouts and dtypes, read once.
struct Codes {
  int32_t cpu = aoti_torch_device_type_cpu();
  int32_t strided = aoti_torch_layout_strided();
  int32_t f32 = aoti_torch_dtype_float32();
  int32_t f64 = aoti_torch_dtype_float64();
  int32_t bf16 = aoti_torch_dtype_bfloat16();
  int32_t f16 = aoti_torch_dtype_float16();
  int32_t int64 = aoti_torch_dtype_int64();
  int32_t i8 = aoti_torch_dtype_int8();
  int32_t packed = aoti_torch_dtype_uint8();
  int32_t boolean = aoti_torch_dtype_bool();
};

const Codes& codes() {
  static const Codes all;
  return all;
}

void check(AOTITorchError error, const char* what) {
  if (error != 0) fail(std::string("torch could not ") + what);
}

int64_t element_size(const View& view) {
  if (view.int64) return 8;
  switch (view.dtype) {
    case Dtype::f64: return 8;
    case Dtype::f32: return 4;
    case Dtype::boolean:
    case Dtype::i8:
    case Dtype::i4:
    case Dtype::i3: return 1;
    default: return 2;
  }
}

void read_dtype(View& view, const char* name, bool bytes) {
  const Codes& code = codes();
  const int32_t dtype = view.torch_dtype;
  if (dtype == code.f32) view.dtype = Dtype::f32;
  else if (dtype == code.bf16) view.dtype = Dtype::bf16;
  else if (dtype == code.f16) view.dtype = Dtype::f16;
  else if (dtype == code.f64) view.dtype = Dtype::f64;
  else if (dtype == code.boolean) view.dtype = Dtype::boolean;
  else if (dtype == code.int64) view.int64 = true;
  else if (dtype == code.i8 && bytes) view.dtype = Dtype::i8;
  else if (dtype == code.packed && bytes) view.dtype = Dtype::i4;  // or i3: the width decides
  else fail(std::string(name) + ": a dtype that headwise does not read");
}

// A storage can be smaller than its tensor: some frameworks free it while the tensor is still in use.
void check_storage(const View& view, AtenTensorHandle tensor, const char* name) {
  int64_t last = 0, bytes = 0;
  check(aoti_torch_get_storage_offset(tensor, &last), "read the offset of a tensor");
  check(aoti_torch_get_storage_size(tensor, &bytes), "read the size of a storage");
  bool overflow = last < 0;
  for (int axis = 0; axis < view.axes; ++axis) {
    int64_t step = 0;
    if (view.sizes[axis] == 0) return;  // no element
    overflow |= view.strides[axis] < 0 || __builtin_mul_overflow(view.sizes[axis] - 1, view.strides[axis], &step) ||
                __builtin_add_overflow(last, step, &last);
  }
  if (overflow || last >= bytes / element_size(view) || view.data == nullptr) {
    fail(std::string(name) + ": its storage does not hold its elements");
  }
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(element_size(view)) != 0) {
    fail(std::string(name) + ": its elements do not lie at multiples of their size");
  }
}

}  // namespace

void fail(const std::string& message) { throw std::runtime_error("headwise: " + message); }

Tensors::Tensors(StableIValue value) {
  const auto list = reinterpret_cast<StableListHandle>(value);
  if (!list) return;
  size_t size = 0;
  AOTITorchError error = torch_list_size(list, &size);
  tensors_.reserve(size);
  for (size_t n = 0; n < size && error == 0; ++n) {
    StableIValue item = 0;
    error = torch_list_get_item(list, n, &item);
    if (error == 0) error = torch_call_dispatcher("aten::resolve_neg", "", &item, kTorchAbi);
    if (error == 0) tensors_.emplace_back(item);
  }
  torch_delete_list(list);
  check(error, "read a list of tensors, or carry out what is pending on one of them (its negative bit)");
}

StableIValue list(std::vector<Handle>& tensors) {
  StableListHandle handle = nullptr;
  check(torch_new_list_reserve_size(tensors.size(), &handle), "make a list");
  for (Handle& tensor : tensors) check(torch_list_push_back(handle, tensor.release()), "fill a list");
  return reinterpret_cast<StableIValue>(handle);
}

std::vector<int64_t> take_integers(StableIValue value) {
  const auto list = reinterpret_cast<StableListHandle>(value);
  size_t size = 0;
  AOTITorchError error = torch_list_size(list, &size);
  std::vector<int64_t> numbers(size);
  for (size_t n = 0; n < size && error == 0; ++n) {
    StableIValue item = 0;
    error = torch_list_get_item(list, n, &item);
    numbers[n] = static_cast<int64_t>(item);
  }
  torch_delete_list(list);
  check(error, "read a list of integers");
  return numbers;
}

StableIValue optional(StableIValue value) {
  const auto box = reinterpret_cast<StableIValue*>(value);
  if (!box) return 0;
  const StableIValue inner = *box;
  delete box;  // torch allocates it by new, and does not delete it for an extension of 2.10
  return inner;
}

double number(StableIValue value) {
  double result;
  memcpy(&result, &value, sizeof result);
  return result;
}

StableIValue text(const std::string& value) {
  StringHandle handle = nullptr;
  check(torch_new_string_handle(value.data(), value.size(), &handle), "make a string");
  return reinterpret_cast<StableIValue>(handle);
}

std::string take_text(StableIValue value) {
  const auto handle = reinterpret_cast<StringHandle>(value);
  size_t length = 0;
  const char* data = nullptr;
  AOTITorchError error = torch_string_length(handle, &length);
  if (error == 0) error = torch_string_c_str(handle, &data);
  const std::string result = error == 0 ? std::string(data, length) : std::string();
  torch_delete_string(handle);
  check(error, "read a string");
  return result;
}

int64_t multiply(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) fail("more elements than 2**63");
  return product;
}

View read_view(const Handle& tensor, const char* name, bool bytes) {
  const AtenTensorHandle handle = tensor.get();
  const Codes& code = codes();
  View view;
  int32_t device = 0, layout = 0;
  int64_t axes = 0, *sizes = nullptr, *strides = nullptr;
  check(aoti_torch_get_device_type(handle, &device), "read the device of a tensor");
  check(aoti_torch_get_layout(handle, &layout), "read the layout of a tensor");
  if (device != code.cpu || layout != code.strided) fail(std::string(name) + ": not a strided tensor on the CPU");
  check(aoti_torch_get_dtype(handle, &view.torch_dtype), "read the dtype of a tensor");
  check(aoti_torch_get_dim(handle, &axes), "read the axes of a tensor");
  if (axes > 4) fail(std::string(name) + ": more than 4 axes");
  check(aoti_torch_get_sizes(handle, &sizes), "read the sizes of a tensor");
  check(aoti_torch_get_strides(handle, &strides), "read the strides of a tensor");
  check(torch_get_const_data_ptr(handle, &view.data), "read the address of a tensor");
  view.axes = static_cast<int>(axes);
  std::copy(sizes, sizes + axes, view.sizes);
  std::copy(strides, strides + axes, view.strides);
  read_dtype(view, name, bytes);
  check_storage(view, handle, name);
  return view;
}

void* written(const Handle& tensor) {
  void* data = nullptr;
  check(torch_get_mutable_data_ptr(tensor.get(), &data), "write to a tensor");
  return data;
}

std::string shape(const View& view) {
  std::string result = "(";
  for (int axis = 0; axis < view.axes; ++axis) result += (axis ? ", " : "") + std::to_string(view.sizes[axis]);
  return result + ")";
}

void require_axes(const View& view, const char* name, int axes) {
  if (view.axes != axes) fail(std::string(name) + " must have " + std::to_string(axes) + " axes, got " + shape(view));
}

void require_dtype(const View& view, const char* name, Dtype dtype) {
  if (view.int64 || view.dtype != dtype) fail(std::string(name) + ": a wrong dtype");
}

void require_int64(const View& view, const char* name) {
  if (!view.int64) fail(std::string(name) + " must be int64");
}

bool is_empty(const View& view) { return view.axes > 0 && *std::min_element(view.sizes, view.sizes + view.axes) < 1; }

void require_own_places(const View& view, const char* name) {
  std::vector<int> axes;
  for (int axis = 0; axis < view.axes && !is_empty(view); ++axis) {
    if (view.sizes[axis] > 1) axes.push_back(axis);
  }
  std::sort(axes.begin(), axes.end(), [&](int a, int b) { return view.strides[a] < view.strides[b]; });
  int64_t reach = 0;  // the extent of the axes so far
  for (const int axis : axes) {
    if (view.strides[axis] <= reach) fail(std::string(name) + ": elements overlap, and cannot be written");
    reach += (view.sizes[axis] - 1) * view.strides[axis];
  }
}

Tensor4 tensor4(const View& view) {
  Tensor4 result;
  result.data = const_cast<void*>(view.data);
  result.dtype = view.dtype;
  std::copy(view.strides, view.strides + 4, result.stride);
  return result;
}

Tensor4 broadcast4(const View& view, const char* name, int64_t a, int64_t b, int64_t c, int64_t d) {
  require_axes(view, name, 4);
  const int64_t full[4] = {a, b, c, d};
  Tensor4 result = tensor4(view);
  for (int axis = 0; axis < 4; ++axis) {
    if (view.sizes[axis] == 1) result.stride[axis] = 0;
    else if (view.sizes[axis] != full[axis]) fail(std::string(name) + " does not broadcast: " + shape(view));
  }
  return result;
}

View rows(View view, const char* name, int64_t batch, int64_t size) {
  if (view.axes == 1) {
    view = {view.data,  2,         {1, view.sizes[0], 0, 0}, {0, view.strides[0], 0, 0}, view.torch_dtype,
            view.int64, view.dtype};
  }
  const bool fits = view.axes == 2 && view.sizes[1] == size && (view.sizes[0] == 1 || view.sizes[0] == batch);
  if (!fits)
    fail(std::string(name) + ": expected (1 or " + std::to_string(batch) + ", " + std::to_string(size) + "), got " +
         shape(view));
  if (view.sizes[0] == 1) view.strides[0] = 0;
  return view;
}

Handle empty(int64_t axes, const int64_t* sizes, const int64_t* strides, int32_t torch_dtype, void** data) {
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(axes, sizes, strides, torch_dtype, codes().cpu, 0, &handle), "allocate the result");
  Handle result(reinterpret_cast<StableIValue>(handle));
  check(torch_get_mutable_data_ptr(handle, data), "read the address of the result");
  return result;
}

}  // namespace headwise
