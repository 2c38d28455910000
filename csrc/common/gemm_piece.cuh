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

struct PiecePlace {
  int warp;              // 0 to 3
  int row;               // of the matrix: the piece's first
  int column0, column1;  // of the matrix: where the runs begin

  __device__ __forceinline__ int chunk_column(int index) const {
    return (index < 4 ? column0 : column1) + index % 4 * kChunk;
  }
};

// The line of 128 bytes at `from` is brought into L2.
__device__ __forceinline__ void prefetch_line([[maybe_unused]] const void* from) {
#ifndef FASTATTN_EMULATOR
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
