// Backward of dropout + residual + LayerNorm or RMSNorm.   Formula, shapes and limits: add_layer_norm.h
//
//   normal = (z - mean) * rstd;   g = dout * weight
//   dsum = (g - mean(g) - normal * mean(g * normal)) * rstd + dz       (means along the row)
//   dx = dropout(dsum);   dweight = sum over rows of dout * normal;   dbias = sum over rows of dout;   dx_bias = of dx
//   RMSNorm: mean and mean(g) are 0, no dbias;   with eps_on_std: mean(g * normal) times the row's ratio (norm.h)
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
// Code: common/norm_backward.cuh, except how z is read and its gradient written.
// Weight gradients: all threads of a block add up its rows in a fixed order and write one row of `partial`: 64 KiB of
//   shared memory written and read, 0.6 us for two blocks a multiprocessor; one row after the other, by one warp each,
//   took 3 to 5. Up to hidden 1024 the last of 17 blocks to arrive adds their rows, and the last of those adds the 16
//   sums, each in a fixed order. Which block adds may differ, but the sums do not: equal inputs give equal bits. For
//   wider rows a second kernel adds, which costs the host 2 to 3 us more.
// Traffic: reads dout, z (, dz), writes dsum (, dx): 6 to 10 bytes an element in 16-bit types, 14 or 18 in float32 with
//   dx in 16 bits. `partial` is written and read once: 264 blocks at hidden 1024 write 2.2 MB, which stays in L2.
// H200 (copies at 4.27 TB/s), bf16: 65536 x 1024 with dropout 0.190 ms, 66 % of the bound, without it 0.148;
//   65536 x 512 0.070, 8192 x 512 0.019; Triton's 0.200, 0.150, 0.090 and 0.030. By Nsight Compute half of the issue
//   slots are used, and a warp mostly waits for its loads. float32 with dx in bfloat16, dropout and x_bias: 8192 x 512
//   0.022; with a separate cast 0.024 and 0.005.
// Dropped: the next row's loads before this row's stores, in the same registers: 0.193 ms, no gain. Before measuring:
//   one last block for all of `partial`; the sums of dx in registers, which spill if a thread has two chunks.
#include "add_layer_norm/rows.cuh"
#include "common/norm_backward.cuh"

namespace fastattn::add_layer_norm {
namespace {

constexpr int kKeepChunks = 2;

// Reads z as forward stored it; writes its gradient, plus that of a returned z, to dsum and dx.
template <class T, bool kAligned>
struct Rows {
  static constexpr int kKeep = kKeepChunks;
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
__global__ void __launch_bounds__(norm::kMaxThreads) backward_kernel(const Backward p) {
  norm::backward_rows<T, W, kChunks, kAligned>(p, Rows<T, kAligned>{p, DropoutMask(p.dropout)});
}

template <class W>
__global__ void __launch_bounds__(norm::kAddThreads) add_partial_kernel(const Backward p) {
  norm::add_partial<W>(p);
}

}  // namespace

int backward_blocks(int64_t rows, int hidden, int multiprocessors) {
  return norm::backward_blocks(rows, hidden, kKeepChunks, multiprocessors);
}

void backward(const Backward& p, cudaStream_t stream) {
  const norm::BackwardGrid launched = norm::backward_grid(p.hidden, kKeepChunks, bool(p.dx_bias));
  if (p.blocks > 0) {
    const bool is_aligned = aligned(p.hidden, p.dout, p.dz, p.z, p.weight, p.dsum, p.dx.at, p.partial);
    dispatch(p.dtype, p.weight_dtype, launched.chunks, is_aligned, [&](auto t, auto w, auto chunks, auto vectors) {
      launch(backward_kernel<decltype(t), decltype(w), chunks(), vectors()>, dim3(p.blocks), launched.block,
             launched.shared_bytes, stream, p);
    });
  }
  if (norm::backward_finishes(p.blocks, p.hidden)) return;
  const dim3 grid = norm::add_partial_grid(norm::sums_width(p));
  dtype_switch(p.weight_dtype, [&](auto w) {
    launch(add_partial_kernel<decltype(w)>, grid, dim3(kWarp, norm::kAddRows), sizeof(norm::AddShared), stream, p);
  });
}

}  // namespace fastattn::add_layer_norm
