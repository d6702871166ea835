// One call of the fuzzer: its tensors, its forward and backward, and their comparison.
#pragma once

#include <map>

#include "fuzz/cases.h"

namespace fuzz {

struct Output {
  std::string error;
  std::vector<double> out, lse;  // in logical order
};

struct Worst {
  double share = 0;  // fraction of the allowed error
  uint64_t seed = 0;
};

extern std::map<std::string, Worst> worst;

extern int fixed_threads;       // the number of threads in each case, or 0 for 2 to 8
int threads_of(const Case& k);  // the bits must be those of one thread

// The tensors of one call. If `dirty`, everything that must not change the result is filled with NaN, otherwise with
// zeros, and some tensors in lists have the negative bit.
struct Tensors {
  fake::Tensor query, key, value, key_scale, value_scale, table, sinks, bounds, gate, seed, grad_out, grad_lse;
  std::vector<fake::Tensor> segments, dense, alibi, maps, relative;

  Tensors(const Case& k, bool dirty);
  std::vector<fake::Tensor*> all();
  void move_to_pages(const Case& k);  // moves keys and values; unused pages hold NaN

 private:
  void poison(const Case& k);
};

std::vector<double> numbers(const fake::Tensor& t);
Output run(const Case& k, const Tensors& t);
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);

// Returns an empty text, or a description of the error of x, whose dtype may be smaller than the query's. Updates
// `worst`.
std::string compare(const char* what, const std::vector<double>& x, const std::vector<double>& expected,
                    const std::vector<double>& error, const Case& k, const std::string& isa, int32_t dtype = kFloat);
naive::Rounding rounding(int32_t dtype);

// The gradients of query, key and value, then those of sinks, biases and slopes where the call has them.
struct Back {
  std::string error;
  std::vector<std::vector<double>> grads;
};

// If `part`, by `attend_part_backward` with all keys.
Back run_backward(const Case& k, const Tensors& t, bool corrupt, bool part = false);
// As `check` in fuzz.cpp for the forward, on the instruction set in use.
std::string check_backward(const Case& k, const Tensors& dirty, const Tensors& clean, const std::string& isa);
std::string check_statistics(const Case& k, const Tensors& dirty, const Tensors& clean, const std::string& isa);
std::string corrupt_statistics(const Case& k, const Tensors& t);  // the error of the calls, or empty

std::vector<std::string> isas();  // of this CPU
void use(const std::string& isa);
void corrupt(Draw& draw, AtenTensorOpaque& tensor);

// A tensor in a drawn order of axes, with gaps. If `whole_rows`, its last axis stays contiguous.
fake::Tensor draw_laid(Draw& draw, int32_t dtype, const std::vector<int64_t>& sizes, bool whole_rows);
// Quantises one token as the definition does: in float32, to nearest, ties to even. A NaN makes the unit 1, and an Inf
// makes zeros. Appends the bytes and returns the scale.
float quantise(const std::vector<float>& x, std::vector<double>& out);
bool same_numbers(const std::vector<double>& a, const std::vector<double>& b);  // NaN equals NaN

std::string check_append(uint64_t seed);
std::string corrupt_append(uint64_t seed);  // the error of the call, or empty
std::string check_step(uint64_t seed);
std::string corrupt_step(uint64_t seed);  // likewise

}  // namespace fuzz
