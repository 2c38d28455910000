// The small kernels of the backward on Hopper: lse and delta of each query, padded to whole tiles, and the rounding of
// dq, if it is added up in memory.   Formulas: backward.h
//
// Both are limited by memory. Bytes: of the first, out and dout once; of the second, the sum and dq.
#include "attention/backward_common.cuh"
#include "attention/backward_sm90.h"

namespace fastattn::attention {
namespace {

constexpr int kRowThreads = 128;

// The rows of (b, h); a quad a row. Grid: blocks of rows, heads of all samples.
template <class T>
__global__ void __launch_bounds__(kRowThreads) backward_rows_sm90_kernel(const Backward p, const PaddedRows rows) {
  const int padded = ceil_div(p.shape.seqlen_q, kRowBlock) * kRowBlock;
  const int head = blockIdx.x % (p.shape.batch * p.shape.heads);
  const int m = blockIdx.x / (p.shape.batch * p.shape.heads) * (kRowThreads / 4) + threadIdx.x / 4;
  const int inside = min(m, p.shape.seqlen_q - 1), b = head / p.shape.heads, h = head % p.shape.heads;
  const int64_t from = static_cast<int64_t>(head) * p.shape.seqlen_q + inside;
  const int64_t to = static_cast<int64_t>(head) * padded + m;
  const float lse = m > inside ? -kInfinity : p.lse[from];
  const Matrix<T> out(p.out, b, h, p.shape.seqlen_q, p.shape.head_dim_v);
  const Matrix<T> dout(p.dout, b, h, p.shape.seqlen_q, p.shape.head_dim_v);
  const float delta = row_product(out, dout, inside) - (p.dlse != nullptr ? p.dlse[from] : 0.0f);
  if (threadIdx.x % 4 != 0) return;
  rows.shift[to] = make_exponent<T>(p).shift(lse);
  rows.delta[to] = lse == -kInfinity ? 0.0f : delta;
}

// dq = softmax_scale * sum, rounded. One thread rounds kChunk columns of a row.
template <class T>
__global__ void __launch_bounds__(kRowThreads) backward_round_sm90_kernel(const Backward p, const float* sum) {
  const int chunks = p.shape.head_dim_k / kChunk;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x, row = i / chunks;
  const int64_t head = row / p.shape.seqlen_q;
  if (head >= static_cast<int64_t>(p.shape.batch) * p.shape.heads) return;
  Chunk<float> chunk;
  chunk.template load<true>(sum + i * kChunk, kChunk);
#pragma unroll
  for (int j = 0; j < kChunk; j++) chunk.at[j] *= p.softmax_scale;
  Chunk<T> rounded;
  rounded.pack(chunk.at);
  const Matrix<T> dq(p.dq, head / p.shape.heads, head % p.shape.heads, p.shape.seqlen_q, p.shape.head_dim_k);
  rounded.template store<true>(dq.row(static_cast<int>(row % p.shape.seqlen_q)) + i % chunks * kChunk, kChunk);
}

}  // namespace

void backward_rows_sm90(const Backward& p, const PaddedRows& rows, cudaStream_t stream) {
  const int blocks =
      ceil_div(p.shape.seqlen_q, kRowBlock) * (kRowBlock / (kRowThreads / 4)) * p.shape.batch * p.shape.heads;
  launch(p.dtype == DType::bfloat16 ? backward_rows_sm90_kernel<__nv_bfloat16> : backward_rows_sm90_kernel<__half>,
         dim3(blocks), dim3(kRowThreads), 0, stream, p, rows);
}

void backward_round_sm90(const Backward& p, const float* sum, cudaStream_t stream) {
  const int64_t chunks = int64_t{p.shape.batch} * p.shape.heads * p.shape.seqlen_q * p.shape.head_dim_k / kChunk;
  launch(p.dtype == DType::bfloat16 ? backward_round_sm90_kernel<__nv_bfloat16> : backward_round_sm90_kernel<__half>,
         dim3(static_cast<unsigned>((chunks + kRowThreads - 1) / kRowThreads)), dim3(kRowThreads), 0, stream, p, sum);
}

}  // namespace fastattn::attention
