// A product on Hopper: A (rows x depth) times B, 16-bit types, summed in float32, by blocks that compute one tile after
// the other.
//
// Roles: one warpgroup runs the epilogue; two multiply, each 64 of the tile's rows and all its 2 x kHalf columns, 128
//   accumulators a thread. One thread of the second loads by TMA: a stage is filled again, kStages steps ahead and
//   across tiles, when its products have ended. (A warpgroup that only loads would leave 128 registers a thread, and
//   nvcc needs 154 for the product.)
// Overlap: a multiplying warpgroup writes its accumulators, rounded as cuBLAS rounds them, to 32 KiB of shared memory
//   and continues with the next tile: the epilogue runs at the same time as products. The second warpgroup begins kLag
//   steps after the first and stays kLag steps later, as both need the same time: one multiplies while the other
//   writes, and a stage that the second has read was read by both.
// A bias, one number for each column of B, is added before the rounding.
// The epilogue's interface and the halves of a tile: gemm_piece.cuh. Half 1 begins `second` columns of B after half 0.
// B is depth-contiguous (columns x depth), or, kBTransposed, (depth x columns); TMA loads both as they are in memory.
#pragma once
#include "common/gemm_piece.cuh"
#include "common/mma.cuh"
#include "common/sm90/tma.cuh"
#include "common/sm90/wgmma.cuh"

namespace fastattn::sm90 {

struct GemmTile {
  static constexpr int kM = 128, kHalf = 128, kDepth = 64, kStages = 3, kLag = 1, kMultipliers = 2;
  static constexpr int kPieces = kHalf / kRun, kThreads = kGroup * (kMultipliers + 1);
};
static_assert(kPieceColumns * 2 == kLineBytes && kPieceRows * GemmTile::kMultipliers == GemmTile::kM);

struct alignas(1024) GemmShared {
  unsigned char a[GemmTile::kStages][GemmTile::kM * kLineBytes], b[GemmTile::kStages][2 * GemmTile::kHalf * kLineBytes];
  unsigned char pieces[GemmTile::kMultipliers][GemmTile::kPieces][kPieceRows * kLineBytes];
  float sums[4][2 * kPieceColumns];
  Barrier full[GemmTile::kStages], empty[GemmTile::kStages];  // empty: of the first multiplying warpgroup's reads
  Barrier handed[GemmTile::kMultipliers], taken[GemmTile::kMultipliers];  // the pieces of a warpgroup
};

// A piece of T, in swizzled lines: a row is a line, its chunks 0 to 3 are of the first run.
template <class T>
struct GemmPiece : PiecePlace {
  const unsigned char* lines;
  float (*scratch)[2 * kPieceColumns];

  __device__ __forceinline__ void read(float (&values)[kChunk], int line, int index) const {
    Chunk<T> chunk;
    memcpy(&chunk, lines + swizzled(warp * 16 + line, index), sizeof chunk);
    chunk.unpack(values);
  }
  __device__ __forceinline__ float* sums(int index) const { return scratch[index]; }
};

struct Gemm {
  TensorMap a, b;
  int depth;
  int b_columns;  // of B, in all
  int step;       // from a tile's first column to the next tile's
  int second;     // from half 0 to half 1
  int m_tiles, n_tiles;

  __host__ __device__ int tiles() const { return m_tiles * n_tiles; }
  // Row and column where tile `index` begins.
  __device__ __forceinline__ TilePlace tile(int index) const {
    const TilePlace at = grouped_tile(index, m_tiles, n_tiles);
    return {at.m * GemmTile::kM, at.n * step};
  }
};

// pairs: column c is paired with column c + columns of B, which has 2 * columns; otherwise B has `columns`.
template <bool kBTransposed>
Gemm make_gemm(const void* a, const void* b, int rows, int depth, int columns, bool pairs) {
  constexpr uint32_t kPanel = kLineBytes / 2;  // elements
  const auto map = [](const void* data, int lines, int width, uint32_t box_lines) {
    const uint64_t size = lines, line = uint64_t{2} * width, all = size * line;
    return make_tensor_map({data, {uint64_t(width), size, 1, 1}, {line, all, all}, {kPanel, box_lines, 1, 1}});
  };
  const int b_columns = pairs ? 2 * columns : columns, step = pairs ? GemmTile::kHalf : 2 * GemmTile::kHalf;
  return {map(a, rows, depth, GemmTile::kM),
          kBTransposed ? map(b, depth, b_columns, GemmTile::kDepth) : map(b, b_columns, depth, GemmTile::kHalf),
          depth,
          b_columns,
          step,
          pairs ? columns : GemmTile::kHalf,
          (rows + GemmTile::kM - 1) / GemmTile::kM,
          (columns + step - 1) / step};
}

// A place in the ring of stages, and the parity of its phase.
struct GemmRing {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == GemmTile::kStages) stage = 0, phase ^= 1;
  }
};

