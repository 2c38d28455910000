// dq, dk and dv of sequences so short that a block holds all keys.   Limits: short_backward.h, formulas: backward.h
//
// Grid: one block per (batch, key head), and in it the query heads of the group one after the other, in chunks of 32 queries.
//   A block has two warps for 32 keys. All of a row's scores are in the block, so that its sum and its delta come from the
//   probabilities themselves: out is not read, no pass goes before, and lse need not be exact. S and dP are computed once,
//   5 products where kernels that own their tiles need 7, and nothing but the results goes to memory.
// A chunk: (1) warp w takes queries 16 (w % 2) .. and keys 32 (w / 2) .., makes S and dP, and adds up its share of each row;
//   (2) it makes P and dS and leaves them in shared memory, rounded to T; (3) it takes keys 16 w .. for dk and dv, with P^T
//   and dS^T read transposed, and queries 16 (w % 2) .. for its share of the columns of dq, which is then complete. Where
//   none of 16 queries sees any of 32 keys, (1) and (3) pass over the products. In (2) it writes dS to dbias, if wanted.
// Registers: dk and dv [16, kHeadDim] of each warp, a tile each of S and dP [16, 32].
// Shared memory: k, v, two chunks of q and dout, P and dS of one, in KiB:
//   keys                           64    128
//   16 bits, head dimension 64     55     73
//   16 bits, head dimension 128    87    121
//   float32, head dimension 64    103    137
//   float32 at 128 would take 167 KiB for 64 keys, 233 for 128: of the chips it is for, Hopper alone could hold the first,
//   and two more kernels would take as long to compile as four of 16 bits. The kernels for any length serve there.
// Bytes: q, k, v and dout once, dq, dk and dv once.
// dbias: of a bias (B, H, Lq, Lk) each element is dS of one block, which writes it before it is rounded. One that is shared
//   by batches or heads is a sum over blocks, which without atomics needs memory of the size of all dS and a second pass:
//   bias_gradient.cu computes dS once more instead, for which this kernel leaves delta and remainder. One that queries share
//   is a by-product of backward_dkdv.cu.
// Compiled offline with nvcc 13.0 (no GPU has timed it yet), nothing spills: up to 168 registers at head dimension 64, as
//   its __launch_bounds__ ask for more threads than there are: three blocks of 4 warps a multiprocessor, or one of 8;
//   of float32 shared memory leaves room for one, on Hopper for two of 4 warps; 244 at 128. Tried and dropped:
//   128 registers, for two blocks of 8 warps: 72 to 276 bytes spilled.
#include "attention/short_backward.h"

#include "attention/backward.cuh"
#include "common/device.h"

namespace fastattn::attention {
namespace {

constexpr int kChunkRows = 32, kMaxWarps = kMaxShort / 16;
template <class T>
constexpr int kScoreStride = kMaxShort * static_cast<int>(sizeof(T)) + 16;  // bytes of a row of P and dS

template <class T, int kHeadDim>
struct ShortShared {
  using Chunk = unsigned char[kChunkRows * kTileStride<T, kHeadDim>];
  alignas(16) Chunk q[2], dout[2];
  alignas(16) unsigned char p[kChunkRows * kScoreStride<T>], ds[kChunkRows * kScoreStride<T>];
  float total[kMaxWarps / 2][kChunkRows], delta[kMaxWarps / 2][kChunkRows];  // of each 32 keys
  unsigned char kept[kChunkRows][kMaxShort / 8];
  bool visible[kMaxWarps / 2][2];  // do queries 16 i .. of the chunk see any of these 32 keys
  // Behind it: k and v, of as many rows as there are keys.
};

int warps_of(int seqlen_k) { return 2 * blocks_of(seqlen_k, 32); }

template <class T, int kHeadDim>
size_t shared_bytes(int seqlen_k) {
  return sizeof(ShortShared<T, kHeadDim>) + 2 * 16 * warps_of(seqlen_k) * kTileStride<T, kHeadDim>;
}

// Two neighbours of a row, rounded to T.
template <class T>
__device__ __forceinline__ void store_pair(void* to, float low, float high) {
  if constexpr (sizeof(T) == 2)
    *static_cast<uint32_t*>(to) = pack_word<T>(low, high);
  else
    *static_cast<float2*>(to) = make_float2(low, high);
}

// The warp's 16 x 32 scores, rounded to T, to rows of P or dS.
template <class T>
__device__ __forceinline__ void keep_scores(unsigned char* rows, int row, int key, const float (&s)[4][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; j++) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      store_pair<T>(rows + (row + lane / 4 + 8 * half) * kScoreStride<T> + (key + 8 * j + lane % 4 * 2) * sizeof(T),
                    s[j][2 * half], s[j][2 * half + 1]);
  }
}

// A, from P or dS: 16 queries from `row` on, the depth of a product of keys from n on. Of floats, depth comes in the order of
// load_b_columns: accumulator_as_a().
template <class T>
__device__ __forceinline__ void load_scores(uint32_t (&words)[4], const unsigned char* rows, int row, int n) {
  if constexpr (sizeof(T) == 2) {
    load_a<T, kScoreStride<T>>(words, rows, row, n * 2);
  } else {
    const int lane = threadIdx.x % 32;
    const unsigned char* const from = rows + (row + lane / 4) * kScoreStride<T> + (n + lane % 4 * 2) * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) memcpy(&words[i], from + i % 2 * 8 * kScoreStride<T> + i / 2 * 4, 4);
    round_words<T>(words);
  }
}

