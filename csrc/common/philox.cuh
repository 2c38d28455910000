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

// Byte i of the result is 0xff if byte x of `word` has its highest bit, else 0; 8 + x is digit i of `bytes`.
__device__ __forceinline__ uint32_t signs_of_bytes(uint32_t word, uint32_t bytes) {
#ifdef FASTATTN_EMULATOR
  uint32_t result = 0;
  for (int i = 0; i < 32; i += 8) result |= (word >> ((bytes >> i / 2 & 7) * 8 + 7) & 1) * 0xffu << i;
  return result;
#else
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "r"(bytes));
  return result;
#endif
}

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

  // For lane c of a quad: which of the columns 8 (group + k) + 2c and the next are kept, k = 0 .. 3, as pair_mask()
  // reads it. On Hopper the two instructions that compare are one each.
  __device__ __forceinline__ uint32_t kept_in_quad(int64_t row, int group) const {
    const int lane = threadIdx.x % 4;
    // Of a word and its half: max(half, threshold - 1) - (threshold - 1), or 1 if that is more. Threshold 0 keeps all.
    const uint32_t low = threshold_ > 0 ? threshold_ - 1 : 1, add = threshold_ > 0 ? (0x10000 - low) & 0xffff : 0;
    uint32_t words[4], bits = 0;
    draw(words, row, group + lane);
#pragma unroll
    for (int j = 0; j < 4; j++)
      bits = 2 * bits + __viaddmin_u16x2(__vmaxu2(words[j], low * 0x10001), add * 0x10001, 0x10001);
    bits <<= 4 * lane;
    bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
    bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
    return bits << lane;  // of group k: bits 4k + 3 and 4k + 19
  }

  // 0xffff in the half of each of the two columns of group k that is kept.
  __device__ static __forceinline__ uint32_t pair_mask(uint32_t kept, int k) {
    return signs_of_bytes(k % 2 == 0 ? kept << 4 : kept, k < 2 ? 0xaa88 : 0xbb99);
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
