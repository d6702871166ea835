// The kernels for baseline: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_baseline
#define HW_NAME "baseline"
#define HW_BF16 0
#include "simd/vec_plain.h"
#include "kernels/table.h"

namespace headwise {
const Kernels* baseline_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
