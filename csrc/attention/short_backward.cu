// dq, dk and dv of sequences so short that a block holds all keys: 16-bit types, head dimensions up to 128.
//   Interface: short_backward.h, formulas: backward.h
//
// Grid: one block per (batch, key head), as many as in backward_dkdv.cu. It computes the query heads of its group one
//   after the other, in chunks of 32 queries, with two warps for 32 keys. The block has all scores of a row, so that
//   delta = sum_j P dP - dlse is computed from the scores: out is not read, and no other kernel runs before. S and dP
//   are computed once: 5 products, where kernels that own their tiles need 7, and only results are written to memory.
// A chunk: (1) warp w computes P and dP of queries 16 (w % 2) .. and keys 32 (w / 2) .., and its part of each row's
//   delta; (2) it computes dS, writes P and dS to shared memory, rounded to T, and dS to dbias, if needed; (3) it adds
//   to dk and dv of keys 16 w .., with P^T and dS^T read transposed, and computes its columns of dq of queries 16 (w %
//   2) .., which are then complete. If none of 32 keys is visible to 16 queries, (1) and (3) skip the products.
// Registers: dk and dv [16, kHeadDim] of each warp, a tile each of S and dP [16, 32].
// Shared memory: k, v, q and dout of a chunk, or of two if there are more, P and dS of one, in KiB:
//   keys                           32    64    128
//   16 bits, head dimension 64     24.5  46.5  72.5
//   16 bits, head dimension 128    40.5  78.5  120.5
//   with one chunk, at 32 keys, and with more at 64 and 128. If this does not fit on a chip, the kernels of all lengths
//   are used.
// Bytes: q, k, v and dout once, dq, dk and dv once.
// dbias: for a bias (B, H, Lq, Lk) each element is dS of one block, which writes it unrounded. If batches or heads
//   share the bias, dbias is a sum over blocks, which without atomics needs memory of the size of all dS and a second
//   pass: bias_gradient.cu computes dS again instead, and this kernel writes delta for it. If queries share the bias,
//   the chunks add up their columns of dS: dbias_keys.
// Compiled offline with nvcc 13.0, nothing spills: up to 168 registers at head dimension 64, because __launch_bounds__
//   asks for more threads than there are, and 255 at 128. Blocks of a Hopper multiprocessor at 64: six with 32 keys,
//   three with 64, one with 128. A lane draws the dropout of its own scores and keeps it in two words.
// H200, bf16, 8 heads of 64, padding, ms, Triton's in brackets: 128 x 64 tokens 0.0397 (0.0296). With the forward and
//   dropout: 256 x 32 tokens 0.0501 (0.0435), 128 x 64 0.0697 (0.0495), 85 x 96 0.0895 (0.145), 64 x 128 0.107 (0.110).
// Tried and dropped: 128 registers, for two blocks of 8 warps: 128 to 276 bytes spilled; a template parameter for
//   dropout: without it the kernel has three more branches, under 1 %; float32, which needed 103 to 137 KiB at head
//   dimension 64 and would need 233 at 128, more than any chip has.
#include "attention/short_backward.h"

#include <algorithm>
#include <limits>

#include "attention/backward_common.cuh"
#include "common/device.h"

namespace fastattn::attention {
namespace {

constexpr int kChunkRows = 32, kMaxWarps = kMaxShort / 16;

// Bytes of a row of P or dS, without bank conflicts. keys: a multiple of 32.
__host__ __device__ __forceinline__ int score_stride(int keys) { return keys * 2 + 16; }

// Stores a warp's 16 x 8 kTiles scores, of queries from `row` and keys from `key` on, rounded to T.
template <class T, int kTiles>
__device__ __forceinline__ void store_scores(unsigned char* scores, int stride, int row, int key,
                                             const float (&s)[kTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kTiles; j++) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      *reinterpret_cast<uint32_t*>(scores + (row + lane / 4 + 8 * half) * stride + (key + 8 * j + lane % 4 * 2) * 2) =
          pack_word<T>(s[j][2 * half], s[j][2 * half + 1]);
  }
}

// sum (16 x 8 kTiles) += 16 keys from `key` on of the transpose of scores, times the kChunkRows rows of tile b.
template <class T, int kStride, int kTiles>
__device__ __forceinline__ void add_transposed(float (&sum)[kTiles][4], const unsigned char* scores, int stride,
                                               int key, const unsigned char* b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < kChunkRows; row += kMmaDepth<T>) {
    uint32_t words[4];
    ldmatrix<true>(words, scores + (row + lane % 8 + lane / 16 * 8) * stride + (key + lane / 8 % 2 * 8) * 2);
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t pair[2][2];
      load_b_columns<T, kStride>(pair, b, row, 8 * j);
      mma<T>(sum[j], words, pair[0]);
      mma<T>(sum[j + 1], words, pair[1]);
    }
  }
}

