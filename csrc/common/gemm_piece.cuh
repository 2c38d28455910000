// How a product's accumulators reach an epilogue: piece by piece, through shared memory.
//
// A piece is 64 rows of two runs of 32 columns each; each of four warps has 16 rows of it. In shared memory the
// scattered pairs of an accumulator become whole chunks of eight columns of a row, as an epilogue needs them: 16-byte
// accesses, one Philox call a chunk, and the same arithmetic as in a pointwise kernel. The two runs come from the two
// halves of a tile's columns. The halves need not be adjacent in B: a gate and the value that it gates then come to the
// same thread.
//
// An epilogue is an object with
//   expect(row, rows, column0, column1, columns, thread, threads)   called early, by `threads` threads: the part of the
//                              matrix that follows, so that the epilogue can prefetch into L2 what it reads
//   operator()(piece, sync)    called by the four warps; sync() waits for all of them
// and a piece is a PiecePlace with
//   read(values, line, index)  chunk 0 to 7 of row 0 to 15 of this warp: 0 to 3 are of the first run
//   sums(warp)                 128 floats of each warp for the epilogue, after this warp has read all that it needs
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

// Prefetches the line of 128 bytes at `from` into L2.
__device__ __forceinline__ void prefetch_line([[maybe_unused]] const void* from) {
#ifndef FASTATTN_EMULATOR
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}

// Tile `index`, in the order of columns of kGroup tiles: the tiles in progress then cover about as many rows as
// columns, and most reads of both operands hit L2.
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
