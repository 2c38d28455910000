// Backward of dropout + residual + LayerNorm or RMSNorm.   Formula, shapes and limits: add_layer_norm.h
//
//   normal = (z - mean) * rstd;   g = dout * weight
//   dsum = (g - mean(g) - normal * mean(g * normal)) * rstd + dz       (means along the row)
//   dx = dropout(dsum);   dweight = sum over rows of dout * normal;   dbias = sum over rows of dout
//   RMSNorm: mean and mean(g) are 0, and there is no dbias
//
// Grid: about two blocks of 256 threads a multiprocessor, each walking the rows in strides of the grid. A row belongs to
//   one warp up to hidden 512, to hidden / 512 warps above; narrow rows share a block, several in flight.
// Registers: a thread owns the same columns in every row, so it sums their dweight and dbias in registers, and keeps
//   their weight there. dout and z of the row stay in registers, as read, between the two passes; beyond hidden 8192,
//   where 512 threads have no room for them, the second pass reads them again, from L2.
// Shared memory: the warps' partial sums of a row; at the end, the block's sums of dweight and dbias.
// Weight gradients: each block adds its rows' sums in a fixed order and writes one row of `partial`. Up to hidden 1024 the
//   last of 16 blocks to arrive adds their rows, and the last of those adds the 17 sums, each in a fixed order: who adds
//   depends on the run, what is added does not, so equal inputs give equal bits. Wider rows leave it to a second kernel.
//   By arithmetic, not measured: a block alone reads about 0.1 TB/s of L2, so the end of this launch costs 2 tickets, 1 us
//   each, and 2 x 17 rows of 8 hidden bytes: 3.5 us at hidden 512, 5 at 1024, 11 at 4096. A second launch is 1 us of gap
//   and 3 of loads at any width, and 2 to 3 us of the host, which eager training of small models waits for.
// Traffic: reads dout, z (, dz), writes dsum (, dx): 6 to 10 bytes an element in 16-bit types. `partial` is written and
//   read once: 264 blocks at hidden 1024 make 2.2 MB, which stays in L2.
// Dropped before measuring: one last block for all of `partial`, 11 us at hidden 512.
#include "add_layer_norm/rows.cuh"

#include <algorithm>