// sum (16 x 16) += 16 queries from `row` on of scores, times 16 columns from `column` on of tile b, whose rows are
// keys. Products of keys for which visible(key) is false are skipped.
template <class T, int kStride, class Visible>
__device__ __forceinline__ void add_rows(float (&sum)[2][4], const unsigned char* scores, int stride, int row,
                                         const unsigned char* b, int column, int keys, Visible visible) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int key = 0; key < keys; key += kMmaDepth<T>) {
    if (!visible(key)) continue;
    uint32_t words[4], pair[2][2];
    ldmatrix<false>(words, scores + (row + lane % 16) * stride + key * 2 + lane / 16 * 16);
    load_b_columns<T, kStride>(pair, b, key, column);
    mma<T>(sum[0], words, pair[0]);
    mma<T>(sum[1], words, pair[1]);
  }
}

// factor * sum to rows row .. row + 15, columns from `column` on, of a matrix.
template <class T>
__device__ __forceinline__ void store_accumulators(const Matrix<T>& x, int row, int column, const float (&sum)[2][4],
                                                   float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int at = row + lane / 4 + 8 * half;
    if (at >= x.rows) continue;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int first = column + 8 * j + lane % 4 * 2;
      T* const to = x.row(at) + first;
      const float low = sum[j][2 * half] * factor, high = sum[j][2 * half + 1] * factor;
      if (x.vectors) {
        if (first < x.columns) *reinterpret_cast<uint32_t*>(to) = pack_word<T>(low, high);
      } else {
        if (first < x.columns) to[0] = T(low);
        if (first + 1 < x.columns) to[1] = T(high);
      }
    }
  }
}

// Writes a warp's dS, of queries m .. and keys n .., to dbias (B, H, Lq, Lk), whose matrix begins at row0.
template <class To, int kTiles>
__device__ __forceinline__ void write_dbias(void* dbias, int64_t row0, int m, int n, const Shape& shape,
                                            const float (&ds)[kTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kTiles; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int query = m + lane / 4 + e / 2 * 8, key = n + 8 * j + lane % 4 * 2 + e % 2;
      if (query < shape.seqlen_q && key < shape.seqlen_k)
        static_cast<To*>(dbias)[(row0 + query) * shape.seqlen_k + key] = To(ds[j][e]);
    }
  }
}

// Column 8 j + 2 (lane % 4) + e of a warp's 16 x 8 kTiles scores, summed over its rows.
template <int kTiles>
__device__ __forceinline__ float column_sum(const float (&s)[kTiles][4], int j, int e) {
  float sum = s[j][e] + s[j][e + 2];
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  return sum;
}

struct alignas(16) ShortShared {
  float delta[kMaxWarps / 2][kChunkRows];  // the part of each 32 keys
  float key_sum[2][kMaxShort];             // of dS, over queries 16 i .. of the chunks
  bool visible[kMaxWarps / 2][2];          // is any of these 32 keys visible to queries 16 i .. of the chunk
  // After it: k and v; P and dS of a chunk; q and dout of a chunk, or of two if there are more.
};

int warp_count(int seqlen_k) { return 2 * ceil_div(seqlen_k, 32); }

template <class T, int kHeadDim>
size_t shared_bytes(int seqlen_k, int chunks) {
  const int keys = 16 * warp_count(seqlen_k), rows = 2 * keys + 2 * kChunkRows * std::min(chunks, 2);
  return sizeof(ShortShared) + rows * kTileStride<T, kHeadDim> + 2 * kChunkRows * score_stride(keys);
}

