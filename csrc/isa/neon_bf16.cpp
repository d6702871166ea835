// The kernels for neon_bf16: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_neon_bf16
#define HW_NAME "neon_bf16"
// clang-format off: each header needs those above it.
#include "simd/vec_neon.h"
#include "simd/bf16_neon.h"
#include "simd/amx_none.h"
#include "simd/vnni_neon.h"
#include "kernels/table.h"
// clang-format on

namespace headwise {
const Kernels* neon_bf16_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
