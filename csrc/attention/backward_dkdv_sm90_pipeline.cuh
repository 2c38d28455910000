// The pipeline of backward_dkdv_sm90.cu, which alone includes it: tiles, shared memory, work items, and the producer.
#pragma once
#include "attention/backward_sm90_common.cuh"

namespace fastattn::attention {
namespace {

constexpr int kBlockN = kGroupRows * kConsumers;
// One kEmpty and kFull for each consumer: of its part of dq in shared memory.
enum NamedBarrier { kGroupBarrier = 1, kBothBarrier = 3, kEmpty = 4, kFull = 6 };

template <int kHeadDimPadded>
struct Tiles {
  static constexpr int kHeadDim = kHeadDimPadded, kPanels = kHeadDim / kPanel;
  static constexpr int kBlockM = kHeadDim <= 64 ? 128 : 64;
  // With 64 queries each consumer computes 64 columns of dq, with 128 the rows of 64 queries.
  static constexpr bool kDqByColumns = kBlockM == kGroupRows, kBlocks = false;
};

// Of a bool matrix: a warpgroup skips the blocks of 64 x 64 that its keys do not see.
template <int kHeadDimPadded>
struct BlockTiles : Tiles<kHeadDimPadded> {
  static constexpr bool kBlocks = true;
};

// A tile of queries, for consumers and senders. m0 is -1 after the last one.
struct alignas(16) QueryTile {
  int m0, h;
  uint32_t kind;  // with kBlocks TileLoop::classes, else whether it is partial
  int turn;       // how many tiles of keys come before this one
};
// A consumer hands over tile i + 1, for which the sender has to be done with tile i, before it releases the queries of
// tile i + 2. So if the producer may load tile i + 4, all are done with the entry of tile i.
constexpr int kTilesKept = 2 * kStages;

struct WorkItem {
  int b, h_k, n0, group;
};

template <class Tiles>
struct alignas(1024) Shared {
  static constexpr int kPanels = Tiles::kPanels, kBlockM = Tiles::kBlockM;
  // dS of both warpgroups, whose lines are keys, and their parts of dq before they are sent.
  unsigned char ds[2][kBlockM / kPanel][kBlockN * kLineBytes];
  float4 dq[kConsumers][kPartSize / 4 / kGroup][kGroup];
  unsigned char k[kPanels][kBlockN * kLineBytes], v[kPanels][kBlockN * kLineBytes];  // at the end dk and dv
  unsigned char q[kStages][kPanels][kBlockM * kLineBytes], dout[kStages][kPanels][kBlockM * kLineBytes];
  float shift[kStages][kBlockM], delta[kStages][kBlockM];
  unsigned char kept[kConsumers * 4][kBlockM][2];  // of each warp: bit r % 8 of byte r / 8 for key r of its 16
  Barrier full_kv, full_q[kStages], full_dout[kStages], empty[kStages];
  QueryTile tiles[kTilesKept];
  WorkItem item;
  TileLoop loop;  // of the producer: it has too few registers
};

// Where the next queries and their gradients are.
struct Place {
  int number = 0;  // modulo kTilesKept

