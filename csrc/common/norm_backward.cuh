// Backward of LayerNorm and RMSNorm. Grid, registers: add_layer_norm/backward.cu
//
//   normal = (z - mean) * rstd;   g = dout * weight
//   dz = (g - mean(g) - normal * mean(g * normal)) * rstd;   dweight = sum of dout * normal;   dbias = sum of dout
//   dx_bias = sum of the dx that the op computes from dz;   with eps_on_std: mean(g * normal) times ratio (norm.h)
//
// An op's Rows reads z, and writes what it computes from dz:
//   kKeep                                   chunks of a row, at most, that a thread keeps between its two passes
//   read(chunk, row, c, count)              chunk c of the thread, of `count` columns, else zero; may be called twice
//   write(grad, row, c, count)              the gradient of that chunk; leaves in grad what dx_bias sums
//
// dx_bias may be null. Each thread has those sums in shared memory: there are too few registers for them and the row.
#pragma once
#include "common/norm.cuh"

#include <algorithm>

namespace fastattn::norm {

constexpr int kThreads = 256;  // of a block, unless a row needs more
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kFinishHidden = 1024;  // widest row whose weight gradients need no second kernel
constexpr int kSharedChunks = 2;     // chunks of a thread, at most, where a block has several rows or a dx_bias
constexpr int kAddRows = 16;         // rows of `partial` that the second kernel adds at a time
constexpr int kAddThreads = kAddRows * kWarp;

struct alignas(16) BackwardShared {
  float sums[2][2][kMaxWarps];  // used alternately: a warp may begin the next row while another still reads
  bool last;                    // whether this block arrived last
};

__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float4 plus(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

__device__ __forceinline__ float4 four(const float (&values)[kChunk], int first) {
  return {values[first], values[first + 1], values[first + 2], values[first + 3]};
}

template <class P>
__host__ __device__ __forceinline__ int sums_width(const P& p) {
  return p.hidden * (1 + (p.dbias ? 1 : 0) + (p.dx_bias ? 1 : 0));
}

// Column `col` of the sums: dweight's, then dbias's, then dx_bias's.
template <class W, class P>
__device__ __forceinline__ void store_sum(const P& p, int col, float sum) {
  if (col < p.hidden) return store_element(elements<W>(p.dweight) + col, sum);
  const int start = sums_width(p) - p.hidden;
  if (p.dx_bias && col >= start) return store_element(p.dx_bias + (col - start), sum);
  store_element(elements<W>(p.dbias) + (col - p.hidden), sum);
}

// Whether this block is the last of `count` to arrive. It then sees what the others wrote before.
__device__ __forceinline__ bool arrives_last(int* ticket, int count, bool& last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    last = atomicAdd(ticket, 1) == count - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

// The sum of `count` rows of `partial` from row `first` on, in a V's columns at `col`: kSpan loads at a time, added in
// pairs.
template <class V, class P>
__device__ __forceinline__ V sum_rows(const P& p, int first, int count, int col, int width) {
  V total = {};
  for (int start = 0; start < count; start += kSpan) {
    V row[kSpan];
#pragma unroll
    for (int r = 0; r < kSpan; r++) {
      const float* const from = p.partial + static_cast<int64_t>(first + start + r) * width + col;
      row[r] = start + r < count ? *reinterpret_cast<const V*>(from) : V{};
    }
#pragma unroll
    for (int step = 1; step < kSpan; step *= 2) {
#pragma unroll
      for (int r = 0; r + step < kSpan; r += 2 * step) row[r] = plus(row[r], row[r + step]);
    }
    total = plus(total, row[0]);
  }
  return total;
}

// Adds the rows of `partial` without another launch. Each block calls it after it wrote its row.
template <class W, bool kAligned, class P>
__device__ void finish(const P& p, bool& last) {
  using V = std::conditional_t<kAligned, float4, float>;
  constexpr int kColumns = sizeof(V) / sizeof(float);
  const int width = sums_width(p), thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int begin = thread * kColumns, step = blockDim.x * blockDim.y * kColumns;
  const int group = blockIdx.x / kSpan, groups = (p.blocks + kSpan - 1) / kSpan;
  const int members = min(kSpan, p.blocks - group * kSpan);
  int* const tickets = reinterpret_cast<int*>(p.statistics + 2 * p.rows);
  if (!arrives_last(tickets + 1 + group, members, last)) return;
  float* const mine = p.partial + static_cast<int64_t>(p.blocks + group) * width;
#pragma unroll(kAligned ? 1 : 2)
  for (int col = begin; col < width; col += step)
    *reinterpret_cast<V*>(mine + col) = sum_rows<V>(p, group * kSpan, members, col, width);
  if (!arrives_last(tickets, groups, last)) return;
#pragma unroll(kAligned ? 1 : 2)
  for (int col = begin; col < width; col += step) {
    const V sum = sum_rows<V>(p, p.blocks, groups, col, width);
#pragma unroll
    for (int j = 0; j < kColumns; j++) store_sum<W>(p, col + j, reinterpret_cast<const float*>(&sum)[j]);
  }
}

// D, W: types of dout, and of weight and bias.
template <class D, class W, int kChunks, bool kAligned, class P, class Rows>
__device__ __forceinline__ void backward_rows(const P& p, Rows rows) {
  constexpr bool kKeepRow = kChunks <= Rows::kKeep;
  constexpr int kHeld = kKeepRow ? kChunks : 1;  // chunks of dout, z and weight in registers at once
  BackwardShared& shared = shared_memory<BackwardShared>();
  const auto dout = elements<D>(p.dout);
  const auto weight = elements<W>(p.weight);

  const auto inside = [&](int c) { return columns_inside<kAligned>(column(c), p.hidden); };

  Chunk<W> weight_chunk[kHeld];
  Chunk<D> dout_chunk[kHeld];
  Chunk<D> z_chunk[kHeld];
  if (kKeepRow) {
#pragma unroll
    for (int c = 0; c < kChunks; c++) weight_chunk[c].template load<kAligned>(weight + column(c), inside(c));
  }

  // In shared memory: the threads' sums of dx_bias; at the end, if the block has several rows, of dweight and dbias.
  // For each, and for each half of a chunk, four columns of every thread, next to each other: no bank conflicts.
  constexpr int kHalves = 2 * kChunks;
  const bool sums_dx = kChunks <= kSharedChunks && p.dx_bias;
  const int threads = blockDim.x * blockDim.y;
  float4* const sums_of_threads = reinterpret_cast<float4*>(&shared + 1);
  float4* const my_sums = sums_of_threads + threadIdx.y * blockDim.x + threadIdx.x;
  if (sums_dx) {
#pragma unroll
    for (int i = 0; i < kHalves; i++) my_sums[i * threads] = float4{};
  }

  float dweight[kChunks][kChunk] = {}, dbias[kChunks][kChunk] = {};
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int turn = 0;
  // All warps of a block have the same bound, so that they reach the same barriers.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < p.rows; first += stride, turn ^= 1) {
    const int64_t row = first + threadIdx.y, start = row * p.hidden;
    const bool live = row < p.rows;
    const float mean = live && p.dbias ? p.statistics[row] : 0.0f;
    const float rstd = live ? p.statistics[p.rows + row] : 0.0f;

    const auto read = [&](int c) {
      if (!kKeepRow) __syncwarp();  // all chunks loaded at once would need too many registers
      int at = c;
#ifndef FASTATTN_EMULATOR
      if (!kKeepRow && kAligned) asm volatile("" : "+r"(at));  // addresses kept from row to row would spill
#endif
      rows.read(z_chunk[c % kHeld], row, at, live ? inside(at) : 0);
      if (!kKeepRow) weight_chunk[0].template load<kAligned>(weight + column(at), inside(at));
      dout_chunk[c % kHeld].template load<kAligned>(dout + (start + column(at)), live ? inside(at) : 0);
    };
    // dout, normal and g of chunk c; g and dout are zero outside the row.
    const auto terms = [&](int c, float (&grad)[kChunk], float (&normal)[kChunk], float (&g)[kChunk]) {
      dout_chunk[c % kHeld].unpack(grad);
      z_chunk[c % kHeld].unpack(normal);
      weight_chunk[c % kHeld].unpack(g);
#pragma unroll
      for (int j = 0; j < kChunk; j++) {
        normal[j] = (normal[j] - mean) * rstd;
        g[j] *= grad[j];
      }
    };

    if (kKeepRow) {
#pragma unroll
      for (int c = 0; c < kChunks; c++) read(c);
    }
    float sums[2] = {0.0f, 0.0f};  // of g and of g * normal
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
      if (!kKeepRow) read(c);
      float grad[kChunk], normal[kChunk], g[kChunk];
      terms(c, grad, normal, g);
#pragma unroll
      for (int j = 0; j < kChunk; j++) {
        dweight[c][j] += grad[j] * normal[j];
        dbias[c][j] += grad[j];
        sums[0] += g[j];
        sums[1] += g[j] * normal[j];
      }
    }
    row_sum(sums, shared.sums[turn]);
    if (!live) continue;  // waits for the others at the next row's barrier
    const float mean_g = p.dbias ? sums[0] / p.hidden : 0.0f;
    float mean_g_normal = sums[1] / p.hidden;
    if (p.eps_on_std) mean_g_normal *= p.statistics[2 * p.rows + kTickets + row];

#pragma unroll(kHeld)
    for (int c = 0; c < kChunks; c++) {
      if (!kKeepRow) read(c);
      float grad[kChunk], normal[kChunk], g[kChunk];
      terms(c, grad, normal, g);
#pragma unroll
      for (int j = 0; j < kChunk; j++) grad[j] = (g[j] - mean_g - normal[j] * mean_g_normal) * rstd;
      if (!kKeepRow) __syncwarp();  // as above
      rows.write(grad, row, c, inside(c));
      if (sums_dx) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float4& sum = my_sums[(2 * c + half) * threads];
          sum = plus(sum, four(grad, 4 * half));
        }
      }
    }
  }

  // The block's row of `partial`. `half` counts halves of chunks: of dweight, then of dbias, then of dx_bias.
  float* const partial = p.partial + static_cast<int64_t>(blockIdx.x) * sums_width(p);
  const auto write = [&](int half, const float4& sum) {
    const int col = column(half / 2 % kChunks) + half % 2 * 4;
    float* const to = partial + half / kHalves * p.hidden + col;
    if (kAligned) {
      if (col < p.hidden) *reinterpret_cast<float4*>(to) = sum;
    } else {
      if (col < p.hidden) to[0] = sum.x;
      if (col + 1 < p.hidden) to[1] = sum.y;
      if (col + 2 < p.hidden) to[2] = sum.z;
      if (col + 3 < p.hidden) to[3] = sum.w;
    }
  };
  const bool several_rows = kChunks <= kSharedChunks && blockDim.y > 1;
  const int dx_halves = sums_dx ? kHalves : 0, weight_halves = p.dbias ? 2 * kHalves : kHalves;
  if (several_rows) {
#pragma unroll
    for (int half = 0; half < kHalves; half++) {
      my_sums[(dx_halves + half) * threads] = four(dweight[half / 2], half % 2 * 4);
      if (p.dbias) my_sums[(dx_halves + kHalves + half) * threads] = four(dbias[half / 2], half % 2 * 4);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
#pragma unroll
      for (int j = 0; j < kChunk; j++) {
        const int col = column(c) + j;
        if (j >= inside(c)) continue;
        partial[col] = dweight[c][j];
        if (p.dbias) partial[p.hidden + col] = dbias[c][j];
      }
    }
  }
  if (kChunks <= kSharedChunks) {
    __syncthreads();
    const int first = several_rows ? 0 : weight_halves;
    for (int half = first + threadIdx.y; half < weight_halves + dx_halves; half += blockDim.y) {
      const int place = half < weight_halves ? dx_halves + half : half - weight_halves;
      const float4* const rows_sums = sums_of_threads + place * threads + threadIdx.x;
      float4 sum = rows_sums[0];
#pragma unroll 4
      for (unsigned y = 1; y < blockDim.y; y++) sum = plus(sum, rows_sums[y * blockDim.x]);
      write(half, sum);
    }
  }
  if (kChunks <= kSharedChunks && p.hidden <= kFinishHidden) finish<W, kAligned>(p, shared.last);
}

