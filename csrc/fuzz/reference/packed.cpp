#include "fuzz/reference/packed.h"

#include <math.h>

#include <algorithm>
#include <map>

namespace fuzz {
namespace {

// The rows of a discrete cosine transform: a rotation that has no equal entries side by side. It is computed once for
// each width.
const std::vector<double>& rotation(int64_t n) {
  static std::map<int64_t, std::vector<double>> known;
  std::vector<double>& entries = known[n];
  const auto size = static_cast<double>(n);
  for (int64_t at = static_cast<int64_t>(entries.size()); at < n * n; ++at) {
    const int64_t i = at / n, j = at % n;
    const double wave = cos(M_PI / size * (static_cast<double>(i) + 0.5) * static_cast<double>(j));
    entries.push_back(wave * sqrt((j == 0 ? 1.0 : 2.0) / size) * (i % 3 == 1 ? -1 : 1));
  }
  return entries;
}

}  // namespace

std::vector<double> levels_of(const double* row, int bits, int64_t n) {
  std::vector<double> levels;
  const auto bit = [&](int64_t byte, int64_t at) { return static_cast<int>(row[byte]) >> at & 1; };
  for (int64_t i = 0; i < n; ++i) {
    int code = 0;
    if (bits == 4) {
      for (int64_t b = 0; b < 4; ++b) code |= bit(i % (n / 2), i / (n / 2) * 4 + b) << b;
    } else {
      for (int64_t b = 0; b < 2; ++b) code |= bit(i % (n / 4), i / (n / 4) * 2 + b) << b;
      code |= bit(n / 4 + i % (n / 8), i / (n / 8)) << 2;
    }
    levels.push_back(2 * code + 1 - (1 << bits));
  }
  return levels;
}

std::vector<double> levels_of(const DrawnTensor& t, int bits, int64_t width) {
  std::vector<double> all;
  for (size_t row = 0; row < t.x.size(); row += static_cast<size_t>(t.sizes[3])) {
    const std::vector<double> levels = levels_of(&t.x[row], bits, width);
    all.insert(all.end(), levels.begin(), levels.end());
  }
  return all;
}

fake::Tensor rotation_of(int64_t n, bool inverse) {
  const int64_t pitch = (n + 15) / 16 * 16;
  fake::Tensor t = fake::make(kFloat, {n, pitch}, {pitch, 1}, 0, 0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      write(*t, i * pitch + j, rotation(n)[static_cast<size_t>(inverse ? j * n + i : i * n + j)]);
    }
  }
  return t;
}

std::string compare_token(const std::vector<float>& token, const double* row, double scale, int bits) {
  const auto n = static_cast<int64_t>(token.size());
  const double most = (1 << bits) - 1, tiny = static_cast<double>(n) * 0x1p-148;
  double total = 0, peak = 0, squares = 0;
  for (const float x : token) total += fabs(static_cast<double>(x));
  if (!std::isfinite(total)) return std::isnan(scale) ? "" : "a token that is not finite has a scale";
  if (std::isnan(scale)) return total > 1e38 ? "" : "a token without a scale";  // its sums may overflow
  const std::vector<double>& turn = rotation(n);
  std::vector<double> y(token.size());
  for (int64_t j = 0; j < n; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i)
      sum += static_cast<double>(token[static_cast<size_t>(i)]) * turn[static_cast<size_t>(i * n + j)];
    y[static_cast<size_t>(j)] = sum;
    peak = std::max(peak, fabs(sum));
    squares += sum * sum;
  }
  const double size = sqrt(squares / static_cast<double>(n));
  double wanted = peak / most;
  // squares of large elements overflow in float32, and those of small ones lose bits or are 0
  const double gaussian = size * (bits == 4 ? 0.3352 : 0.5860) / 2;
  const bool exact = total < 1e18 && size > 1e-15;
  if (exact) wanted = std::min(wanted, gaussian);
  if (exact && fabs(scale - wanted) > 1e-5 * wanted + tiny) return "another scale than the token's";
  if (scale > peak / most * (1 + 1e-5) + tiny) return "a scale that is larger than the token needs";
  if (scale < 0 || (scale == 0 && peak > 1e-15)) return "a scale of 0";
  const std::vector<double> levels = levels_of(row, bits, n);
  for (int64_t j = 0; j < n && scale > 0; ++j) {
    const double place = std::clamp(y[static_cast<size_t>(j)] / scale, -most, most);
    const double slack = 1.02 + (2 * tiny + 1e-6 * total) / scale;
    if (fabs(levels[static_cast<size_t>(j)] - place) > slack) return "another code than the token's";
  }
  return "";
}

}  // namespace fuzz
