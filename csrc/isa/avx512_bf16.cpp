// The kernels for avx512_bf16: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_avx512_bf16
#define HW_NAME "avx512_bf16"
#define HW_ONCE 0
#define HW_KEYS_AT_ONCE 4
// clang-format off: each header needs those above it.
#include "simd/vec_avx512.h"
#include "simd/bf16_avx512.h"
#include "simd/amx_none.h"
#include "simd/vnni_avx512.h"
#include "kernels/table.h"
// clang-format on

namespace headwise {
const Kernels* avx512_bf16_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
