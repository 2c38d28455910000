// Backward of embedding + positions + dropout + LayerNorm.   Formula, shapes and limits: embed_layer_norm.h
//
//   normal = (z - mean) * rstd;   g = dout * weight
//   drow = dropout((g - mean(g) - normal * mean(g * normal)) * rstd) * scale       (means along the row)
//   dweight = sum over rows of dout * normal;   dbias = sum over rows of dout
//
// The caller adds drow of row r to row index[r] of the embedding's gradient.
// Grid, shared memory and the weight gradients: as in add_layer_norm/backward.cu, by the same code,
//   common/norm_backward.cuh; but a thread keeps one chunk of a row between the two passes, not two: up to hidden 4096
//   a row belongs to hidden / 256 warps. For a wider row z is gathered in each pass.
// Registers: z is gathered again, with its dropout, and kept as float32. At most 128 a thread, so two blocks a
//   multiprocessor up to hidden 2048. No spills up to hidden 8192; wider rows, where 64 are sums, spill up to 23 loads
//   and stores, unaligned 107. Dropped, offline: two chunks, which spills 30 registers.
// Traffic: reads dout and a row of embedding, writes drow: 10 bytes an element with a float32 embedding and a 16-bit
//   dout.
#include "common/norm_backward.cuh"
#include "embed_layer_norm/rows.cuh"

namespace fastattn::embed_layer_norm {
namespace {

constexpr int kKeepChunks = 1;

template <int kChunks, bool kAligned>
struct Rows {
  static constexpr int kKeep = kKeepChunks;
  using Z = float;
  const Backward& p;
  Embedded embedded;

  __device__ __forceinline__ void begin(int64_t row, bool live) {
    embedded.begin(row, p.hidden, live);
    if (live && threadIdx.x == 0) p.index[row] = embedded.token();
  }

  __device__ __forceinline__ void read(Chunk<float>& chunk, int64_t /*row*/, int c, int count) const {
    Chunk<DynamicDtype> word, spot;
    embedded.load<kAligned>(word, spot, column(c), count);
    embedded.combine(chunk.at, word, spot, column(c));
    if (kChunks > kKeep) __syncwarp();  // before dout and weight are loaded: saves registers
  }

  __device__ __forceinline__ void write(float (&grad)[kChunk], int64_t row, int c, int count) const {
    embedded.differentiate(grad, column(c));
    store_chunk<kAligned>(p.drows + (row * p.hidden + column(c)), grad, count);
  }
};

template <int kChunks, bool kAligned>
__global__ void __launch_bounds__(norm::kMaxThreads) backward_kernel(const Backward p) {
  norm::backward_rows<DynamicDtype, DynamicDtype, kChunks, kAligned>(p, Rows<kChunks, kAligned>{p, Embedded(p.source)});
}

__global__ void __launch_bounds__(norm::kAddThreads) add_partial_kernel(const Backward p) {
  norm::add_partial<DynamicDtype>(p);
}

}  // namespace

int backward_blocks(int64_t rows, int hidden, int multiprocessors) {
  return norm::backward_blocks(rows, hidden, kKeepChunks, multiprocessors);
}

void backward(const Backward& p, cudaStream_t stream) {
  const norm::BackwardGrid launched = norm::backward_grid(p.hidden, kKeepChunks);
  if (p.blocks > 0) {
    const bool is_aligned = norm::aligned(p.hidden, p.source.embedding.at, p.source.position_table.at, p.dout.at,
                                          p.weight.at, p.drows.at, p.partial);
    norm::shape_switch(launched.chunks, is_aligned, [&](auto chunks, auto vectors) {
      launch(backward_kernel<chunks(), vectors()>, dim3(p.blocks), launched.block, launched.shared_bytes, stream, p);
    });
  }
  if (norm::backward_finishes(p.blocks, p.hidden)) return;
  const dim3 grid = norm::add_partial_grid(2 * p.hidden);
  launch(add_partial_kernel, grid, dim3(kWarp, norm::kAddRows), sizeof(norm::AddShared), stream, p);
}

}  // namespace fastattn::embed_layer_norm
