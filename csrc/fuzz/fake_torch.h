// torch's side of the stable ABI for the fuzzer. Tensors end directly before memory that may not be touched, so that
// every build fails if it reads one byte too far. There is a pool of real threads, and the boxed operators can be
// called by name.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "torch_abi/torch_abi.h"

enum Code : int32_t { kPacked = 0, kHalf = 5, kFloat = 6, kDouble = 7, kLong = 4, kBool = 11, kByte = 1, kBfloat = 15 };

int64_t code_size(int32_t dtype);

// The tensor of a handle. Like in torch, `storage` may be shorter than sizes and strides need.
struct AtenTensorOpaque {
  int32_t dtype = kFloat, device = 0, layout = 0;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;            // elements
  std::shared_ptr<void> keeper;  // frees the storage when its last tensor is gone
  char* storage = nullptr;
  int64_t storage_bytes = 0;
  bool negative = false;  // the negative bit: the numbers are those in memory, negated

  char* data() const {  // computed without pointer arithmetic, because the tensor may be corrupt
    const auto at = static_cast<uint64_t>(offset) * static_cast<uint64_t>(code_size(dtype));
    return storage == nullptr ? nullptr : reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(storage) + at);
  }
  int64_t numel() const;
};

namespace fake {

using Tensor = std::shared_ptr<AtenTensorOpaque>;

// Makes a tensor with exactly the bytes that sizes, strides and offset reach, all set to `fill`.
Tensor make(int32_t dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset,
            unsigned char fill);

// Makes a tensor of the same numbers with the opposite negative bit, in a storage of its own.
Tensor negated(const AtenTensorOpaque& tensor);

// The arguments of an operator, its call, and its results, which are new handles for `take`.
StableIValue give(const Tensor& tensor);
StableIValue give_optional(const Tensor& tensor);            // null = None
StableIValue give_list(const std::vector<Tensor>* tensors);  // null = None, boxed as Tensor[]?
StableIValue give_number(double value);
StableIValue give_integers(const std::vector<int64_t>& numbers);
std::string call(const char* name, std::vector<StableIValue>& stack, uint64_t outputs);  // the error, or empty
Tensor take(StableIValue value);
std::vector<Tensor> take_list(StableIValue value);

int64_t live();  // handles not yet deleted
void set_threads(int count);
// Sets the seed that decides which storages have the forbidden memory before them and which behind, and how they are
// aligned.
void place_storages(uint64_t seed);
// Makes the n-th `new[]` from now on fail, for scratch and partial results; none if n < 0.
void fail_allocation(int64_t n);

}  // namespace fake
