// Backward of dropout + residual + LayerNorm.   Formula, shapes and limits: add_layer_norm.h
//
//   normal = (z - mean) * rstd;   g = dout * weight
//   dsum = (g - mean(g) - normal * mean(g * normal)) * rstd + dz       (means along the row)
//   dx = dropout(dsum);   dweight = sum over rows of dout * normal;   dbias = sum over rows of dout
//
// Grid: about two blocks of 256 threads a multiprocessor, each walking the rows in strides of the grid. A row belongs to
//   one warp up to hidden 512, to hidden / 512 warps above; narrow rows share a block, several in flight.
// Registers: a thread owns the same columns in every row, so it sums their dweight and dbias in registers, and keeps
//   their weight there. dout and z of the row stay in registers, as read, between the two passes; beyond hidden 8192,
//   where 512 threads have no room for them, the second pass reads them again, from L2.
// Shared memory: the warps' partial sums of a row; at the end, the block's sums of dweight and dbias.
// Weight gradients: each block adds its rows' sums in a fixed order and writes one row of `partial`; a second kernel adds
//   the rows of `partial` column by column, in a fixed order. No atomics: equal inputs give equal bits.
// Traffic: reads dout, z (, dz), writes dsum (, dx): 6 to 10 bytes an element in 16-bit types. `partial` is written and
//   read once: 264 blocks at hidden 1024 make 2.2 MB, which stays in L2.
// Dropped before measuring: finishing inside the first kernel, by the block that arrives last. One block would add all
//   of `partial` alone; a second launch spreads that over the columns.
#include "add_layer_norm/rows.cuh"

#include <algorithm>

namespace fastattn::add_layer_norm {
namespace {

constexpr int kThreads = 256;  // of a block, where the row does not need more
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kAddRows = 16;  // rows of `partial` added side by side

struct BackwardShared {
  float sums[2][2][kMaxWarps];  // used in turns: a warp may enter the next row while another still reads
};

// The block's column sums follow it, where a block holds several rows: (2, hidden).
inline size_t backward_shared_bytes(int hidden, int rows_per_block) {
  return sizeof(BackwardShared) + (rows_per_block > 1 ? 2 * hidden * sizeof(float) : 0);
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
    const float mean = live ? p.mean[row] : 0.0f, rstd = live ? p.rstd[row] : 0.0f;

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
    const float mean_g = sums[0] / p.hidden, mean_g_normal = sums[1] / p.hidden;

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
  float* const partial = p.partial + static_cast<int64_t>(blockIdx.x) * 2 * p.hidden;
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
          to[col] = dweight[c][j], to[p.hidden + col] = dbias[c][j];
        }
      }
    }
    __syncthreads();
  }
}

struct AddShared {
  float dweight[kAddRows][kWarp], dbias[kAddRows][kWarp];
};

// dweight, dbias = the sum of the rows of `partial`. Block (32 columns, kAddRows).
template <class W>
__global__ void __launch_bounds__(kAddRows * kWarp) add_partial_kernel(const Backward p) {
  AddShared& shared = shared_memory<AddShared>();
  const int col = blockIdx.x * kWarp + threadIdx.x;
  float dweight = 0.0f, dbias = 0.0f;
  if (col < p.hidden) {
#pragma unroll 4
    for (int64_t block = threadIdx.y; block < p.blocks; block += kAddRows) {
      dweight += p.partial[block * 2 * p.hidden + col];
      dbias += p.partial[(block * 2 + 1) * p.hidden + col];
    }
  }
  shared.dweight[threadIdx.y][threadIdx.x] = dweight;
  shared.dbias[threadIdx.y][threadIdx.x] = dbias;
  __syncthreads();
  if (threadIdx.y > 0 || col >= p.hidden) return;
  for (int y = 1; y < kAddRows; y++) dweight += shared.dweight[y][threadIdx.x], dbias += shared.dbias[y][threadIdx.x];
  static_cast<W*>(p.dweight)[col] = W(dweight);
  static_cast<W*>(p.dbias)[col] = W(dbias);
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
  return static_cast<int>(std::min<int64_t>((rows + rows_per_block - 1) / rows_per_block,
                                            kBlocksPerMultiprocessor * multiprocessors));
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
  const dim3 grid((p.hidden + kWarp - 1) / kWarp);
  dtype_switch(p.weight_dtype, [&](auto w) {
    launch(add_partial_kernel<decltype(w)>, grid, dim3(kWarp, kAddRows), sizeof(AddShared), stream, p);
  });
}

}  // namespace fastattn::add_layer_norm
