// Backward of dropout + residual + LayerNorm or RMSNorm.   Formula, shapes and limits: add_layer_norm.h
//
//   normal = (z - mean) * rstd;   g = dout * weight
//   dsum = (g - mean(g) - normal * mean(g * normal)) * rstd + dz       (means along the row)
//   dx = dropout(dsum);   dweight = sum over rows of dout * normal;   dbias = sum over rows of dout;   dx_bias = of dx
//   RMSNorm: mean and mean(g) are 0, no dbias;   with eps_on_std: mean(g * normal) times the row's ratio
//
// Grid: about two blocks of 256 threads a multiprocessor, each computing every grid-th row. A row belongs to one warp
//   up to hidden 512, and to hidden / 512 warps above; a block has several narrow rows at the same time.
// Registers: a thread owns the same columns in every row, so it sums their dweight and dbias in registers, and has
//   their weight there. dout and z of the row stay in registers between the two passes. Beyond hidden 8192 they do not
//   fit into the registers of 512 threads: the second pass reads them again, from L2.
// Shared memory: the warps' partial sums of a row; at the end, up to hidden 2048, each thread's sums of dweight and
//   dbias, 16 or 32 KiB. With x_bias, each thread's sums of dx, 8 to 32 KiB, up to hidden 8192: read, added to and
//   written for each row, 8 bytes an element of the 128 a clock. Beyond 8192 the registers of the addresses would
//   spill, and the caller sums dx. At hidden 512 and 1024: 32 KiB a block, with x_bias 48. Registers allow two blocks a
//   multiprocessor, shared memory more than two (with x_bias on sm_86: two).
// Weight gradients: all threads of a block add up its rows in a fixed order and write one row of `partial`: 64 KiB of
//   shared memory written and read, 0.6 us for two blocks a multiprocessor; one row after the other, by one warp each,
//   took 3 to 5. Up to hidden 1024 the last of 17 blocks to arrive adds their rows, and the last of those adds the 16
//   sums, each in a fixed order. Which block adds may differ, but the sums do not: equal inputs give equal bits. For
//   wider rows a second kernel adds, which costs the host 2 to 3 us more.
// Traffic: reads dout, z (, dz), writes dsum (, dx): 6 to 10 bytes an element in 16-bit types, 14 or 18 in float32 with
//   dx in 16 bits. `partial` is written and read once: 264 blocks at hidden 1024 write 2.2 MB, which stays in L2.
// H200 (copies at 4.27 TB/s), bf16: 65536 x 1024 with dropout 0.190 ms, 66 % of the bound, without it 0.148;
//   65536 x 512 0.070, 8192 x 512 0.019; Triton's 0.200, 0.150, 0.090 and 0.030. By Nsight Compute half of the issue
//   slots are used, and a warp mostly waits for its loads. At 1024 the four rows of a block still had one barrier, so
//   that each turn took as long as the slowest of 16 loads; with one each, estimated: 0.190 to 0.15. float32 with dx in
//   bfloat16, dropout and x_bias: 8192 x 512 0.022; with a separate cast 0.024 and 0.005.
// Dropped: the next row's loads before this row's stores, in the same registers: 0.193 ms, no gain. Before measuring:
//   one last block for all of `partial`; the sums of dx in registers, which spill if a thread has two chunks.
#include "add_layer_norm/rows.cuh"

#include <algorithm>

