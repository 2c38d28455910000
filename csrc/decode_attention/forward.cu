// Attention of new tokens to a cache.   Formula, shapes and limits: decode_attention.h
//
// Source: Dao et al. 2023, "Flash-Decoding for long-context inference": with few sequences, several blocks share the
//   positions of one, and a second kernel merges their results.
// Grid: a block of four warps for each (sequence, key head, split, queries that have the same keys). With ancestors, or
//   if each query reads its own row, those queries are the heads of a group; if there is one row, all queries, up to
//   kQueries of them, so that keys are read once. Beams read their common history once from memory and then from L2:
//   the blocks of a head are neighbours.
// A position is read by as many lanes as its head dimension has chunks of eight, four positions at a time a warp at
//   head_dim 64. The next turn's keys are loaded as soon as this turn's scores are done, into the same registers, and
//   its values as soon as this turn's are added: each has half a turn to arrive. Their rows are read before the scores.
// Registers: a lane's eight columns of the sum, its maximum and total, for each query. Each group of lanes has its own
//   sums, which are added in a fixed order at the end.
// Shared memory: the queries in float32, and at the end the groups' sums: 48 KiB for eight queries, 6 KiB for one.
// Tensor cores: several queries in 16 bits, aligned, at head dimensions up to 128. A warp has 16 positions, in the
//   fragments of mma.m16n8k16; the next turn is loaded at the same two places. No shared memory before the end, 9 KiB.
// Bytes: the visible keys and values once, q and out; for each split head_dim + 1 floats a query, written and read.
//   Work: 2 * (head_dim of k + of v) FLOPs a query and visible position.
// Unaligned tensors, and head dimensions that are no multiple of eight, are read element by element.
// A bias and a softcap are uniform branches. The kernel of eight aligned queries without tensor cores has neither, as
// 16 to 84 bytes were spilled: such calls are read element by element, too.
// Compiled offline with nvcc 13.0, sm_80 / sm_90, nothing spills:
//   one query      bfloat16 126 / 127 registers   float32 95 / 96: four blocks a multiprocessor
//   eight queries  bfloat16 168 / 164             float32 168 / 168: three
//   tensor cores   head_dim 64 143 / 142: three   128 243 / 240: two
// H200, 8 heads of 64, ms, Triton's in brackets, each query with its own rows:
//   32 x 5 queries of    64 keys            512 keys           2048 keys                  256 x 5 of 64 keys
//   bfloat16             0.0131 (0.0094)    0.0520 (0.0441)    0.171 (0.168), 3.9 TB/s    0.0878 (0.0558), 1.9 TB/s
//   float32              0.0141             0.0821             0.303, 4.4 TB/s            0.0962, 3.5 TB/s
//   On tensor cores, 64 keys that 8 queries share, 32 x 8, bfloat16: 0.0102 (0.0082).
#include "common/mma.cuh"
#include "common/softcap.cuh"
#include "common/softmax.cuh"
#include "common/vec.cuh"
#include "decode_attention/decode_attention.h"

namespace fastattn::decode_attention {
namespace {

constexpr int kThreads = 128;
constexpr int kSplitPositions = 256;  // least of a block, so that the merge pays
constexpr int kMaxSplits = 64;

// The least blocks for whose registers a multiprocessor has room.
template <int kCount, bool kAligned>
constexpr int kBlocks = !kAligned ? 2 : kCount == 1 ? 4 : 3;

// Whether decode_kernel has the softcap and the bias. With eight aligned queries its registers would spill.
template <int kCount, bool kAligned>
constexpr bool kHasBias = kCount == 1 || !kAligned;

// What the groups of lanes of a block found: their sums, a chunk of columns an entry, their maxima and totals.
template <int kCount, int kGroups, int kEntries>
struct alignas(16) Sums {
  float sums[kCount][kEntries][kChunk];
  float peak[kGroups][kCount], total[kGroups][kCount];
};

template <int kCount>
struct alignas(16) Shared {
  float q[kCount][kMaxHeadDim];
  Sums<kCount, kThreads, kThreads> found;
};

// Scores and lse are powers of e in float32 and powers of two in 16 bits: q has that factor. power(x): for x <= 0.
template <class T>
constexpr float kUnit = sizeof(T) == 4 ? 1.0f : kLog2e;

template <class T>
__device__ __forceinline__ float power(float x) {
  return sizeof(T) == 4 ? exp_exact(x) : exp2_approximate(x);
}

// The number of queries with the same keys: all, or one.
__host__ __device__ __forceinline__ int queries_together(bool shared_keys, int queries) {
  return shared_keys ? queries : 1;
}

// What a block computes: some queries, and the positions from `begin` to `end`.
template <class T, int kCount>
struct Work {
  const Decode& p;
  bool shared_keys;
  int group, same, split, h_k, first_query, first, begin, end;  // same: queries with the same keys; first: its first
  int64_t b;
  const int* ancestors;