// The same of the transpose: 16 keys from `key` on, queries from `from` on.
template <class T>
__device__ __forceinline__ void load_transposed_scores(uint32_t (&words)[4], const unsigned char* rows, int key, int from) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix<true>(words, rows + (from + lane % 8 + lane / 16 * 8) * kScoreStride<T> + (key + lane / 8 % 2 * 8) * 2);
  } else {
    const unsigned char* const at = rows + (from + lane % 4 * 2) * kScoreStride<T> + (key + lane / 4) * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) memcpy(&words[i], at + i / 2 * kScoreStride<T> + i % 2 * 32, 4);
    round_words<T>(words);
  }
}

// sum (16 x kHeadDim) += the transpose of columns key .. key + 15 of P or dS, times the chunk's rows of tile b.
template <class T, int kHeadDim>
__device__ __forceinline__ void add_transposed(float (&sum)[kHeadDim / 8][4], const unsigned char* rows, int key,
                                               const unsigned char* b) {
#pragma unroll(kUnrolled<T>)
  for (int from = 0; from < kChunkRows; from += kMmaDepth<T>) {
    uint32_t words[4];
    load_transposed_scores<T>(words, rows, key, from);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 2) {
      uint32_t pair[2][2];
      load_b_columns<T, kTileStride<T, kHeadDim>>(pair, b, from, 8 * j);
      mma<T>(sum[j], words, pair[0]);
      mma<T>(sum[j + 1], words, pair[1]);
    }
  }
}

// Rows m .. of dq, columns column .. column + 15: 16 rows of dS from `row` on times the keys that they see.
template <class T, int kHeadDim>
__device__ __forceinline__ void write_dq(const Matrix<T>& dq, int m, int column, const ShortShared<T, kHeadDim>& shared,
                                         int row, const unsigned char* k, int keys, float scale) {
  float sum[2][4] = {};
#pragma unroll 2
  for (int n = 0; n < keys; n += kMmaDepth<T>) {
    if (!shared.visible[n / 32][row / 16]) continue;
    uint32_t words[4], pair[2][2];
    load_scores<T>(words, shared.ds, row, n);
    load_b_columns<T, kTileStride<T, kHeadDim>>(pair, k, n, column);
    mma<T>(sum[0], words, pair[0]);
    mma<T>(sum[1], words, pair[1]);
  }
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int at = m + lane / 4 + 8 * half;
    if (at >= dq.rows) continue;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int first = column + 8 * j + lane % 4 * 2;
      Element<T>* const to = dq.row(at) + first;
      const float low = sum[j][2 * half] * scale, high = sum[j][2 * half + 1] * scale;
      if (dq.vectors) {
        if (first < dq.columns) store_pair<T>(to, low, high);
      } else {
        if (first < dq.columns) to[0] = Element<T>(low);
        if (first + 1 < dq.columns) to[1] = Element<T>(high);
      }
    }
  }
}

