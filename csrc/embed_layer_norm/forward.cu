// Forward of embedding + positions + dropout + LayerNorm.   Formula, shapes and limits: embed_layer_norm.h
//
// Grid, registers and shared memory: as in add_layer_norm/forward.cu; after z the code is the same, common/norm.cuh.
// Traffic: reads a row of embedding for each token and writes out: at most 6 bytes an element with a float32 embedding
//   and a 16-bit result. Frequent tokens, positions, weight and bias come from L2 and L1. z is never stored, the
//   dropout mask is computed.
// Types are known at run time only: 6 kernels are enough for the 36 combinations of embedding, table, weight and out.
#include "embed_layer_norm/rows.cuh"

namespace fastattn::embed_layer_norm {
namespace {

template <int kChunks, bool kAligned>
__global__ void __launch_bounds__(norm::kMaxThreads) forward_kernel(const Forward p) {
  const int64_t row = norm::forward_row(p);
  if (row >= p.rows) return;  // whole warps, and only if a row is one warp, without barriers
  Embedded embedded(p.source);
  embedded.begin(row, p.hidden, true);

  // All loads of the row are issued before the first is used.
  Chunk<DynamicDtype> word[kChunks], spot[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; c++)
    embedded.load<kAligned>(word[c], spot[c], column(c), columns_inside<kAligned>(column(c), p.hidden));

  float z[kChunks][kChunk];
#pragma unroll
  for (int c = 0; c < kChunks; c++) embedded.combine(z[c], word[c], spot[c], column(c));
  norm::normalize<DynamicDtype, DynamicDtype, kAligned>(p, row, z);
}

}  // namespace

void forward(const Forward& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  const norm::ForwardGrid launched = norm::forward_grid(p.rows, p.hidden);
  const bool is_aligned =
      norm::aligned(p.hidden, p.source.embedding.at, p.source.position_table.at, p.weight.at, p.bias.at, p.out.at);
  norm::shape_switch(launched.chunks, is_aligned, [&](auto chunks, auto vectors) {
    launch(forward_kernel<chunks(), vectors()>, launched.grid, launched.block, sizeof(norm::ForwardShared), stream, p);
  });
}

}  // namespace fastattn::embed_layer_norm
