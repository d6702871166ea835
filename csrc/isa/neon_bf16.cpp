// The kernels for neon_bf16: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_neon_bf16
#define HW_NAME "neon_bf16"
// clang-format off: each header needs those above it.
#include "simd/arm/vec_neon-inl.h"
#include "simd/arm/bf16_neon-inl.h"
#include "simd/plain/amx_none-inl.h"
#include "simd/arm/vnni_neon-inl.h"
#include "simd/plain/words_none-inl.h"
#include "kernels/table-inl.h"
// clang-format on

namespace headwise {
const Kernels* neon_bf16_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
