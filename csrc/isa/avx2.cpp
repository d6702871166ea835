// The kernels for avx2: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_avx2
#define HW_NAME "avx2"
// clang-format off: each header needs those above it.
#include "simd/vec_avx2.h"
#include "simd/bf16_none.h"
#include "simd/amx_none.h"
#include "simd/vnni_none.h"
#include "kernels/table.h"
// clang-format on

namespace headwise {
const Kernels* avx2_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
