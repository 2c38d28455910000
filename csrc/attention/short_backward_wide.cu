// dq, dk and dv of short sequences whose heads or elements are wide: those that short_backward.cu cannot hold.
//   Interface: short_backward.h, formulas: backward.h
//
// Grid: one block per (batch, key head), 16 queries and 16 keys a warp; the query heads of a group one after the other.
//   Scores, 128 x 128 at most, are all that a block holds as a whole; q, k, v and dout come in slices of 64 bytes a row, one
//   step ahead. (1) A warp adds up S and dP of its 16 queries and all keys in registers, slice after slice. Rows are whole,
//   so that their sum and delta come from the probabilities themselves: out is not read, and lse need not be exact. (2) P
//   goes to shared memory, rounded to T, and every slice of dout makes one of dv. (3) dS takes the place of P; slices of q
//   make dk, those of k dq. 5 products; where none of 16 queries sees any of 32 keys, they are passed over.
// Registers: S and dP [16, 128] of each warp; a slice [16, 64 bytes] of a result.
// Shared memory: four slices of 128 rows, of which the scores, that come later, take the place of two: 60 KiB of 16-bit
//   types and 92 KiB of float32 for 128 queries, which every chip has.
// Bytes: v once, q, k and dout twice, the second time from L2; dq, dk and dv once. Over the heads of a group dk and dv add
//   up in `sums`, float32 of their size, where a thread finds what it left itself: no block reads another one's.
// dbias, dbias_keys: as in short_backward.cu, of whole columns.
// Compiled offline with nvcc 13.0, sm_80 / sm_90 (no GPU has timed it yet), nothing spills: 234 / 238 registers of 16-bit
//   types, 237 / 236 of float32, 225 / 230 of tf32. That is one block of 8 warps a multiprocessor, two of 4.
#include "attention/short_backward.cuh"

namespace fastattn::attention {
namespace {

template <class T>
constexpr int kColumns = 64 / static_cast<int>(sizeof(T));  // of a slice
template <class T>
constexpr int kSliceStride = kTileStride<T, kColumns<T>>;

template <class T>
struct WideShared {
  using Slice = unsigned char[kMaxShort * kSliceStride<T>];
  alignas(16) Slice slices[2];
  float key_sum[kMaxShort / 16][kMaxShort];  // of dS, over the queries of a warp
  unsigned char kept[kMaxShort][kMaxShort / 8];
  uint32_t visible[kMaxShort / 16];  // bit i: do these 16 queries see any of keys 32 i ..
  bool key_seen[kMaxShort], query_sees[kMaxShort];
  // Behind it: scores, 16 rows a warp, and until they are there two slices.