struct AddShared {
  float sum[kAddRows][kWarp];
};

// dweight, dbias, dx_bias = the sum of the rows of `partial`. Block (32 columns, kAddRows).
template <class W, class P>
__device__ __forceinline__ void add_partial(const P& p) {
  AddShared& shared = shared_memory<AddShared>();
  const int width = sums_width(p), col = blockIdx.x * kWarp + threadIdx.x;
  float sum = 0.0f;
  if (col < width) {
#pragma unroll 4
    for (int64_t block = threadIdx.y; block < p.blocks; block += kAddRows) sum += p.partial[block * width + col];
  }
  shared.sum[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= width) return;
  for (int y = 1; y < kAddRows; y++) sum += shared.sum[y][threadIdx.x];
  store_sum<W>(p, col, sum);
}

struct BackwardGrid {
  int chunks;
  dim3 block;  // (threads of a row, rows)
  size_t shared_bytes;
};

// Shared memory of a block, after BackwardShared: with dx_bias each thread's sums of it; where the block has several
// rows, also those of dweight and dbias. keep: Rows::kKeep.
inline BackwardGrid backward_grid(int hidden, int keep, bool has_dx_bias = false) {
  const Shape shape = shape_of(hidden, keep);
  const int rows_per_block = std::max(kThreads / (shape.row_warps * kWarp), 1);
  const int threads = shape.row_warps * kWarp * rows_per_block;
  const size_t sums = (has_dx_bias ? 1 : 0) + (rows_per_block > 1 ? 2 : 0);
  return {shape.chunks, dim3(shape.row_warps * kWarp, rows_per_block),
          sizeof(BackwardShared) + sums * threads * shape.chunks * kChunk * sizeof(float)};
}

// The blocks of the backward on a device with `multiprocessors`.
inline int backward_blocks(int64_t rows, int hidden, int keep, int multiprocessors) {
  const int64_t rows_per_block = backward_grid(hidden, keep).block.y;
  const int wanted = std::min(kBlocksPerMultiprocessor * multiprocessors, kMaxBlocks);
  return static_cast<int>(std::min<int64_t>((rows + rows_per_block - 1) / rows_per_block, wanted));
}

// Whether that launch also computes the weight gradients; if not, add_partial does, in blocks of (32 columns,
// kAddRows).
inline bool backward_finishes(int blocks, int hidden) { return blocks > 0 && hidden <= kFinishHidden; }

inline dim3 add_partial_grid(int width) { return dim3((width + kWarp - 1) / kWarp); }

}  // namespace fastattn::norm
