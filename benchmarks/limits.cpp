// What this machine can do at most: multiply-adds a second and bytes read a second, by all threads together.
// Compiled on the fly by limits.py with -march=native; a function whose instructions the CPU lacks returns 0.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

volatile double sink;  // results go here, so that no loop is removed

// Each worker calls work(index), which returns how much it did, until the time is up. Returns work a second, all
// together.
template <class Work> double rate(int threads, double seconds, Work work) {
    std::atomic<int> ready{0};
    std::vector<double> done(threads), took(threads);
    auto loop = [&](int index) {
        work(index);  // pages in, clock up
        ready.fetch_add(1);
        while (ready.load() < threads) {}
        const auto start = Clock::now();
        do done[index] += work(index);
        while ((took[index] = since(start)) < seconds);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(loop, i);
    loop(0);
    for (auto& thread : others) thread.join();
    double sum = 0;
    for (int i = 0; i < threads; ++i) sum += done[i] / took[i];
    return sum;
}

// A multiply-add waits some 4 cycles for its predecessor and two start in a cycle: as many independent sums as the
// registers hold keep both units busy. The compiler makes the multiply-add of a * b + c.
template <class Vector, int sums> double multiply_adds(double repeats) {
    constexpr int lanes = sizeof(Vector) / sizeof(float);
    Vector sum[sums], a, b;
    for (int lane = 0; lane < lanes; ++lane) a[lane] = 0.5f + lane * 1e-3f, b[lane] = 1e-3f;
    for (auto& one : sum) one = b;
    for (double n = 0; n < repeats; ++n) {
        asm volatile("" : "+m"(a), "+m"(b));  // not known beforehand
        const Vector x = a, y = b;
        for (int inner = 0; inner < 64; ++inner) {
#pragma GCC unroll 24
            for (int i = 0; i < sums; ++i) sum[i] = sum[i] * x + y;
        }
    }
    float total = 0;
    for (auto& one : sum)
        for (int lane = 0; lane < lanes; ++lane) total += one[lane];
    sink = total;
    return repeats * 64 * sums * lanes * 2;
}

#if defined(__AVX512F__)
typedef float Wide __attribute__((vector_size(64)));
constexpr int wide_sums = 24;
#elif defined(__AVX__)
typedef float Wide __attribute__((vector_size(32)));
constexpr int wide_sums = 12;
#else
typedef float Wide __attribute__((vector_size(16)));
constexpr int wide_sums = 12;
#endif

#if defined(__AVX512BF16__)
double bf16_products(double repeats) {
    __m512 sum[24];
    for (auto& one : sum) one = _mm512_setzero_ps();
    __m512i a = _mm512_set1_epi16(0x3f00), b = _mm512_set1_epi16(0x3a80);
    for (double n = 0; n < repeats; ++n) {
        asm volatile("" : "+v"(a), "+v"(b));
        for (int inner = 0; inner < 64; ++inner) {
#pragma GCC unroll 24
            for (int i = 0; i < 24; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)a, (__m512bh)b);
        }
    }
    __m512 all = sum[0];
    for (auto& one : sum) all += one;
    sink = all[0] + all[7];
    return repeats * 64 * 24 * 32 * 2;
}
#endif

// One pass over a piece of memory in several streams, each prefetched so many bytes ahead (0: by the hardware alone) into
// the L1 cache (3) or the L2 cache (2).
template <size_t streams, size_t ahead, int level = 3> double pass(const char* bytes, size_t size) {
    typedef unsigned Line __attribute__((vector_size(64)));
    const size_t part = size / streams / 64 * 64;
    Line sum[streams] = {};
    for (size_t at = 0; at < part; at += 64) {
#pragma GCC unroll 8
        for (size_t s = 0; s < streams; ++s) {
            const char* here = bytes + s * part + at;
            if (ahead > 0) __builtin_prefetch(here + ahead, 0, level);
            Line line;
            std::memcpy(&line, here, sizeof line);
            sum[s] += line;
        }
    }
    Line all = sum[0];
    for (size_t s = 1; s < streams; ++s) all += sum[s];
    sink = all[0] + all[7];
    return static_cast<double>(part * streams);
}

// The loops that were the fastest on some CPU, for buffers of some size: more streams have more lines on their way.
double (*const loops[])(const char*, size_t) = {pass<1, 0>, pass<1, 4096>, pass<1, 4096, 2>,    pass<4, 0>,
                                                pass<4, 1024>, pass<4, 1024, 2>, pass<8, 0>, pass<8, 2048>};
constexpr int loop_count = sizeof(loops) / sizeof(loops[0]);

}  // namespace

extern "C" double fma_rate(int threads, double seconds) {
    return rate(threads, seconds, [](int) { return multiply_adds<Wide, wide_sums>(500); });
}

// The multiply-adds of 8 lanes that AVX2 has, for kernels limited to AVX2.
extern "C" double fma_avx2_rate(int threads, double seconds) {
#if defined(__AVX2__) && defined(__FMA__)
    typedef float Eight __attribute__((vector_size(32)));
    return rate(threads, seconds, [](int) { return multiply_adds<Eight, 12>(1000); });
#else
    return 0;
#endif
}

extern "C" double bf16_rate(int threads, double seconds) {
#if defined(__AVX512BF16__)
    return rate(threads, seconds, [](int) { return bf16_products(500); });
#else
    return 0;
#endif
}

// Bytes a second read from these buffers, over and over, by the loop that reads them fastest, each thread its own part
// of each: what caches hold comes from the caches, as it does for a kernel called over and over.
extern "C" double read_rate(int threads, double seconds, const char** buffers, const size_t* sizes, int count) {
    double best = 0;
    for (const auto loop : loops) {
        best = std::max(best, rate(threads, seconds / loop_count, [=](int index) {
            double done = 0;
            for (int i = 0; i < count; ++i) {
                const size_t part = sizes[i] / threads / 64 * 64;
                done += loop(buffers[i] + index * part, part);
            }
            return done;
        }));
    }
    return best;
}