template <class T, int kHeadDim>
__global__ void __launch_bounds__(kHeadDim <= 64 ? 384 : 256) short_backward_kernel(const Backward p, void* dbias) {
  constexpr int kStride = kTileStride<T, kHeadDim>;
  auto& shared = shared_memory<ShortShared>();
  const Shape& shape = p.shape;
  const Mask& mask = p.by_query;
  const int h_k = blockIdx.x % shape.key_heads, b = blockIdx.x / shape.key_heads, group = shape.heads / shape.key_heads;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int keys = 16 * warps, stride = score_stride(keys), row = warp % 2 * 16, key = warp / 2 * 32,
            warp_key = warp * 16;
  unsigned char* const k_tile = reinterpret_cast<unsigned char*>(&shared + 1);
  unsigned char* const v_tile = k_tile + keys * kStride;
  unsigned char* const p_tile = v_tile + keys * kStride;
  unsigned char* const ds_tile = p_tile + kChunkRows * stride;
  const auto q_tile = [&](int i) { return ds_tile + kChunkRows * stride + i % 2 * (2 * kChunkRows * kStride); };
  const auto dout_tile = [&](int i) { return q_tile(i) + kChunkRows * kStride; };
  const DropoutMask dropout(p.dropout);
  const float dropout_scale = dropout.active() ? dropout.scale() : 1.0f;
  const ScoreExponent exponent = make_exponent<T>(p);

  // Keys that take no part, or that the band excludes from all queries, may hold anything: they are read as zeros. A
  // lane tests one of 16 rows, so that their copies do not wait one after the other.
  const auto may_read = [&](int n) {
    return max(n - mask.band_hi, 0) <= min(n - mask.band_lo, shape.seqlen_q - 1) && takes_part(mask, b, n);
  };
  const uint32_t read_keys = __ballot_sync(0xffffffffu, may_read(warp_key + lane % 16));
  const auto read = [&](int n) { return (read_keys >> (n - warp_key) & 1) != 0; };
  const Matrix<T> k(p.k, b, h_k, shape.seqlen_k, shape.head_dim_k), v(p.v, b, h_k, shape.seqlen_k, shape.head_dim_v);
  load_tile<T, 16, kHeadDim, 32>(k_tile + warp_key * kStride, k, warp_key, read);
  load_tile<T, 16, kHeadDim, 32>(v_tile + warp_key * kStride, v, warp_key, read);
  const int chunks = ceil_div(shape.seqlen_q, kChunkRows), count = group * chunks;
  const auto load = [&](int i) {
    const int h = h_k * group + i / chunks, m0 = i % chunks * kChunkRows;
    const int m = m0 + row + lane % 16;  // its gradient, and it, may hold anything if no key is visible to it
    const bool has_visible_keys =
        m < shape.seqlen_q && p.lse[(static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_q + m] != -kInfinity;
    const uint32_t read_rows = __ballot_sync(0xffffffffu, has_visible_keys);
    for (int part = warp; part < 4; part += warps) {  // 16 rows of one of the two for a warp
      const bool is_q = part < 2;
      const StridedMatrix rows = {is_q ? p.q.data : p.dout.data, is_q ? p.q.stride_b : p.dout.stride_b,
                                  is_q ? p.q.stride_h : p.dout.stride_h, is_q ? p.q.stride : p.dout.stride};
      const Matrix<T> x(rows, b, h, shape.seqlen_q, is_q ? shape.head_dim_k : shape.head_dim_v);
      load_tile<T, 16, kHeadDim, 32>((is_q ? q_tile(i) : dout_tile(i)) + row * kStride, x, m0 + row,
                                     [&](int m) { return (read_rows >> (m - m0 - row) & 1) != 0; });
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
    float shift[2], delta[2] = {};
    uint32_t bits[2], kept[2] = {};  // kept: bit 8j + e is column 8j + 2c + e
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = m0 + row + g + 8 * half;
      if (dropout.active()) kept[half] = dropout.kept_by_quad(row0 + m, key / 8) >> 2 * c;
      shift[half] = exponent.shift(m < shape.seqlen_q ? p.lse[row0 + m] : -kInfinity);
      bits[half] = visible_bits<32>(mask, b, h, m, shape.seqlen_q, key, shape.seqlen_k);
    }
    i == 0 ? cp_async_wait<1>() : cp_async_wait<0>();
    __syncthreads();

    float s[4][4] = {}, dp[4][4] = {};
    const bool visible = __ballot_sync(0xffffffffu, ((bits[0] | bits[1]) & 0xff) != 0) != 0;
    if (lane == 0) shared.visible[warp / 2][warp % 2] = visible;
    if (visible) {
      multiply_rows<T, kHeadDim>(s, q_tile(i), row, k_tile + key * kStride);
      multiply_rows<T, kHeadDim>(dp, dout_tile(i), row, v_tile + key * kStride);
    }
    make_probabilities<T, false>(s, exponent, p, b, h, m0 + row, key, [&](int, int e) { return shift[e / 2]; });
    clear_masked(s, bits[0], bits[1]);
    const auto drop = [&](float (&x)[4][4]) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
          if ((kept[e / 2] >> (8 * j + e % 2) & 1) == 0) x[j][e] = 0.0f;
      }
    };
    if (dropout.active()) drop(dp);
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) delta[e / 2] += s[j][e] * dp[j][e];
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      delta[half] = quad_sum(delta[half]);
      if (c == 0) shared.delta[warp / 2][row + g + 8 * half] = delta[half];
    }
    __syncthreads();
    if (i > 0) {  // the other chunk is done with
      if (i + 1 < count) load(i + 1);
      cp_async_commit();
    }

    uint32_t visible_keys = 0;  // bit w: any of keys 32 w .. to queries row .. row + 15
    delta[0] = delta[1] = 0.0f;