namespace fastattn::add_layer_norm {
namespace {

constexpr int kThreads = 256;  // of a block, where the row does not need more
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kFinishHidden = 1024;  // widest row whose weight gradients need no second kernel
constexpr int kAddRows = 16;         // rows of `partial` that the second kernel adds side by side

struct BackwardShared {
  float sums[2][2][kMaxWarps];  // used in turns: a warp may enter the next row while another still reads
  bool last;                    // whether this block arrived last
};

// The block's column sums follow it, where a block holds several rows: (2, hidden).
inline size_t backward_shared_bytes(int hidden, int rows_per_block) {
  return sizeof(BackwardShared) + (rows_per_block > 1 ? 2 * hidden * sizeof(float) : 0);
}

__device__ __forceinline__ int width_of(const Backward& p) { return p.dbias != nullptr ? 2 * p.hidden : p.hidden; }

// Column `col` of the sums: dweight's, then dbias's.
template <class W>
__device__ __forceinline__ void store_sum(const Backward& p, int col, float sum) {
  if (col < p.hidden)
    static_cast<W*>(p.dweight)[col] = W(sum);
  else
    static_cast<W*>(p.dbias)[col - p.hidden] = W(sum);
}

// Whether this block is the last of `count` to come here; then what the others wrote before is visible to it.
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

// The sum of `count` rows of `partial` from row `first` on at column `col`: kSpan loads at a time in flight, added in pairs.
__device__ __forceinline__ float sum_rows(const Backward& p, int first, int count, int col, int width) {
  float total = 0.0f;
  for (int start = 0; start < count; start += kSpan) {
    float row[kSpan];
#pragma unroll
    for (int r = 0; r < kSpan; r++)
      row[r] = start + r < count ? p.partial[static_cast<int64_t>(first + start + r) * width + col] : 0.0f;
#pragma unroll
    for (int step = 1; step < kSpan; step *= 2) {
#pragma unroll
      for (int r = 0; r + step < kSpan; r += 2 * step) row[r] += row[r + step];
    }
    total += row[0];
  }
  return total;
}

// Adds the rows of `partial` without another launch; each block calls it once its row is written.
template <class W>
__device__ void finish(const Backward& p, bool& last) {
  const int width = width_of(p), threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int group = blockIdx.x / kSpan, groups = (p.blocks + kSpan - 1) / kSpan;
  const int members = min(kSpan, p.blocks - group * kSpan);
  int* const tickets = reinterpret_cast<int*>(p.statistics + 2 * p.rows);
  if (!arrives_last(tickets + 1 + group, members, last)) return;
  float* const mine = p.partial + static_cast<int64_t>(p.blocks + group) * width;
#pragma unroll 2
  for (int col = thread; col < width; col += threads) mine[col] = sum_rows(p, group * kSpan, members, col, width);
  if (!arrives_last(tickets, groups, last)) return;
#pragma unroll 2
  for (int col = thread; col < width; col += threads) store_sum<W>(p, col, sum_rows(p, p.blocks, groups, col, width));
}

template <class T, class W, int kChunks, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const Backward p) {
  constexpr bool kKeepRow = kChunks <= 2;
  constexpr int kHeld = kKeepRow ? kChunks : 1;  // chunks of dout, z and weight in registers at once
  BackwardShared& shared = shared_memory<BackwardShared>();
  const T *dout = static_cast<const T*>(p.dout), *z = static_cast<const T*>(p.z);
  const W* weight = static_cast<const W*>(p.weight);
  const DropoutMask mask(p.dropout);

  const auto inside = [&](int c) { return columns_inside<kAligned>(column(c), p.hidden); };

  Chunk<W> weight_chunk[kHeld];
  Chunk<T> dout_chunk[kHeld], z_chunk[kHeld];
  if (kKeepRow) {
#pragma unroll
    for (int c = 0; c < kChunks; c++) weight_chunk[c].template load<kAligned>(weight + column(c), inside(c));
  }

  float dweight[kChunks][kChunk] = {}, dbias[kChunks][kChunk] = {};
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int turn = 0;
  // The bound is the block's, not the warp's: all warps of a block meet at the same barriers.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < p.rows; first += stride, turn ^= 1) {
    const int64_t row = first + threadIdx.y, start = row * p.hidden;
    const bool live = row < p.rows;
    const float mean = live && p.dbias != nullptr ? p.statistics[row] : 0.0f;
    const float rstd = live ? p.statistics[p.rows + row] : 0.0f;

    const auto read = [&](int c) {
      if (!kKeepRow) {
        __syncwarp();  // keeps the compiler from loading all chunks at once, for which there are no registers
        weight_chunk[0].template load<kAligned>(weight + column(c), inside(c));
      }
      dout_chunk[c % kHeld].template load<kAligned>(dout + start + column(c), live ? inside(c) : 0);
      z_chunk[c % kHeld].template load<kAligned>(z + start + column(c), live ? inside(c) : 0);
    };
    // dout, normal and g of chunk c; g and dout are zero outside the row.
    const auto terms = [&](int c, float(&grad)[kChunk], float(&normal)[kChunk], float(&g)[kChunk]) {
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
    const float mean_g = p.dbias != nullptr ? sums[0] / p.hidden : 0.0f, mean_g_normal = sums[1] / p.hidden;

#pragma unroll(kHeld)
    for (int c = 0; c < kChunks; c++) {
      if (!kKeepRow) read(c);
      float grad[kChunk], normal[kChunk], g[kChunk];
      terms(c, grad, normal, g);
      Chunk<T> chunk;
      chunk.template load<kAligned>(static_cast<const T*>(p.dz) + start + column(c), p.dz ? inside(c) : 0);
      chunk.unpack(grad);
#pragma unroll
      for (int j = 0; j < kChunk; j++) grad[j] += (g[j] - mean_g - normal[j] * mean_g_normal) * rstd;
      if (p.dsum != nullptr) {
        chunk.pack(grad);
        chunk.template store<kAligned>(static_cast<T*>(p.dsum) + start + column(c), inside(c));
      }
      if (p.dx != nullptr) {
        mask.apply(grad, row, column(c));
        chunk.pack(grad);
        chunk.template store<kAligned>(static_cast<T*>(p.dx) + start + column(c), inside(c));
      }
    }
  }

  // The rows of the block, one after the other, into the block's row of `partial`: by way of shared memory, but for the last.
  float* const block_sums = reinterpret_cast<float*>(&shared + 1);
  float* const partial = p.partial + static_cast<int64_t>(blockIdx.x) * width_of(p);
  for (unsigned y = 0; y < blockDim.y; y++) {
    if (y == threadIdx.y) {
#pragma unroll
      for (int c = 0; c < kChunks; c++) {
#pragma unroll
        for (int j = 0; j < kChunk; j++) {
          const int col = column(c) + j;
          if (j >= inside(c)) continue;
          if (y > 0) dweight[c][j] += block_sums[col], dbias[c][j] += block_sums[p.hidden + col];
          float* const to = y + 1 < blockDim.y ? block_sums : partial;
          to[col] = dweight[c][j];
          if (to == block_sums || p.dbias != nullptr) to[p.hidden + col] = dbias[c][j];
        }
      }
    }
    __syncthreads();
  }
  if (kKeepRow && p.hidden <= kFinishHidden) finish<W>(p, shared.last);
}

struct AddShared {
  float sum[kAddRows][kWarp];
};

// dweight, dbias = the sum of the rows of `partial`. Block (32 columns, kAddRows).
template <class W>
__global__ void __launch_bounds__(kAddRows * kWarp) add_partial_kernel(const Backward p) {
  AddShared& shared = shared_memory<AddShared>();
  const int width = width_of(p), col = blockIdx.x * kWarp + threadIdx.x;
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
  Shape shape;
  int rows_per_block;
};

BackwardGrid backward_grid(int hidden) {
  const Shape shape = shape_of(hidden, 2);
  return {shape, std::max(kThreads / (shape.row_warps * kWarp), 1)};
}

}  // namespace

