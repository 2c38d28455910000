// The feed-forward's pointwise passes after cuBLAS's products, and the bias gradient.   Formulas: feed_forward.h
//
// Grid: blocks of 32 x 8 threads; a thread owns a chunk of eight columns. Forward: of kForwardRows rows, all loaded
//   before the first is used. Backward: of every eighth of kSumRows rows, the next loaded before one is computed; it
//   adds up its columns of dz in registers, and the block adds its threads' sums in a fixed order, through 16 KiB of
//   shared memory, to one row of `partial`.
// Traffic in 16-bit types, bytes an element of h: forward reads z (2, gated 4) and writes h; backward reads dh and z,
//   writes dz and, except for relu, h: relu 6, others 8, gated 12. `partial` is 4 bytes for 64 elements.
// The bias gradient adds the rows of `partial` in a fixed order: no atomics, equal inputs give equal bits.
// Not here: bias1, which cuBLAS adds in its own epilogue.
// H200, bf16, 16384 x 512 x 2048 with all products, forward and backward, ms, Triton's in brackets: relu 0.458 (0.440),
//   gelu 0.498 (0.610), swiglu 0.694 (0.779); with dropout 0.469 (0.466), 0.526 (0.666), 0.712 (0.849).
// Dropped without being timed: a kernel for Hopper, of wgmma and a ring of TMA stages, with this as the product's
//   epilogue. No call used it by default.
#include "common/reduce.cuh"
#include "feed_forward/hidden.cuh"

namespace fastattn::feed_forward {
namespace {

constexpr int kRowThreads = 8, kForwardRows = 2, kAddRows = 16;
constexpr int kBlockColumns = kWarp * kChunk;

__device__ __forceinline__ int thread_column() { return (blockIdx.y * kWarp + threadIdx.x) * kChunk; }

template <class T, bool kAligned>
__global__ void __launch_bounds__(kWarp* kRowThreads) forward_pointwise_kernel(const Forward p) {
  const int col = thread_column(), inside = columns_inside<kAligned>(col, p.hidden.d_inner);
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.y) * kForwardRows;
  Chunk<T> gate_chunk[kForwardRows], up_chunk[kForwardRows];
#pragma unroll
  for (int r = 0; r < kForwardRows; r++) {
    const int64_t row = first + r;
    const int count = row < p.hidden.tokens ? inside : 0;
    // z may be h, unless it is gated.
    gate_chunk[r].template load<kAligned, true>(z_at<T>(p.hidden, p.z, row, col), count);
    if (p.hidden.gated) up_chunk[r].template load<kAligned>(z_at<T>(p.hidden, p.z, row, col, true), count);
  }
  const DropoutMask dropout(p.hidden.dropout);
#pragma unroll
  for (int r = 0; r < kForwardRows; r++) {
    if (inside == 0 || first + r >= p.hidden.tokens) return;
    float gate[kChunk], up[kChunk];
    gate_chunk[r].unpack(gate);
    if (p.hidden.gated) up_chunk[r].unpack(up);
    forward_chunk<T, kAligned>(p, dropout, gate, up, first + r, col);
  }
}

struct BackwardShared {
  float dgate[kRowThreads][kBlockColumns], dup[kRowThreads][kBlockColumns];
};

template <class T, bool kAligned>
__global__ void __launch_bounds__(kWarp* kRowThreads) backward_pointwise_kernel(const Backward p) {
  BackwardShared& shared = shared_memory<BackwardShared>();
  const int col = thread_column(), inside = columns_inside<kAligned>(col, p.hidden.d_inner);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSumRows + threadIdx.y;
  const DropoutMask dropout(p.hidden.dropout);
  float dgate_sum[kChunk] = {}, dup_sum[kChunk] = {};
  Chunk<T> grad_chunk, next_grad;
  Saved<T> saved, next_saved;
  const auto read = [&](int64_t row) {
    // dh may be dz.
    next_grad.template load<kAligned, true>(static_cast<const T*>(p.dh) + row * p.hidden.d_inner + col,
                                            row < p.hidden.tokens ? inside : 0);
    next_saved.template load<kAligned>(p, row, col);
  };
  read(first);
#pragma unroll 1
  for (int step = 0; step < kSumRows; step += kRowThreads) {
    const int64_t row = first + step;
    grad_chunk = next_grad, saved = next_saved;
    if (step + kRowThreads < kSumRows) read(row + kRowThreads);
    if (row >= p.hidden.tokens) break;
    float grad[kChunk], dup[kChunk] = {};
    grad_chunk.unpack(grad);
    backward_chunk<T, kAligned>(p, dropout, saved, grad, dup, row, col);
#pragma unroll
    for (int j = 0; j < kChunk; j++) dgate_sum[j] += grad[j], dup_sum[j] += dup[j];
  }
  if (p.partial == nullptr) return;
#pragma unroll
  for (int j = 0; j < kChunk; j++) {
    shared.dgate[threadIdx.y][threadIdx.x * kChunk + j] = dgate_sum[j];
    shared.dup[threadIdx.y][threadIdx.x * kChunk + j] = dup_sum[j];
  }
  __syncthreads();
  const int column = threadIdx.y * kWarp + threadIdx.x, sum_col = blockIdx.y * kBlockColumns + column;  // one a thread
  if (sum_col >= p.hidden.d_inner) return;
  float dgate = 0.0f, dup = 0.0f;
#pragma unroll
  for (int y = 0; y < kRowThreads; y++) dgate += shared.dgate[y][column], dup += shared.dup[y][column];
  float* const to = p.partial + blockIdx.x * z_columns(p.hidden) + sum_col;
  to[0] = dgate;
  if (p.hidden.gated) to[p.hidden.d_inner] = dup;
}
static_assert(kBlockColumns == kWarp * kRowThreads, "a thread adds up one column of the block");

struct AddShared {
  float sum[kAddRows][kWarp];
};

// dbias1 = the sum of the rows of `partial`. Block (32 columns, kAddRows).
template <class T>
__global__ void __launch_bounds__(kAddRows* kWarp)
    add_partial_kernel(const float* partial, T* sum_of, int rows, int columns) {
  AddShared& shared = shared_memory<AddShared>();
  const int col = blockIdx.x * kWarp + threadIdx.x;
  float sum = 0.0f;
  if (col < columns) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < rows; row += kAddRows) sum += partial[row * columns + col];
  }
  shared.sum[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= columns) return;
  for (int y = 1; y < kAddRows; y++) sum += shared.sum[y][threadIdx.x];
  sum_of[col] = T(sum);
}

