// The kernels for avx2: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_avx2
#define HW_NAME "avx2"
#define HW_BF16 0
#include "simd/vec_avx2.h"
#include "kernels/table.h"

namespace headwise {
const Kernels* avx2_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
