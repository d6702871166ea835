// Copies keys and values that are far apart in memory into one block. In memory of the order (B, T, H, D), each key of
// a head can be on a page of its own. Every item of rows would then have to look up all of these pages again, and its
// rows would compete for few lines of the caches.
#pragma once

#include <memory>
#include <optional>

#include "call/attention_call.h"

namespace headwise {

// The call with its keys and values in place, or in a copy if many rows read each key.
class RepackedKeys {
 public:
  RepackedKeys(const Call& p, int64_t workers);
  const Call& call() const { return packed_ ? *packed_ : call_; }

 private:
  const Call& call_;
  std::optional<Call> packed_;
  std::unique_ptr<char[]> memory_;
};

}  // namespace headwise
