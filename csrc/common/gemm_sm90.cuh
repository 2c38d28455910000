// A product on Hopper: A (rows x depth) times B, 16-bit types, summed in float32, by blocks that take one tile after the other.
//
// Roles: one thread of the producer warpgroup copies by TMA, kStages steps of kDepth ahead, across tiles; two consumer
//   warpgroups have 64 of the tile's rows each, and all its 2 x kHalf columns: 128 accumulators a thread.
// Overlap: while consumers are in the epilogue of a tile, the first kStages steps of the next arrive. The second warpgroup
//   begins kLag steps after the first and, as both take equally long, stays behind: it multiplies beside the first one's
//   epilogue, and the first one multiplies beside its. One that is much further ahead would wait for the stages of the other.
// Pieces for the epilogue: gemm_piece.cuh. Half 1 of a tile begins `second` columns of B after half 0.
// B is depth-contiguous (columns x depth), or, kBTransposed, (depth x columns); both come by TMA as they lie in memory.
#pragma once
#include "common/gemm_piece.cuh"
#include "common/sm90/tma.cuh"
#include "common/sm90/wgmma.cuh"

namespace fastattn::sm90 {

struct GemmTile {
  static constexpr int kM = 128, kHalf = 128, kDepth = 64, kStages = 4, kLag = 2, kConsumers = 2, kGroupRows = 64;
  static constexpr int kThreads = kGroup * (kConsumers + 1), kConsumerRegisters = 232, kProducerRegisters = 40;
};

struct alignas(1024) GemmShared {
  unsigned char a[GemmTile::kStages][GemmTile::kM * kLineBytes], b[GemmTile::kStages][2 * GemmTile::kHalf * kLineBytes];
  float pieces[GemmTile::kConsumers][4 * kPieceFloats];
  Barrier full[GemmTile::kStages], empty[GemmTile::kStages];
};

struct Gemm {
  TensorMap a, b;
  int rows, depth;
  int columns;  // that half 0 ranges over, in steps of `step`
  int step;     // from a tile's first column to the next tile's
  int second;   // from half 0 to half 1

  __host__ __device__ int n_tiles() const { return (columns + step - 1) / step; }
  __host__ __device__ int m_tiles() const { return (rows + GemmTile::kM - 1) / GemmTile::kM; }
  __host__ __device__ int tiles() const { return m_tiles() * n_tiles(); }
};

// pairs: column c meets column c + columns of B, which has 2 * columns; otherwise B has `columns`.
template <bool kBTransposed>
Gemm make_gemm(const void* a, const void* b, int rows, int depth, int columns, bool pairs) {
  constexpr uint32_t kPanel = kLineBytes / 2;  // elements
  const auto map = [](const void* data, int lines, int width, uint32_t box_lines) {
    const uint64_t size = lines, stride = uint64_t{2} * width;
    return make_tensor_map({data, {uint64_t(width), size, 1, 1}, {stride, 16, 16}, {kPanel, box_lines, 1, 1}, false, true});
  };
  const int b_columns = pairs ? 2 * columns : columns;
  return {map(a, rows, depth, GemmTile::kM),
          kBTransposed ? map(b, depth, b_columns, GemmTile::kDepth) : map(b, b_columns, depth, GemmTile::kHalf),
          rows,
          depth,
          columns,
          pairs ? GemmTile::kHalf : 2 * GemmTile::kHalf,
          pairs ? columns : GemmTile::kHalf};
}

// A place in the ring of stages, and the parity of its phase.
struct GemmRing {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == GemmTile::kStages) stage = 0, phase ^= 1;
  }
};

template <bool kBTransposed>
__device__ __forceinline__ void produce_gemm(const Gemm& g, GemmShared& shared) {
  prefetch(g.a), prefetch(g.b);
  GemmRing ring;
#pragma unroll 1
  for (int index = blockIdx.x; index < g.tiles(); index += gridDim.x) {
    const TilePlace tile = grouped_tile(index, g.m_tiles(), g.n_tiles());
    const int m0 = tile.m * GemmTile::kM, n0 = tile.n * g.step;
#pragma unroll 1
    for (int k = 0; k < g.depth; k += GemmTile::kDepth, ring.advance()) {
      Barrier& full = shared.full[ring.stage];
      unsigned char* const b = shared.b[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      full.arrive_expect(sizeof shared.a[0] + sizeof shared.b[0]);
      tma_load(shared.a[ring.stage], g.a, full, k, m0, 0, 0);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        unsigned char* const to = b + half * GemmTile::kHalf * kLineBytes;
        const int n = n0 + half * g.second;
        if constexpr (kBTransposed) {
          tma_load(to, g.b, full, n, k, 0, 0);
          tma_load(to + GemmTile::kDepth * kLineBytes, g.b, full, n + 64, k, 0, 0);
        } else {
          tma_load(to, g.b, full, k, n, 0, 0);
        }
      }
    }
  }
}

