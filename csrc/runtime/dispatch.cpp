// Chooses the instruction set, runs the items of a call on torch's threads, and merges splits of the keys.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#if defined(__SANITIZE_ADDRESS__)  // of g++
#include <sanitizer/asan_interface.h>
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "runtime/dispatch.h"
#include "runtime/repack.h"
#include "runtime/schedule.h"
#include "simd/philox.h"
#include "simd/x86/cpu_amx.h"

namespace headwise {
namespace {

#if defined(__aarch64__)
// Whether the CPU has products of bfloat16 pairs, and products of bytes of which one factor is unsigned.
bool arm_has_bf16_and_i8mm() {
#if defined(__linux__)
  // the values of Linux's headers, which may be too old to have them
  constexpr unsigned long i8mm = 1ul << 13, bf16 = 1ul << 14;
  return (getauxval(AT_HWCAP2) & (i8mm | bf16)) == (i8mm | bf16);
#elif defined(__APPLE__)
  for (const char* name : {"hw.optional.arm.FEAT_BF16", "hw.optional.arm.FEAT_I8MM"}) {
    int has = 0;
    size_t size = sizeof(has);
    if (sysctlbyname(name, &has, &size, nullptr, 0) != 0 || has == 0) return false;
  }
  return true;
#else
  return false;
#endif
}
#endif

[[maybe_unused]] bool cpu_has(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // all such CPUs have F16C
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (std::strcmp(name, "avx2") == 0) return avx2;
  if (std::strcmp(name, "avx512") == 0) return avx512;
  const bool bf16 = __builtin_cpu_supports("avx512bf16"), vnni = __builtin_cpu_supports("avx512vnni");
  if (std::strcmp(name, "avx512_vnni") == 0) return avx512 && vnni;
  if (std::strcmp(name, "amx_bf16") == 0) return avx512 && bf16 && vnni && amx_is_allowed();
  if (std::strcmp(name, "avx512_bf16") == 0) return avx512 && bf16 && vnni;  // it includes vnni_avx512-inl.h, too
#elif defined(__aarch64__)
  if (std::strcmp(name, "neon") == 0) return true;
  if (std::strcmp(name, "neon_bf16") == 0) return arm_has_bf16_and_i8mm();
#endif
  return std::strcmp(name, "baseline") == 0;
}

#if defined(__x86_64__)
// Whether products of bfloat16 pairs are the fastest. Intel's CPUs start one every other cycle, but two float32
// multiply-adds every cycle: pairs do half the arithmetic of float32 there (213 against 405 GF/s on two cores).
[[maybe_unused]] bool pairs_are_quick() {
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel");
}
#endif

}  // namespace

// True on AMD's Zen 4 (family 19h; no instruction set of Zen 3 uses this). There, a prefetch into the L1 cache occupies
// one of its few miss buffers until memory answers, and products have to wait for a free one. A prefetch into the L2
// cache uses other buffers. On Zen 5 this way is a tenth slower.
static std::atomic<bool>& into_l2() {
  static std::atomic<bool> is = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amdfam19h") != 0;
#else
    return false;
#endif
  }();
  return is;
}

bool prefers_l2_prefetch() { return into_l2().load(std::memory_order_relaxed); }

void set_l2_prefetch(bool is) { into_l2() = is; }

