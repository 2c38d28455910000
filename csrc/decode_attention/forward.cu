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
// Bytes: the visible keys and values once, q and out; for each split head_dim + 1 floats a query, written and read.
//   Work: 2 * (head_dim of k + of v) FLOPs a query and visible position, on CUDA cores: at eight queries in bfloat16
//   eight FLOPs a byte, of which an H100 has some 20 at 3.0 TB/s.
// Unaligned tensors, and head dimensions that are no multiple of eight, are read element by element.
// Compiled offline with nvcc 13.0, sm_80 / sm_90, nothing spills; no GPU has timed it yet:
//   one query      bfloat16 128 / 128 registers   float32 90 / 92: four blocks a multiprocessor
//   eight queries  bfloat16 168 / 164             float32 168 / 168: three
//   A turn of eight queries, 2 KiB of bfloat16 a warp at head_dim 64: 658 instructions (264 FFMA, 64 FMUL, 48 FADD, 24
//   MUFU, 32 shared and shuffles), before 697: the scale is now in q. They limit an H100 to 2.9 TB/s (before 2.7, and
//   waits for loads: 1.7 to 2.0). Estimated: 2.2 to 2.5, so 15 to 30 % less time. One query: bound by memory, as before.
//   Not done: mma.m16n8k16 with the queries as half of the 16 rows. Keys and values can be loaded into its fragments
//   without shared memory; 16 positions then need about 150 instructions, now 1316. Estimated: memory's rate, 2.8 TB/s.
#include "common/softmax.cuh"
#include "common/vec.cuh"
#include "decode_attention/decode_attention.h"

