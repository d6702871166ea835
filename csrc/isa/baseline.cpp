// The kernels for baseline: compiled with its flags, called only where the CPU has it.
#define HW_ISA isa_baseline
#define HW_NAME "baseline"
// clang-format off: each header needs those above it.
#include "simd/plain/vec_plain-inl.h"
#include "simd/plain/bf16_none-inl.h"
#include "simd/plain/amx_none-inl.h"
#include "simd/plain/vnni_none-inl.h"
#include "simd/plain/words_none-inl.h"
#include "kernels/table-inl.h"
// clang-format on

namespace headwise {
const Kernels* baseline_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
