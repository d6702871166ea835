// torch's tensors as the binding sees them: owned handles, and checked views of what they hold.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "problem.h"
#include "torch/torch_abi.h"

namespace headwise {

[[noreturn]] void fail(const std::string& message);  // becomes a RuntimeError in Python

// A handle that is ours to delete.
class Owned {
 public:
  Owned() = default;
  explicit Owned(StableIValue value) : handle_(reinterpret_cast<AtenTensorHandle>(value)) {}
  Owned(Owned&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned& operator=(Owned&&) = delete;
  ~Owned() {
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

// The tensors of a list, taken out of it; the list (or 0 for none) is deleted.
class Tensors {
 public:
  explicit Tensors(StableIValue list);
  size_t size() const { return tensors_.size(); }
  const Owned& operator[](size_t n) const { return tensors_[n]; }
  std::vector<Owned>::const_iterator begin() const { return tensors_.begin(); }
  std::vector<Owned>::const_iterator end() const { return tensors_.end(); }

 private:
  std::vector<Owned> tensors_;
};

StableIValue list(std::vector<Owned>& tensors);  // gives them away
StableIValue optional(StableIValue value);  // the handle in a Tensor? or Tensor[]?, or 0
double number(StableIValue value);
StableIValue text(const std::string& value);
std::string take_text(StableIValue value);
int64_t multiply(int64_t a, int64_t b);  // refuses overflow

// What a tensor holds, borrowed from it. Every element lies within its storage.
struct View {
  const void* data = nullptr;
  int axes = 0;
  int64_t sizes[4] = {0, 0, 0, 0};
  int64_t strides[4] = {0, 0, 0, 0};
  int32_t torch_dtype = 0;
  bool int64 = false;  // else `dtype` says what it is
  Dtype dtype = Dtype::f32;
};

// At most 4 axes, on the CPU, int64 or a dtype in `Dtype`; int8 only where `bytes` are wanted.
View look(const Owned& tensor, const char* name, bool bytes = false);
std::string shape(const View& view);
void require_axes(const View& view, const char* name, int axes);
void require_dtype(const View& view, const char* name, Dtype dtype);
void require_int64(const View& view, const char* name);
Tensor4 tensor4(const View& view);
Tensor4 broadcast4(const View& view, const char* name, int64_t a, int64_t b, int64_t c, int64_t d);
View rows(View view, const char* name, int64_t batch, int64_t size);  // (size), (1, size) or (batch, size), as two axes
Owned empty(int64_t axes, const int64_t* sizes, const int64_t* strides, int32_t torch_dtype, void** data);

}  // namespace headwise
