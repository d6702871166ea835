// The kernels for amx_bf16: compiled with its flags, called only where the CPU and the system have it. avx512_vnni, but
// for bfloat16.
#define HW_ISA isa_amx_bf16
#define HW_NAME "amx_bf16"
// clang-format off: each header needs those above it.
#include "simd/vec_avx512.h"
#include "simd/bf16_avx512.h"
#include "simd/amx.h"
#include "simd/vnni_avx512.h"
#include "kernels/table.h"
// clang-format on

namespace headwise {
const Kernels* amx_bf16_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