namespace fastattn::add_layer_norm {
namespace {

constexpr int kThreads = 256;                     // of a block, unless a row needs more
constexpr int kMaxRows = kThreads / (2 * kWarp);  // of a block, if each has several warps
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kFinishHidden = 1024;  // widest row whose weight gradients need no second kernel
// Chunks of a row, at most, that a thread keeps between its two passes. With more, a block has one row and no dx_bias.
constexpr int kKeepChunks = 2;
constexpr int kAddRows = 16;         // rows of `partial` that the second kernel adds at a time

struct alignas(16) Shared {
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

__host__ __device__ __forceinline__ int sums_width(const Backward& p) {
  return p.hidden * (1 + (p.dbias ? 1 : 0) + (p.dx_bias ? 1 : 0));
}

// Column `col` of the sums: dweight's, then dbias's, then dx_bias's.
template <class W>
__device__ __forceinline__ void store_sum(const Backward& p, int col, float sum) {
  const int start = sums_width(p) - p.hidden;
  if (col < p.hidden)
    static_cast<W*>(p.dweight)[col] = W(sum);
  else if (p.dx_bias && col >= start)
    x_switch<float>(p.dx_bias.dtype, [&](auto* type) { static_cast<decltype(type)>(p.dx_bias.at)[col - start] = sum; });
  else
    static_cast<W*>(p.dbias)[col - p.hidden] = W(sum);
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
template <class V>
__device__ __forceinline__ V sum_rows(const Backward& p, int first, int count, int col, int width) {
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
template <class W, bool kAligned>
__device__ void finish(const Backward& p, bool& last) {
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

// Reads z as forward stored it; writes its gradient, plus that of a returned z, to dsum and dx. Without this struct
// and the function that gets it, four chunks of a row spill.
template <class T, bool kAligned>
struct Rows {
  const Backward& p;
  const DropoutMask mask;

  __device__ __forceinline__ void read(Chunk<T>& chunk, int64_t row, int c, int count) const {
    chunk.template load<kAligned>(static_cast<const T*>(p.z) + row * p.hidden + column(c), count);
  }

  __device__ __forceinline__ void write(float (&grad)[kChunk], int64_t row, int c, int count) const {
    const int64_t place = row * p.hidden + column(c);
    Chunk<T> chunk;
    chunk.template load<kAligned>(static_cast<const T*>(p.dz) + place, p.dz ? count : 0);
    float dz[kChunk];
    chunk.unpack(dz);
#pragma unroll
    for (int j = 0; j < kChunk; j++) grad[j] += dz[j];
    if (p.dsum != nullptr) store_chunk<kAligned>(static_cast<T*>(p.dsum) + place, grad, count);
    if (p.dx) {
      mask.apply(grad, row, column(c));
      x_switch<T>(p.dx.dtype, [&](auto* type) {
        store_chunk<kAligned>(static_cast<decltype(type)>(p.dx.at) + place, grad, count);
      });
    }
  }
};

template <class T, class W, int kChunks, bool kAligned>
__device__ __forceinline__ void backward_rows(const Backward& p, Rows<T, kAligned> rows) {
  constexpr bool kKeepRow = kChunks <= kKeepChunks;
  constexpr int kHeld = kKeepRow ? kChunks : 1;  // chunks of dout, z and weight in registers at once
  Shared& shared = shared_memory<Shared>();
  const auto dout = static_cast<const T*>(p.dout);
  const auto weight = static_cast<const W*>(p.weight);

  const auto inside = [&](int c) { return columns_inside<kAligned>(column(c), p.hidden); };

  Chunk<W> weight_chunk[kHeld];
  Chunk<T> dout_chunk[kHeld], z_chunk[kHeld];
  if (kKeepRow) {
#pragma unroll
    for (int c = 0; c < kChunks; c++) weight_chunk[c].template load<kAligned>(weight + column(c), inside(c));
  }

  // In shared memory: the threads' sums of dx_bias; at the end, if the block has several rows, of dweight and dbias.
  // For each, and for each half of a chunk, four columns of every thread, next to each other: no bank conflicts.
  constexpr int kHalves = 2 * kChunks;
  const bool sums_dx = kKeepRow && p.dx_bias;
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
  // All warps of a row have the same bound, so that they reach the same barriers.
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
    row_sum<kKeepRow ? kMaxRows : 1>(sums, shared.sums[turn]);
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
  const bool several_rows = kKeepRow && blockDim.y > 1;
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
  if (kKeepRow) {
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
  if (kKeepRow && p.hidden <= kFinishHidden) finish<W, kAligned>(p, shared.last);
}

template <class T, class W, int kChunks, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const Backward p) {
  backward_rows<T, W, kChunks>(p, Rows<T, kAligned>{p, DropoutMask(p.dropout)});
}

struct AddShared {
  float sum[kAddRows][kWarp];
};

// dweight, dbias, dx_bias = the sum of the rows of `partial`. Block (32 columns, kAddRows).
template <class W>
__global__ void __launch_bounds__(kAddRows* kWarp) add_partial_kernel(const Backward p) {
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

inline int rows_of_block(const Shape& shape) { return std::max(kThreads / (shape.row_warps * kWarp), 1); }

}  // namespace

int backward_blocks(int64_t rows, int hidden, int multiprocessors) {
  const int rows_per_block = rows_of_block(shape_of(hidden, kKeepChunks));
  const int wanted = std::min(kBlocksPerMultiprocessor * multiprocessors, kMaxBlocks);
  return static_cast<int>(std::min<int64_t>((rows + rows_per_block - 1) / rows_per_block, wanted));
}

void backward(const Backward& p, cudaStream_t stream) {
  const Shape shape = shape_of(p.hidden, kKeepChunks);
  const dim3 block(shape.row_warps * kWarp, rows_of_block(shape));
  // After Shared: with dx_bias each thread's sums of it; where the block has several rows, also of dweight and dbias.
  const size_t sums = (p.dx_bias ? 1 : 0) + (block.y > 1 ? 2 : 0);
  const size_t shared_bytes = sizeof(Shared) + sums * block.x * block.y * shape.chunks * kChunk * sizeof(float);
  if (p.blocks > 0) {
    const bool is_aligned = aligned(p.hidden, p.dout, p.dz, p.z, p.weight, p.dsum, p.dx.at, p.partial);
    dispatch(p.dtype, p.weight_dtype, shape.chunks, is_aligned, [&](auto t, auto w, auto chunks, auto vectors) {
      launch(backward_kernel<decltype(t), decltype(w), chunks(), vectors()>, dim3(p.blocks), block, shared_bytes,
             stream, p);
    });
    if (p.hidden <= kFinishHidden) return;
  }
  const dim3 grid((sums_width(p) + kWarp - 1) / kWarp);
  dtype_switch(p.weight_dtype, [&](auto w) {
    launch(add_partial_kernel<decltype(w)>, grid, dim3(kWarp, kAddRows), sizeof(AddShared), stream, p);
  });
}

}  // namespace fastattn::add_layer_norm
