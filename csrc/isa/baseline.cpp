// The kernels for baseline: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_baseline
#define HW_NAME "baseline"
// clang-format off: each header needs those above it.
#include "simd/vec_plain.h"
#include "simd/bf16_none.h"
#include "simd/amx_none.h"
#include "simd/vnni_none.h"
#include "kernels/table.h"
// clang-format on

namespace headwise {
const Kernels* baseline_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