  __device__ __forceinline__ explicit Work(const Decode& p) : p(p) {
    shared_keys = p.rows == 1 && p.ancestors == nullptr;
    const int together = queries_together(shared_keys, p.queries);
    group = p.heads / p.key_heads, same = together * group;
    const int tiles = (same + kCount - 1) / kCount, parts = p.queries / together * tiles;
    const int part = blockIdx.x % parts, head = blockIdx.x / parts / p.splits;
    split = blockIdx.x / parts % p.splits, h_k = head % p.key_heads, b = head / p.key_heads;
    first_query = part / tiles * together, first = part % tiles * kCount;
    ancestors = p.ancestors == nullptr
                    ? nullptr
                    : p.ancestors + b * p.ancestors_stride_b + first_query * p.ancestors_stride_w;
    const int length = p.lengths == nullptr ? p.positions : min(max(p.lengths[b], 0), p.positions);
    const int span = (length + p.splits - 1) / p.splits;
    begin = split * span, end = min(begin + span, length);
  }

  __device__ __forceinline__ bool has(int i) const { return first + i < same; }
  // The query and the head of the block's i-th query.
  __device__ __forceinline__ int query(int i) const { return first_query + (first + i) / group; }
  __device__ __forceinline__ int query_head(int i) const { return h_k * group + (first + i) % group; }
  __device__ __forceinline__ const T* q(int i) const {
    return static_cast<const T*>(p.q) + b * p.q_stride_b + query(i) * p.q_stride_w + query_head(i) * p.q_stride_h;
  }
  __device__ __forceinline__ const T* head_of(const Cached& t) const {
    return static_cast<const T*>(t.at) + b * t.stride_b + h_k * t.stride_h;
  }

  // The row of a position, or -1: it is not visible.
  __device__ __forceinline__ int row_of(int64_t n) const {
    if (n >= end) return -1;
    if (ancestors == nullptr) return shared_keys ? 0 : first_query;
    const int row = ancestors[n * p.ancestors_stride_m];
    return row < p.rows ? row : -1;
  }

  // The score of position n and the block's i-th query from their scaled product, both in powers of e or two.
  __device__ __forceinline__ float score(float product, int i, int64_t n) const {
    const float softcap = p.softcap * kUnit<T>;
    if (softcap > 0.0f) product = softcap * tanh_for<T>(product * reciprocal(softcap));
    if (p.bias == nullptr) return product;
    return fmaf(p.bias[query_head(i) * p.bias_stride_h + n * p.bias_stride_m], kUnit<T>, product);
  }

