// The parameters of dropout that a launcher gets. The rule: philox.cuh.
#pragma once
#include <cstdint>

namespace fastattn {

struct Dropout {
  const int64_t* rng_state;  // in: (seed, offset), on the device; null: no dropout
  uint32_t threshold;        // round(dropout_p * 65536); 65536 drops everything
  float scale;               // 1 / (1 - dropout_p), or 0 where everything is dropped
};

}  // namespace fastattn