  __device__ __forceinline__ unsigned char* scores() { return reinterpret_cast<unsigned char*>(this + 1); }
  // q and k, or dout and v, of a step.
  __device__ __forceinline__ Slice* pair(int step) { return step % 2 == 0 ? slices : reinterpret_cast<Slice*>(scores()); }
};

int warps_of(const Shape& shape) { return blocks_of(std::max(shape.seqlen_q, shape.seqlen_k), 16); }

template <class T>
__global__ void __launch_bounds__(2 * kMaxShort) short_backward_wide_kernel(const Backward p, void* dbias, float* sums) {
  constexpr int kSlice = kColumns<T>, kStride = kSliceStride<T>, kTiles = kMaxShort / 8;
  auto& shared = shared_memory<WideShared<T>>();
  const Shape& shape = p.shape;
  const Visibility& who = p.by_query;
  const int Lq = shape.seqlen_q, Lk = shape.seqlen_k;
  const int h_k = blockIdx.x % shape.key_heads, b = blockIdx.x / shape.key_heads, group = shape.heads / shape.key_heads;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, warp = threadIdx.x / 32, own = warp * 16;
  const int rows = blockDim.x / 2;
  const int k_slices = blocks_of(shape.head_dim_k, kSlice), v_slices = blocks_of(shape.head_dim_v, kSlice);
  const DropoutMask dropout(p.dropout);
  const ScoreExponent exponent = exponent_of<T>(p);
  for (int n = threadIdx.x; n < Lk; n += blockDim.x) shared.key_seen[n] = group_sees(who, shape, b, h_k, n);

  for (int h = h_k * group; h < (h_k + 1) * group; h++) {
    const int64_t row0 = (static_cast<int64_t>(b) * shape.heads + h) * Lq;
    for (int m = threadIdx.x; m < Lq; m += blockDim.x) shared.query_sees[m] = p.lse[row0 + m] != -kInfinity;
    __syncthreads();  // also: the head before is done with

    // (1)
    // Slice i of q or k, or, of what is as wide as v, of dout or v.
    const auto load = [&](unsigned char* slice, int i, bool of_keys, bool of_v) {
      const Rows& rows = of_keys ? of_v ? p.v : p.k : of_v ? p.dout : p.q;
      Matrix<T> x(rows, b, of_keys ? h_k : h, of_keys ? Lk : Lq, of_v ? shape.head_dim_v : shape.head_dim_k);
      x.data += i * kSlice, x.columns -= i * kSlice;
      const bool* const takes_part = of_keys ? shared.key_seen : shared.query_sees;
      load_tile<T, kMaxShort, kSlice>(slice, x, 0, [&](int row) { return takes_part[row]; });
    };
    const auto load_pair = [&](int step) {
      const bool of_v = step >= k_slices;
#pragma unroll 1
      for (int of_keys = 0; of_keys < 2; of_keys++)
        load(shared.pair(step)[of_keys], of_v ? step - k_slices : step, of_keys, of_v);
      cp_async_commit();
    };
    load_pair(0);
    if (dropout.active()) {
      for (int i = threadIdx.x; i < rows * blocks_of(Lk, 8); i += blockDim.x)
        shared.kept[i % rows][i / rows] = static_cast<unsigned char>(dropout.kept(row0 + i % rows, i / rows));
    }
    float shift[2];
    uint32_t bits[2], visible = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = own + g + 8 * half;
      shift[half] = exponent.shift(m < Lq ? p.lse[row0 + m] : -kInfinity);
      bits[half] = sees<kMaxShort>(who, b, h, m, Lq, 0, Lk, who.band_lo, who.band_hi);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (__ballot_sync(0xffffffffu, ((bits[0] | bits[1]) >> 8 * i & 0xff) != 0) != 0) visible |= 1u << i;
    if (lane == 0) shared.visible[warp] = visible;

    float s[kTiles][4] = {}, dp[kTiles][4] = {};
    int step = 0;
    const auto multiply = [&](float (&product)[kTiles][4], int count) {
      for (const int end = step + count; step < end; step++) {
        cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < k_slices + v_slices) load_pair(step + 1);
        const auto* const pair = shared.pair(step);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          auto& part = reinterpret_cast<float(&)[4][4]>(product[4 * i]);
          if ((visible >> i & 1) != 0) multiply_rows<T, kSlice>(part, pair[0], own, pair[1] + 32 * i * kStride, true);
        }
      }
    };
    multiply(s, k_slices);
    multiply(dp, v_slices);
    __syncthreads();  // the slices are done with

    // From dout's slices dv is made, from q's and k's, which come in turns, dk and dq.
    const auto load_slice = [&](int i) {
      const int at = i - v_slices;
      load(shared.slices[i % 2], at < 0 ? i : at / 2, at >= 0 && at % 2 == 1, at < 0);
      cp_async_commit();
    };
    load_slice(0);