int backward_blocks(int64_t rows, int hidden, int multiprocessors) {
  const int64_t rows_per_block = backward_grid(hidden).rows_per_block;
  const int wanted = std::min(kBlocksPerMultiprocessor * multiprocessors, kMaxBlocks);
  return static_cast<int>(std::min<int64_t>((rows + rows_per_block - 1) / rows_per_block, wanted));
}

void backward(const Backward& p, cudaStream_t stream) {
  const auto [shape, rows_per_block] = backward_grid(p.hidden);
  if (p.blocks > 0) {
    const bool is_aligned = aligned(p.hidden, p.dout, p.dz, p.z, p.weight, p.dsum, p.dx);
    const dim3 block(shape.row_warps * kWarp, rows_per_block);
    const size_t shared_bytes = backward_shared_bytes(p.hidden, rows_per_block);
    dispatch(p.dtype, p.weight_dtype, shape.chunks, is_aligned, [&](auto t, auto w, auto chunks, auto vectors) {
      launch(backward_kernel<decltype(t), decltype(w), chunks(), vectors()>, dim3(p.blocks), block, shared_bytes, stream, p);
    });
  }
  if (p.blocks > 0 && p.hidden <= kFinishHidden) return;
  const int width = p.dbias != nullptr ? 2 * p.hidden : p.hidden;
  const dim3 grid((width + kWarp - 1) / kWarp);
  dtype_switch(p.weight_dtype, [&](auto w) {
    launch(add_partial_kernel<decltype(w)>, grid, dim3(kWarp, kAddRows), sizeof(AddShared), stream, p);
  });
}

}  // namespace fastattn::add_layer_norm
