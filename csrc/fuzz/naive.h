// Attention by its definition, in double, with the error that each result may have: what the fuzzer holds kernels against.
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
  std::vector<double> sinks;     // (H), or empty
  int64_t low, high;
  std::vector<int64_t> bounds;   // (B, 5): low, high, start, stop, always; or empty
  std::vector<Segments> segments;
  std::vector<Dense> dense;
  std::vector<Alibi> alibi;
  std::vector<double> gate;      // (B, H, T, V), or empty
  int bytes = 0;                    // int8 keys and values: the digits that queries and weights may be written in
  std::vector<double> value_scale;  // (B, K, S) of these
  double dropout = 0;
  std::vector<char> keep;        // (B, H, T, S) where dropout > 0
};

struct Score {
  bool attended = false;
  double value = 0, error = 0;
  double slope = 1, slope_error = 0;  // of the softcap
};

Score score_of(const Call& c, int64_t b, int64_t h, int64_t i, int64_t j);

// Unit roundoffs of what a kernel may round: the output, the weights before they meet the values, the exponential.
struct Rounding {
  double out, weights, exponential, smallest;
};

struct Result {
  std::vector<double> out, out_error;  // (B, H, T, V)
  std::vector<double> lse, lse_error;  // (B, H, T)
};

// Whether band, ids and boolean tensors let row (b, h, i) see key j: all rules but the -inf of a bias.
bool may_see(const Call& c, int64_t b, int64_t h, int64_t i, int64_t j);

Result attention(const Call& c, const Rounding& unit);

struct Gradient {
  std::vector<double> x, error;
};

// What comes from behind.
struct Upstream {
  std::vector<double> out;  // (B, H, T, V)
  std::vector<double> lse;  // (B, H, T), or empty
};

struct Gradients {
  Gradient query, key, value, sinks;
  Gradient scores;               // (B, H, T, S): what a bias of that size gets
  std::vector<Gradient> slopes;  // (B, H) of each rule
};

// By the formulas; `forward` is the call's own result, without a gate. A row in which anything is no number makes all
// that it may attend NaN, if anything comes back to it at all.
Gradients backward(const Call& c, const Rounding& unit, const Result& forward, const Upstream& upstream);

}  // namespace naive
