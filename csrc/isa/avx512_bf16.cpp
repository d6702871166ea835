// The kernels for avx512_bf16: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_avx512_bf16
#define HW_NAME "avx512_bf16"
#define HW_PREFETCH_LOCALITY 0
#define HW_KEYS_AT_ONCE 4
// clang-format off: each header needs those above it.
#include "simd/x86/vec_avx512-inl.h"
#include "simd/x86/bf16_avx512-inl.h"
#include "simd/plain/amx_none-inl.h"
#include "simd/x86/vnni_avx512-inl.h"
#include "simd/plain/words_none-inl.h"
#include "kernels/table-inl.h"
// clang-format on

namespace headwise {
const Kernels* avx512_bf16_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