namespace fastattn::decode_attention {
namespace {

constexpr int kThreads = 128;
constexpr int kSplitPositions = 256;  // least of a block, so that the merge pays
constexpr int kMaxSplits = 64;
constexpr int kSplitBlocks = 4;  // of a multiprocessor: splits make no more

// The least blocks for whose registers a multiprocessor has room.
template <int kCount, bool kAligned>
constexpr int kBlocks = !kAligned ? 2 : kCount == 1 ? 4 : 3;

template <int kCount>
struct alignas(16) Shared {
  float q[kCount][kMaxHeadDim];
  float sums[kCount][kThreads][kChunk];
  float peak[kThreads][kCount], total[kThreads][kCount];  // of groups of lanes
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

template <class T, int kCount, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks<kCount, kAligned>) decode_kernel(const Decode p, const int lanes) {
  constexpr int kAhead = (kCount == 1 ? 8 : 4) / sizeof(T);
  auto& shared = shared_memory<Shared<kCount>>();
  const bool shared_keys = p.rows == 1 && p.ancestors == nullptr;
  const int together = queries_together(shared_keys, p.queries), group = p.heads / p.key_heads, same = together * group;
  const int tiles = (same + kCount - 1) / kCount, parts = p.queries / together * tiles;
  const int part = blockIdx.x % parts, split = blockIdx.x / parts % p.splits, head = blockIdx.x / parts / p.splits;
  const int h_k = head % p.key_heads, first_query = part / tiles * together, first = part % tiles * kCount;
  const int64_t b = head / p.key_heads;
  // The query and the head of the block's i-th query.
  const auto query = [&](int i) { return first_query + (first + i) / group; };
  const auto query_head = [&](int i) { return h_k * group + (first + i) % group; };

  const T* const q = static_cast<const T*>(p.q) + b * p.q_stride_b;
  const float scale = p.softmax_scale * kUnit<T>;
  for (int e = threadIdx.x; e < kCount * kMaxHeadDim; e += kThreads) {
    const int i = e / kMaxHeadDim, col = e % kMaxHeadDim;
    const bool inside = first + i < same && col < p.k.head_dim;
    shared.q[i][col] = inside ? scale * float(q[query(i) * p.q_stride_w + query_head(i) * p.q_stride_h + col]) : 0.0f;
  }
  __syncthreads();

  const int length = p.lengths == nullptr ? p.positions : min(max(p.lengths[b], 0), p.positions);
  const int span = (length + p.splits - 1) / p.splits, begin = split * span, end = min(begin + span, length);
  const int groups = kThreads / lanes, thread_group = threadIdx.x / lanes, col = threadIdx.x % lanes * kChunk;
  const int columns_k = columns_inside<kAligned>(col, p.k.head_dim);
  const int columns_v = columns_inside<kAligned>(col, p.v.head_dim);
  const T* const keys = static_cast<const T*>(p.k.at) + b * p.k.stride_b + h_k * p.k.stride_h + col;
  const T* const values = static_cast<const T*>(p.v.at) + b * p.v.stride_b + h_k * p.v.stride_h + col;
  const int* const ancestors =
      p.ancestors == nullptr ? nullptr : p.ancestors + b * p.ancestors_stride_b + first_query * p.ancestors_stride_w;

  float peak[kCount], total[kCount] = {}, sums[kCount][kChunk] = {};
#pragma unroll
  for (int i = 0; i < kCount; i++) peak[i] = -INFINITY;

  // The row of the thread's a-th position of a turn, or -1: it has no such position.
  const auto row_of = [&](int turn, int a) {
    const int64_t n = turn + a * groups + thread_group;
    if (n >= end) return -1;
    if (ancestors == nullptr) return shared_keys ? 0 : first_query;
    const int row = ancestors[n * p.ancestors_stride_m];
    return row < p.rows ? row : -1;
  };
  const auto read = [&](Chunk<T>& chunk, const T* from, const Cached& t, int turn, int a, int64_t row, int columns) {
    const int64_t n = turn + a * groups + thread_group;
    chunk.template load<kAligned>(from + n * t.stride_m + row * t.stride_r, row >= 0 ? columns : 0);
  };
  int row[kAhead];
  Chunk<T> k[kAhead], v[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; a++) {
    row[a] = row_of(begin, a);
    read(k[a], keys, p.k, begin, a, row[a], columns_k);
    read(v[a], values, p.v, begin, a, row[a], columns_v);
  }

  // All threads have the same number of turns, as the lanes of a warp share the sums of products.
  for (int turn = begin; turn < end; turn += groups * kAhead) {
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
    for (int j = 0; j < kChunk; j++) shared.sums[i][threadIdx.x][j] = sums[i][j];
    if (col == 0) shared.peak[thread_group][i] = peak[i], shared.total[thread_group][i] = total[i];
  }
  __syncthreads();

  const int64_t rows = static_cast<int64_t>(p.batch) * p.queries * p.heads;
  for (int e = threadIdx.x; e < min(kCount, same - first) * p.v.head_dim; e += kThreads) {
    const int i = e / p.v.head_dim, column = e % p.v.head_dim;
    float highest = -INFINITY, all = 0.0f, sum = 0.0f;
    for (int g = 0; g < groups; g++) highest = fmaxf(highest, shared.peak[g][i]);
    const float shift = highest == -INFINITY ? 0.0f : highest;
    for (int g = 0; g < groups; g++) {
      const float weight = power<T>(shared.peak[g][i] - shift);
      all = fmaf(weight, shared.total[g][i], all);
      sum = fmaf(weight, shared.sums[i][g * lanes + column / kChunk][column % kChunk], sum);
    }
    const float result = all > 0.0f ? sum / all : 0.0f;
    const int64_t row = (b * p.queries + query(i)) * p.heads + query_head(i);
    if (p.partial == nullptr) {
      static_cast<T*>(p.out)[row * p.v.head_dim + column] = T(result);
      continue;
    }
    p.partial[(split * rows + row) * p.v.head_dim + column] = result;
    if (column == 0) p.lse[split * rows + row] = all > 0.0f ? shift + kUnit<T> * logf(all) : -INFINITY;
  }
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
  static_cast<T*>(p.out)[e] = T(all > 0.0f ? sum / all : 0.0f);
}

bool is_aligned(const Cached& t) {
  return reinterpret_cast<uintptr_t>(t.at) % 16 == 0 && t.head_dim % kChunk == 0 &&
         (t.stride_b | t.stride_m | t.stride_r | t.stride_h) % kChunk == 0;
}

// Blocks of a split.
int64_t ceil_div(int batch, int queries, int heads, int key_heads, bool shared_keys) {
  if (queries == 0) return 0;
  const int together = queries_together(shared_keys, queries), same = together * (heads / key_heads);
  return static_cast<int64_t>(batch) * key_heads * (queries / together) *
         (same == 1 ? 1 : (same + kQueries - 1) / kQueries);
}

}  // namespace

int decode_splits(int batch, int queries, int heads, int key_heads, int positions, bool shared_keys,
                  int multiprocessors) {
  const int64_t blocks = ceil_div(batch, queries, heads, key_heads, shared_keys);
  const int64_t possible = static_cast<int64_t>(kSplitBlocks) * multiprocessors / (blocks > 0 ? blocks : 1);
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
  const int64_t blocks = ceil_div(p.batch, p.queries, p.heads, p.key_heads, shared_keys) * p.splits;
  dtype_switch(p.dtype, [&](auto t) {
    using T = decltype(t);
    const auto start = [&](auto kernel, size_t shared) {
      launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), shared, stream, p, lanes);
    };
    const bool aligned = is_aligned(p.k) && is_aligned(p.v);
    if (one)
      start(aligned ? decode_kernel<T, 1, true> : decode_kernel<T, 1, false>, sizeof(Shared<1>));
    else
      start(aligned ? decode_kernel<T, kQueries, true> : decode_kernel<T, kQueries, false>, sizeof(Shared<kQueries>));
    if (p.partial != nullptr)
      launch(merge_kernel<T>, dim3(static_cast<unsigned>((rows * p.v.head_dim + kThreads - 1) / kThreads)),
             dim3(kThreads), 0, stream, p, rows);
  });
}

}  // namespace fastattn::decode_attention
