// Attention by its definition, in double, with an error bound for each result: the reference of the fuzzer.
#pragma once

#include <stdint.h>

#include <vector>

namespace naive {

struct Dense {
  bool boolean = false;
  std::vector<double> x;  // (B, H, T, S)
};

struct Segments {
  std::vector<int64_t> query, key;  // (B, T), (B, S)
};

struct Alibi {
  std::vector<double> slopes;    // (B, H)
  std::vector<int64_t> offsets;  // (B)
};

struct Call {
  int64_t B, H, K, T, S, D, V;
  std::vector<double> query, key, value;  // as (B, H, T, D), (B, K, S, D), (B, K, S, V)
  double scale = 1, softcap = 0;
  std::vector<double> sinks;  // (H), or empty
  int64_t low, high;
  std::vector<int64_t> bounds;  // (B, 5): low, high, start, stop, always; or empty
  std::vector<Segments> segments;
  std::vector<Dense> dense;
  std::vector<Alibi> alibi;
  std::vector<double> gate;         // (B, H, T, V), or empty
  int bytes = 0;                    // int8 keys and values: the digits of queries and weights
  std::vector<double> value_scale;  // (B, K, S) of these
  double dropout = 0;
  std::vector<char> keep;  // (B, H, T, S) where dropout > 0
};

struct Score {
  bool attended = false;
  double value = 0, error = 0;
  double slope = 1, slope_error = 0;  // of the softcap
};

Score score_of(const Call& c, int64_t b, int64_t h, int64_t i, int64_t j);

// The relative error of a weight whose score has this error. It is finite even for products of two such errors; a
// weight of 0 has none.
double error_of_weight(double error);

// Unit roundoffs of a kernel: of the output, of the weights before they are multiplied by values, and of the
// exponential.
struct Rounding {
  double out, weights, exponential, smallest;
};

struct Result {
  std::vector<double> out, out_error;  // (B, H, T, V)
  std::vector<double> lse, lse_error;  // (B, H, T)
};

// True if bounds, ids and boolean tensors allow row (b, h, i) to attend key j. These are all rules except the -inf of a
// bias.
bool may_attend(const Call& c, int64_t b, int64_t h, int64_t i, int64_t j);

Result attention(const Call& c, const Rounding& unit);

struct Gradient {
  std::vector<double> x, error;
};

// The gradients of the results.
struct Upstream {
  std::vector<double> out;  // (B, H, T, V)
  std::vector<double> lse;  // (B, H, T), or empty
};

struct Gradients {
  Gradient query, key, value, sinks;
  Gradient scores;               // (B, H, T, S): the gradient of a bias of that size
  std::vector<Gradient> slopes;  // (B, H) of each rule
};

// Computes the gradients by the formulas. `forward` is the result of the call without a gate. A row with a NaN or Inf
// makes everything that it may attend NaN, unless its upstream gradient is 0.
Gradients backward(const Call& c, const Rounding& unit, const Result& forward, const Upstream& upstream);

}  // namespace naive
