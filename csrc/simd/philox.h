// Philox4x32-10, the counter-based generator of Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3").
// Whether dropout keeps a weight depends only on the seed and on the position of the weight, so that a second pass
// draws the same.
#pragma once

#include <stdint.h>

#include "simd/inline.h"

namespace headwise {

constexpr uint32_t kPhiloxFirst = 0xD2511F53u, kPhiloxSecond = 0xCD9E8D57u;  // factors of a round
constexpr uint32_t kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;   // from a round's key to the next one's

struct Philox {
  uint32_t word[4];
};

HW_INLINE Philox philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{kPhiloxFirst} * c0, b = uint64_t{kPhiloxSecond} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += kPhiloxStep0;
    k1 += kPhiloxStep1;
  }
  return {{c0, c1, c2, c3}};
}

// The four words for the keys 4 q .. 4 q + 3 of query i of head `plane` = b * H + h.
HW_INLINE Philox dropout_words(uint64_t seed, int64_t plane, int64_t i, int64_t q) {
  return philox(seed, static_cast<uint32_t>(q), static_cast<uint32_t>(i), static_cast<uint32_t>(plane),
                static_cast<uint32_t>(plane >> 32));
}

// Words below this are dropped.
HW_INLINE uint32_t dropout_threshold(float dropout) {
  const double bound = static_cast<double>(dropout) * 4294967296.0;
  return bound >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(bound);
}

}  // namespace headwise
