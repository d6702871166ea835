// The kernels for neon: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_neon
#define HW_NAME "neon"
// clang-format off: each header needs those above it.
#include "simd/vec_neon.h"
#include "simd/bf16_none.h"
#include "simd/amx_none.h"
#include "simd/vnni_none.h"
#include "kernels/table.h"
// clang-format on

namespace headwise {
const Kernels* neon_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
