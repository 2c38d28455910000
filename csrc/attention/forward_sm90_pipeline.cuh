// The pipeline of forward_sm90.cu, which alone includes it: tiles, shared memory, work items, and the producer.
#pragma once
#include "attention/sm90.cuh"

namespace fastattn::attention {
namespace {

using namespace sm90;

template <int kHeadDimPadded>
struct Tiles {
  static constexpr int kHeadDim = kHeadDimPadded, kPanels = kHeadDim / kPanel, kConsumers = kHeadDim <= 64 ? 3 : 2;
  static constexpr int kBlockM = kGroupRows * kConsumers, kBlockN = 128, kStages = 2;
  static constexpr bool kBlocks = false;
  using Registers = RegisterSplit<kConsumers, kConsumers == 3 ? 32 : 40, kConsumers == 3 ? 160 : 232>;
};

// Of a bool matrix: a warpgroup skips the blocks of 64 x 64 that it does not see. With more stages those that skip wait
// less for the others.
template <int kHeadDimPadded>
struct BlockTiles : Tiles<kHeadDimPadded> {
  static constexpr int kStages = kHeadDimPadded <= 64 ? 4 : 2;
  static constexpr bool kBlocks = true;
};

// What consumers must know of an item. count: tiles of keys, the partial ones first; -1 after the last item.
struct WorkItem {
  int b, h, m0, partial, count;
};

template <class Tiles>
struct alignas(1024) Shared {
  static constexpr int kLine = kLineBytes, kStages = Tiles::kStages;
  unsigned char q[Tiles::kPanels][Tiles::kBlockM * kLine];
  unsigned char k[kStages][Tiles::kPanels][Tiles::kBlockN * kLine], v[kStages][Tiles::kPanels][Tiles::kBlockN * kLine];
  unsigned char out[Tiles::kPanels][Tiles::kBlockM * kLine];
  Barrier full_q, empty_q, full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
  // The item of q, and the first key of each tile, from the producer. A place is written again only after all threads
  // are past the next item, and past the second tile from there: then their reads have ended without another barrier.
  WorkItem items[2];
  int first_keys[2][kStages];
  uint32_t classes[2][kStages];  // with kBlocks, of each tile
};

struct Arguments {
  Forward p;
  TensorMap q, k, v, out;
  int key_begin;  // the first key of the maps of k and v: keys_in_band
  int items, heads_together;
  int* next_item;  // null: blocks get equally many items, each time in the other order
};

template <class Tiles>
__device__ __forceinline__ void produce(const Arguments& a, Shared<Tiles>& shared) {
  for (const TensorMap* map : {&a.q, &a.k, &a.v, &a.out}) prefetch(*map);
  const Shape& shape = a.p.shape;
  const int group = shape.heads / shape.key_heads, tiles = ceil_div(shape.seqlen_q, Tiles::kBlockM);
  Ring<Tiles::kStages> keys, values;
  int index = blockIdx.x;
  for (int turn = 0, round = 0;; turn ^= 1) {
    const bool ends = index >= a.items;
    const auto [head, tile] =
        item_in_order(min(index, a.items - 1), shape.batch * shape.heads, tiles, a.heads_together);
    const int b = head / shape.heads, h = head % shape.heads, m0 = (tiles - 1 - tile) * Tiles::kBlockM;
    TileLoop loop{};
    if (!ends) loop = plan_tiles<Tiles::kBlockN>(a.p.mask, b, h, m0, Tiles::kBlockM, shape.seqlen_q, shape.seqlen_k);
    int next = 0;  // the first key of the tile whose keys were loaded last
    const auto load_keys = [&](int i) {
      if (i >= loop.count) return;
      shared.empty_k[keys.stage].wait(keys.phase ^ 1);
      next = loop.tile(i) * Tiles::kBlockN;
      shared.first_keys[keys.phase][keys.stage] = next;
      if (Tiles::kBlocks) shared.classes[keys.phase][keys.stage] = loop.classes(i);
      load_panels(shared.k[keys.stage], a.k, shared.full_k[keys.stage], next - a.key_begin, h / group, b);
      keys.advance();
    };
    load_keys(0);  // while the last item's queries are still read
    shared.empty_q.wait(turn ^ 1);
    shared.items[turn] = {b, h, m0, loop.partial, ends ? -1 : loop.count};
    if (ends) break;
    load_panels(shared.q, a.q, shared.full_q, m0, h, b);
    // Keys one tile ahead of values: consumers use and release them in this order.
#pragma unroll 1
    for (int i = 0; i < loop.count; i++) {
      const int key = next;
      load_keys(i + 1);
      shared.empty_v[values.stage].wait(values.phase ^ 1);
      load_panels(shared.v[values.stage], a.v, shared.full_v[values.stage], key - a.key_begin, h / group, b);
      values.advance();
    }
    if (a.next_item != nullptr) {
      index = gridDim.x + atomicAdd(a.next_item, 1);
    } else {
      round++;
      index = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    }
  }
  shared.full_q.arrive();
}

}  // namespace
}  // namespace fastattn::attention