  // Writes the block's results, from those of its groups. `entries` of a group hold the columns of a query.
  template <int kGroups, int kEntries>
  __device__ __forceinline__ void write(const Sums<kCount, kGroups, kEntries>& found, int groups, int entries) const {
    const int64_t rows = static_cast<int64_t>(p.batch) * p.queries * p.heads;
    for (int e = threadIdx.x; e < min(kCount, same - first) * p.v.head_dim; e += kThreads) {
      const int i = e / p.v.head_dim, column = e % p.v.head_dim;
      float highest = -INFINITY, all = 0.0f, sum = 0.0f;
      for (int g = 0; g < groups; g++) highest = fmaxf(highest, found.peak[g][i]);
      const float shift = highest == -INFINITY ? 0.0f : highest;
      for (int g = 0; g < groups; g++) {
        const float weight = power<T>(found.peak[g][i] - shift);
        all = fmaf(weight, found.total[g][i], all);
        sum = fmaf(weight, found.sums[i][g * entries + column / kChunk][column % kChunk], sum);
      }
      const float result = all == 0.0f ? 0.0f : sum / all;  // NaN passes
      const int64_t row = (b * p.queries + query(i)) * p.heads + query_head(i);
      if (p.partial == nullptr) {
        static_cast<T*>(p.out)[row * p.v.head_dim + column] = T(result);
        continue;
      }
      p.partial[(split * rows + row) * p.v.head_dim + column] = result;
      if (column == 0) p.lse[split * rows + row] = all == 0.0f ? -INFINITY : shift + kUnit<T> * logf(all);
    }
  }
};

template <class T, int kCount, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks<kCount, kAligned>) decode_kernel(const Decode p, const int lanes) {
  constexpr int kAhead = (kCount == 1 ? 8 : 4) / sizeof(T);
  auto& shared = shared_memory<Shared<kCount>>();
  const Work<T, kCount> work(p);
  const float scale = p.softmax_scale * kUnit<T>;
  for (int e = threadIdx.x; e < kCount * kMaxHeadDim; e += kThreads) {
    const int i = e / kMaxHeadDim, col = e % kMaxHeadDim;
    const bool inside = work.has(i) && col < p.k.head_dim;
    shared.q[i][col] = inside ? scale * float(work.q(i)[col]) : 0.0f;
  }
  __syncthreads();

  const int groups = kThreads / lanes, thread_group = threadIdx.x / lanes, col = threadIdx.x % lanes * kChunk;
  const int columns_k = columns_inside<kAligned>(col, p.k.head_dim);
  const int columns_v = columns_inside<kAligned>(col, p.v.head_dim);
  const T *const keys = work.head_of(p.k) + col, *const values = work.head_of(p.v) + col;

  float peak[kCount], total[kCount] = {}, sums[kCount][kChunk] = {};
#pragma unroll
  for (int i = 0; i < kCount; i++) peak[i] = -INFINITY;

  const auto row_of = [&](int turn, int a) { return work.row_of(turn + a * groups + thread_group); };
  const auto read = [&](Chunk<T>& chunk, const T* from, const Cached& t, int turn, int a, int64_t row, int columns) {
    const int64_t n = turn + a * groups + thread_group;
    chunk.template load<kAligned>(from + n * t.stride_m + row * t.stride_r, row >= 0 ? columns : 0);
  };
  int row[kAhead];
  Chunk<T> k[kAhead], v[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; a++) {
    row[a] = row_of(work.begin, a);
    read(k[a], keys, p.k, work.begin, a, row[a], columns_k);
    read(v[a], values, p.v, work.begin, a, row[a], columns_v);
  }

  // All threads have the same number of turns, as the lanes of a warp share the sums of products.
  for (int turn = work.begin; turn < work.end; turn += groups * kAhead) {
    const int next_turn = turn + groups * kAhead;
    int next_row[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; a++) next_row[a] = row_of(next_turn, a);

    float s[kAhead][kCount] = {};
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      float key[kChunk];
      k[a].unpack(key);
#pragma unroll
      for (int i = 0; i < kCount; i++)
#pragma unroll
        for (int j = 0; j < kChunk; j++) s[a][i] = fmaf(shared.q[i][col + j], key[j], s[a][i]);
    }
#pragma unroll
    for (int a = 0; a < kAhead; a++) read(k[a], keys, p.k, next_turn, a, next_row[a], columns_k);
    for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
      for (int a = 0; a < kAhead; a++)
#pragma unroll
        for (int i = 0; i < kCount; i++) s[a][i] += __shfl_xor_sync(0xffffffffu, s[a][i], step);
    }

#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const float before = peak[i];
#pragma unroll
      for (int a = 0; a < kAhead; a++) {
        if constexpr (kHasBias<kCount, kAligned>)
          s[a][i] = row[a] >= 0 ? work.score(s[a][i], i, turn + a * groups + thread_group) : -INFINITY;
        else
          s[a][i] = row[a] >= 0 ? s[a][i] : -INFINITY;
        peak[i] = fmaxf(peak[i], s[a][i]);
      }
      const float shift = peak[i] == -INFINITY ? 0.0f : peak[i];  // nothing visible yet: avoids -inf - -inf
      const float rescale = power<T>(before - shift);
      total[i] *= rescale;
#pragma unroll
      for (int j = 0; j < kChunk; j++) sums[i][j] *= rescale;
#pragma unroll
      for (int a = 0; a < kAhead; a++) total[i] += s[a][i] = power<T>(s[a][i] - shift);
    }
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      float value[kChunk];
      v[a].unpack(value);
