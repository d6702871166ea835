// Keys and values that lie far apart, side by side. In memory of the order (B, T, H, D) each key of a head is on a page
// of its own, and every item of rows would look up all these pages again, and find its rows in few lines of the caches.
#pragma once

#include <memory>
#include <optional>

#include "call/attention_call.h"

namespace headwise {

// The call with keys and values as they are, or in a copy where many rows read each key.
class PackedKeys {
 public:
  PackedKeys(const Problem& p, int64_t workers);
  const Problem& call() const { return packed_ ? *packed_ : call_; }

 private:
  const Problem& call_;
  std::optional<Problem> packed_;
  std::unique_ptr<char[]> memory_;
};

}  // namespace headwise
