// Rotary positions of a decode step: rotates one row of each head and rounds wherever torch rounds. Not to be called
// under FlushDenormals, because torch keeps denormals.
#pragma once

#include "call/step_call.h"
#include "kernels/cache/quantize-inl.h"

namespace headwise {
namespace HW_ISA {

// A thread's scratch. Each array has room for the whole vectors of a head.
struct StepScratch {
  float *x, *partner, *cos, *sin, *rows, *rotated;
  uint16_t* halves;

  StepScratch(char* base, int64_t width) {
    const int64_t n = round_up(width, W);
    x = reinterpret_cast<float*>(base);
    partner = x + n;
    cos = partner + n;
    sin = cos + n;
    rows = sin + n;
    rotated = rows + kRotatedRows * n;
    halves = reinterpret_cast<uint16_t*>(rotated + kRotatedRows * n);
  }
};

static int64_t step_scratch_bytes(int64_t width) { return round_up(width, W) * (18 + 8 * kRotatedRows); }

static inline void round_in_place(float* x, int64_t n, Dtype dtype, uint16_t* halves) {
  if (dtype == Dtype::f32) return;
  write_floats(reinterpret_cast<char*>(halves), dtype, x, n);
  copy_floats(x, reinterpret_cast<const char*>(halves), dtype, 1, n, n);
}

// Loads the cosine and the sine of each rotated element.
static inline void load_angles(const Rotary& rotary, int64_t b, const StepScratch& s) {
  const int64_t size = rotary.size, half = size / 2, n = rotary.by_number ? size : half;
  const auto load_line = [&](const void* from, const int64_t* stride, float* line, float* out) {
    const char* row = static_cast<const char*>(from) + b * stride[0] * size_of(rotary.dtype);
    copy_floats(rotary.by_number ? out : line, row, rotary.dtype, stride[1], n, n);
    for (int64_t d = 0; d < size && !rotary.by_number; ++d) out[d] = line[rotary.interleaved ? d / 2 : d % half];
  };
  load_line(rotary.cos, rotary.cos_stride, s.x, s.cos);
  load_line(rotary.sin, rotary.sin_stride, s.x, s.sin);
}

// Writes a head of n elements, rotated, to s.x, as floats that `dtype` can hold.
static inline void rotate_row(const Rotary& rotary, const char* row, Dtype dtype, int64_t stride, int64_t n,
                              const StepScratch& s) {
  copy_floats(s.x, row, dtype, stride, n, round_up(n, W));
  if (rotary.cos == nullptr) return;
  const int64_t size = rotary.size, half = size / 2;
  float* HW_RESTRICT x = s.x + rotary.first;
  float* HW_RESTRICT partner = s.partner;
  if (rotary.interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      partner[2 * i] = -x[2 * i + 1];
      partner[2 * i + 1] = x[2 * i];
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      partner[i] = -x[half + i];
      partner[half + i] = x[i];
    }
  }
  for (int64_t d = 0; d < size; ++d) x[d] *= s.cos[d];
  for (int64_t d = 0; d < size; ++d) partner[d] *= s.sin[d];
  round_in_place(x, size, rotary.dtype, s.halves);
  round_in_place(partner, size, rotary.dtype, s.halves);
  for (int64_t d = 0; d < size; ++d) x[d] += partner[d];
  round_in_place(x, size, dtype, s.halves);
}

// Rotates and writes all heads of row b of the batch.
static void place_row(const Call& cache, const Step& step, int64_t b, char* scratch) {
  const int64_t D = cache.D, V = step.value_width;
  const StepScratch s(scratch, max(D, V));
  const Dtype dtype = step.query.dtype;
  if (step.rotary.cos != nullptr) load_angles(step.rotary, b, s);
  const bool packed = step.key_rotation.data != nullptr;
  const int64_t together = packed ? kRotatedRows : 1, pitch = round_up(D, W);
  for (int64_t first = 0; first < cache.H; first += together) {
    const int64_t count = min(together, cache.H - first);
    const float* rows = s.x;
    for (int64_t n = 0; n < count; ++n) {
      rotate_row(step.rotary, at(step.query, b, first + n, 0), dtype, step.query.stride[3], D, s);
      if (packed) memcpy(s.rows + n * pitch, s.x, static_cast<size_t>(pitch) * sizeof(float));
    }
    if (packed) {
      rotate_rows(s.rows, count, pitch, step.key_rotation, D, s.rotated);
      rows = s.rotated;
    }
    for (int64_t n = 0; n < count; ++n)
      write_floats(step.rotated + (b * cache.H + first + n) * D * size_of(dtype), dtype, rows + n * pitch, D);
  }
  const int64_t place = step.places[b], page = cache.table == nullptr ? 0 : place / cache.page;
  const int64_t to_row = cache.table == nullptr ? b : cache.table[b * cache.table_stride + page];
  const int64_t to_place = cache.table == nullptr ? place : place % cache.page;
  const auto write = [&](const Tensor4& to, const Tensor4& scale, const Rotation& rotation, int64_t head, int64_t n) {
    char* data = const_cast<char*>(at(to, to_row, head, to_place));
    if (!is_code(to.dtype)) return write_floats(data, dtype, s.x, n);
    auto* unit = reinterpret_cast<float*>(const_cast<char*>(at(scale, to_row, head, to_place)));
    if (to.dtype == Dtype::i8) {
      *unit = quantize_floats(s.x, n, reinterpret_cast<int8_t*>(data));
      return;
    }
    rotate_rows<1>(s.x, 0, rotation, n, s.rotated);
    *unit =
        encode_floats(s.rotated, n, floats_are_finite(s.x, round_up(n, W)), to.dtype, reinterpret_cast<uint8_t*>(data));
  };
  for (int64_t head = 0; head < cache.K; ++head) {
    rotate_row(step.rotary, at(step.key, b, head, 0), dtype, step.key.stride[3], D, s);
    write(cache.key, cache.key_scale, step.key_rotation, head, D);
    if (step.value.data == nullptr) continue;
    copy_floats(s.x, at(step.value, b, head, 0), dtype, step.value.stride[3], V, round_up(V, W));
    write(cache.value, cache.value_scale, step.value_rotation, head, V);
  }
}

// Rotates and writes the outputs of all heads of row b of the batch.
static void rotate_output_row(const Call& call, const RotatedOutput& rotated, int64_t b, char* scratch) {
  const Rotation& rotation = rotated.rotation;
  const StepScratch s(scratch, rotation.pitch);
  for (int64_t first = 0; first < call.H; first += kRotatedRows) {
    const int64_t count = min(int64_t{kRotatedRows}, call.H - first);
    rotate_rows(rotated.rows + (b * call.H + first) * rotation.pitch, count, rotation.pitch, rotation, call.V,
                s.rotated);
    for (int64_t n = 0; n < count; ++n) write_row(call, b, first + n, 0, s.rotated + n * rotation.pitch);
  }
}

}  // namespace HW_ISA
}  // namespace headwise
