#include "runtime/repack.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "runtime/dispatch.h"
#include "runtime/thread_pool.h"

namespace headwise {
namespace {

constexpr int64_t kManyRows = 4096;  // rows that read each key: for fewer rows the copy takes longer than it saves
constexpr int64_t kFarApart = 2048;  // bytes from key to key
constexpr int64_t kKeys = 128;       // copied at a time
constexpr int64_t kLine = 64;

// Bytes from row to row of the copy: whole cache lines, but no multiple of 1024, because such rows would share a few
// lines of the caches.
int64_t pitch_of(int64_t width, Dtype dtype) {
  const int64_t lines = (width * size_of(dtype) + kLine - 1) / kLine * kLine;
  return lines % 1024 == 0 ? lines + kLine : lines;
}

bool is_far_apart(const Call& p, const Tensor4& x) {
  const bool broadcast = (x.stride[0] == 0 && p.B > 1) || (x.stride[1] == 0 && p.K > 1);
  return x.stride[3] == 1 && !broadcast && x.stride[2] * size_of(x.dtype) >= kFarApart;
}

bool pays(const Call& p) {
  if (p.table != nullptr || p.bytes() || p.V == 0 || !is_far_apart(p, p.key) || !is_far_apart(p, p.value)) return false;
  int64_t keys = p.S;
  if (p.bounds == nullptr) keys = std::min(keys, p.high - p.low);
  const double rows = static_cast<double>(p.T * (p.H / p.K)) * static_cast<double>(keys) / static_cast<double>(p.S);
  return rows >= static_cast<double>(kManyRows);
}

// Copies x to `to`, with `width` columns. Some keys of all heads are copied before the next keys, because they share
// pages.
Tensor4 copied(const Call& p, const Tensor4& x, int64_t width, char* to, int64_t workers) {
  const int64_t size = size_of(x.dtype), pitch = pitch_of(width, x.dtype), parts = (p.S + kKeys - 1) / kKeys;
  const auto copy = [&](int64_t i, char*) {
    const int64_t b = i / parts, first = i % parts * kKeys, last = std::min(first + kKeys, p.S);
    for (int64_t k = 0; k < p.K; ++k) {
      const char* from = static_cast<const char*>(x.data) + (b * x.stride[0] + k * x.stride[1]) * size;
      char* rows = to + (b * p.K + k) * p.S * pitch;
      for (int64_t j = first; j < last; ++j) {
        std::memcpy(rows + j * pitch, from + j * x.stride[2] * size, static_cast<size_t>(width * size));
      }
    }
  };
  for_each_item(workers, p.B * parts, true, 0, copy, scratch_of);
  Tensor4 packed = x;
  packed.data = to;
  packed.stride[0] = p.K * p.S * pitch / size;
  packed.stride[1] = p.S * pitch / size;
  packed.stride[2] = pitch / size;
  return packed;
}

}  // namespace

RepackedKeys::RepackedKeys(const Call& p, int64_t workers) : call_(p) {
  if (!pays(p)) return;
  const int64_t rows = p.B * p.K * p.S, keys = rows * pitch_of(p.D, p.key.dtype);
  const int64_t bytes = keys + rows * pitch_of(p.V, p.value.dtype) + kLine;
  memory_.reset(new (std::nothrow) char[static_cast<size_t>(bytes)]);
  if (memory_ == nullptr) return;
  const auto address = reinterpret_cast<uintptr_t>(memory_.get());
  char* to = reinterpret_cast<char*>((address + kLine - 1) / kLine * kLine);
  packed_ = p;
  packed_->key = copied(p, p.key, p.D, to, workers);
  packed_->value = copied(p, p.value, p.V, to + keys, workers);
}

}  // namespace headwise