namespace {

// The instruction sets that this CPU can run, best first. HEADWISE_BUILT_SETS is CMake's list of those in the library:
// X(avx512) X(avx2).
const std::vector<const Kernels*>& available() {
  static const std::vector<const Kernels*> sets = [] {
#define X(name) name##_kernels(),
    const Kernels* const made[] = {HEADWISE_BUILT_SETS baseline_kernels()};
#undef X
    std::vector<const Kernels*> all;
    for (const Kernels* set : made) {
      if (cpu_has(set->name)) all.push_back(set);
    }
#if defined(__x86_64__)
    // then these two neighbours in the list change places
    for (size_t i = 1; i < all.size() && !pairs_are_quick(); ++i) {
      if (std::strcmp(all[i - 1]->name, "avx512_bf16") == 0 && std::strcmp(all[i]->name, "avx512_vnni") == 0) {
        std::swap(all[i - 1], all[i]);
      }
    }
#endif
    return all;
  }();
  return sets;
}

const Kernels* find(const char* name) {
  for (const Kernels* set : available()) {
    if (std::strcmp(set->name, name) == 0) return set;
  }
  return nullptr;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> set = [] {
    const char* forced = std::getenv("HEADWISE_ISA");
    const Kernels* by_name = forced != nullptr ? find(forced) : nullptr;
    return by_name != nullptr ? by_name : available().front();
  }();
  return set;
}

std::atomic<bool> forked{false};

// A forked child has no thread pool, and a parallel region there would wait for it for ever. The handler is installed
// when the library is loaded, because the parent may have started the pool without calling this library.
#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int watches_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

// Nanoseconds of work below which no threads are woken. In a loop of calls another thread costs 3 to 5 us.
std::atomic<double> parallel_threshold{8000.0};

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

int64_t workers_for(double nanoseconds) {
  return forked || nanoseconds < parallel_threshold.load(std::memory_order_relaxed) ? 1 : thread_count();
}

void set_parallel_threshold(double nanoseconds) { parallel_threshold = nanoseconds; }

char* scratch_of(int64_t bytes) {
  thread_local std::unique_ptr<char[]> buffer;
  thread_local int64_t size = 0;
  if (size < bytes) {
    buffer.reset();
    size = 0;
    buffer.reset(new char[static_cast<size_t>(bytes) + 64]);
    size = bytes;
  }
  const auto address = reinterpret_cast<uintptr_t>(buffer.get());
  char* start = reinterpret_cast<char*>((address + 63) / 64 * 64);
// with AddressSanitizer, reads behind the requested bytes are errors and unwritten floats are NaN
#if defined(__SANITIZE_ADDRESS__)
  if (size == 0) return start;
  char* end = buffer.get() + size + 64;
  ASAN_UNPOISON_MEMORY_REGION(start, static_cast<size_t>(end - start));
  std::memset(start, 0xff, static_cast<size_t>(bytes));
  ASAN_POISON_MEMORY_REGION(start + bytes, static_cast<size_t>(end - start - bytes));
#endif
  return start;
}

double estimate(const Call& p) {
  int64_t keys = p.S;
  if (p.bounds == nullptr && p.high - p.low < keys) keys = p.high - p.low;
  const double pairs = static_cast<double>(p.B * p.H * p.T) * static_cast<double>(keys);
  const double read = static_cast<double>(p.B * p.K * keys) * static_cast<double>(p.D + p.V);
  // In a nanosecond a thread does 100 multiply-adds, or reads 10 elements.
  return pairs * static_cast<double>(p.D + p.V) / 100.0 + read / 10.0;
}

Floats::Floats(int64_t n) : memory(new float[static_cast<size_t>(n) + 16]) {
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  data = reinterpret_cast<float*>((address + 63) / 64 * 64);
}

void attend(const Call& call) {
  const Kernels& set = kernels();
  const int64_t workers = workers_for(estimate(call));
  const RepackedKeys packed(call, workers);
  const Call& p = packed.call();
  Schedule schedule = schedule_rows(p, set.plan(p), workers);
  Plan& plan = schedule.plan;
  std::optional<Floats> partial;
  if (plan.splits > 1) {
    partial.emplace(p.B * p.K * plan.splits * plan.split_floats(p));
    plan.partial = partial->data;
  }
  const int64_t items = plan.groups(p) * plan.splits;
  for_each_worker(workers, items, schedule.uniform, [&](Queue& queue) {
    auto get = [&](bool takes) {
      const int64_t number = takes ? queue.take() : queue.peek();
      return number < 0 ? number : schedule.item(number);
    };
    const Items mine = {[](void* context, bool takes) { return (*static_cast<decltype(get)*>(context))(takes); }, &get};
    set.run(p, plan, scratch_of(plan.scratch_bytes), mine);
  });
  if (plan.splits == 1) return;
  constexpr int64_t kRows = 16;
  const int64_t parts = (plan.rows + kRows - 1) / kRows;
  const auto merge = [&](int64_t i, char*) {
    const int64_t head = i / parts, first = i % parts * kRows;
    set.merge(p, plan, head / p.K, head % p.K, first, std::min(first + kRows, plan.rows));
  };
  for_each_item(workers, p.B * p.K * parts, true, 0, merge, scratch_of);
}

void dropout_keep(bool* keep, int64_t B, int64_t H, int64_t first, int64_t rows, int64_t S, float dropout,
                  const DropoutSeed& seed) {
  const uint32_t threshold = dropout_threshold(dropout);
  const int64_t heads = seed.heads == 0 ? H : seed.heads;
  for (int64_t n = 0; n < B * H; ++n) {
    const int64_t plane = n / H * heads + seed.head + n % H;
    for (int64_t i = seed.query + first; i < seed.query + first + rows; ++i) {
      Philox words = {};
      for (int64_t j = 0; j < S; ++j) {
        const int64_t key = seed.key + j;
        if (j == 0 || key % 4 == 0) words = dropout_words(seed.value, plane, i, key / 4);
        keep[j] = words.word[key % 4] >= threshold;
      }
      keep += S;
    }
  }
}

const char* isa() { return kernels().name; }

const char* const* isas() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> all;
    for (const Kernels* set : available()) all.push_back(set->name);
    all.push_back(nullptr);
    return all;
  }();
  return names.data();
}

bool use_isa(const char* name) {
  const Kernels* set = find(name);
  if (set == nullptr) return false;
  current().store(set, std::memory_order_relaxed);
  return true;
}

}  // namespace headwise
