// Macros for the compiler's attributes, prefetching, and the CPU's denormal mode.
#pragma once

#include <stdint.h>

// The caches into which data that is read once is prefetched: 3 for the L1 cache and all caches behind it, 0 for the L1
// cache alone. An instruction set may define it as 0 if that keeps the L2 cache of its CPUs free for data that is read
// again. On Intel's CPUs prefetching with 0 takes three times as long.
#ifndef HW_PREFETCH_LOCALITY
#define HW_PREFETCH_LOCALITY 3
#endif

// The number of keys whose exponentials are computed side by side. Intel's CPUs gain nothing from more than one.
#ifndef HW_KEYS_AT_ONCE
#define HW_KEYS_AT_ONCE 1
#endif

#if defined(__GNUC__) || defined(__clang__)
#define HW_INLINE static inline __attribute__((always_inline))
#define HW_MEMBER inline __attribute__((always_inline))  // HW_INLINE for members of a class
#define HW_LAMBDA __attribute__((always_inline))         // goes after the parameters of a lambda
#define HW_NOINLINE __attribute__((noinline))            // for functions that need all registers
#define HW_PREFETCH_ONCE(p) __builtin_prefetch(p, 0, HW_PREFETCH_LOCALITY)
#define HW_PREFETCH_NEAR(p) __builtin_prefetch(p, 0, 2)  // into the L2 cache
#define HW_PREFETCH_TO_WRITE(p) __builtin_prefetch(p, 1, 3)
#define HW_RESTRICT __restrict__
#elif defined(_MSC_VER)
#define HW_INLINE static __forceinline
#define HW_MEMBER __forceinline
#define HW_LAMBDA
#define HW_NOINLINE __declspec(noinline)
#define HW_PREFETCH_ONCE(p) ((void)(p))
#define HW_PREFETCH_NEAR(p) ((void)(p))
#define HW_PREFETCH_TO_WRITE(p) ((void)(p))
#define HW_RESTRICT __restrict
#else
#define HW_INLINE static inline
#define HW_MEMBER inline
#define HW_LAMBDA
#define HW_NOINLINE
#define HW_PREFETCH_ONCE(p) ((void)(p))
#define HW_PREFETCH_NEAR(p) ((void)(p))
#define HW_PREFETCH_TO_WRITE(p) ((void)(p))
#define HW_RESTRICT
#endif

#if defined(__clang__)
#define HW_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define HW_UNROLL _Pragma("GCC unroll 16")
#else
#define HW_UNROLL
#endif

// Returns p + bytes, which may point outside the array. For prefetches only.
template <class T>
HW_INLINE const T* offset(const T* p, int64_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes));
}

// Makes the address opaque to the compiler. Otherwise it would keep sums of p and other numbers in registers, one for
// each use.
HW_INLINE void opaque_address(const int8_t*& p) {
#if defined(__GNUC__)
  asm volatile("" : "+r"(p));
#else
  (void)p;
#endif
}

// Makes a vector opaque to the compiler, which otherwise loads it again for each product.
template <class Vector>
HW_INLINE void keep_in_register(Vector& x) {
#if defined(__GNUC__) && defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__GNUC__) && defined(__aarch64__)
  asm("" : "+w"(x));
#else
  (void)x;
#endif
}

// Prefetches the line at p, into the L2 cache only if `IntoL2`. It is inline assembly so that the compiler leaves it
// between the products: many prefetches at once would wait for one another.
template <bool IntoL2 = false>
HW_INLINE void prefetch_here(const int8_t* p) {
#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
  if constexpr (IntoL2) {
    asm volatile("prefetcht1 %0" : : "m"(*p));
  } else if constexpr (HW_PREFETCH_LOCALITY == 0) {
    asm volatile("prefetchnta %0" : : "m"(*p));
  } else {
    asm volatile("prefetcht0 %0" : : "m"(*p));
  }
#else
  HW_PREFETCH_ONCE(p);
#endif
}

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
// During the lifetime of this object denormal results are flushed to 0, because on many CPUs each of them costs a
// hundred cycles.
class [[maybe_unused]] FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8000); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};
#elif defined(__aarch64__) && defined(__GNUC__)
class [[maybe_unused]] FlushDenormals {
 public:
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | uint64_t{1} << 24));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
};
#else
class [[maybe_unused]] FlushDenormals {};
#endif