template <class T, bool kBTransposed, class Epilogue>
__device__ __forceinline__ void consume_gemm(const Gemm& g, GemmShared& shared, Epilogue& epilogue) {
  constexpr int kColumns = 2 * GemmTile::kHalf;
  constexpr int kStart = GemmTile::kConsumers + 1;  // named barrier, after the warpgroups' own
  const int group = threadIdx.x / kGroup - 1, thread = threadIdx.x % kGroup;
  const int start_at = min(GemmTile::kLag * GemmTile::kDepth, g.depth);
  bool starts_other = group == 0;
  if (!starts_other) named_barrier_sync(kStart, 2 * kGroup);
  GemmRing ring;
#pragma unroll 1
  for (int index = blockIdx.x; index < g.tiles(); index += gridDim.x) {
    const TilePlace tile = grouped_tile(index, g.m_tiles(), g.n_tiles());
    const int m0 = tile.m * GemmTile::kM + group * GemmTile::kGroupRows, n0 = tile.n * g.step;
    epilogue.expect(m0, GemmTile::kGroupRows, n0, n0 + g.second, GemmTile::kHalf, thread, kGroup);

    float d[kColumns / 2];
    int last = -1;  // the stage that the product under way reads
#pragma unroll 1
    for (int k = 0; k < g.depth; k += GemmTile::kDepth, ring.advance()) {
      shared.full[ring.stage].wait(ring.phase);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < GemmTile::kDepth; kk += 16) {
        const uint64_t a = along_columns<GemmTile::kM>(shared.a[ring.stage], group * GemmTile::kGroupRows, kk);
        if constexpr (kBTransposed)
          wgmma<T, kColumns, false, true>(d, a, along_lines<GemmTile::kDepth>(shared.b[ring.stage], kk, 0), k + kk > 0);
        else
          wgmma<T, kColumns, false, false>(d, a, along_columns<kColumns>(shared.b[ring.stage], 0, kk), k + kk > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (last >= 0 && thread == 0) shared.empty[last].arrive();
      last = ring.stage;
      if (starts_other && k + GemmTile::kDepth >= start_at) {
        named_barrier_arrive(kStart, 2 * kGroup);
        starts_other = false;
      }
    }
    wgmma_wait<0>();
    if (thread == 0) shared.empty[last].arrive();

    // Not unrolled, and so the accumulators are chosen by a branch: an epilogue is long, and stands here once.
#pragma unroll 1
    for (int i = 0; i < GemmTile::kHalf / kRun; i++) {
      const int run = i * kRun;
      const Piece piece{shared.pieces[group], thread / 32, m0, n0 + run, n0 + g.second + run};
#pragma unroll
      for (int k = 0; k < GemmTile::kHalf / kRun; k++)
        if (k == i)
#pragma unroll
          for (int j = 0; j < 8; j++) {
            const float* const from = d + (j / 4 * GemmTile::kHalf + k * kRun + j % 4 * 8) / 2;
            piece.write(j, from[0], from[1], from[2], from[3]);
          }
      __syncwarp();
      epilogue(piece, [&] { named_barrier_sync(1 + group, kGroup); });
      __syncwarp();
    }
  }
}

// The kernel's body: a block of GemmTile::kThreads with a GemmShared.
template <class T, bool kBTransposed, class Epilogue>
__device__ __forceinline__ void run_gemm(const Gemm& g, Epilogue& epilogue) {
  GemmShared& shared = shared_memory<GemmShared>();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < GemmTile::kStages; stage++)
      shared.full[stage].init(1), shared.empty[stage].init(GemmTile::kConsumers);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    fewer_registers<GemmTile::kProducerRegisters>();
    if (threadIdx.x == 0) produce_gemm<kBTransposed>(g, shared);
  } else {
    more_registers<GemmTile::kConsumerRegisters>();
    consume_gemm<T, kBTransposed>(g, shared, epilogue);
  }
}

}  // namespace fastattn::sm90
