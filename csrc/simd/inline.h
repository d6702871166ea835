// What the kernel text needs of the compiler and of the machine's modes.
#pragma once

#if defined(__GNUC__) || defined(__clang__)
#define HW_INLINE static inline __attribute__((always_inline))
#define HW_APART __attribute__((noinline))  // on its own the compiler finds registers for all it holds
#define HW_PREFETCH_ONCE(p) __builtin_prefetch(p, 0, 0)  // read once, soon: past the second cache
#define HW_PREFETCH_NEAR(p) __builtin_prefetch(p, 0, 2)  // into the second cache
#define HW_RESTRICT __restrict__
#elif defined(_MSC_VER)
#define HW_INLINE static __forceinline
#define HW_APART __declspec(noinline)
#define HW_PREFETCH_ONCE(p) ((void)(p))
#define HW_PREFETCH_NEAR(p) ((void)(p))
#define HW_RESTRICT __restrict
#else
#define HW_INLINE static inline
#define HW_APART
#define HW_PREFETCH_ONCE(p) ((void)(p))
#define HW_PREFETCH_NEAR(p) ((void)(p))
#define HW_RESTRICT
#endif

#if defined(__clang__)
#define HW_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define HW_UNROLL _Pragma("GCC unroll 16")
#else
#define HW_UNROLL
#endif

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
// While it lives, a result too small for a normal number is 0: on many CPUs denormals cost a hundred cycles each.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8000); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};
#else
class FlushDenormals {};
#endif
