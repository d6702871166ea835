// Reads and checks the arguments that several operators have: from torch's stack to a `Call`.
#pragma once

#include "binding/tensors.h"
#include "call/append_call.h"
#include "call/attention_call.h"

namespace headwise {

// Fills in query, key, value and their sizes. All three must have one dtype.
void fill_problem(Call& p, const View& query, const View& key, const View& value);
// Keys or values of a cache, with their scales if they are int8.
struct CacheTensor {
  const Handle& data;
  const Handle& scale;
};
// The same for keys and values of a cache. With a table they are in pages, and `table` lists the pages of each batch
// row.
void fill_cache_problem(Call& p, const View& query, const CacheTensor& key, const CacheTensor& value,
                        const Handle& table, int64_t length);

int64_t clamp_far(int64_t offset);
float read_scale(double scale);

// The eleven arguments that describe the way from scores to weights: scale, softcap, sinks?, low, high, bounds?,
// segments?, dense?, alibi?, maps?, relative?. The constructor takes them from the stack. A `Rules` owns the tensors to
// which a filled call points, so it must live as long as the call.
class Rules {
 public:
  explicit Rules(const StableIValue* stack);
  void fill(Call& p) const;  // call `fill_problem` first
  const Tensors& dense() const { return dense_; }
  const Tensors& alibi() const { return alibi_; }
  const Tensors& relative() const { return relative_; }  // the last of the call's dense masks

 private:
  double scale_, softcap_;
  int64_t low_, high_;
  Handle sinks_, bounds_;
  Tensors segments_, dense_, alibi_, maps_, relative_;
};

constexpr int kRuleCount = 11;
// The part of a schema that declares these arguments.
#define HEADWISE_RULES                                                                                       \
  "float scale, float softcap, Tensor? sinks, SymInt low, SymInt high, Tensor? bounds, Tensor[]? segments, " \
  "Tensor[]? dense, Tensor[]? alibi, Tensor[]? maps, Tensor[]? relative"

// Gives packed rows the width of the codes that they hold.
View unpacked(View rows, const char* name, Dtype dtype);
// Reads the matrix by which tokens of `width` numbers are rotated: (width, n) float32, n a multiple of 16.
Rotation read_rotation(const Handle& rotation, const char* name, int64_t width);

void take_gate(Call& p, const Handle& gate);
float read_dropout(StableIValue value);
DropoutSeed read_seed(const Handle& seed);
void take_dropout(Call& p, float dropout, const Handle& seed);

}  // namespace headwise
