// Runs an append to a cache of codes on torch's threads, some tokens of a head in each item.
#include "call/append_call.h"

#include <algorithm>
#include <vector>

#include "runtime/dispatch.h"

namespace headwise {

void append_codes(const Append& append, const AppendSpan* spans, size_t count) {
  constexpr int64_t piece = 64;  // tokens of an item
  std::vector<AppendSpan> pieces;
  int64_t tokens = 0;
  for (size_t n = 0; n < count; ++n) {
    AppendSpan rest = spans[n];
    for (tokens += rest.count; rest.count > 0; rest.count -= piece) {
      pieces.push_back(rest);
      pieces.back().count = std::min(rest.count, piece);
      rest.from_place += piece;
      rest.to_place += piece;
    }
  }
  const int64_t widest = std::max(append.key.width, append.value.width);
  const int64_t rows = tokens * append.K, width = append.key.width + append.value.width;
  double nanoseconds = static_cast<double>(rows) * (20.0 + static_cast<double>(width) / 4.0);
  if (append.key.rotation.data != nullptr) nanoseconds *= 4.0;
  const Kernels& set = kernels();
  for_each_item(
      workers_for(nanoseconds), static_cast<int64_t>(pieces.size()) * append.K, true,
      set.append_scratch_floats(widest) * static_cast<int64_t>(sizeof(float)),
      [&](int64_t i, char* scratch) {
        const AppendSpan& span = pieces[static_cast<size_t>(i / append.K)];
        set.append(append, span, i % append.K, reinterpret_cast<float*>(scratch));
      },
      scratch_of);
}

}  // namespace headwise
