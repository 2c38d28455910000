// The dropout rule on the device.   Specification: fastattn/backends/reference/philox.py. The reference and all Triton
// and CUDA kernels draw the same bits; only the backend aten uses PyTorch's own generator.
//
// Element (row, col) uses a 16-bit lane of Philox 4x32 with 7 rounds: key = seed, counter = (col / 8, row, offset),
// lane = col % 8; it is kept if lane >= threshold. One call gives a chunk of eight columns. The bits depend only on the
// element's global position, so the backward pass draws the mask again instead of reading it.
#pragma once
#include "common/dropout.h"
#include "common/launch.cuh"

namespace fastattn {

class DropoutMask {
 public:
  __device__ __forceinline__ explicit DropoutMask(const Dropout& dropout)
      : active_(dropout.rng_state != nullptr), threshold_(dropout.threshold), scale_(dropout.scale) {
    if (!active_) return;
    const uint64_t seed = dropout.rng_state[0];
    key_[0] = static_cast<uint32_t>(seed), key_[1] = static_cast<uint32_t>(seed >> 32);
    offset_ = static_cast<uint32_t>(dropout.rng_state[1]);
  }

  __device__ __forceinline__ bool active() const { return active_; }
  __device__ __forceinline__ float scale() const { return scale_; }

  // Which of the columns 8 * group .. 8 * group + 7 of a row are kept: bit j for column 8 * group + j.
  __device__ __forceinline__ uint32_t kept(int64_t row, int group) const {
    uint32_t words[4], bits = 0;
    draw(words, row, group);
#pragma unroll
    for (int j = 0; j < 4; j++)
      bits |= ((words[j] & 0xffff) >= threshold_ ? 1u : 0u) << (2 * j) | (words[j] >> 16 >= threshold_ ? 2u : 0u)
                                                                             << (2 * j);
    return bits;
  }

  // The same for four groups from `group` on, for a quad: four lanes of one row, which make one call each. Bit 8k + j
  // is column 8 * (group + k) + j.
  __device__ __forceinline__ uint32_t kept_by_quad(int64_t row, int group) const {
    const int lane = threadIdx.x % 4;
    uint32_t bits = kept(row, group + lane) << 8 * lane;
    bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
    return bits | __shfl_xor_sync(0xffffffffu, bits, 2);
  }

  // Applies dropout to the chunk of columns col .. col + 7 of a row; col is a multiple of 8.
  __device__ __forceinline__ void apply(float (&values)[8], int64_t row, int col) const {
    if (!active_) return;
    uint32_t words[4];
    draw(words, row, col / 8);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const uint32_t lane = j % 2 == 0 ? words[j / 2] & 0xffff : words[j / 2] >> 16;
      values[j] = lane >= threshold_ ? values[j] * scale_ : 0.0f;  // a select: a dropped inf or NaN is gone
    }
  }

 private:
  __device__ __forceinline__ void draw(uint32_t (&words)[4], int64_t row, int group) const {
    uint32_t c0 = group, c1 = static_cast<uint32_t>(row), c2 = static_cast<uint32_t>(row >> 32), c3 = offset_;
    uint32_t k0 = key_[0], k1 = key_[1];
#pragma unroll
    for (int round = 0; round < 7; round++) {
      const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
      c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1), c3 = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
  }

  bool active_;
  uint32_t threshold_, key_[2] = {}, offset_ = 0;
  float scale_;
};

}  // namespace fastattn
