// torch's side of the stable ABI for the fuzzer: tensors flush with memory that may not be touched, so that every build
// sees one byte too far, a pool of real threads, and the boxed operators by name.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "torch_abi/torch_abi.h"

enum Code : int32_t { kHalf = 5, kFloat = 6, kDouble = 7, kLong = 4, kBool = 11, kByte = 1, kBfloat = 15 };

int64_t code_size(int32_t dtype);

// A tensor behind a handle. `storage` may be shorter than sizes and strides need, as in torch.
struct AtenTensorOpaque {
  int32_t dtype = kFloat, device = 0, layout = 0;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;            // elements
  std::shared_ptr<void> keeper;  // frees the storage with its last tensor
  char* storage = nullptr;
  int64_t storage_bytes = 0;
  bool negative = false;  // the negative bit: the numbers are those in memory, negated

  char* data() const {  // of a corrupt tensor too, so without pointer arithmetic
    const auto at = static_cast<uint64_t>(offset) * static_cast<uint64_t>(code_size(dtype));
    return storage == nullptr ? nullptr : reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(storage) + at);
  }
  int64_t numel() const;
};

namespace fake {

using Tensor = std::shared_ptr<AtenTensorOpaque>;

// With exactly the bytes that sizes, strides and offset reach, all set to `fill`.
Tensor make(int32_t dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset,
            unsigned char fill);

// The same numbers with the other negative bit, in a storage of its own.
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
// Which storages have the forbidden memory before them, and which behind, is drawn from here on; as is their alignment.
void place_storages(uint64_t seed);
// The n-th `new[]` from now on fails, for scratch and partial results; none where n < 0.
void fail_allocation(int64_t n);

}  // namespace fake
