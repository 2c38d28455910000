// dq, dk and dv of sequences so short that a block holds all keys: 16-bit types, head dimensions up to 128.
//   Interface: short_backward.h, formulas: backward.h
//
// Grid: one block per (batch, key head), and in it the query heads of the group one after the other, in chunks of 32
//   queries; backward_dkdv.cu has no more blocks either. A block has two warps for 32 keys. All of a row's scores are in the
//   block, so that its sum and its delta come from the probabilities themselves: out is not read, no pass goes before, and
//   lse need not be exact. S and dP are computed once, 5 products where kernels that own their tiles need 7, and nothing but
//   the results goes to memory.
// A chunk: (1) warp w takes queries 16 (w % 2) .. and keys 32 (w / 2) .., makes S and dP, and adds up its share of each row;
//   (2) it makes P and dS and leaves them in shared memory, rounded to T; (3) it takes keys 16 w .. for dk and dv, with P^T
//   and dS^T read transposed, and queries 16 (w % 2) .. for its share of the columns of dq, which is then complete. Where
//   none of 16 queries sees any of 32 keys, (1) and (3) pass over the products. In (2) it writes dS to dbias, if wanted.
// Registers: dk and dv [16, kHeadDim] of each warp, a tile each of S and dP [16, 32].
// Shared memory: k, v, two chunks of q and dout, P and dS of one, in KiB:
//   keys                           64    128
//   16 bits, head dimension 64     55     73
//   16 bits, head dimension 128    87    121
//   What a chip cannot hold, and wider heads and elements, goes to short_backward_wide.cu.
// Bytes: q, k, v and dout once, dq, dk and dv once.
// dbias: of a bias (B, H, Lq, Lk) each element is dS of one block, which writes it before it is rounded. One that is shared
//   by batches or heads is a sum over blocks, which without atomics needs memory of the size of all dS and a second pass:
//   bias_gradient.cu computes dS once more instead, for which this kernel leaves delta and remainder. Of one that queries
//   share, dbias_keys, the chunks add up their columns of dS.
// Compiled offline with nvcc 13.0 (no GPU has timed it yet), nothing spills: up to 168 registers at head dimension 64, as
//   its __launch_bounds__ ask for more threads than there are: three blocks of 4 warps a multiprocessor, or one of 8;
//   245 at 128. Tried and dropped: 128 registers, for two blocks of 8 warps: 72 to 276 bytes spilled; float32 here, which
//   took 103 to 137 KiB at head dimension 64 and would take 233 at 128, more than any chip has.
#include <limits>

#include "attention/short_backward.cuh"
#include "common/device.h"

