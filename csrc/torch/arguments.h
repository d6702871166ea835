// The arguments that the operators share, from torch's stack to a `Problem`, checked.
#pragma once

#include "problem.h"
#include "torch/tensors.h"

namespace headwise {

// query, key, value and their sizes; all of one dtype.
void fill_problem(Problem& p, const View& query, const View& key, const View& value);
// Keys or values that a cache holds: a scale with them where they are int8.
struct Held {
  const Owned& data;
  const Owned& scale;
};
// The same with what a cache holds; in pages where there is a table, for each row of the batch a list of them.
void fill_held(Problem& p, const View& query, const Held& key, const Held& value, const Owned& table, int64_t length);

int64_t clamp_far(int64_t offset);
float read_scale(double scale);

// What stands between scores and weights: eleven arguments, scale, softcap, sinks?, low, high, bounds?, segments?, dense?,
// alibi?, maps?, relative?. Takes them from the stack as soon as it is made; owns what the filled problem points to.
class Rules {
 public:
  explicit Rules(const StableIValue* stack);
  void fill(Problem& p) const;  // after `fill_problem`
  const Tensors& dense() const { return dense_; }
  const Tensors& alibi() const { return alibi_; }
  const Tensors& relative() const { return relative_; }  // they are the last of the dense masks

 private:
  double scale_, softcap_;
  int64_t low_, high_;
  Owned sinks_, bounds_;
  Tensors segments_, dense_, alibi_, maps_, relative_;
};

constexpr int kRuleCount = 11;
// Their text in a schema.
#define HEADWISE_RULES                                                                                          \
  "float scale, float softcap, Tensor? sinks, SymInt low, SymInt high, Tensor? bounds, Tensor[]? segments, "    \
  "Tensor[]? dense, Tensor[]? alibi, Tensor[]? maps, Tensor[]? relative"

void take_gate(Problem& p, const Owned& gate);
float read_dropout(StableIValue value);
uint64_t read_seed(const Owned& seed);
void take_dropout(Problem& p, float dropout, const Owned& seed);

}  // namespace headwise
