#include "fuzz/fake_torch.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <new>
#include <thread>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace {

std::atomic<int64_t> live_handles{0};
std::atomic<uint32_t> threads{1};
thread_local uint32_t thread_index = 0;
thread_local bool inside = false;

std::map<std::string, headwise::Boxed>& operators() {
  static std::map<std::string, headwise::Boxed> all;
  return all;
}

// Stores a result of an ABI function, which then returns 0 for success.
template <class T, class Value>
AOTITorchError give(T* to, Value value) {
  *to = value;
  return 0;
}

AtenTensorHandle new_handle(const AtenTensorOpaque& tensor) {
  ++live_handles;
  return new AtenTensorOpaque(tensor);
}

std::atomic<uint64_t> storages{0};
std::atomic<int64_t> allocations_left{-1};

// A storage, which is freed with its last tensor. Its pages lie between two pages that may not be touched, and it ends
// at the one behind it or begins at the one before it. AddressSanitizer guards the rest of its pages.
class Block {
 public:
  char* bytes;

  explicit Block(int64_t size) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), used = static_cast<size_t>(size);
    const size_t inner = (used + page - 1) / page * page;
    length_ = inner + 2 * page;
    void* all = mmap(nullptr, length_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) abort();
    pages_ = static_cast<char*>(all);
    char* first = pages_ + page;
    if (inner > 0 && mprotect(first, inner, PROT_READ | PROT_WRITE) != 0) abort();
    const uint64_t number = storages++ * 0x9e3779b97f4a7c15u;
    bytes = number >> 62 == 0 ? first : first + inner - used;  // because most reads that go too far go behind the end
    ASAN_POISON_MEMORY_REGION(first, static_cast<size_t>(bytes - first));
    ASAN_POISON_MEMORY_REGION(bytes + used, inner - used - static_cast<size_t>(bytes - first));
  }
  ~Block() {
    ASAN_UNPOISON_MEMORY_REGION(pages_, length_);
    munmap(pages_, length_);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

 private:
  char* pages_;
  size_t length_;
};

}  // namespace