template <class... Pointers>
bool aligned(int d_inner, Pointers... pointers) {
  return d_inner % kChunk == 0 && ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

dim3 grid_for(const Hidden& hidden, int block_rows) {
  return {static_cast<unsigned>((hidden.tokens + block_rows - 1) / block_rows),
          static_cast<unsigned>((hidden.d_inner + kBlockColumns - 1) / kBlockColumns)};
}

}  // namespace

void forward(const Forward& p, cudaStream_t stream) {
  const dim3 grid = grid_for(p.hidden, kRowThreads * kForwardRows), block(kWarp, kRowThreads);
  const bool is_aligned = aligned(p.hidden.d_inner, p.z, p.h);
  dtype_switch(p.hidden.dtype, [&](auto t) {
    using T = decltype(t);
    launch(is_aligned ? forward_pointwise_kernel<T, true> : forward_pointwise_kernel<T, false>, grid, block, 0, stream,
           p);
  });
}

void backward(const Backward& p, cudaStream_t stream) {
  const dim3 grid = grid_for(p.hidden, kSumRows), block(kWarp, kRowThreads);
  const bool is_aligned = aligned(p.hidden.d_inner, p.dh, p.saved, p.dz, p.h);
  dtype_switch(p.hidden.dtype, [&](auto t) {
    using T = decltype(t);
    launch(is_aligned ? backward_pointwise_kernel<T, true> : backward_pointwise_kernel<T, false>, grid, block,
           sizeof(BackwardShared), stream, p);
  });
}

void bias_gradient(const Backward& p, cudaStream_t stream) {
  if (p.partial == nullptr) return;
  const int columns = p.hidden.gated ? 2 * p.hidden.d_inner : p.hidden.d_inner;
  const int rows = static_cast<int>((p.hidden.tokens + kSumRows - 1) / kSumRows);
  dtype_switch(p.hidden.dtype, [&](auto t) {
    using T = decltype(t);
    launch(add_partial_kernel<T>, dim3((columns + kWarp - 1) / kWarp), dim3(kWarp, kAddRows), sizeof(AddShared), stream,
           static_cast<const float*>(p.partial), static_cast<T*>(p.dbias1), rows, columns);
  });
}

}  // namespace fastattn::feed_forward
