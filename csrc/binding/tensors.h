// Wrappers of torch's tensors for the binding: owning handles, and checked views of their data.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "call/attention_call.h"
#include "torch_abi/torch_abi.h"

namespace headwise {

[[noreturn]] void fail(const std::string& message);  // raises a RuntimeError in Python

// An owning handle of a tensor.
class Handle {
 public:
  Handle() = default;
  explicit Handle(StableIValue value) : handle_(reinterpret_cast<AtenTensorHandle>(value)) {}
  Handle(Handle&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  Handle& operator=(Handle&&) = delete;
  ~Handle() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }
  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  StableIValue release() {
    const auto value = reinterpret_cast<StableIValue>(handle_);
    handle_ = nullptr;
    return value;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// The tensors of a list; a list of 0 is empty. The constructor deletes the list.
class Tensors {
 public:
  explicit Tensors(StableIValue list);
  size_t size() const { return tensors_.size(); }
  const Handle& operator[](size_t n) const { return tensors_[n]; }
  std::vector<Handle>::const_iterator begin() const { return tensors_.begin(); }
  std::vector<Handle>::const_iterator end() const { return tensors_.end(); }

 private:
  std::vector<Handle> tensors_;
};

StableIValue list(std::vector<Handle>& tensors);  // moves the tensors into a list
std::vector<int64_t> take_integers(StableIValue list);
StableIValue optional(StableIValue value);  // returns the handle in a Tensor? or Tensor[]?, or 0
double number(StableIValue value);
StableIValue text(const std::string& value);
std::string take_text(StableIValue value);
int64_t multiply(int64_t a, int64_t b);  // refuses overflow

// The data of a tensor, not owned. Every element is within the storage.
struct View {
  const void* data = nullptr;
  int axes = 0;
  int64_t sizes[4] = {0, 0, 0, 0};
  int64_t strides[4] = {0, 0, 0, 0};
  int32_t torch_dtype = 0;
  bool int64 = false;  // if true, `dtype` has no meaning
  Dtype dtype = Dtype::f32;
};

// Fails for more than 4 axes, for devices other than the CPU, for dtypes other than int64 and those of `Dtype`, and for
// int8 and uint8 (packed codes) unless `bytes` is set.
View read_view(const Handle& tensor, const char* name, bool bytes = false);
void* written(const Handle& tensor);  // returns the address to write to
std::string shape(const View& view);
void require_axes(const View& view, const char* name, int axes);
void require_dtype(const View& view, const char* name, Dtype dtype);
void require_int64(const View& view, const char* name);
bool is_empty(const View& view);  // true if it has no element
// Fails if two elements may share an address. Axes that interleave are refused as well, even if no two elements do.
void require_own_places(const View& view, const char* name);
Tensor4 tensor4(const View& view);
Tensor4 broadcast4(const View& view, const char* name, int64_t a, int64_t b, int64_t c, int64_t d);
View rows(View view, const char* name, int64_t batch, int64_t size);  // (size), (1, size) or (batch, size), as two axes
Handle empty(int64_t axes, const int64_t* sizes, const int64_t* strides, int32_t torch_dtype, void** data);

}  // namespace headwise