// Only scratch and partial results are allocated as arrays of numbers here.
void* operator new[](size_t size) {
  void* memory = allocations_left >= 0 && allocations_left-- == 0 ? nullptr : malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t size, const std::nothrow_t&) noexcept {
  return allocations_left >= 0 && allocations_left-- == 0 ? nullptr : malloc(size > 0 ? size : 1);
}
void operator delete[](void* memory) noexcept { free(memory); }
void operator delete[](void* memory, size_t) noexcept { free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { free(memory); }

struct StableListOpaque {
  std::vector<StableIValue> items;
};

struct StringOpaque {
  std::string text;
};

int64_t code_size(int32_t dtype) {
  switch (dtype) {
    case kFloat: return 4;
    case kDouble:
    case kLong: return 8;
    case kBool:
    case kPacked:
    case kByte: return 1;
    default: return 2;
  }
}

int64_t AtenTensorOpaque::numel() const {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

namespace fake {

Tensor make(int32_t dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset,
            unsigned char fill) {
  auto tensor = std::make_shared<AtenTensorOpaque>();
  tensor->dtype = dtype;
  tensor->sizes = std::move(sizes);
  tensor->strides = std::move(strides);
  tensor->offset = offset;
  int64_t last = offset;
  for (size_t axis = 0; axis < tensor->sizes.size(); ++axis) {
    last += (tensor->sizes[axis] - 1) * tensor->strides[axis];
  }
  tensor->storage_bytes = tensor->numel() == 0 ? 0 : (last + 1) * code_size(dtype);
  auto block = std::make_shared<Block>(tensor->storage_bytes);
  tensor->storage = block->bytes;
  tensor->keeper = block;
  memset(tensor->storage, fill, static_cast<size_t>(tensor->storage_bytes));
  return tensor;
}

Tensor negated(const AtenTensorOpaque& tensor) {
  auto other = std::make_shared<AtenTensorOpaque>(tensor);
  auto block = std::make_shared<Block>(tensor.storage_bytes);
  other->storage = block->bytes;
  other->keeper = block;
  other->negative = !tensor.negative;
  memcpy(other->storage, tensor.storage, static_cast<size_t>(tensor.storage_bytes));
  const int64_t size = code_size(tensor.dtype);
  for (int64_t at = 0; at + size <= tensor.storage_bytes; at += size) {  // including what is between the elements
    uint64_t bits = 0;
    memcpy(&bits, other->storage + at, static_cast<size_t>(size));
    bits = tensor.dtype == kLong || tensor.dtype == kByte ? 0 - bits : bits ^ uint64_t{1} << (8 * size - 1);
    memcpy(other->storage + at, &bits, static_cast<size_t>(size));
  }
  return other;
}

StableIValue give(const Tensor& tensor) { return reinterpret_cast<StableIValue>(new_handle(*tensor)); }

StableIValue give_optional(const Tensor& tensor) {
  return tensor == nullptr ? 0 : reinterpret_cast<StableIValue>(new StableIValue(give(tensor)));
}

StableIValue give_list(const std::vector<Tensor>* tensors) {
  if (tensors == nullptr) return 0;
  auto* list = new StableListOpaque;
  ++live_handles;
  for (const Tensor& tensor : *tensors) list->items.push_back(give(tensor));
  return reinterpret_cast<StableIValue>(new StableIValue(reinterpret_cast<StableIValue>(list)));
}

StableIValue give_number(double value) {
  StableIValue bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

StableIValue give_integers(const std::vector<int64_t>& numbers) {
  auto* list = new StableListOpaque;
  ++live_handles;
  for (const int64_t number : numbers) list->items.push_back(static_cast<StableIValue>(number));
  return reinterpret_cast<StableIValue>(list);
}

std::string call(const char* name, std::vector<StableIValue>& stack, uint64_t outputs) {
  const auto op = operators().find(name);
  if (op == operators().end()) return std::string("no operator ") + name;
  try {
    op->second(stack.data(), stack.size(), outputs);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

Tensor take(StableIValue value) {
  --live_handles;
  return Tensor(reinterpret_cast<AtenTensorHandle>(value));
}

std::vector<Tensor> take_list(StableIValue value) {
  auto* list = reinterpret_cast<StableListOpaque*>(value);
  std::vector<Tensor> all;
  for (const StableIValue item : list->items) all.push_back(take(item));
  --live_handles;
  delete list;
  return all;
}

int64_t live() { return live_handles; }

void set_threads(int count) { threads = static_cast<uint32_t>(count); }

void place_storages(uint64_t seed) { storages = seed; }

void fail_allocation(int64_t n) { allocations_left = n; }

}  // namespace fake

extern "C" {

int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_layout_strided() { return 0; }
int32_t aoti_torch_dtype_float32() { return kFloat; }
int32_t aoti_torch_dtype_float64() { return kDouble; }
int32_t aoti_torch_dtype_bfloat16() { return kBfloat; }
int32_t aoti_torch_dtype_float16() { return kHalf; }
int32_t aoti_torch_dtype_int64() { return kLong; }
int32_t aoti_torch_dtype_int8() { return kByte; }
int32_t aoti_torch_dtype_uint8() { return kPacked; }
int32_t aoti_torch_dtype_bool() { return kBool; }

AOTITorchError aoti_torch_get_device_type(AtenTensorHandle x, int32_t* to) { return give(to, x->device); }
AOTITorchError aoti_torch_get_layout(AtenTensorHandle x, int32_t* to) { return give(to, x->layout); }
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle x, int32_t* to) { return give(to, x->dtype); }
AOTITorchError aoti_torch_get_dim(AtenTensorHandle x, int64_t* to) {
  return give(to, static_cast<int64_t>(x->sizes.size()));
}
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle x, int64_t** to) { return give(to, x->sizes.data()); }
AOTITorchError aoti_torch_get_strides(AtenTensorHandle x, int64_t** to) { return give(to, x->strides.data()); }
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle x, int64_t* to) { return give(to, x->offset); }
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle x, int64_t* to) { return give(to, x->storage_bytes); }
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle x, const void** to) { return give(to, x->data()); }
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle x, void** to) { return give(to, x->data()); }

AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t, int32_t, AtenTensorHandle* to) {
  double bytes = static_cast<double>(code_size(dtype));
  for (int64_t axis = 0; axis < dims; ++axis) bytes *= static_cast<double>(sizes[axis]);
  if (bytes > 1e9) return 1;
  *to = new_handle(*fake::make(dtype, {sizes, sizes + dims}, {strides, strides + dims}, 0, 0xa5));
  return 0;
}

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle x) {
  --live_handles;
  delete x;
  return 0;
}

AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* to) {
  ++live_handles;
  *to = new StableListOpaque;
  (*to)->items.reserve(size);
  return 0;
}
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue item) {
  list->items.push_back(item);
  return 0;
}
AOTITorchError torch_list_size(StableListHandle list, size_t* to) { return give(to, list->items.size()); }
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* to) {
  return give(to, list->items[index]);
}
AOTITorchError torch_delete_list(StableListHandle list) {
  --live_handles;
  delete list;
  return 0;
}

AOTITorchError torch_new_string_handle(const char* data, size_t length, StringHandle* to) {
  return give(to, new StringOpaque{std::string(data, length)});
}
AOTITorchError torch_string_length(StringHandle x, size_t* to) { return give(to, x->text.size()); }
AOTITorchError torch_string_c_str(StringHandle x, const char** to) { return give(to, x->text.c_str()); }
AOTITorchError torch_delete_string(StringHandle x) {
  delete x;
  return 0;
}

AOTITorchError torch_get_num_threads(uint32_t* to) { return give(to, threads.load()); }
AOTITorchError torch_get_thread_idx(uint32_t* to) { return give(to, thread_index); }

// Cuts the range like at::parallel_for: one piece for each thread.
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain, headwise::Range function, void* context) {
  const int64_t pieces = std::min<int64_t>(threads, (end - begin + grain - 1) / std::max<int64_t>(grain, 1));
  if (begin >= end) return 0;
  if (pieces <= 1 || inside) {
    function(begin, end, context);
    return 0;
  }
  const int64_t size = (end - begin + pieces - 1) / pieces;
  std::atomic<int32_t> failed{0};
  std::vector<std::thread> team;
  for (int64_t piece = 0; piece * size < end - begin; ++piece) {
    team.emplace_back([&, piece] {
      inside = true;
      thread_index = static_cast<uint32_t>(piece);
      const int64_t first = begin + piece * size;
      try {
        function(first, std::min(first + size, end), context);
      } catch (const std::exception&) {
        failed = 1;
      }
    });
  }
  for (std::thread& thread : team) thread.join();
  return failed;
}

AOTITorchError torch_call_dispatcher(const char* name, const char*, StableIValue* stack, uint64_t) {
  if (strcmp(name, "aten::resolve_neg") != 0) return 1;
  auto* tensor = reinterpret_cast<AtenTensorHandle>(stack[0]);
  if (!tensor->negative) return 0;
  stack[0] = reinterpret_cast<StableIValue>(new_handle(*fake::negated(*tensor)));
  return aoti_torch_delete_tensor_object(tensor);
}

AOTITorchError aoti_torch_library_init_def(const char*, const char*, uint32_t, TorchLibraryHandle*) { return 0; }
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, TorchLibraryHandle*) {
  return 0;
}
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char*) { return 0; }
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* name, headwise::Boxed function, uint64_t) {
  operators()[name] = function;
  return 0;
}

}  // extern "C"
