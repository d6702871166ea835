// The kernels for avx2: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_avx2
#define HW_NAME "avx2"
// clang-format off: each header needs those above it.
#include "simd/x86/vec_avx2-inl.h"
#include "simd/plain/bf16_none-inl.h"
#include "simd/plain/amx_none-inl.h"
#include "simd/plain/vnni_none-inl.h"
#include "simd/x86/words_avx2-inl.h"
#include "kernels/table-inl.h"
// clang-format on

namespace headwise {
const Kernels* avx2_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
