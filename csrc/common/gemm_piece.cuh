// How a product's accumulators reach an epilogue: piece by piece, through shared memory.
//
// A piece is 64 rows of two runs of 32 columns each; four warps have 16 rows of it each. On the way through shared memory an
// accumulator's scattered pairs become whole chunks of eight columns of a row, which is what an epilogue wants: 16-byte accesses
// of memory, one Philox call a chunk, and the same arithmetic as a pointwise kernel's.
// The two runs come from the two halves of a tile's columns. The halves may lie apart in B: a gate and what it gates, of the
// same hidden columns, then meet in one thread.
//
// An epilogue is an object with
//   expect(row, rows, column0, column1, columns, thread, threads)   by `threads` threads, long before: which part of the matrix
//                              it will be called for, so that it can fetch what it reads into L2
//   operator()(piece, sync)    by the four warps; sync() waits for all of them
// and a piece is a PiecePlace with
//   read(values, line, index)   chunk 0 to 7 of row 0 to 15 of this warp: 0 to 3 are of the first run
//   sums(warp)                  128 floats of each warp, for the epilogue, once this warp has read all that it needs
#pragma once
#include "common/launch.cuh"
#include "common/vec.cuh"

namespace fastattn {

constexpr int kPieceRows = 64, kRun = 32, kPieceColumns = 2 * kRun;
constexpr int kPieceFloats = 16 * kPieceColumns;  // of one warp

struct PiecePlace {
  int warp;              // 0 to 3
  int row;               // of the matrix: the piece's first
  int column0, column1;  // of the matrix: where the runs begin

  __device__ __forceinline__ int chunk_column(int index) const {
    return (index < 4 ? column0 : column1) + index % 4 * kChunk;
  }
};

// A piece in float32.
struct Piece : PiecePlace {
  float* at;  // the four warps' parts, kPieceFloats each

  // Swizzled, so that neither side's accesses meet in one memory bank more than twice.
  __device__ __forceinline__ float* chunk(int line, int index) const {
    return at + warp * kPieceFloats + line * kPieceColumns + (index ^ line % 8) * kChunk;
  }
  __device__ __forceinline__ float* sums(int of_warp) const { return at + of_warp * kPieceFloats; }

  __device__ __forceinline__ void read(float (&values)[kChunk], int line, int index) const {
    const float4* const from = reinterpret_cast<const float4*>(chunk(line, index));
    const float4 low = from[0], high = from[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  }

  // Accumulators of one 16 x 8 product (mma.cuh), the lane's row and the eighth after it.
  __device__ __forceinline__ void write(int index, float top0, float top1, float bottom0, float bottom1) const {
    const int lane = threadIdx.x % 32, line = lane / 4, pair = lane % 4 * 2;
    *reinterpret_cast<float2*>(chunk(line, index) + pair) = make_float2(top0, top1);
    *reinterpret_cast<float2*>(chunk(line + 8, index) + pair) = make_float2(bottom0, bottom1);
  }
};

// The line of 128 bytes at `from` is brought into L2.
__device__ __forceinline__ void prefetch_line([[maybe_unused]] const void* from) {
#ifndef FASTATTN_HOST
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}

// Tile `index` of tiles in columns of kGroup tiles, one after another: those that are worked on together then cover about as
// many rows as columns, and L2 serves most of both operands.
struct TilePlace {
  int m, n;
};
__device__ __forceinline__ TilePlace grouped_tile(int index, int m_tiles, int n_tiles) {
  constexpr int kGroup = 8;
  const int group = index / (kGroup * n_tiles), place = index % (kGroup * n_tiles);
  const int height = min(m_tiles - group * kGroup, kGroup);
  return {group * kGroup + place % height, place / height};
}

}  // namespace fastattn