// Loads the steps of all tiles of the block, one after the other. Used by one thread.
template <bool kBTransposed>
class GemmFetcher {
 public:
  __device__ __forceinline__ GemmFetcher(const Gemm& g, GemmShared& shared)
      : g_(g), shared_(shared), tile_(g.tile(blockIdx.x)) {}

  // Loads into a stage that nothing reads any more; after the last step it does nothing.
  __device__ __forceinline__ void next(int stage) {
    if (index_ >= g_.tiles()) return;
    Barrier& full = shared_.full[stage];
    full.arrive_expect(sizeof shared_.a[0] + sizeof shared_.b[0]);
    tma_load(shared_.a[stage], g_.a, full, k_, tile_.m, 0, 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      unsigned char* const to = shared_.b[stage] + half * GemmTile::kHalf * kLineBytes;
      const int n = tile_.n + half * g_.second;
      if constexpr (kBTransposed) {
        tma_load(to, g_.b, full, n, k_, 0, 0);
        tma_load(to + GemmTile::kDepth * kLineBytes, g_.b, full, n + 64, k_, 0, 0);
      } else {
        tma_load(to, g_.b, full, k_, n, 0, 0);
      }
    }
    k_ += GemmTile::kDepth;
    if (k_ < g_.depth) return;
    k_ = 0, index_ += gridDim.x;
    if (index_ < g_.tiles()) tile_ = g_.tile(index_);
  }

 private:
  const Gemm& g_;
  GemmShared& shared_;
  int index_ = blockIdx.x, k_ = 0;
  TilePlace tile_;
};

template <class T, bool kBTransposed>
__device__ __forceinline__ void multiply_gemm(const Gemm& g, const T* bias, GemmShared& shared) {
  constexpr int kColumns = 2 * GemmTile::kHalf, kStart = 1;  // named barrier
  const int group = threadIdx.x / kGroup - 1, thread = threadIdx.x % kGroup, lane = thread % 32;
  GemmFetcher<kBTransposed> fetcher(g, shared);
  const int start_at = min(GemmTile::kLag * GemmTile::kDepth, g.depth);
  bool starts_other = group == 0;
  if (!starts_other) {
#pragma unroll 1
    for (int stage = 0; stage < GemmTile::kStages && thread == 0; stage++) fetcher.next(stage);
    __syncwarp();
    named_barrier_sync(kStart, 2 * kGroup);
  }
  const auto release = [&](const GemmRing& at) {
    if (group == 0) return shared.empty[at.stage].arrive_if(thread == 0);
    if (thread == 0) {
      shared.empty[at.stage].wait(at.phase);
      fetcher.next(at.stage);
    }
    __syncwarp();  // before the next product
  };
  GemmRing ring;
  int turn = 0;  // parity of the tile
#pragma unroll 1
  for (int index = blockIdx.x; index < g.tiles(); index += gridDim.x, turn ^= 1) {
    float d[kColumns / 2];
    GemmRing last = ring;  // what the running product reads
#pragma unroll 1
    for (int k = 0; k < g.depth; k += GemmTile::kDepth) {
      shared.full[ring.stage].wait(ring.phase);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < GemmTile::kDepth; kk += 16) {
        const uint64_t a = along_columns<GemmTile::kM>(shared.a[ring.stage], group * kPieceRows, kk);
        if constexpr (kBTransposed)
          wgmma<T, kColumns, false, true>(d, a, along_lines<GemmTile::kDepth>(shared.b[ring.stage], kk, 0), k + kk > 0);
        else
          wgmma<T, kColumns, false, false>(d, a, along_columns<kColumns>(shared.b[ring.stage], 0, kk), k + kk > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (k > 0) release(last);
      last = ring;
      ring.advance();
      if (starts_other && k + GemmTile::kDepth >= start_at) {
        named_barrier_arrive(kStart, 2 * kGroup);
        starts_other = false;
      }
    }
    wgmma_wait<0>(d);
    release(last);

    shared.taken[group].wait(turn ^ 1);
    const int line = thread / 32 * 16 + lane % 16, n0 = g.tile(index).n;
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
      const int half = column / GemmTile::kHalf, in_half = column % GemmTile::kHalf;
      uint32_t words[4];
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        const float* const from = d + column / 2 + 4 * eight;  // rows lane / 4 and eight after it, two columns each
        const int n = n0 + half * g.second + in_half + 8 * eight + lane % 4 * 2;
        T pair[2];
        const uint32_t word =
            bias != nullptr && n < g.b_columns ? __ldg(reinterpret_cast<const uint32_t*>(bias + n)) : 0;
        memcpy(pair, &word, sizeof word);
        float low, high;
        unpack_pair(pair, low, high);
        words[2 * eight] = pack_word<T>(from[0] + low, from[1] + high);
        words[2 * eight + 1] = pack_word<T>(from[2] + low, from[3] + high);
      }
      const int chunk = (half * kRun + in_half % kRun) / kChunk + lane / 16;
      stmatrix(shared.pieces[group][in_half / kRun] + swizzled(line, chunk), words);
    }
    shared.handed[group].arrive();
  }
}

