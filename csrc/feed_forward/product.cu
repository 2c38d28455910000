// The feed-forward's products with their epilogues, for compute capability 8.0 and up.   Formulas: feed_forward.h
//
// Grid: a block a tile of 128 rows x 2 x 64 columns, two blocks a multiprocessor: one's epilogue runs beside the other's product.
//   Forward: a gated tile's halves are 64 gates and the 64 columns that they gate, from where weight1 has them; otherwise 128
//   columns side by side. Backward: 128 columns of dh, whose epilogue makes one or two tiles of dz.
// Registers: 64 accumulators a thread. Shared memory: 4 stages of 20 KiB (18.5 backward); the pieces on their way to the
//   epilogue lie in the same place.
// Work: 2 * depth FLOP an element of z or dh. Bytes an element of h, beyond the operands: forward writes h, and z where it is
//   stored; backward reads z, or h for relu, and writes dz and, but for relu, h.
// The type of activation, gating and dropout are branches that a block takes as one: 4 kernels serve every call.
// Compiled offline with nvcc 13.0, sm_80 / sm_90 (no GPU has timed it yet): forward 126 / 124 registers, backward 127 / 125,
//   nothing spills; 80 and 74 KiB of shared memory.
// Tried and dropped, same compiler: pieces that leave the accumulators one after the other, as on Hopper. What is still to come
//   stays in registers, and the backward spills 164 to 574 bytes, the more the further ahead it reads.
#include "common/gemm.cuh"
#include "feed_forward/product.cuh"

namespace fastattn::feed_forward {
namespace {

template <class T>
using ForwardTile = GemmTile<T, false>;
template <class T>
using BackwardTile = GemmTile<T, true>;

template <class T>
__global__ void __launch_bounds__(ForwardTile<T>::kThreads, 2) forward_product_kernel(const Gemm g, const Forward p) {
  ForwardEpilogue<T> epilogue(p);
  ForwardTile<T>::run(g, blockIdx.x, shared_memory<typename ForwardTile<T>::Shared>(), epilogue);
}

template <class T>
__global__ void __launch_bounds__(BackwardTile<T>::kThreads, 2) backward_product_kernel(const Gemm g, const Backward p) {
  BackwardEpilogue<T, 4> epilogue(p);
  BackwardTile<T>::run(g, blockIdx.x, shared_memory<typename BackwardTile<T>::Shared>(), epilogue);
}

template <class Tile, class Kernel, class Parameters>
void launch_product(Kernel kernel, const Gemm& g, const Parameters& p, cudaStream_t stream) {
  launch(kernel, dim3(g.m_tiles(Tile::kM) * g.n_tiles()), dim3(Tile::kThreads), sizeof(typename Tile::Shared), stream, g, p);
}

}  // namespace

void forward_product(const Operands& product, const Forward& p, cudaStream_t stream) {
  const auto gemm = p.hidden.gated ? Gemm::pairs : Gemm::plain;
  const Gemm g = gemm(product.a, product.b, static_cast<int>(p.hidden.tokens), product.depth, p.hidden.d_ff,
                      ForwardTile<__half>::kHalf);
  if (p.hidden.dtype == DType::bfloat16)
    launch_product<ForwardTile<__nv_bfloat16>>(forward_product_kernel<__nv_bfloat16>, g, p, stream);
  else
    launch_product<ForwardTile<__half>>(forward_product_kernel<__half>, g, p, stream);
}

void backward_product(const Operands& product, const Backward& p, cudaStream_t stream) {
  const Gemm g = Gemm::plain(product.a, product.b, static_cast<int>(p.hidden.tokens), product.depth, p.hidden.d_ff,
                             BackwardTile<__half>::kHalf);
  if (p.hidden.dtype == DType::bfloat16)
    launch_product<BackwardTile<__nv_bfloat16>>(backward_product_kernel<__nv_bfloat16>, g, p, stream);
  else
    launch_product<BackwardTile<__half>>(backward_product_kernel<__half>, g, p, stream);
}

}  // namespace fastattn::feed_forward