namespace fastattn::attention {
namespace {

constexpr int kChunkRows = 32, kMaxWarps = kMaxShort / 16;
template <class T, int kHeadDim>
struct ShortShared {
  using Chunk = unsigned char[kChunkRows * kTileStride<T, kHeadDim>];
  alignas(16) Chunk q[2], dout[2];
  alignas(16) unsigned char p[kChunkRows * kScoreStride<T>], ds[kChunkRows * kScoreStride<T>];
  float total[kMaxWarps / 2][kChunkRows], delta[kMaxWarps / 2][kChunkRows];  // of each 32 keys
  float key_sum[2][kMaxShort];  // of dS, over queries 16 i .. of the chunks
  unsigned char kept[kChunkRows][kMaxShort / 8];
  bool visible[kMaxWarps / 2][2];  // do queries 16 i .. of the chunk see any of these 32 keys
  // Behind it: k and v, of as many rows as there are keys.
};

int warps_of(int seqlen_k) { return 2 * blocks_of(seqlen_k, 32); }

template <class T, int kHeadDim>
size_t shared_bytes(int seqlen_k) {
  return sizeof(ShortShared<T, kHeadDim>) + 2 * 16 * warps_of(seqlen_k) * kTileStride<T, kHeadDim>;
}

template <class T, int kHeadDim>
__global__ void __launch_bounds__(kHeadDim <= 64 ? 384 : 256) short_backward_kernel(const Backward p, void* dbias) {
  constexpr int kStride = kTileStride<T, kHeadDim>;
  auto& shared = shared_memory<ShortShared<T, kHeadDim>>();
  const Shape& shape = p.shape;
  const Visibility& who = p.by_query;
  const int h_k = blockIdx.x % shape.key_heads, b = blockIdx.x / shape.key_heads, group = shape.heads / shape.key_heads;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int keys = 16 * warps, row = warp % 2 * 16, key = warp / 2 * 32, own_key = warp * 16;
  unsigned char* const k_tile = reinterpret_cast<unsigned char*>(&shared + 1);
  unsigned char* const v_tile = k_tile + keys * kStride;
  const DropoutMask dropout(p.dropout);
  const ScoreExponent exponent = exponent_of<T>(p);

  const auto seen = [&](int n) { return group_sees(who, shape, b, h_k, n); };
  const auto all = [](int) { return true; };
  const Matrix<T> k(p.k, b, h_k, shape.seqlen_k, shape.head_dim_k), v(p.v, b, h_k, shape.seqlen_k, shape.head_dim_v);
  load_tile<T, 16, kHeadDim, 32>(k_tile + own_key * kStride, k, own_key, seen);
  load_tile<T, 16, kHeadDim, 32>(v_tile + own_key * kStride, v, own_key, seen);
  const int chunks = blocks_of(shape.seqlen_q, kChunkRows), count = group * chunks;
  const auto load = [&](int i) {
    const int h = h_k * group + i / chunks, m0 = i % chunks * kChunkRows;
    const float* lse = p.lse + (static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_q;
    const auto sees_some = [&](int m) { return lse[m] != -kInfinity; };
    for (int part = warp; part < 4; part += warps) {  // a warp takes 16 rows of one of the two
      const bool is_q = part < 2;
      const int from = part % 2 * 16;
      const Rows rows = {is_q ? p.q.data : p.dout.data, is_q ? p.q.stride_b : p.dout.stride_b,
                         is_q ? p.q.stride_h : p.dout.stride_h, is_q ? p.q.stride : p.dout.stride};
      const Matrix<T> x(rows, b, h, shape.seqlen_q, is_q ? shape.head_dim_k : shape.head_dim_v);
      load_tile<T, 16, kHeadDim, 32>((is_q ? shared.q : shared.dout)[i % 2] + from * kStride, x, m0 + from, sees_some);
    }
  };

  float dk[kHeadDim / 8][4] = {}, dv[kHeadDim / 8][4] = {};
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    if (i < count) load(i);
    cp_async_commit();
  }
  for (int i = 0; i < count; i++) {
    const int h = h_k * group + i / chunks, m0 = i % chunks * kChunkRows;
    const int64_t row0 = (static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_q;
    if (dropout.active()) {
      for (int j = threadIdx.x; j < kChunkRows * keys / 8; j += blockDim.x)
        shared.kept[j % kChunkRows][j / kChunkRows] =
            static_cast<unsigned char>(dropout.kept(row0 + m0 + j % kChunkRows, j / kChunkRows));
    }
    float shift[2], total[2] = {}, delta[2] = {};
    uint32_t bits[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = m0 + row + g + 8 * half;
      shift[half] = exponent.shift(m < shape.seqlen_q ? p.lse[row0 + m] : -kInfinity);
      bits[half] = sees<32>(who, b, h, m, shape.seqlen_q, key, shape.seqlen_k, who.band_lo, who.band_hi);
    }
    i == 0 ? cp_async_wait<1>() : cp_async_wait<0>();
    __syncthreads();

    float s[4][4] = {}, dp[4][4] = {};
    const bool visible = __ballot_sync(0xffffffffu, ((bits[0] | bits[1]) & 0xff) != 0) != 0;
    if (lane == 0) shared.visible[warp / 2][warp % 2] = visible;
    if (visible) {
      multiply_rows<T, kHeadDim>(s, shared.q[i % 2], row, k_tile + key * kStride);
      multiply_rows<T, kHeadDim>(dp, shared.dout[i % 2], row, v_tile + key * kStride);
    }
    make_probabilities<false>(s, exponent, p, b, h, m0 + row, key, [&](int, int e) { return shift[e / 2]; },
                              [](int, int) { return 0.0f; });
    clear_unseen(s, bits[0], bits[1]);
    const auto kept = [&](int j, int e) {
      return (shared.kept[row + g + e / 2 * 8][key / 8 + j] >> (2 * c + e % 2) & 1) != 0;
    };
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (dropout.active()) dp[j][e] = kept(j, e) ? dp[j][e] * dropout.scale() : 0.0f;
        total[e / 2] += s[j][e], delta[e / 2] += s[j][e] * dp[j][e];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      total[half] = quad_sum(total[half]), delta[half] = quad_sum(delta[half]);
      if (c != 0) continue;
      shared.total[warp / 2][row + g + 8 * half] = total[half];
      shared.delta[warp / 2][row + g + 8 * half] = delta[half];
    }
    __syncthreads();
    if (i > 0) {  // the other chunk is done with
      if (i + 1 < count) load(i + 1);
      cp_async_commit();
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = m0 + row + g + 8 * half;
      total[half] = delta[half] = 0.0f;
      for (int w = 0; w < warps / 2; w++)
        total[half] += shared.total[w][row + g + 8 * half], delta[half] += shared.delta[w][row + g + 8 * half];
      const float sum = total[half];
      total[half] = sum > 0.0f ? 1.0f / sum : 0.0f;  // 0 for a query that sees nothing
      delta[half] = sum > 0.0f ? delta[half] / sum : 0.0f;  // of a single key its dP, to the last bit
      if (p.dlse != nullptr && shift[half] != kInfinity) delta[half] -= p.dlse[row0 + m];
      if (p.delta != nullptr && warp < 2 && c == 0 && m < shape.seqlen_q)
        p.delta[row0 + m] = delta[half], p.remainder[row0 + m] = sum > 0.0f ? log2f(sum) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[j][e] *= total[e / 2];
        dp[j][e] = s[j][e] * (dp[j][e] - delta[e / 2]);
        if (dropout.active()) s[j][e] = kept(j, e) ? s[j][e] : 0.0f;
      }
    }
    if (dbias != nullptr)
      p.bias.dtype == DType::float32 ? write_dbias<float>(dbias, row0, m0 + row, key, shape, dp)
                                     : write_dbias<T>(dbias, row0, m0 + row, key, shape, dp);
    if (p.dbias_keys != nullptr) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float sum = column_sum(dp, j / 2, j % 2);
        float& total_of_key = shared.key_sum[warp % 2][key + j / 2 * 8 + 2 * c + j % 2];
        if (g == 0) total_of_key = m0 == 0 ? sum : total_of_key + sum;
      }
    }
    keep_scores<T>(shared.p, row, key, s);
    keep_scores<T>(shared.ds, row, key, dp);
    __syncthreads();

