// The kernels for amx_bf16: compiled with its flags, and called only if the CPU has it and the system allows it. Like
// avx512_vnni, except for bfloat16.
#define HW_ISA isa_amx_bf16
#define HW_NAME "amx_bf16"
// clang-format off: each header needs those above it.
#include "simd/x86/vec_avx512-inl.h"
#include "simd/x86/bf16_avx512-inl.h"
#include "simd/x86/amx-inl.h"
#include "simd/x86/vnni_avx512-inl.h"
#include "simd/plain/words_none-inl.h"
#include "kernels/table-inl.h"
// clang-format on

namespace headwise {
const Kernels* amx_bf16_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
