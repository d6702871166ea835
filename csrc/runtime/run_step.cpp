// Runs a decode step on torch's threads, one item for each row of the batch.
#include "call/step_call.h"
#include "runtime/dispatch.h"

namespace headwise {

void place_step(const Call& cache, const Step& step) {
  const Kernels& set = kernels();
  const int64_t width = cache.D > step.value_width ? cache.D : step.value_width;
  double nanoseconds = static_cast<double>(cache.B * (cache.H + 2 * cache.K)) * static_cast<double>(width);
  if (step.key_rotation.data != nullptr) nanoseconds *= 4.0;
  for_each_item(
      workers_for(nanoseconds), cache.B, true, set.step_scratch_bytes(width),
      [&](int64_t b, char* scratch) { set.place_row(cache, step, b, scratch); }, scratch_of);
}

void rotate_output(const Call& call, const RotatedOutput& rotated) {
  const Kernels& set = kernels();
  const double nanoseconds = 4.0 * static_cast<double>(call.B * call.H) * static_cast<double>(call.V);
  for_each_item(
      workers_for(nanoseconds), call.B, true, set.step_scratch_bytes(rotated.rotation.pitch),
      [&](int64_t b, char* scratch) { set.rotate_output_row(call, rotated, b, scratch); }, scratch_of);
}

}  // namespace headwise
