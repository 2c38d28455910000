// The pipeline of forward_sm90.cu, which alone includes it: tiles, shared memory, work items, and the producer.
#pragma once
#include "attention/forward_sm90.h"
#include "attention/sm90.cuh"

namespace fastattn::attention {
namespace {

using namespace sm90;

template <int kHeadDimPadded>
struct Tiles {
  static constexpr int kHeadDim = kHeadDimPadded, kPanels = kHeadDim / kPanel;
  static constexpr int kConsumers = kHeadDim <= 64 ? 3 : 2;
  static constexpr int kBlockM = kGroupRows * kConsumers, kBlockN = kHeadDim <= 128 ? 128 : 64;
  using Registers = RegisterSplit<kConsumers, kConsumers == 3 ? 32 : 40, kConsumers == 3 ? 160 : 232>;
  static constexpr bool kOutOverQueries = kHeadDim > 128;  // both do not fit into shared memory
};

template <class Tiles>
struct alignas(1024) Shared {
  static constexpr int kLine = kLineBytes;
  unsigned char q[Tiles::kPanels][Tiles::kBlockM * kLine];
  unsigned char k[kStages][Tiles::kPanels][Tiles::kBlockN * kLine], v[kStages][Tiles::kPanels][Tiles::kBlockN * kLine];
  unsigned char out[Tiles::kOutOverQueries ? 1 : Tiles::kPanels]
                   [Tiles::kOutOverQueries ? 1024 : Tiles::kBlockM * kLine];
  Barrier full_q, empty_q, full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
  int item;  // the work item that q is of; -1 at the end

  __device__ __forceinline__ unsigned char* out_panel(int panel) {
    return Tiles::kOutOverQueries ? q[panel] : out[panel];
  }
};

struct Arguments {
  Forward p;
  TensorMap q, k, v, out;
  int key_begin;  // the first key of the maps of k and v: keys_in_band
  int items, heads_together;
  int* next_item;  // null: a block computes every gridDim.x-th item
};

struct WorkItem {
  int b, h, m0;
  TileLoop loop;
};

template <class Tiles>
__device__ __forceinline__ WorkItem item_at(const Arguments& a, int index) {
  const Shape& shape = a.p.shape;
  const int tiles = ceil_div(shape.seqlen_q, Tiles::kBlockM);
  const auto [head, tile] = item_in_order(index, shape.batch * shape.heads, tiles, a.heads_together);
  const int b = head / shape.heads, h = head % shape.heads, m0 = (tiles - 1 - tile) * Tiles::kBlockM;
  return {b, h, m0, plan_tiles<Tiles::kBlockN>(a.p.mask, b, h, m0, Tiles::kBlockM, shape.seqlen_q, shape.seqlen_k)};
}

template <class Tiles>
__device__ __forceinline__ void produce(const Arguments& a, Shared<Tiles>& shared) {
  for (const TensorMap* map : {&a.q, &a.k, &a.v, &a.out}) prefetch(*map);
  const int group = a.p.shape.heads / a.p.shape.key_heads;
  Ring keys, values;
  const auto load = [&](auto& ring, auto& tiles, const TensorMap& map, auto& full, auto& empty, const WorkItem& item,
                        int i) {
    empty[ring.stage].wait(ring.phase ^ 1);
    const int key = item.loop.tile(i) * Tiles::kBlockN - a.key_begin;
    load_panels(tiles[ring.stage], map, full[ring.stage], key, item.h / group, item.b);
    ring.advance();
  };
  const auto load_keys = [&](const WorkItem& item, int i) {
    if (i < item.loop.count) load(keys, shared.k, a.k, shared.full_k, shared.empty_k, item, i);
  };
  int index = blockIdx.x;
  for (int turn = 0;; turn ^= 1) {
    const bool ends = index >= a.items;
    const WorkItem item = ends ? WorkItem{} : item_at<Tiles>(a, index);
    load_keys(item, 0);  // while the last item's queries are still read
    shared.empty_q.wait(turn ^ 1);
    shared.item = ends ? -1 : index;
    if (ends) break;
    load_panels(shared.q, a.q, shared.full_q, item.m0, item.h, item.b);
    // Keys one tile ahead of values: consumers use and release them in this order.
#pragma unroll 1
    for (int i = 0; i < item.loop.count; i++) {
      load_keys(item, i + 1);
      load(values, shared.v, a.v, shared.full_v, shared.empty_v, item, i);
    }
    index = a.next_item == nullptr ? index + gridDim.x : gridDim.x + atomicAdd(a.next_item, 1);
  }
  shared.full_q.arrive();
}

}  // namespace
}  // namespace fastattn::attention