template <class T, class Epilogue>
__device__ __forceinline__ void finish_gemm(const Gemm& g, GemmShared& shared, Epilogue& epilogue) {
  constexpr int kAll = 2;  // named barrier
  const int thread = threadIdx.x % kGroup;
  const auto expect = [&](TilePlace at) {
    epilogue.expect(at.m, GemmTile::kM, at.n, at.n + g.second, GemmTile::kHalf, thread, kGroup);
  };
  expect(g.tile(blockIdx.x));
  int turn = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < g.tiles(); index += gridDim.x, turn ^= 1) {
    const auto [m0, n0] = g.tile(index);
    if (index + static_cast<int>(gridDim.x) < g.tiles()) expect(g.tile(index + gridDim.x));  // a tile ahead
    // Not unrolled: an epilogue is long, and this is its only copy.
#pragma unroll 1
    for (int i = 0; i < GemmTile::kMultipliers * GemmTile::kPieces; i++) {
      const int group = i / GemmTile::kPieces, piece = i % GemmTile::kPieces, n = n0 + piece * kRun;
      if (piece == 0) shared.handed[group].wait(turn);
      const PiecePlace place{thread / 32, m0 + group * kPieceRows, n, n + g.second};
      epilogue(GemmPiece<T>{place, shared.pieces[group][piece], shared.sums}, [] { named_barrier_sync(kAll, kGroup); });
      if (piece == GemmTile::kPieces - 1) shared.taken[group].arrive();
    }
  }
}

// The kernel's body: a block of GemmTile::kThreads with a GemmShared. bias: at a multiple of 4 bytes, or null.
template <class T, bool kBTransposed, class Epilogue>
__device__ __forceinline__ void run_gemm(const Gemm& g, const T* bias, Epilogue& epilogue) {
  GemmShared& shared = shared_memory<GemmShared>();
  if (threadIdx.x == 0) {
    prefetch(g.a), prefetch(g.b);
    for (int stage = 0; stage < GemmTile::kStages; stage++) shared.full[stage].init(1), shared.empty[stage].init(1);
    for (int group = 0; group < GemmTile::kMultipliers; group++)
      shared.handed[group].init(kGroup), shared.taken[group].init(kGroup);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroup)
    finish_gemm<T>(g, shared, epilogue);
  else
    multiply_gemm<T, kBTransposed>(g, bias, shared);
}

}  // namespace fastattn::sm90
