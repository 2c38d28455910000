// The frame of the backward on Hopper: tiles and their shared memory, the work of a block, and its producer.
// A part of backward_sm90.cu, which alone includes it.
#pragma once
#include "attention/backward.cuh"
#include "attention/backward_sm90.h"
#include "attention/sm90.cuh"

namespace fastattn::attention {
namespace {

using namespace sm90;

constexpr int kBlockN = 128, kConsumers = 2, kSm90Threads = kGroup * (kConsumers + 1);
constexpr int kFloatPanel = 32;  // floats of a swizzled line
template <int kHeadDimPadded>
struct Tiles {
  static constexpr int kHeadDim = kHeadDimPadded, kPanels = kHeadDim / kPanel;
  static constexpr int kBlockM = kHeadDim <= 64 ? 128 : 64;
};

template <class Tiles>
struct alignas(1024) Shared {
  static constexpr int kPanels = Tiles::kPanels, kBlockM = Tiles::kBlockM;
  unsigned char k[kPanels][kBlockN * kLineBytes], v[kPanels][kBlockN * kLineBytes];  // at the end dk and dv
  unsigned char q[kStages][kPanels][kBlockM * kLineBytes], dout[kStages][kPanels][kBlockM * kLineBytes];
  unsigned char ds[2][kBlockM / kPanel][kBlockN * kLineBytes];  // lines are keys
  unsigned char dq[kConsumers][64 / kFloatPanel][kRowsOfGroup * kLineBytes];
  float shift[kStages][kBlockM], delta[kStages][kBlockM];
  unsigned char kept[kConsumers * 4][kBlockM][2];  // of each warp: bit r % 8 of byte r / 8 for key r of its 16
  Barrier full_kv, full_q[kStages], full_dout[kStages], empty[kStages];
};

struct Arguments {
  Backward p;
  const float *shift, *delta;
  TensorMap q, k, v, dout, dq, dk, dv;
  int key_begin;  // the first key of the maps of k and v: keys_in_band
};

struct Work {
  int b, h_k, n0, group;
};

template <class Tiles>
__device__ __forceinline__ Work work_of_block(const Arguments& a) {
  const Shape& shape = a.p.shape;
  const int heads = shape.batch * shape.key_heads, head = blockIdx.x % heads;
  return {head / shape.key_heads, head % shape.key_heads, static_cast<int>(blockIdx.x) / heads * kBlockN,
          shape.heads / shape.key_heads};
}

template <class Tiles>
__device__ __forceinline__ Walk walk_of(const Arguments& a, const Work& work, int h) {
  const Visibility& who = a.p.by_key;
  return plan_walk<kBlockN, Tiles::kBlockM>(who.lists, work.b, h, work.n0, a.p.shape.seqlen_k, a.p.shape.seqlen_q,
                                            -who.band_hi, -who.band_lo);
}

template <class Tiles>
__device__ __forceinline__ void produce(const Arguments& a, Shared<Tiles>& shared) {
  for (const TensorMap* map : {&a.k, &a.v, &a.q, &a.dout, &a.dq, &a.dk, &a.dv}) prefetch(*map);
  const Work work = work_of_block<Tiles>(a);
  shared.full_kv.arrive_expect(2 * sizeof shared.k);
  for (int panel = 0; panel < Tiles::kPanels; panel++) {
    tma_load(shared.k[panel], a.k, shared.full_kv, panel * kPanel, work.n0 - a.key_begin, work.h_k, work.b);
    tma_load(shared.v[panel], a.v, shared.full_kv, panel * kPanel, work.n0 - a.key_begin, work.h_k, work.b);
  }
  const int padded = blocks_of(a.p.shape.seqlen_q, kRowBlock) * kRowBlock;
  Ring ring;
  for (int h = work.h_k * work.group; h < (work.h_k + 1) * work.group; h++) {
    const Walk walk = walk_of<Tiles>(a, work, h);
    const int64_t row0 = (static_cast<int64_t>(work.b) * a.p.shape.heads + h) * padded;
#pragma unroll 1
    for (int i = 0; i < walk.count; i++, ring.advance()) {
      const int m0 = walk.tile(i) * Tiles::kBlockM, stage = ring.stage;
      constexpr int kBytes = sizeof shared.shift[0];
      const auto load = [&](auto& tile, const TensorMap& map, float* row, const float* rows, Barrier& full) {
        full.arrive_expect(sizeof tile + kBytes);
        for (int panel = 0; panel < Tiles::kPanels; panel++) tma_load(tile[panel], map, full, panel * kPanel, m0, h, work.b);
        bulk_load(row, rows + row0 + m0, kBytes, full);
      };
      shared.empty[stage].wait(ring.phase ^ 1);
      load(shared.q[stage], a.q, shared.shift[stage], a.shift, shared.full_q[stage]);
      load(shared.dout[stage], a.dout, shared.delta[stage], a.delta, shared.full_dout[stage]);
    }
  }
}

}  // namespace
}  // namespace fastattn::attention