#pragma unroll 1
    for (int w = 0; w < warps / 2; w++) {
      delta[0] += shared.delta[w][row + g], delta[1] += shared.delta[w][row + g + 8];
      visible_keys |= (shared.visible[w][row / 16] ? 1u : 0u) << w;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = m0 + row + g + 8 * half;
      delta[half] *= dropout_scale;
      if (p.dlse != nullptr && shift[half] != kInfinity) delta[half] -= p.dlse[row0 + m];
      if (p.delta != nullptr && warp < 2 && c == 0 && m < shape.seqlen_q) p.delta[row0 + m] = delta[half];
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) dp[j][e] = s[j][e] * fmaf(dp[j][e], dropout_scale, -delta[e / 2]);
    }
    if (dropout.active()) drop(s);
    if (dbias != nullptr)
      p.bias.dtype == DType::float32 ? write_dbias<float>(dbias, row0, m0 + row, key, shape, dp)
                                     : write_dbias<T>(dbias, row0, m0 + row, key, shape, dp);
    if (p.dbias_keys != nullptr) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float sum = column_sum(dp, j / 2, j % 2);
        float& key_total = shared.key_sum[warp % 2][key + j / 2 * 8 + 2 * c + j % 2];
        if (g == 0) key_total = m0 == 0 ? sum : key_total + sum;
      }
    }
    store_scores<T>(p_tile, stride, row, key, s);
    store_scores<T>(ds_tile, stride, row, key, dp);
    __syncthreads();

    if (shared.visible[warp / 2][0] || shared.visible[warp / 2][1]) {
      add_transposed<T, kStride>(dv, p_tile, stride, warp_key, dout_tile(i));
      add_transposed<T, kStride>(dk, ds_tile, stride, warp_key, q_tile(i));
    }
    const Matrix<T> dq(p.dq, b, h, shape.seqlen_q, shape.head_dim_k);
    for (int column = warp / 2 * 16; column < shape.head_dim_k; column += 8 * warps) {
      float sum[2][4] = {};
      add_rows<T, kStride>(sum, ds_tile, stride, row, k_tile, column, keys,
                           [&](int n) { return (visible_keys >> n / 32 & 1) != 0; });
      store_accumulators(dq, m0 + row, column, sum, p.softmax_scale);
    }
    if (p.dbias_keys != nullptr && m0 + kChunkRows >= shape.seqlen_q && threadIdx.x < shape.seqlen_k)
      p.dbias_keys[(static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_k + threadIdx.x] =
          shared.key_sum[0][threadIdx.x] + shared.key_sum[1][threadIdx.x];
  }
  cp_async_wait<0>();
  __syncthreads();
  store_tile<T, kHeadDim>(Matrix<T>(p.dk, b, h_k, shape.seqlen_k, shape.head_dim_k), warp_key,
                          k_tile + warp_key * kStride, dk, p.softmax_scale);
  store_tile<T, kHeadDim>(Matrix<T>(p.dv, b, h_k, shape.seqlen_k, shape.head_dim_v), warp_key,
                          v_tile + warp_key * kStride, dv, dropout_scale);
}

// Calls f(T, kHeadDim), if there is such a kernel; kHeadDim is an integral constant.
template <class Function>
void with_short_kernel(int head_dim, DType dtype, Function&& f) {
  const auto with_type = [&](auto t) {
    if (head_dim <= 64) return f(t, Int<64>{});
    if (head_dim <= 128) f(t, Int<128>{});
  };
  if (dtype == DType::bfloat16) with_type(__nv_bfloat16{});
  if (dtype == DType::float16) with_type(__half{});
}

}  // namespace

bool has_short_backward(int head_dim, DType dtype, int device) {
  size_t bytes = std::numeric_limits<size_t>::max();
  with_short_kernel(head_dim, dtype,
                    [&](auto t, auto padded) { bytes = shared_bytes<decltype(t), padded()>(kMaxShort, 2); });
  return bytes <= static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

void short_backward(const Backward& p, void* dbias, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.shape.batch) * p.shape.key_heads;
  if (blocks == 0 || p.shape.seqlen_k == 0) return;
  with_short_kernel(head_dim(p.shape), p.dtype, [&](auto t, auto padded) {
    using T = decltype(t);
    const int chunks = p.shape.heads / p.shape.key_heads * ceil_div(p.shape.seqlen_q, kChunkRows);
    launch(short_backward_kernel<T, padded()>, dim3(static_cast<unsigned>(blocks)),
           dim3(32 * warp_count(p.shape.seqlen_k)), shared_bytes<T, padded()>(p.shape.seqlen_k, chunks), stream, p,
           dbias);
  });
}

}  // namespace fastattn::attention