#pragma unroll
      for (int i = 0; i < kCount; i++)
#pragma unroll
        for (int j = 0; j < kChunk; j++) sums[i][j] = fmaf(s[a][i], value[j], sums[i][j]);
    }
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      read(v[a], values, p.v, next_turn, a, next_row[a], columns_v);
      row[a] = next_row[a];
    }
  }

#pragma unroll
  for (int i = 0; i < kCount; i++) {
#pragma unroll
    for (int j = 0; j < kChunk; j++) shared.found.sums[i][threadIdx.x][j] = sums[i][j];
    if (col == 0) shared.found.peak[thread_group][i] = peak[i], shared.found.total[thread_group][i] = total[i];
  }
  __syncthreads();
  work.write(shared.found, groups, lanes);
}

constexpr int kWarps = kThreads / 32, kWarpPositions = 16;

template <int kHeadDim>
using TensorSums = Sums<kQueries, kWarps, kWarps * kHeadDim / kChunk>;

// The same for several queries on tensor cores, in 16 bits and aligned. A warp multiplies 16 positions at a time:
// scores = q k^T and sums += weights v. The eight queries are half of a product's rows; the other half is zero. The
// order of columns along a product's sum, and that of its results, is free: lanes load 16 bytes of a row as they are.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeadDim == 64 ? 3 : 2) tensor_decode_kernel(const Decode p) {
  constexpr int kChunksK = kHeadDim / 32, kChunksV = kHeadDim / 64;  // of a lane, of each position
  auto& shared = shared_memory<TensorSums<kHeadDim>>();
  const Work<T, kQueries> work(p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int col_k = c * kChunk, col_v = g * kChunk;
  const T *const keys = work.head_of(p.k) + col_k, *const values = work.head_of(p.v) + col_v;
  const float scale = p.softmax_scale * kUnit<T>;

  Chunk<T> q[kChunksK], k[2][kChunksK], v[4][kChunksV];
#pragma unroll
  for (int d = 0; d < kChunksK; d++) {
    const bool inside = work.has(g) && 32 * d + col_k < p.k.head_dim;
    q[d].template load<false>(work.q(g) + (32 * d + col_k), inside ? kChunk : 0);
  }
  // Of the positions from `turn` on, lane i has the row of the i-th; a lane loads keys of two, and values of four.
  const auto load_keys = [&](int turn, int row) {
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const int i = 8 * t + g;
      const int64_t n = turn + i, r = __shfl_sync(0xffffffffu, row, i);
#pragma unroll
      for (int d = 0; d < kChunksK; d++)
        k[t][d].template load<true>(keys + (n * p.k.stride_m + r * p.k.stride_r + 32 * d),
                                    r >= 0 && 32 * d + col_k < p.k.head_dim ? kChunk : 0);
    }
  };
  const auto value_position = [&](int t) { return t / 2 * 8 + 2 * c + t % 2; };
  const auto load_values = [&](int turn, int row) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int i = value_position(t);
      const int64_t n = turn + i, r = __shfl_sync(0xffffffffu, row, i);
