// The kernels for avx512_vnni: compiled with its flags, and called only if the CPU has it. bfloat16 is computed in
// float32, for CPUs without products of bfloat16 pairs and for those where these take longer.
#define HW_ISA isa_avx512_vnni
#define HW_NAME "avx512_vnni"
// clang-format off: each header needs those above it.
#include "simd/x86/vec_avx512-inl.h"
#include "simd/plain/bf16_none-inl.h"
#include "simd/plain/amx_none-inl.h"
#include "simd/x86/vnni_avx512-inl.h"
#include "simd/plain/words_none-inl.h"
#include "kernels/table-inl.h"
// clang-format on

namespace headwise {
const Kernels* avx512_vnni_kernels() { return &HW_ISA::kernels; }
}  // namespace headwise
