// Checks whether this process may use products of tiles of bfloat16 and int8. To be called only on CPUs with AVX-512.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headwise {

// True if the CPU has products of tiles of bfloat16 and int8, and the system lets this process use them. Linux requires
// a request, because the state of a thread grows by 8 KiB.
static inline bool amx_is_allowed() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, saved = 1u << 27;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & (bf16 | tile | int8)) != (bf16 | tile | int8)) return false;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & saved) == 0) return false;  // the system does not save extended state
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned states = 3u << 17;  // shapes and contents of tiles
  if ((low & states) != states) return false;
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, which headers may be too old to have
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

}  // namespace headwise
#endif
