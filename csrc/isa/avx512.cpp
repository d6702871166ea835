// The kernels for avx512: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_avx512
#define HW_NAME "avx512"
#define HW_BF16 0
#include "simd/vec_avx512.h"
#include "kernels/table.h"

namespace headwise {
const Kernels* avx512_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
