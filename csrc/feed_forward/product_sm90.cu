// The feed-forward's products with their epilogues, on Hopper.
// Formulas: feed_forward.h, the product: common/gemm_sm90.cuh
//
// Grid: a block per multiprocessor, which computes one tile of 128 rows x 2 x 128 columns after the other. Forward: the
//   halves of a gated tile are 128 gates and the 128 columns that they gate, from their places in weight1; else 256
//   adjacent columns. Backward: 256 columns of dh, whose epilogue computes one or two tiles of dz; weight2 is read as
//   it is in memory, transposed by wgmma.
// Shared memory: 3 stages of 48 KiB, 64 KiB for products before the epilogue reads them.
// Work: 2 * depth FLOP an element of z or dh, 85 FLOP for a byte from L2. Bytes an element of h, without the operands:
//   forward writes h, and z if it is stored; backward reads z, or h for relu, and writes dz and, except for relu, h.
// The type of activation, gating and dropout are uniform branches: 4 kernels are enough for every call.
// Compiled offline with nvcc 13.0 (no GPU has timed it yet): 168 registers, nothing spills, wgmma is not serialized.
// Tried and dropped, same compiler: the bias as the initial value of the sums, which makes ptxas serialize wgmma
//   (C7515).
// Dropped by counting instructions at depth 512: no fourth role, each warpgroup with the epilogue of its own rows. A
//   tile is 8192 cycles of the tensor cores, which would idle for the 5000 (relu, dropout) to 8000 (gelu) cycles of
//   issuing an epilogue.
// Not used without a timing: clusters of two, which halve the reads from L2.
#include "common/check.h"
#include "common/gemm_sm90.cuh"
#include "feed_forward/product.cuh"

#include <algorithm>

namespace fastattn::feed_forward {
namespace {

using sm90::GemmTile;

template <class T>
__global__ void __launch_bounds__(GemmTile::kThreads, 1)
    forward_product_sm90_kernel(const __grid_constant__ sm90::Gemm g, const T* bias1,
                                const __grid_constant__ Forward p) {
  ForwardEpilogue<T> epilogue(p);
  sm90::run_gemm<T, false>(g, bias1, epilogue);
}

template <class T>
__global__ void __launch_bounds__(GemmTile::kThreads, 1)
    backward_product_sm90_kernel(const __grid_constant__ sm90::Gemm g, const __grid_constant__ Backward p) {
  BackwardEpilogue<T, 4> epilogue(p);
  sm90::run_gemm<T, true>(g, nullptr, epilogue);
}

template <class Kernel, class... Parameters>
void launch_product(Kernel kernel, cudaStream_t stream, const sm90::Gemm& g, const Parameters&... p) {
  int device, multiprocessors;
  FASTATTN_CHECK(cudaGetDevice(&device));
  FASTATTN_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  launch(kernel, dim3(std::min(g.tiles(), multiprocessors)), dim3(GemmTile::kThreads), sizeof(sm90::GemmShared), stream,
         g, p...);
}

}  // namespace

void forward_product_sm90(const Operands& product, const Forward& p, cudaStream_t stream) {
  const sm90::Gemm g = sm90::make_gemm<false>(product.a, product.b, static_cast<int>(p.hidden.tokens), product.depth,
                                              p.hidden.d_inner, p.hidden.gated);
  Forward rest = p;
  rest.bias1 = nullptr;  // the product adds it
  const auto run = [&](auto kernel, auto* bias1) { launch_product(kernel, stream, g, bias1, rest); };
  if (p.hidden.dtype == DType::bfloat16)
    run(forward_product_sm90_kernel<__nv_bfloat16>, static_cast<const __nv_bfloat16*>(p.bias1));
  else
    run(forward_product_sm90_kernel<__half>, static_cast<const __half*>(p.bias1));
}

void backward_product_sm90(const Operands& product, const Backward& p, cudaStream_t stream) {
  const sm90::Gemm g = sm90::make_gemm<true>(product.a, product.b, static_cast<int>(p.hidden.tokens), product.depth,
                                             p.hidden.d_inner, false);
  if (p.hidden.dtype == DType::bfloat16)
    launch_product(backward_product_sm90_kernel<__nv_bfloat16>, stream, g, p);
  else
    launch_product(backward_product_sm90_kernel<__half>, stream, g, p);
}

}  // namespace fastattn::feed_forward
