// The pipeline of backward_dkdv_sm90.cu, which alone includes it: tiles, shared memory, work items, and the producer.
#pragma once
#include "attention/backward_sm90_common.cuh"

namespace fastattn::attention {
namespace {

constexpr int kBlockN = kGroupRows * kConsumers, kFloatPanel = 32;  // floats of a swizzled line

// What a block computes. Beyond a head dimension of 128 dk and dv do not both fit into registers: they have separate
// blocks.
enum class Outputs { dk, dv, dk_dv, dk_dv_dq };

template <int kHeadDimPadded>
struct Tiles {
  static constexpr int kHeadDim = kHeadDimPadded, kPanels = kHeadDim / kPanel;
  static constexpr int kBlockM = kHeadDim <= 64 ? 128 : 64;
  static constexpr bool kSplit = kHeadDim > 128;
  static constexpr int kGradientStages = kSplit ? 1 : kStages;  // shared memory is full
};

// dS of both warpgroups, and their parts of dq before they are stored.
template <class Tiles>
struct SumShared {
  unsigned char ds[2][Tiles::kBlockM / kPanel][kBlockN * kLineBytes];  // lines are keys
  unsigned char dq[kConsumers][64 / kFloatPanel][kGroupRows * kLineBytes];
};
struct Empty {};

template <class Tiles, Outputs kOutputs>
struct alignas(1024) Shared : std::conditional_t<kOutputs == Outputs::dk_dv_dq, SumShared<Tiles>, Empty> {
  static constexpr int kPanels = Tiles::kPanels, kBlockM = Tiles::kBlockM;
  unsigned char k[kPanels][kBlockN * kLineBytes], v[kPanels][kBlockN * kLineBytes];  // at the end dk and dv
  unsigned char q[kStages][kPanels][kBlockM * kLineBytes], dout[Tiles::kGradientStages][kPanels][kBlockM * kLineBytes];
  float shift[kStages][kBlockM], delta[Tiles::kGradientStages][kBlockM];
  unsigned char kept[kConsumers * 4][kBlockM][2];  // of each warp: bit r % 8 of byte r / 8 for key r of its 16
  Barrier full_kv, full_q[kStages], empty_q[kStages], full_dout[Tiles::kGradientStages],
      empty_dout[Tiles::kGradientStages];
};

// The float32 sum of dq, in boxes of half a warpgroup's part.
inline TensorMap sum_map(const Shape& s, float* sum) {
  const uint64_t row = uint64_t{4} * s.head_dim_k, head = row * s.seqlen_q;
  return make_tensor_map({sum,
                          {uint64_t(s.head_dim_k), uint64_t(s.seqlen_q), uint64_t(s.heads), uint64_t(s.batch)},
                          {row, head, head * s.heads},
                          {kFloatPanel, kGroupRows, 1, 1},
                          true,
                          true});
}

struct WorkItem {
  int b, h_k, n0, group;
};

template <class Tiles>
__device__ __forceinline__ WorkItem block_item(const Arguments& a) {
  const Shape& shape = a.p.shape;
  const auto [head, tile] =
      item_in_order(blockIdx.x, shape.batch * shape.key_heads, ceil_div(shape.seqlen_k, kBlockN), a.heads_together);
  return {head / shape.key_heads, head % shape.key_heads, tile * kBlockN, shape.heads / shape.key_heads};
}

// The query tiles of a block's keys. Keys past the end are zeros. For dq, dS is multiplied with them, so a ragged tile
// must be partial.
template <class Tiles, Outputs kOutputs>
__device__ __forceinline__ TileLoop loop_of(const Arguments& a, const WorkItem& item, int h) {
  const Shape& shape = a.p.shape;
  TileLoop loop = plan_tiles<Tiles::kBlockM>(a.p.by_key, item.b, h, item.n0, kBlockN, shape.seqlen_k, shape.seqlen_q);
  const bool ragged = item.n0 + kBlockN > shape.seqlen_k;
  if (kOutputs == Outputs::dk_dv_dq && ragged && loop.list == nullptr) loop.left = loop.partial = loop.count;
  return loop;
}

template <class Tiles, Outputs kOutputs>
__device__ __forceinline__ void produce(const Arguments& a, Shared<Tiles, kOutputs>& shared) {
  for (const TensorMap* map : {&a.k, &a.v, &a.q, &a.dout, &a.dq, &a.dk, &a.dv}) prefetch(*map);
  const WorkItem item = block_item<Tiles>(a);
  shared.full_kv.arrive_expect((kOutputs != Outputs::dv ? 2 : 1) * sizeof shared.k);
  copy_panels(shared.k, a.k, shared.full_kv, item.n0 - a.key_begin, item.h_k, item.b);
  if (kOutputs != Outputs::dv) copy_panels(shared.v, a.v, shared.full_kv, item.n0 - a.key_begin, item.h_k, item.b);
  Ring queries;
  RingOf<Tiles::kGradientStages> gradients;
  constexpr int kBytes = Tiles::kBlockM * sizeof(float);
  for (int h = item.h_k * item.group; h < (item.h_k + 1) * item.group; h++) {
    const TileLoop loop = loop_of<Tiles, kOutputs>(a, item, h);
    const int64_t row0 = first_row(a, item.b, h);
#pragma unroll 1
    for (int i = 0; i < loop.count; i++) {
      const int m0 = loop.tile(i) * Tiles::kBlockM, stage = queries.stage, gradient_stage = gradients.stage;
      Barrier &full_q = shared.full_q[stage], &full_dout = shared.full_dout[gradient_stage];
      shared.empty_q[stage].wait(queries.phase ^ 1);
      full_q.arrive_expect(sizeof shared.q[0] + kBytes);
      copy_panels(shared.q[stage], a.q, full_q, m0, h, item.b);
      bulk_load(shared.shift[stage], a.rows.shift + row0 + m0, kBytes, full_q);
      queries.advance();
      shared.empty_dout[gradient_stage].wait(gradients.phase ^ 1);
      full_dout.arrive_expect(sizeof shared.dout[0] + kBytes);
      copy_panels(shared.dout[gradient_stage], a.dout, full_dout, m0, h, item.b);
      bulk_load(shared.delta[gradient_stage], a.rows.delta + row0 + m0, kBytes, full_dout);
      gradients.advance();
    }
  }
}

}  // namespace
}  // namespace fastattn::attention
