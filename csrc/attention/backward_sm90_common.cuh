// Shared by the kernels of the backward on Hopper: arguments and sizes.
#pragma once
#include "attention/backward_common.cuh"
#include "attention/backward_sm90.h"
#include "attention/sm90.cuh"

namespace fastattn::attention {
namespace {

using namespace sm90;

constexpr int kConsumers = 2;
using Registers = RegisterSplit<kConsumers, 24, 240>;

struct Arguments {
  Backward p;
  PaddedRows rows;
  PartialSums sums;
  TensorMap q, k, v, dout, dk, dv;
  int key_begin;       // the first key of the maps of k and v: keys_in_band
  int heads_together;  // of those that a block owns a tile of: item_in_order
};

// The first row of (b, h) in PaddedRows.
__device__ __forceinline__ int64_t first_row(const Arguments& a, int b, int h) {
  const int padded = ceil_div(a.p.shape.seqlen_q, kRowBlock) * kRowBlock;
  return (static_cast<int64_t>(b) * a.p.shape.heads + h) * padded;
}

}  // namespace
}  // namespace fastattn::attention
