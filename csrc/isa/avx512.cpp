// The kernels for avx512: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_avx512
#define HW_NAME "avx512"
// clang-format off: each header needs those above it.
#include "simd/x86/vec_avx512-inl.h"
#include "simd/plain/bf16_none-inl.h"
#include "simd/plain/amx_none-inl.h"
#include "simd/plain/vnni_none-inl.h"
#include "simd/plain/words_none-inl.h"
#include "kernels/table-inl.h"
// clang-format on

namespace headwise {
const Kernels* avx512_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
