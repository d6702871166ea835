// The kernels for avx512: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_avx512
#define HW_NAME "avx512"
// clang-format off: each header needs those above it.
#include "simd/vec_avx512.h"
#include "simd/bf16_none.h"
#include "simd/amx_none.h"
#include "simd/vnni_none.h"
#include "kernels/table.h"
// clang-format on

namespace headwise {
const Kernels* avx512_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