#pragma unroll
      for (int d = 0; d < kChunksV; d++)
        v[t][d].template load<true>(values + (n * p.v.stride_m + r * p.v.stride_r + 64 * d),
                                    r >= 0 && 64 * d + col_v < p.v.head_dim ? kChunk : 0);
    }
  };

  // Of query g; `total` without the other lanes of it.
  float peak = -INFINITY, total = 0.0f, sums[kChunksV][kChunk][4] = {};
  int turn = work.begin + warp * kWarpPositions, row = work.row_of(turn + lane % kWarpPositions);
  load_keys(turn, row);
  load_values(turn, row);
  while (turn < work.end) {
    const int next_turn = turn + kWarps * kWarpPositions, next_row = work.row_of(next_turn + lane % kWarpPositions);
    float s[2][4] = {};
#pragma unroll
    for (int d = 0; d < kChunksK; d++) {
      uint32_t q_words[4];
      memcpy(q_words, q[d].at, 16);
#pragma unroll
      for (int t = 0; t < 2; t++) {
        uint32_t words[4];
        memcpy(words, k[t][d].at, 16);
        mma<T>(s[t], {q_words[0], 0, q_words[1], 0}, {words[0], words[1]});
        mma<T>(s[t], {q_words[2], 0, q_words[3], 0}, {words[2], words[3]});
      }
    }
    load_keys(next_turn, next_row);

    const uint32_t visible = __ballot_sync(0xffffffffu, row >= 0);
    float highest = peak;
#pragma unroll
    for (int t = 0; t < 4; t++) {
      float& score = s[t / 2][t % 2];
      const int i = value_position(t);
      score = visible >> i & 1 ? work.score(score * scale, g, turn + i) : -INFINITY;
      highest = fmaxf(highest, score);
    }
    highest = quad_max(highest);
    const float shift = highest == -INFINITY ? 0.0f : highest;  // nothing visible yet: avoids -inf - -inf
    const float rescale = power<T>(peak - shift);
    peak = highest;
    total *= rescale;
#pragma unroll
    for (int t = 0; t < 4; t++) total += s[t / 2][t % 2] = power<T>(s[t / 2][t % 2] - shift);
    const uint32_t weights[4] = {pack_word<T>(s[0][0], s[0][1]), 0, pack_word<T>(s[1][0], s[1][1]), 0};
#pragma unroll
    for (int d = 0; d < kChunksV; d++) {
#pragma unroll
      for (int j = 0; j < kChunk; j++) {
        const T pairs[4] = {v[0][d].at[j], v[1][d].at[j], v[2][d].at[j], v[3][d].at[j]};
        uint32_t words[2];
        memcpy(words, pairs, 8);
        sums[d][j][0] *= rescale, sums[d][j][1] *= rescale;
        mma<T>(sums[d][j], weights, words);
      }
    }
    load_values(next_turn, next_row);
    turn = next_turn, row = next_row;
  }

  total = quad_sum(total);
  if (c == 0) shared.peak[warp][g] = peak, shared.total[warp][g] = total;
#pragma unroll
  for (int d = 0; d < kChunksV; d++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int j = 0; j < kChunk; j++)
        shared.sums[g][warp * (kHeadDim / kChunk) + 8 * d + 2 * c + e][j] = sums[d][j][e];
    }
  }
  __syncthreads();
  work.write(shared, kWarps, kHeadDim / kChunk);
}

