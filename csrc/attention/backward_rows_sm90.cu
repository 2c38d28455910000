// The small kernels of the backward on Hopper: lse and delta of each query, padded to whole tiles; the order in which
// dq is added up, and its rounding.   Formulas: backward.h
//
// They are limited by memory. Bytes: of the first, out and dout once; of the last, the sum and dq. H200, bf16, 8 x 32
//   heads, 2048 queries, D 64: 43 us at 3.3 TB/s, 46 us at 3.9 TB/s, and the order, by an earlier kernel, 3 us: 5 % of
//   the backward.
#include "attention/backward_sm90_common.cuh"

namespace fastattn::attention {
namespace {

constexpr int kRowThreads = 128;

// The rows of (b, h); a quad a row. Grid: blocks of rows, heads of all samples. Together they clear `count` counters.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    backward_rows_sm90_kernel(const Backward p, const PaddedRows rows, int* counters, int64_t count) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kRowThreads)
    counters[i] = 0;
  const int padded = ceil_div(p.shape.seqlen_q, kRowBlock) * kRowBlock;
  const int head = blockIdx.x % (p.shape.batch * p.shape.heads);
  const int m = blockIdx.x / (p.shape.batch * p.shape.heads) * (kRowThreads / 4) + threadIdx.x / 4;
  const int inside = min(m, p.shape.seqlen_q - 1), b = head / p.shape.heads, h = head % p.shape.heads;
  const int64_t from = static_cast<int64_t>(head) * p.shape.seqlen_q + inside;
  const int64_t to = static_cast<int64_t>(head) * padded + m;
  const float lse = m > inside ? -kInfinity : p.lse[from];
  const Matrix<T> out(p.out, b, h, p.shape.seqlen_q, p.shape.head_dim_v);
  const Matrix<T> dout(p.dout, b, h, p.shape.seqlen_q, p.shape.head_dim_v);
  const float delta = row_product(out, dout, inside) - (p.dlse != nullptr ? p.dlse[from] : 0.0f);
  if (threadIdx.x % 4 != 0) return;
  rows.shift[to] = lse == -kInfinity ? kInfinity : lse * kLog2e;
  rows.delta[to] = lse == -kInfinity ? 0.0f : delta;
}

// PartialSums.turns. Grid: groups of 32 tiles of keys of all (b, h), by groups of query tiles. A warp reads the list of
// a tile of keys, and its lanes read only the places in use. For each query tile, a block counts the entries of earlier
// groups, and notes those of its own group as bits, which it then counts.
// Estimated for 32k packed tokens in sequences of 2k at D 128, 256 lists of 512 places with 32 in use: eight blocks
// read 1408 lists, 191 KB, the last one nine lists a warp, 10 us. Dropped: one block over all 131072 places, twice,
// each with a 64-bit division, estimated at 200 to 400 us.
constexpr int kTurnTiles = 2048;

struct TurnShared {
  int earlier[kTurnTiles];
  uint32_t listed[kTurnTiles];
};

__global__ void __launch_bounds__(32 * 32) backward_turns_sm90_kernel(const Mask by_key, int key_tiles, int* turns) {
  TurnShared& shared = shared_memory<TurnShared>();
  const int warp = threadIdx.x / 32, groups = ceil_div(key_tiles, 32), group = blockIdx.x % groups * 32;
  const int64_t list = static_cast<int64_t>(blockIdx.x / groups) * key_tiles;
  const int own = group + warp, first = blockIdx.y * kTurnTiles;
  const auto for_each_entry = [&](int key_tile, auto&& f) {
    const int count = by_key.counts[list + key_tile].y;
    for (int place = threadIdx.x % 32; place < count; place += 32) {
      const int64_t entry = (list + key_tile) * by_key.max_tiles + place;
      const int tile = (by_key.tiles[entry] & kTileBits) - first;
      if (tile >= 0 && tile < kTurnTiles) f(entry, tile);
    }
  };
  for (int i = threadIdx.x; i < kTurnTiles; i += blockDim.x) shared.earlier[i] = 0, shared.listed[i] = 0;
  __syncthreads();
  for (int key_tile = warp; key_tile < group; key_tile += 32)
    for_each_entry(key_tile, [&](int64_t, int tile) { atomicAdd(shared.earlier + tile, 1); });
  // An entry is in a list once, so that adding sets its bit.
  if (own < key_tiles) for_each_entry(own, [&](int64_t, int tile) { atomicAdd(shared.listed + tile, 1u << warp); });
  __syncthreads();
  if (own < key_tiles)
    for_each_entry(own, [&](int64_t entry, int tile) {
      turns[entry] = shared.earlier[tile] + __popc(shared.listed[tile] & first_bits(warp));
    });
}

// dq = softmax_scale * sum, rounded. A warpgroup rounds a part; without tiles of keys it is zero, and was not written.
template <class T>
__global__ void __launch_bounds__(kGroup)
    backward_round_sm90_kernel(const Backward p, const PartialSums sums, const __grid_constant__ TensorMap dq) {
  struct alignas(1024) Tile {
    unsigned char panels[1][kGroupRows * kLineBytes];
  };
  Tile& tile = shared_memory<Tile>();
  const Shape& shape = p.shape;
  const int64_t part = blockIdx.x;
  const int panels = max(shape.head_dim_k, shape.head_dim_v) > kPanel ? 2 : 1, panel = static_cast<int>(part % panels);
  const int blocks = ceil_div(shape.seqlen_q, kRowBlock) * (kRowBlock / kGroupRows);
  const int block = static_cast<int>(part / panels % blocks), head = static_cast<int>(part / panels / blocks);
  const bool empty = sums.counters[part] == 0;
  const auto* const from = reinterpret_cast<const float4*>(sums.parts + part * kPartSize) + threadIdx.x;
  float sum[kPartSize / kGroup];
#pragma unroll
  for (int i = 0; i < kPartSize / kGroup / 4; i++) {
    const float4 four = empty ? make_float4(0, 0, 0, 0) : from[i * kGroup];
    sum[4 * i] = four.x, sum[4 * i + 1] = four.y, sum[4 * i + 2] = four.z, sum[4 * i + 3] = four.w;
  }
  write_lines<T, kPanel>(tile.panels, 0, threadIdx.x, sum, p.softmax_scale);
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x > 0) return;
  tma_store(dq, tile.panels[0], panel * kPanel, block * kGroupRows, head % shape.heads, head / shape.heads);
  bulk_commit();
  bulk_wait<0>();
}

}  // namespace

