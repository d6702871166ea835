// The few C functions of torch's stable ABI that headwise calls. torch keeps them from version 2.10 on, no matter which
// compiler or version built it. They are declared here so that building needs neither torch's headers nor a download of
// hundreds of megabytes into a build environment. tests/csrc/test_native_build.py compiles this file together with
// torch's own declarations.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
struct StringOpaque;
using StringHandle = StringOpaque*;
using AOTITorchError = int32_t;  // 0 = success
using StableIValue = uint64_t;   // an argument: the bits of a number, or a handle that the called function owns

namespace headwise {
using Boxed = void (*)(StableIValue* stack, uint64_t inputs, uint64_t outputs);
using Range = void (*)(int64_t begin, int64_t end, void* context);
constexpr uint64_t kTorchAbi =
    (uint64_t{2} << 56) | (uint64_t{10} << 48);  // the version of the ABI that we use: torch 2.10
}  // namespace headwise

// Calls F(result, name, (parameters)) for each function. It is a list because csrc/torch_abi/stub.cpp defines the same
// functions, for the linker.
#define HEADWISE_TORCH_ABI(F)                                                                                  \
  F(int32_t, aoti_torch_device_type_cpu, ())                                                                   \
  F(int32_t, aoti_torch_layout_strided, ())                                                                    \
  F(int32_t, aoti_torch_dtype_float32, ())                                                                     \
  F(int32_t, aoti_torch_dtype_float64, ())                                                                     \
  F(int32_t, aoti_torch_dtype_bfloat16, ())                                                                    \
  F(int32_t, aoti_torch_dtype_float16, ())                                                                     \
  F(int32_t, aoti_torch_dtype_int64, ())                                                                       \
  F(int32_t, aoti_torch_dtype_int8, ())                                                                        \
  F(int32_t, aoti_torch_dtype_uint8, ())                                                                       \
  F(int32_t, aoti_torch_dtype_bool, ())                                                                        \
  F(AOTITorchError, aoti_torch_get_device_type, (AtenTensorHandle, int32_t*))                                  \
  F(AOTITorchError, aoti_torch_get_layout, (AtenTensorHandle, int32_t*))                                       \
  F(AOTITorchError, aoti_torch_get_dtype, (AtenTensorHandle, int32_t*))                                        \
  F(AOTITorchError, aoti_torch_get_dim, (AtenTensorHandle, int64_t*))                                          \
  F(AOTITorchError, aoti_torch_get_sizes, (AtenTensorHandle, int64_t**))                                       \
  F(AOTITorchError, aoti_torch_get_strides, (AtenTensorHandle, int64_t**))                                     \
  F(AOTITorchError, aoti_torch_get_storage_offset, (AtenTensorHandle, int64_t*))                               \
  F(AOTITorchError, aoti_torch_get_storage_size, (AtenTensorHandle, int64_t*))                                 \
  F(AOTITorchError, torch_get_const_data_ptr, (AtenTensorHandle, const void**))                                \
  F(AOTITorchError, torch_get_mutable_data_ptr, (AtenTensorHandle, void**))                                    \
  F(AOTITorchError, aoti_torch_empty_strided,                                                                  \
    (int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device, int32_t index, \
     AtenTensorHandle*))                                                                                       \
  F(AOTITorchError, aoti_torch_delete_tensor_object, (AtenTensorHandle))                                       \
  F(AOTITorchError, torch_new_list_reserve_size, (size_t size, StableListHandle*))                             \
  F(AOTITorchError, torch_list_push_back, (StableListHandle, StableIValue))                                    \
  F(AOTITorchError, torch_list_size, (StableListHandle, size_t*))                                              \
  F(AOTITorchError, torch_list_get_item, (StableListHandle, size_t index, StableIValue*))                      \
  F(AOTITorchError, torch_delete_list, (StableListHandle))                                                     \
  F(AOTITorchError, torch_new_string_handle, (const char* data, size_t length, StringHandle*))                 \
  F(AOTITorchError, torch_string_length, (StringHandle, size_t*))                                              \
  F(AOTITorchError, torch_string_c_str, (StringHandle, const char**))                                          \
  F(AOTITorchError, torch_delete_string, (StringHandle))                                                       \
  F(AOTITorchError, torch_parallel_for,                                                                        \
    (int64_t begin, int64_t end, int64_t grain, headwise::Range function, void* context))                      \
  F(AOTITorchError, torch_get_num_threads, (uint32_t*))                                                        \
  F(AOTITorchError, torch_get_thread_idx, (uint32_t*))                                                         \
  F(AOTITorchError, torch_call_dispatcher,                                                                     \
    (const char* name, const char* overload, StableIValue* stack, uint64_t version))                           \
  F(AOTITorchError, aoti_torch_library_init_def,                                                               \
    (const char* space, const char* file, uint32_t line, TorchLibraryHandle*))                                 \
  F(AOTITorchError, aoti_torch_library_init_impl,                                                              \
    (const char* space, const char* key, const char* file, uint32_t line, TorchLibraryHandle*))                \
  F(AOTITorchError, aoti_torch_library_def, (TorchLibraryHandle, const char* schema))                          \
  F(AOTITorchError, torch_library_impl, (TorchLibraryHandle, const char* name, headwise::Boxed, uint64_t version))

extern "C" {
#define HEADWISE_DECLARE(result, name, parameters) result name parameters;
HEADWISE_TORCH_ABI(HEADWISE_DECLARE)
#undef HEADWISE_DECLARE
}