    if (shared.visible[warp / 2][0] || shared.visible[warp / 2][1]) {
      add_transposed<T, kStride>(dv, shared.p, own_key, shared.dout[i % 2], kChunkRows, all);
      add_transposed<T, kStride>(dk, shared.ds, own_key, shared.q[i % 2], kChunkRows, all);
    }
    const Matrix<T> dq(p.dq, b, h, shape.seqlen_q, shape.head_dim_k);
    for (int column = warp / 2 * 16; column < shape.head_dim_k; column += 8 * warps) {
      float sum[2][4] = {};
      add_rows<T, kStride>(sum, shared.ds, row, k_tile, column, keys,
                           [&](int n) { return shared.visible[n / 32][row / 16]; });
      store_accumulators(dq, m0 + row, column, sum, p.softmax_scale);
    }
    if (p.dbias_keys != nullptr && m0 + kChunkRows >= shape.seqlen_q && threadIdx.x < shape.seqlen_k)
      p.dbias_keys[(static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_k + threadIdx.x] =
          shared.key_sum[0][threadIdx.x] + shared.key_sum[1][threadIdx.x];
  }
  cp_async_wait<0>();
  __syncthreads();
  store_tile<T, kHeadDim>(Matrix<T>(p.dk, b, h_k, shape.seqlen_k, shape.head_dim_k), own_key, k_tile + own_key * kStride, dk,
                          p.softmax_scale);
  store_tile<T, kHeadDim>(Matrix<T>(p.dv, b, h_k, shape.seqlen_k, shape.head_dim_v), own_key, v_tile + own_key * kStride, dv,
                          dropout.active() ? dropout.scale() : 1.0f);
}

// Calls f(T, kHeadDim), as values that carry them in their types, where there is such a kernel.
template <class Function>
void with_short_kernel(const Shape& shape, DType dtype, Function&& f) {
  const int head_dim = std::max(shape.head_dim_k, shape.head_dim_v);
  const auto with_head_dim = [&](auto t) {
    if (head_dim <= 64) return f(t, Int<64>{});
    if (head_dim <= 128) f(t, Int<128>{});
  };
  if (dtype == DType::bfloat16) with_head_dim(__nv_bfloat16{});
  if (dtype == DType::float16) with_head_dim(__half{});
}

// Can a block of the device hold all keys?
bool holds_keys(const Shape& shape, DType dtype, int device) {
  size_t bytes = std::numeric_limits<size_t>::max();
  with_short_kernel(shape, dtype, [&](auto t, auto head_dim) {
    bytes = shared_bytes<decltype(t), head_dim()>(shape.seqlen_k);
  });
  return bytes <= static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

}  // namespace

bool is_short(const Shape& shape) { return std::max(shape.seqlen_q, shape.seqlen_k) <= kMaxShort; }

int64_t short_backward_sums(const Shape& shape, DType dtype, int device) {
  return shape.heads == shape.key_heads || holds_keys(shape, dtype, device) ? 0 : short_backward_wide_sums(shape, dtype);
}

void short_backward(const Backward& p, void* dbias, float* sums, int device, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.shape.batch) * p.shape.key_heads;
  if (blocks == 0 || p.shape.seqlen_k == 0) return;
  if (!holds_keys(p.shape, p.dtype, device)) return short_backward_wide(p, dbias, sums, stream);
  with_short_kernel(p.shape, p.dtype, [&](auto t, auto head_dim) {
    using T = decltype(t);
    launch(short_backward_kernel<T, head_dim()>, dim3(static_cast<unsigned>(blocks)), dim3(32 * warps_of(p.shape.seqlen_k)),
           shared_bytes<T, head_dim()>(p.shape.seqlen_k), stream, p, dbias);
  });
}

}  // namespace fastattn::attention