void backward_rows_sm90(const Backward& p, const PaddedRows& rows, const PartialSums& sums, cudaStream_t stream) {
  const int blocks =
      ceil_div(p.shape.seqlen_q, kRowBlock) * (kRowBlock / (kRowThreads / 4)) * p.shape.batch * p.shape.heads;
  launch(p.dtype == DType::bfloat16 ? backward_rows_sm90_kernel<__nv_bfloat16> : backward_rows_sm90_kernel<__half>,
         dim3(blocks), dim3(kRowThreads), 0, stream, p, rows, sums.counters, parts_of(p.shape) + 1);
  const Mask& by_key = p.by_key;
  if (by_key.tiles == nullptr) return;
  const TileSize tile = backward_sm90_tile(head_dim(p.shape));
  const int key_tiles = ceil_div(p.shape.seqlen_k, tile.rows), query_tiles = ceil_div(p.shape.seqlen_q, tile.columns);
  const int batches = by_key.lists_stride_b != 0 ? p.shape.batch : 1;
  const int lists = batches * (by_key.lists_stride_h != 0 ? p.shape.heads : 1);
  launch(backward_turns_sm90_kernel, dim3(lists * ceil_div(key_tiles, 32), ceil_div(query_tiles, kTurnTiles)),
         dim3(32 * 32), sizeof(TurnShared), stream, by_key, key_tiles, sums.turns);
}

void backward_round_sm90(const Backward& p, const PartialSums& sums, cudaStream_t stream) {
  const Shape& s = p.shape;
  const TensorMap dq = matrix_map(p.dq, s.head_dim_k, 0, s.seqlen_q, s.heads, s.batch, kGroupRows);
  launch(p.dtype == DType::bfloat16 ? backward_round_sm90_kernel<__nv_bfloat16> : backward_round_sm90_kernel<__half>,
         dim3(static_cast<unsigned>(parts_of(p.shape))), dim3(kGroup), sizeof(unsigned char[kGroupRows * kLineBytes]),
         stream, p, sums, dq);
}

}  // namespace fastattn::attention