    // (2)
    float total[2] = {}, delta[2] = {}, dlse[2] = {};
    make_probabilities<false>(s, exponent, p, b, h, own, 0, [&](int, int e) { return shift[e / 2]; },
                              [](int, int) { return 0.0f; });
    clear_unseen(s, bits[0], bits[1]);
    const auto kept = [&](int j, int e) { return (shared.kept[own + g + e / 2 * 8][j] >> (2 * c + e % 2) & 1) != 0; };
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (dropout.active()) dp[j][e] = kept(j, e) ? dp[j][e] * dropout.scale() : 0.0f;
        total[e / 2] += s[j][e], delta[e / 2] += s[j][e] * dp[j][e];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = own + g + 8 * half;
      const float sum = quad_sum(total[half]), product = quad_sum(delta[half]);
      total[half] = sum > 0.0f ? 1.0f / sum : 0.0f;  // 0 for a query that sees nothing
      delta[half] = sum > 0.0f ? product / sum : 0.0f;  // of a single key its dP, to the last bit
      if (p.dlse != nullptr && shift[half] != kInfinity) {
        dlse[half] = p.dlse[row0 + m];
        if (!kDlseApart<T>) delta[half] -= dlse[half];
      }
      if (p.delta != nullptr && c == 0 && m < Lq)
        p.delta[row0 + m] = delta[half], p.remainder[row0 + m] = sum > 0.0f ? log2f(sum) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[j][e] *= total[e / 2];
        dp[j][e] = score_gradient<T>(s[j][e], dp[j][e], delta[e / 2], dlse[e / 2]);
        if (dropout.active()) s[j][e] = kept(j, e) ? s[j][e] : 0.0f;
      }
    }
    if (dbias != nullptr)
      p.bias.dtype == DType::float32 ? write_dbias<float>(dbias, row0, own, 0, shape, dp)
                                     : write_dbias<Element<T>>(dbias, row0, own, 0, shape, dp);
    if (p.dbias_keys != nullptr) {
#pragma unroll
      for (int j = 0; j < 2 * kTiles; j++) {
        const float sum = column_sum(dp, j / 2, j % 2);
        if (g == 0) shared.key_sum[warp][j / 2 * 8 + 2 * c + j % 2] = sum;
      }
    }
    keep_scores<T>(shared.scores(), own, 0, s);

    // (3)
    for (int i = 0; i < v_slices + 2 * k_slices; i++) {
      cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < v_slices + 2 * k_slices) load_slice(i + 1);
      if (i == 0 && p.dbias_keys != nullptr && threadIdx.x < Lk) {
        float sum = 0.0f;
        for (int w = 0; w < rows / 16; w++) sum += shared.key_sum[w][threadIdx.x];
        p.dbias_keys[(static_cast<int64_t>(b) * shape.heads + h) * Lk + threadIdx.x] = sum;
      }
      if (i == v_slices) {
        keep_scores<T>(shared.scores(), own, 0, dp);
        __syncthreads();
      }
      const unsigned char* const slice = shared.slices[i % 2];
      const bool is_dv = i < v_slices;
      const int column = (is_dv ? i : (i - v_slices) / 2) * kSlice;
      float sum[kSlice / 8][4] = {};
      if (!is_dv && (i - v_slices) % 2 == 1) {
        add_rows<T, kStride>(sum, shared.scores(), own, slice, 0, kMaxShort,
                             [&](int n) { return (visible >> n / 32 & 1) != 0; });
        store_accumulators(Matrix<T>(p.dq, b, h, Lq, shape.head_dim_k), own, column, sum, p.softmax_scale);
        continue;
      }
      add_transposed<T, kStride>(sum, shared.scores(), own, slice, rows,
                                 [&](int m) { return (shared.visible[m / 16] >> own / 32 & 1) != 0; });
      if (group > 1) {
        const int slice_of_sums = (is_dv ? 0 : v_slices) + column / kSlice;
        const int64_t place = static_cast<int64_t>(blockIdx.x) * (v_slices + k_slices) + slice_of_sums;
        float4* const of_thread = reinterpret_cast<float4*>(sums) + place * blockDim.x * (kSlice / 8) + threadIdx.x;
        const bool is_first = h == h_k * group, is_last = h == (h_k + 1) * group - 1;
#pragma unroll
        for (int j = 0; j < kSlice / 8; j++) {
          float4& at = of_thread[j * blockDim.x];
          if (!is_first) sum[j][0] += at.x, sum[j][1] += at.y, sum[j][2] += at.z, sum[j][3] += at.w;
          if (!is_last) at = make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
        }
        if (!is_last) continue;
      }
      const Matrix<T> result(is_dv ? p.dv : p.dk, b, h_k, Lk, is_dv ? shape.head_dim_v : shape.head_dim_k);
      store_accumulators(result, own, column, sum, !is_dv ? p.softmax_scale : dropout.active() ? dropout.scale() : 1.0f);
    }
  }
}

}  // namespace

int64_t short_backward_wide_sums(const Shape& shape, DType dtype) {
  const int columns = 64 / (dtype == DType::float32 ? 4 : 2);
  const int slices = blocks_of(shape.head_dim_k, columns) + blocks_of(shape.head_dim_v, columns);
  return static_cast<int64_t>(shape.batch) * shape.key_heads * slices * warps_of(shape) * 16 * columns;
}

void short_backward_wide(const Backward& p, void* dbias, float* sums, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.shape.batch) * p.shape.key_heads;
  const int warps = warps_of(p.shape);
  with_type(p.dtype, p.tf32, [&](auto t) {
    using T = decltype(t);
    const size_t behind = std::max<size_t>(2 * sizeof(typename WideShared<T>::Slice), 16 * warps * kScoreStride<T>);
    launch(short_backward_wide_kernel<T>, dim3(blocks), dim3(32 * warps), sizeof(WideShared<T>) + behind, stream, p, dbias,
           sums);
  });
}

}  // namespace fastattn::attention
