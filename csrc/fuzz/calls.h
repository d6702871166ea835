// One call of the fuzzer: its tensors, the forward and the backward run on them, and what they are compared by.
#pragma once

#include <map>

#include "fuzz/cases.h"

namespace fuzz {

struct Output {
  std::string error;
  std::vector<double> out, lse;  // in logical order
};

struct Worst {
  double share = 0;  // of the error allowed
  uint64_t seed = 0;
};

extern std::map<std::string, Worst> worst;

// The tensors of one call. `dirty` fills what must not matter with NaN, else with zeros, and gives what lies in lists the
// negative bit now and then.
struct Tensors {
  fake::Tensor query, key, value, key_scale, value_scale, table, sinks, bounds, gate, seed, grad_out, grad_lse;
  std::vector<fake::Tensor> segments, dense, alibi, maps, relative;

  Tensors(const Case& k, bool dirty);
  std::vector<fake::Tensor*> all();
  void lay_in_pages(const Case& k);  // keys and values, as they are, with NaN in places that nobody has

 private:
  void poison(const Case& k);
};

std::vector<double> numbers(const fake::Tensor& t);
Output run(const Case& k, const Tensors& t);
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);

// Empty, or what is wrong with x, whose own dtype may be smaller than the query's. Remembers how much of the allowed error
// was used.
std::string compare(const char* what, const std::vector<double>& x, const std::vector<double>& expected,
                    const std::vector<double>& error, const Case& k, const std::string& isa, int32_t dtype = kFloat);
naive::Rounding rounding(int32_t dtype);

// The gradients: those of query, key, value, and then, where there are such, of sinks, biases and slopes.
struct Back {
  std::string error;
  std::vector<std::vector<double>> grads;
};

Back run_backward(const Case& k, const Tensors& t, bool spoiled_ends);
// What `check` in fuzz.cpp does with the forward; on the instruction set in use.
std::string check_backward(const Case& k, const Tensors& dirty, const Tensors& clean, const std::string& isa);
std::string check_statistics(const Case& k, const Tensors& dirty, const Tensors& clean, const std::string& isa);
std::string spoiled_statistics(const Case& k, const Tensors& t);  // the error of the calls, or empty

}  // namespace fuzz
