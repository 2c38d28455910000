// The two epilogues of the feed-forward's products.   Interface: common/gemm_piece.cuh, arithmetic: hidden.cuh
#pragma once
#include "common/gemm_piece.cuh"
#include "feed_forward/hidden.cuh"

namespace fastattn::feed_forward {

// A lane computes a chunk of h at a time; gated, from a gate of the first run and its partner in the second.
template <class T>
class ForwardEpilogue {
 public:
  __device__ __forceinline__ explicit ForwardEpilogue(const Forward& p) : p_(p), dropout_(p.hidden.dropout) {}

  __device__ __forceinline__ void expect(int, int, int, int, int, int, int) const {}

  template <class Piece, class Sync>
  __device__ __forceinline__ void operator()(const Piece& piece, Sync) const {
    const int shift = p_.hidden.gated ? 2 : 3;  // chunks of h in a row: 4 or 8
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 16 << shift; i += 32) {
      const int line = i >> shift, index = i & ((1 << shift) - 1), col = piece.chunk_column(index);
      const int64_t row = piece.row + piece.warp * 16 + line;
      if (row >= p_.hidden.tokens || col >= p_.hidden.d_inner) continue;
      float gate[kChunk], up[kChunk];
      piece.read(gate, line, index);
      if (p_.hidden.gated) piece.read(up, line, index + kRun / kChunk);
      forward_chunk<T, true>(p_, dropout_, gate, up, row, col);
    }
  }

 private:
  const Forward& p_;
  const DropoutMask dropout_;
};

// A lane has one chunk of columns in four rows. What the forward saved was prefetched into L2 during the product;
// kAhead rows, as registers allow, are loaded before the first is used.
template <class T, int kAhead>
class BackwardEpilogue {
 public:
  __device__ __forceinline__ explicit BackwardEpilogue(const Backward& p) : p_(p), dropout_(p.hidden.dropout) {}

  __device__ __forceinline__ void expect(int row, int rows, int column0, int column1, int columns, int thread,
                                         int threads) const {
    constexpr int kLine = 64;  // elements of 128 bytes
    const int lines = columns / kLine;
    for (int i = thread; i < rows * 2 * lines; i += threads) {
      const int col = (i / lines % 2 ? column1 : column0) + i % lines * kLine, m = row + i / (2 * lines);
      if (m >= p_.hidden.tokens || col >= p_.hidden.d_inner) continue;
      prefetch_line(z_at<T>(p_.hidden, p_.saved, m, col));
      if (p_.hidden.gated) prefetch_line(z_at<T>(p_.hidden, p_.saved, m, col, true));
    }
  }

  template <class Piece, class Sync>
  __device__ __forceinline__ void operator()(const Piece& piece, Sync sync) const {
    constexpr int kRowStep = 4;
    const int lane = threadIdx.x % 32, index = lane % 8, col = piece.chunk_column(index);
    const int64_t first = piece.row + piece.warp * 16 + lane / 8;
    Saved<T> held[kAhead], saved;
    float dgate_sum[kChunk] = {}, dup_sum[kChunk] = {};
#pragma unroll 1
    for (int i = 0; i < 16 / kRowStep; i++) {
      const int64_t row = first + i * kRowStep;
      if (i % kAhead == 0) {
#pragma unroll
        for (int k = 0; k < kAhead; k++) held[k].template load<true>(p_, row + k * kRowStep, col);
      }
#pragma unroll
      for (int k = 0; k < kAhead; k++)
        if (i % kAhead == k) saved = held[k];
      if (row >= p_.hidden.tokens || col >= p_.hidden.d_inner) continue;
      float grad[kChunk], dup[kChunk] = {};
      piece.read(grad, lane / 8 + i * kRowStep, index);
      backward_chunk<T, true>(p_, dropout_, saved, grad, dup, row, col);
#pragma unroll
      for (int j = 0; j < kChunk; j++) dgate_sum[j] += grad[j], dup_sum[j] += dup[j];
    }
    if (p_.partial != nullptr) add_up(piece, dgate_sum, dup_sum, sync);
  }

 private:
  // The sums of 64 rows become one row of `partial`, in a fixed order.
  template <class Piece, class Sync>
  __device__ __forceinline__ void add_up(const Piece& piece, float (&dgate)[kChunk], float (&dup)[kChunk],
                                         Sync sync) const {
    const int lane = threadIdx.x % 32;
    float* const sums = piece.sums(piece.warp);
#pragma unroll
    for (int j = 0; j < kChunk; j++) {
#pragma unroll
      for (int step = 8; step < 32; step *= 2) {
        dgate[j] += __shfl_xor_sync(0xffffffffu, dgate[j], step);
        dup[j] += __shfl_xor_sync(0xffffffffu, dup[j], step);
      }
    }
    __syncwarp();  // all have read their part of the piece
    if (lane < 8) {
#pragma unroll
      for (int j = 0; j < kChunk; j++)
        sums[lane * kChunk + j] = dgate[j], sums[kPieceColumns + lane * kChunk + j] = dup[j];
    }
    sync();
    const int column = piece.warp * 32 + lane;  // of dgate, then of dup
    const int col = piece.chunk_column(column % kPieceColumns / kChunk) + column % kChunk;
    const bool up = column >= kPieceColumns;
    if (piece.row < p_.hidden.tokens && col < p_.hidden.d_inner && (!up || p_.hidden.gated)) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 4; warp++) sum += piece.sums(warp)[column];
      p_.partial[piece.row / kSumRows * z_columns(p_.hidden) + (up ? p_.hidden.d_inner : 0) + col] = sum;
    }
    sync();  // the sums may be overwritten
  }
  static_assert(kPieceRows == kSumRows);

  const Backward& p_;
  const DropoutMask dropout_;
};

}  // namespace fastattn::feed_forward
