// For kernels of the backward on Hopper whose rows are queries: exp(S - lse) and dS of a tile of scores, with the state
// of a thread for it. A warpgroup has 64 queries by kBlockN keys in an accumulator of wgmma (wgmma.cuh).
#pragma once
#include "attention/backward_sm90_common.cuh"

namespace fastattn::attention {
namespace {

template <class T, int kBlockN>
class QueryRows {
 public:
  using Tile = float[kBlockN / 2];

  __device__ __forceinline__ explicit QueryRows(const Arguments& a) : a_(a), dropout_(a.p.dropout) {}

  // The 64 queries of the warpgroup, from m0 on, of (b, h).
  __device__ __forceinline__ void load_rows(int b, int h, int m0) {
    b_ = b, h_ = h, m_ = m0 + threadIdx.x % kGroup / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int64_t row = first_row(a_, b, h) + query(r);
      shift_[r] = a_.rows.shift[row], delta_[r] = a_.rows.delta[row];
    }
  }

  // The visible elements of the tile of keys from n0 on, and dropout.
  __device__ __forceinline__ void load_mask(int n0) {
    n0_ = n0;
#pragma unroll
    for (int r = 0; r < 2; r++)
      bits_[r] = visible_bits<kBlockN>(a_.p.by_query, b_, h_, query(r), a_.p.shape.seqlen_q, n0, a_.p.shape.seqlen_k);
    if (dropout_.active()) {
      const int64_t row0 = (static_cast<int64_t>(b_) * a_.p.shape.heads + h_) * a_.p.shape.seqlen_q;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        kept_[r] = 0;
#pragma unroll
        for (int i = 0; i < kBlockN / 32; i++) {
          const uint32_t kept = dropout_.kept_by_quad(row0 + query(r), n0 / 8 + 4 * i) >> threadIdx.x % 4 * 2;
          kept_[r] |= (kept & 0x03030303u) << 2 * i;
        }
      }
    }
  }

  // s = q k^T becomes exp(S - lse), 0 where it is masked.
  __device__ __forceinline__ void make_probabilities(Tile& s) {
    if (a_.p.bias.data != nullptr) return make_biased_probabilities(s);
    const float unit = a_.p.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kBlockN / 2; j++) {
      s[j] = exp2_approximate(s[j] * unit - shift_[row_of(j)]);
      if (!is_visible(j)) s[j] = 0.0f;
    }
  }

  // dp = dout v^T becomes dP. A select, not a product: it may be NaN for a key that takes no part.
  __device__ __forceinline__ void finish_gradients(Tile& dp) const {
#pragma unroll
    for (int j = 0; j < kBlockN / 2; j++) {
      if (!is_visible(j)) dp[j] = 0.0f;
      if (dropout_.active()) dp[j] = is_kept(j) ? dp[j] * dropout_.scale() : 0.0f;
    }
  }

  // s = dS, of the probabilities s and dP.
  __device__ __forceinline__ void make_score_gradients(Tile& s, const Tile& dp) const {
#pragma unroll
    for (int j = 0; j < kBlockN / 2; j++) s[j] *= dp[j] - delta_[row_of(j)];
  }

  __device__ __forceinline__ int query(int r) const { return m_ + 8 * r; }
  __device__ __forceinline__ int key(int j) const { return n0_ + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2; }

 private:
  // Of accumulator j.
  __device__ __forceinline__ bool is_visible(int j) const { return (bits_[row_of(j)] >> (j / 4 * 2 + j % 2) & 1) != 0; }
  __device__ __forceinline__ bool is_kept(int j) const {
    return (kept_[row_of(j)] >> (j / 4 % 4 * 8 + j / 16 * 2 + j % 2) & 1) != 0;
  }

  __device__ __forceinline__ void make_biased_probabilities(Tile& s) const {
    constexpr int kPart = 32;  // keys whose bias is read at the same time: with more, registers are spilled
#pragma unroll
    for (int from = 0; from < kBlockN; from += kPart) {
      const uint32_t visible[2] = {bits_[0] >> from / 4, bits_[1] >> from / 4};
      if (((visible[0] | visible[1]) & first_bits(kPart / 4)) != 0) {
        for_each_bias<T, kPart>(a_.p.bias, b_, h_, query(0), n0_ + from, visible, [&](int i, float bias) {
          s[from / 2 + i] = fmaf(s[from / 2 + i], a_.p.softmax_scale, bias);
        });
#pragma unroll
        for (int j = from / 2; j < from / 2 + kPart / 2; j++)
          s[j] = is_visible(j) ? exp2_approximate((s[j] - shift_[row_of(j)]) * kLog2e) : 0.0f;
      } else {
#pragma unroll
        for (int j = from / 2; j < from / 2 + kPart / 2; j++) s[j] = 0.0f;
      }
    }
  }

  const Arguments& a_;
  const DropoutMask dropout_;
  int b_, h_, m_, n0_;  // m_: the first of the thread's two rows; the second is m_ + 8
  float shift_[2], delta_[2];
  uint32_t bits_[2], kept_[2];  // of their columns in this tile, two in every eight
};

}  // namespace
}  // namespace fastattn::attention
