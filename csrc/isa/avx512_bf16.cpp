// The kernels for avx512_bf16: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_avx512_bf16
#define HW_NAME "avx512_bf16"
#define HW_BF16 1
#include "simd/vec_avx512.h"
#include "kernels/table.h"

namespace headwise {
const Kernels* avx512_bf16_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