  __device__ __forceinline__ int stage() const { return number % kStages; }
  __device__ __forceinline__ int phase() const { return number / kStages; }
  __device__ __forceinline__ void advance() { number = (number + 1) % kTilesKept; }
};

// A block's work item. Blocks get them in the order in which they start: then a block waits only for blocks that run.
__device__ __forceinline__ WorkItem block_item(const Arguments& a) {
  const Shape& shape = a.p.shape;
  const auto [head, tile] =
      item_in_order(atomicAdd(a.sums.counters + parts_of(shape), 1), shape.batch * shape.key_heads,
                    ceil_div(shape.seqlen_k, kBlockN), a.heads_together);
  return {head / shape.key_heads, head % shape.key_heads, tile * kBlockN, shape.heads / shape.key_heads};
}

// The query tiles of a block's keys. Keys past the end are zeros. For dq, dS is multiplied with them, so a ragged tile
// must be partial.
template <class Tiles>
__device__ __forceinline__ TileLoop loop_of(const Arguments& a, const WorkItem& item, int h) {
  const Shape& shape = a.p.shape;
  TileLoop loop = plan_tiles<Tiles::kBlockM>(a.p.by_key, item.b, h, item.n0, kBlockN, shape.seqlen_k, shape.seqlen_q);
  const bool ragged = item.n0 + kBlockN > shape.seqlen_k;
  if (ragged && loop.list == nullptr) loop.left = loop.partial = loop.count;
  return loop;
}

// How many tiles of keys add to a tile of queries before this one, which has it at `place` of its list: those with
// lower keys.
__device__ __forceinline__ int turn_of(const Arguments& a, const WorkItem& item, const TileLoop& loop, int place,
                                       int m0) {
  const Mask& mask = a.p.by_key;
  if (loop.list != nullptr) return a.sums.turns[loop.list - mask.tiles + place];
  return item.n0 / kBlockN - max(m0 - mask.band_hi, 0) / kBlockN;
}

template <class Tiles>
__device__ __forceinline__ void produce(const Arguments& a, Shared<Tiles>& shared) {
  const WorkItem& item = shared.item;
  for (const TensorMap* map : {&a.k, &a.v, &a.q, &a.dout}) prefetch(*map);
  shared.full_kv.arrive_expect(2 * sizeof shared.k);
  copy_panels(shared.k, a.k, shared.full_kv, item.n0 - a.key_begin, item.h_k, item.b);
  copy_panels(shared.v, a.v, shared.full_kv, item.n0 - a.key_begin, item.h_k, item.b);
  Place place;
  constexpr int kBytes = Tiles::kBlockM * sizeof(float);
  for (int h = item.h_k * item.group; h < (item.h_k + 1) * item.group; h++) {
    shared.loop = loop_of<Tiles>(a, item, h);
    const TileLoop& loop = shared.loop;
    DescendingTiles tiles(loop);
#pragma unroll 1
    while (tiles.next()) {
      const int m0 = tiles.tile * Tiles::kBlockM, stage = place.stage();
      shared.empty[stage].wait(place.phase() ^ 1);
      const uint32_t kind = Tiles::kBlocks ? loop.classes(tiles.place) : tiles.is_partial;
      shared.tiles[place.number] = {m0, h, kind, turn_of(a, item, loop, tiles.place, m0)};
      const int64_t row = first_row(a, item.b, h) + m0;
      Barrier &full_q = shared.full_q[stage], &full_dout = shared.full_dout[stage];
      full_q.arrive_expect(sizeof shared.q[0] + kBytes);
      copy_panels(shared.q[stage], a.q, full_q, m0, h, item.b);
      bulk_load(shared.shift[stage], a.rows.shift + row, kBytes, full_q);
      full_dout.arrive_expect(sizeof shared.dout[0] + kBytes);
      copy_panels(shared.dout[stage], a.dout, full_dout, m0, h, item.b);
      bulk_load(shared.delta[stage], a.rows.delta + row, kBytes, full_dout);
      place.advance();
    }
  }
  shared.empty[place.stage()].wait(place.phase() ^ 1);
  shared.tiles[place.number].m0 = -1;
  shared.full_q[place.stage()].arrive();
}

// Adds a consumer's parts of dq to the sum in memory, in order. Called by a warp.
template <class Tiles>
__device__ __forceinline__ void send_dq(const Arguments& a, Shared<Tiles>& shared, int consumer) {
  constexpr int kThreads = kGroup + 32;
  const bool leads = threadIdx.x % 32 == 0;
  const int blocks = ceil_div(a.p.shape.seqlen_q, kRowBlock) * (kRowBlock / kGroupRows);
  int* const counters = a.sums.counters;
  named_barrier_arrive(kEmpty + consumer, kThreads);
#pragma unroll 1
  for (int i = 0;; i++) {
    named_barrier_sync(kFull + consumer, kThreads);
    const QueryTile tile = shared.tiles[i % kTilesKept];
    if (tile.m0 < 0) break;
    const int block = (shared.item.b * a.p.shape.heads + tile.h) * blocks + tile.m0 / kGroupRows;
    const int part = Tiles::kDqByColumns ? block * Tiles::kPanels + consumer : block + consumer;
    if (leads) {
      wait_for_count(counters + part, tile.turn);
      float* const to = a.sums.parts + int64_t{part} * kPartSize;
      if (tile.turn == 0)
        bulk_store(to, shared.dq[consumer], sizeof shared.dq[consumer]);
      else
        bulk_add(to, &shared.dq[consumer][0][0].x, sizeof shared.dq[consumer]);
      bulk_commit();
      bulk_wait_read<0>();
    }
    __syncwarp();
    named_barrier_arrive(kEmpty + consumer, kThreads);
    if (leads) {
      bulk_wait<0>();
      raise_count(counters + part);
    }
    __syncwarp();
  }
}

}  // namespace
}  // namespace fastattn::attention