// A thread for each column of out; splits in a fixed order.
template <class T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const Decode p, const int64_t rows) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= rows * p.v.head_dim) return;
  const int64_t row = e / p.v.head_dim;
  float highest = -INFINITY, all = 0.0f, sum = 0.0f;
  for (int split = 0; split < p.splits; split++) highest = fmaxf(highest, p.lse[split * rows + row]);
  const float shift = highest == -INFINITY ? 0.0f : highest;
  for (int split = 0; split < p.splits; split++) {
    const float weight = power<T>(p.lse[split * rows + row] - shift);
    all += weight;
    sum = fmaf(weight, p.partial[split * rows * p.v.head_dim + e], sum);
  }
  static_cast<T*>(p.out)[e] = T(all == 0.0f ? 0.0f : sum / all);
}

bool is_aligned(const Cached& t) {
  return reinterpret_cast<uintptr_t>(t.at) % 16 == 0 && t.head_dim % kChunk == 0 &&
         (t.stride_b | t.stride_m | t.stride_r | t.stride_h) % kChunk == 0;
}

int64_t blocks_of_split(int batch, int queries, int heads, int key_heads, bool shared_keys) {
  if (queries == 0) return 0;
  const int together = queries_together(shared_keys, queries), same = together * (heads / key_heads);
  return static_cast<int64_t>(batch) * key_heads * (queries / together) *
         (same == 1 ? 1 : (same + kQueries - 1) / kQueries);
}

}  // namespace

int decode_splits(int batch, int queries, int heads, int key_heads, int positions, bool shared_keys,
                  int multiprocessors) {
  const int64_t blocks = blocks_of_split(batch, queries, heads, key_heads, shared_keys);
  const bool one = queries_together(shared_keys, queries) * (heads / key_heads) == 1;
  const int64_t at_once = int64_t{one ? kBlocks<1, true> : kBlocks<kQueries, true>} * multiprocessors;
  const int64_t possible = at_once / (blocks > 0 ? blocks : 1);
  const int64_t worth = positions / kSplitPositions, most = worth < kMaxSplits ? worth : kMaxSplits;
  const int64_t splits = possible < most ? possible : most;
  return splits > 1 ? static_cast<int>(splits) : 1;
}

void decode_attention(const Decode& p, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.batch) * p.queries * p.heads;
  if (rows == 0) return;
  const bool shared_keys = p.rows == 1 && p.ancestors == nullptr;
  const int chunks = ((p.k.head_dim > p.v.head_dim ? p.k.head_dim : p.v.head_dim) + kChunk - 1) / kChunk;
  int lanes = 1;
  while (lanes < chunks) lanes *= 2;
  const bool one = queries_together(shared_keys, p.queries) * (p.heads / p.key_heads) == 1;
  const int64_t blocks = blocks_of_split(p.batch, p.queries, p.heads, p.key_heads, shared_keys) * p.splits;
  dtype_switch(p.dtype, [&](auto t) {
    using T = decltype(t);
    const auto start = [&](auto kernel, size_t shared) {
      launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), shared, stream, p, lanes);
    };
    const bool aligned = is_aligned(p.k) && is_aligned(p.v), tensor = sizeof(T) == 2 && !one && aligned && lanes <= 16;
    const bool has_bias = p.bias != nullptr || p.softcap > 0.0f;
    if (tensor) {
      if constexpr (sizeof(T) == 2) {
        const bool wide = lanes > 8;
        launch(wide ? tensor_decode_kernel<T, 128> : tensor_decode_kernel<T, 64>, dim3(static_cast<unsigned>(blocks)),
               dim3(kThreads), wide ? sizeof(TensorSums<128>) : sizeof(TensorSums<64>), stream, p);
      }
    } else if (one)
      start(aligned ? decode_kernel<T, 1, true> : decode_kernel<T, 1, false>, sizeof(Shared<1>));
    else
      start(aligned && !has_bias ? decode_kernel<T, kQueries, true> : decode_kernel<T, kQueries, false>,
            sizeof(Shared<kQueries>));
    if (p.partial != nullptr)
      launch(merge_kernel<T>, dim3(static_cast<unsigned>((rows * p.v.head_dim + kThreads - 1) / kThreads)),
             dim3(kThreads), 0, stream, p, rows);
  });
}

}  // namespace fastattn::decode_attention
