// Runs a linear layer on torch's threads, some rows of the weights in each item.
#include "call/linear_call.h"

#include <algorithm>

#include "runtime/dispatch.h"

namespace headwise {

void linear(const Linear& layer) {
  constexpr int64_t item_bytes = 256 << 10, bytes_per_nanosecond = 12;
  const Kernels& set = kernels();
  const int64_t padded = set.linear_padded(layer.width),
                row_bytes = std::max<int64_t>(1, padded * size_of(layer.dtype));
  const Floats packed((kLinearRows + 1) * padded);
  set.pack_linear(layer, packed.data, packed.data + kLinearRows * padded);
  // Whole groups of outputs, so that only the last item has a rest.
  const int64_t outputs = std::clamp<int64_t>(item_bytes / row_bytes / 16, 1, kLinearOutputs / 16) * 16;
  const double nanoseconds =
      static_cast<double>(layer.count * row_bytes) / bytes_per_nanosecond * static_cast<double>(layer.R + 1) / 2;
  for_each_item(
      workers_for(nanoseconds), (layer.count + outputs - 1) / outputs, true, 0,
      [&](int64_t i, char*) {
        set.run_linear(layer, packed.data, i * outputs, std::min(layer.count, (i + 1) * outputs));
      },
      scratch_of);
}

}  // namespace headwise