// The warp's 16 x 32 of dS, of queries m .. and keys n .., to its place in dbias (B, H, Lq, Lk), whose matrix begins at row0.
template <class To>
__device__ __forceinline__ void write_dbias(void* dbias, int64_t row0, int m, int n, const Shape& shape,
                                            const float (&ds)[4][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int query = m + lane / 4 + e / 2 * 8, key = n + 8 * j + lane % 4 * 2 + e % 2;
      if (query < shape.seqlen_q && key < shape.seqlen_k)
        static_cast<To*>(dbias)[(row0 + query) * shape.seqlen_k + key] = To(ds[j][e]);
    }
  }
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

  // A key that nobody sees may hold anything: it is not loaded. If one head of the group sees it, it is there for all.
  const auto seen = [&](int n) {
    if (max(n - who.band_hi, 0) > min(n - who.band_lo, shape.seqlen_q - 1)) return false;
    bool some = false;
    for (int h = h_k * group; h < (h_k + 1) * group; h++) some |= key_is_seen(who, b, h, n);
    return some;
  };
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
      delta[half] *= total[half];
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
                                     : write_dbias<Element<T>>(dbias, row0, m0 + row, key, shape, dp);
    keep_scores<T>(shared.p, row, key, s);
    keep_scores<T>(shared.ds, row, key, dp);
    __syncthreads();

    if (shared.visible[warp / 2][0] || shared.visible[warp / 2][1]) {
      add_transposed<T, kHeadDim>(dv, shared.p, own_key, shared.dout[i % 2]);
      add_transposed<T, kHeadDim>(dk, shared.ds, own_key, shared.q[i % 2]);
    }
    const Matrix<T> dq(p.dq, b, h, shape.seqlen_q, shape.head_dim_k);
    for (int column = warp / 2 * 16; column < shape.head_dim_k; column += 8 * warps)
      write_dq<T, kHeadDim>(dq, m0 + row, column, shared, row, k_tile, keys, p.softmax_scale);
  }
  cp_async_wait<0>();
  __syncthreads();
  store_tile<T, kHeadDim>(Matrix<T>(p.dk, b, h_k, shape.seqlen_k, shape.head_dim_k), own_key, k_tile + own_key * kStride, dk,
                          p.softmax_scale);
  store_tile<T, kHeadDim>(Matrix<T>(p.dv, b, h_k, shape.seqlen_k, shape.head_dim_v), own_key, v_tile + own_key * kStride, dv,
                          dropout.active() ? dropout.scale() : 1.0f);
}

// Calls f(T, kHeadDim), as values that carry them in their types.
template <class Function>
void with_short_kernel(const Shape& shape, DType dtype, bool tf32, Function&& f) {
  if (dtype == DType::float32) return tf32 ? f(Tf32{}, Int<64>{}) : f(0.0f, Int<64>{});
  const auto with_head_dim = [&](auto t) {
    std::max(shape.head_dim_k, shape.head_dim_v) <= 64 ? f(t, Int<64>{}) : f(t, Int<128>{});
  };
  dtype == DType::bfloat16 ? with_head_dim(__nv_bfloat16{}) : with_head_dim(__half{});
}

}  // namespace

bool is_short(const Shape& shape, DType dtype, int device) {
  if (std::max(shape.seqlen_q, shape.seqlen_k) > kMaxShort) return false;
  if (std::max(shape.head_dim_k, shape.head_dim_v) > (dtype == DType::float32 ? 64 : 128)) return false;
  const int64_t blocks = static_cast<int64_t>(shape.batch) * shape.key_heads;
  if (shape.heads != shape.key_heads && blocks < device_attribute(cudaDevAttrMultiProcessorCount, device)) return false;
  size_t bytes = 0;
  with_short_kernel(shape, dtype, false, [&](auto t, auto head_dim) {
    bytes = shared_bytes<decltype(t), head_dim()>(shape.seqlen_k);
  });
  return bytes <= static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

void short_backward(const Backward& p, void* dbias, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.shape.batch) * p.shape.key_heads;
  if (blocks == 0 || p.shape.seqlen_k == 0) return;
  with_short_kernel(p.shape, p.dtype, p.tf32, [&](auto t, auto head_dim) {
    using T = decltype(t);
    launch(short_backward_kernel<T, head_dim()>, dim3(static_cast<unsigned>(blocks)), dim3(32 * warps_of(p.shape.seqlen_k)),
           shared_bytes<T, head_dim()>(p.shape.seqlen_k), stream, p, dbias);
  });
}

}  // namespace fastattn::attention
