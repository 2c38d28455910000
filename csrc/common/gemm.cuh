// One tile of a product for compute capability 8.0 and up: A (rows x depth) times B, 16-bit types, summed in float32.
//
// A block of 256 threads has a tile of kM rows and two halves of kHalf columns each; half 1 begins `second` columns of B after
// half 0. Its warps are 4 x 2: a warp has rows 16 w .. and 64 + 16 w .. of the tile, and 32 columns of each half, so 64
// accumulators a thread. A and B come by cp.async, kStages steps of kDepth ahead. Rows of a stage are 80 or 272 bytes apart, so
// ldmatrix meets no bank twice. Pieces go through the memory of the stages: gemm_piece.cuh.
// B is depth-contiguous (columns x depth), as a Linear's weight in its forward, or, kBTransposed, (depth x columns).
// All of A and B is at multiples of 16 bytes; rows, columns and depth end anywhere that is a multiple of 8 along memory.
#pragma once
#include "common/fragment.cuh"
#include "common/gemm_piece.cuh"

namespace fastattn {

struct Gemm {
  const void *a, *b;
  int rows, depth;
  int b_columns;  // of B, in all
  int columns;    // that half 0 ranges over, in steps of `step`
  int step;       // from a tile's first column to the next tile's
  int second;     // from half 0 to half 1

  // B's columns as they are, tiles of two halves side by side; or in pairs: column c with column c + columns / 2 of B.
  static Gemm plain(const void* a, const void* b, int rows, int depth, int columns, int half) {
    return {a, b, rows, depth, columns, columns, 2 * half, half};
  }
  static Gemm pairs(const void* a, const void* b, int rows, int depth, int pairs, int half) {
    return {a, b, rows, depth, 2 * pairs, pairs, half, pairs};
  }
  __host__ __device__ int n_tiles() const { return (columns + step - 1) / step; }
  __host__ __device__ int m_tiles(int tile_rows) const { return (rows + tile_rows - 1) / tile_rows; }
};

template <class T, bool kBTransposed>
struct GemmTile {
  static constexpr int kM = 128, kHalf = 64, kDepth = 32, kStages = 4, kThreads = 256;
  static constexpr int kAStride = kDepth * 2 + 16, kBStride = (kBTransposed ? 2 * kHalf : kDepth) * 2 + 16;  // bytes
  static constexpr int kBLines = kBTransposed ? kDepth : 2 * kHalf;

  struct Stage {
    unsigned char a[kM * kAStride], b[kBLines * kBStride];
  };
  union alignas(16) Shared {
    Stage stages[kStages];
    float pieces[2][2][4 * kPieceFloats];  // 64 rows, the warps' columns
  };

  template <class Epilogue>
  static __device__ __forceinline__ void run(const Gemm& g, int index, Shared& shared, Epilogue& epilogue) {
    const TilePlace tile = grouped_tile(index, g.m_tiles(kM), g.n_tiles());
    const int m0 = tile.m * kM, n0 = tile.n * g.step;
    const int warp = threadIdx.x / 32, own_rows = warp % 4 * 16, own_run = warp / 4 * kRun;
    epilogue.expect(m0, kM, n0, n0 + g.second, kHalf, threadIdx.x, kThreads);

    const int steps = (g.depth + kDepth - 1) / kDepth;
    float d[2][2 * kRun / 8][4] = {};  // of 16 rows each; four times eight columns of half 0, then of half 1
    for (int step = 0; step < kStages - 1; step++) load(g, shared.stages[step], m0, n0, step, steps);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      load(g, shared.stages[(step + kStages - 1) % kStages], m0, n0, step + kStages - 1, steps);
      multiply(d, shared.stages[step % kStages], own_rows, own_run);
    }
    cp_async_wait<0>();
    __syncthreads();  // the stages become pieces

    const auto piece = [&](int i) {
      return Piece{{warp % 4, m0 + i * kPieceRows, n0 + own_run, n0 + g.second + own_run}, shared.pieces[i][warp / 4]};
    };
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int j = 0; j < 8; j++) piece(i).write(j, d[i][j][0], d[i][j][1], d[i][j][2], d[i][j][3]);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 2; i++) epilogue(piece(i), [] { __syncthreads(); });
  }

 private:
  // Starts the copies of a step, if there is one; commits in any case, as waits count commits.
  static __device__ __forceinline__ void load(const Gemm& g, Stage& stage, int m0, int n0, int step, int steps) {
    const int k0 = step * kDepth;
    if (step < steps) {
#pragma unroll
      for (int turn = 0; turn < kM * kDepth / 8 / kThreads; turn++) {
        const int i = turn * kThreads + threadIdx.x, row = m0 + i / (kDepth / 8), k = k0 + i % (kDepth / 8) * 8;
        cp_async(stage.a + i / (kDepth / 8) * kAStride + i % (kDepth / 8) * 16, at(g.a, row, g.depth, k),
                 row < g.rows && k < g.depth);
      }
      constexpr int kVectors = (kBTransposed ? 2 * kHalf : kDepth) / 8;  // of a line
#pragma unroll
      for (int turn = 0; turn < kBLines * kVectors / kThreads; turn++) {
        const int i = turn * kThreads + threadIdx.x, line = i / kVectors, vector = i % kVectors * 8;
        const int n = kBTransposed ? vector : line, k = k0 + (kBTransposed ? line : vector);
        const int column = n < kHalf ? n0 + n : n0 + g.second + n - kHalf;
        const T* const from = kBTransposed ? at(g.b, k, g.b_columns, column) : at(g.b, column, g.depth, k);
        cp_async(stage.b + line * kBStride + vector * 2, from, column < g.b_columns && k < g.depth);
      }
    }
    cp_async_commit();
  }

  static __device__ __forceinline__ const T* at(const void* matrix, int line, int width, int place) {
    return static_cast<const T*>(matrix) + static_cast<int64_t>(line) * width + place;
  }

  static __device__ __forceinline__ void multiply(float (&d)[2][8][4], const Stage& stage, int own_rows, int own_run) {
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; i++) load_a<T, kAStride>(a[i], stage.a, i * kPieceRows + own_rows, 2 * k);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int n = j / 4 * kHalf + own_run + j % 4 * 8;
        uint32_t b[2][2];
        if constexpr (kBTransposed)
          load_b_columns<T, kBStride>(b, stage.b, k, n);
        else
          load_b_rows<T, kBStride>(b, stage.b, n, 2 * k);
#pragma unroll
        for (int i = 0; i < 2; i++) mma<T>(d[i][j], a[i], b[0]), mma<T>(d[i][j + 1], a[i], b[1]);
      }
    }
  }
};

}  // namespace fastattn
