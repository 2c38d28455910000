// Backward of attention on Hopper: dk, dv and dq in one walk.   Formulas: backward.h
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 2; Shah et al. 2024, FlashAttention-3, arXiv:2407.08608.
// Three launches. The first makes delta, and lse in powers of two; the second does the work; the third rounds dq.
// Grid of the second: a block per (batch, key head, kBlockN keys), the first keys of a head first: under a causal mask they
//   have the longest way. It walks along the queries of every head of its group, so that their dk and dv add up.
// Roles: one thread of the producer warpgroup copies by TMA; each of two consumer warpgroups owns 64 keys. Their scores are
//   transposed, keys by queries: P^T and dS^T then enter dv += P^T dout and dk += dS^T q from registers.
// dq += dS k needs both warpgroups' dS: it goes through shared memory, twice buffered, so that one barrier a tile is enough.
//   Each warpgroup makes a half of the tile's dq and adds it, by TMA, to a float32 copy in memory.
// Registers of a consumer thread: S^T and dP^T (kBlockM / 2 each), dk and dv (kHeadDim / 2 each), dq (32).
// Shared memory: k and v; q and dout, two stages; dS, two buffers; dq on its way out.
// Work: 2 (3 Dk + 2 Dv) FLOPs a visited score, five products; bytes beyond the operands: 4 Dk for each of dq's additions.
// Compiled offline, nvcc 13.0 (no GPU has timed it yet): nothing spills; test_compile_sm90.py asserts it, and the order.
// Dropped, all at head dimension 64: exponentials beside dP's product, for which ptxas spilled 20 bytes and serialized every
//   wgmma; dropout as a branch instead of a template parameter, 92 bytes spilled in the masked loop.
#include "attention/backward_sm90.cuh"
#include "common/check.h"

namespace fastattn::attention {
namespace {

enum NamedBarrier { kOfGroup = 1, kOfBoth = 3 };  // one for each consumer, and one for both

template <class T, class Tiles, bool kDropout>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Arguments& a, Shared<Tiles>& shared)
      : a_(a), shared_(shared), work_(work_of_block<Tiles>(a)), group_(threadIdx.x / kGroup - 1),
        thread_(threadIdx.x % kGroup), dropout_(a.p.dropout) {}

  __device__ __forceinline__ void run() {
    float dk[kHeadDim / 2], dv[kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; i++) dk[i] = dv[i] = 0.0f;
    shared_.full_kv.wait(0);
    clean_keys();
#pragma unroll 1
    for (int h = work_.h_k * work_.group; h < (work_.h_k + 1) * work_.group; h++) {
      const Walk walk = walk_of<Tiles>(a_, work_, h);
      int i = 0;
#pragma unroll 1
      for (; i < walk.partial; i++) step<true>(dk, dv, h, walk.tile(i) * kBlockM);
#pragma unroll 1
      for (; i < walk.count; i++) step<false>(dk, dv, h, walk.tile(i) * kBlockM);
    }
    named_barrier_sync(kOfBoth, kConsumers * kGroup);  // k has been read by both
    stage(shared_.k, dk, a_.p.softmax_scale);
    stage(shared_.v, dv, kDropout ? dropout_.scale() : 1.0f);
    fence_async_proxy();
    named_barrier_sync(kOfGroup + group_, kGroup);
    if (thread_ > 0) return;
    const int first = group_ * kRowsOfGroup;
#pragma unroll
    for (int panel = 0; panel < Tiles::kPanels; panel++) {
      tma_store(a_.dk, shared_.k[panel] + first * kLineBytes, panel * kPanel, work_.n0 + first, work_.h_k, work_.b);
      tma_store(a_.dv, shared_.v[panel] + first * kLineBytes, panel * kPanel, work_.n0 + first, work_.h_k, work_.b);
    }
    bulk_commit();
    bulk_wait<0>();
  }

 private:
  static constexpr int kHeadDim = Tiles::kHeadDim, kBlockM = Tiles::kBlockM;

  // The tile of queries from m0 on of head h.
  template <bool kMasked>
  __device__ __forceinline__ void step(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2], int h, int m0) {
    const int stage = queries_.stage;
    const auto &q = shared_.q[stage], &dout = shared_.dout[stage];
    auto& ds_tile = shared_.ds[buffer_];
    float s[kBlockM / 2], dp[kBlockM / 2], dq[32];
    uint32_t p[kBlockM / 16][4], ds[kBlockM / 16][4], sees_bits[2] = {~0u, ~0u};

    shared_.full_q[stage].wait(queries_.phase);
    if (kMasked) clean_queries(m0);
    wgmma_fence();
#pragma unroll
    for (int column = 0; column < kHeadDim; column += 16)
      wgmma<T, kBlockM, false, false>(s, along_columns<kBlockN>(shared_.k, group_ * kRowsOfGroup, column),
                                      along_columns<kBlockM>(q, 0, column), column > 0);
    wgmma_commit();
    shared_.full_dout[stage].wait(queries_.phase);
    wgmma_fence();
#pragma unroll
    for (int column = 0; column < kHeadDim; column += 16)
      wgmma<T, kBlockM, false, false>(dp, along_columns<kBlockN>(shared_.v, group_ * kRowsOfGroup, column),
                                      along_columns<kBlockM>(dout, 0, column), column > 0);
    wgmma_commit();
    if (kMasked) look(h, m0, sees_bits);
    if (kDropout) draw_dropout(h, m0);

    wgmma_wait<1>();
    const float unit = a_.p.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kBlockM / 2; j += 4) {
      const float2 shift = *reinterpret_cast<const float2*>(&shared_.shift[stage][2 * j + thread_ % 4 * 2]);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[j + e] = exp2_approximate(s[j + e] * unit - (e % 2 == 0 ? shift.x : shift.y));
        if (kMasked && (sees_bits[e / 2] >> (j / 2 + e % 2) & 1) == 0) s[j + e] = 0.0f;
      }
    }
    // With 64 queries the exponentials are computed beside dP's product. It takes an access to memory that depends on them,
    // though its condition is never true: else ptxas moves the wait to before them. With 128 queries it may, as S and dP at
    // once leave too few registers.
    constexpr bool kBeside = kBlockM == 64;
    if (kBeside) shared_.full_kv.arrive_if(pack<kDropout>(p, s));
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < kBlockM / 2; j += 4) {
      const float2 delta = *reinterpret_cast<const float2*>(&shared_.delta[stage][2 * j + thread_ % 4 * 2]);
      const uint32_t kept = kDropout ? kept_bits(j) : ~0u;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float z = kDropout ? dropout_.scale() : 1.0f;
        const float gradient = s[j + e] * ((is_kept(kept, e) ? dp[j + e] * z : 0.0f) - (e % 2 == 0 ? delta.x : delta.y));
        dp[j + e] = kMasked && (sees_bits[e / 2] >> (j / 2 + e % 2) & 1) == 0 ? 0.0f : gradient;
        if (!kBeside && !is_kept(kept, e)) s[j + e] = 0.0f;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) ds[j / 8][j / 4 % 2 * 2 + r] = pack_word<T>(dp[j + 2 * r], dp[j + 2 * r + 1]);
    }
    if (!kBeside) pack<false>(p, s);
    const int lane = thread_ % 32, line = group_ * kRowsOfGroup + thread_ / 32 * 16 + lane % 16;
#pragma unroll
    for (int column = 0; column < kBlockM; column += 16)
      stmatrix(ds_tile[column / kPanel] + swizzled(line, column % kPanel / 8 + lane / 16), ds[column / 16]);
    fence_async_proxy();

    wgmma_fence();
#pragma unroll
    for (int row = 0; row < kBlockM; row += 16)
      wgmma<T, kHeadDim, true>(dv, p[row / 16], along_lines<kBlockM>(dout, row, 0), true);
    wgmma_commit();
    named_barrier_sync(kOfBoth, kConsumers * kGroup);  // dS of both warpgroups is there, and the last one has been read
    // With 64 queries a warpgroup makes 64 columns of dq, with 128 the rows of 64 queries.
    constexpr bool kByColumns = kBlockM == kRowsOfGroup;
    const int row = kByColumns ? 0 : group_ * kRowsOfGroup, column = kByColumns ? group_ * kPanel : 0;
#pragma unroll
    for (int key = 0; key < kBlockN; key += 16)
      wgmma<T, 64, true, true>(dq, along_lines<kBlockN>(ds_tile, key, row), along_lines<kBlockN>(shared_.k, key, column), key > 0);
    wgmma_commit();
#pragma unroll
    for (int line = 0; line < kBlockM; line += 16)
      wgmma<T, kHeadDim, true>(dk, ds[line / 16], along_lines<kBlockM>(q, line, 0), true);
    wgmma_commit();
    wgmma_wait<1>();
    add_dq(dq, m0 + row, column, h);
    wgmma_wait<0>();
    if (thread_ == 0) shared_.empty[stage].arrive();
    queries_.advance();
    buffer_ ^= 1;
  }

  // Adds the warpgroup's 64 x 64 part of dq, from query m and column `column` on, to the float32 copy.
  __device__ __forceinline__ void add_dq(const float (&dq)[32], int m, int column, int h) {
    auto& staged = shared_.dq[group_];
    if (thread_ == 0) bulk_wait_read<0>();
    named_barrier_sync(kOfGroup + group_, kGroup);  // the last one has left shared memory
    const int lane = thread_ % 32, line = thread_ / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int first = i / 4 * 8 + lane % 4 * 2, place = swizzled(line + 8 * row_of(i), first % kFloatPanel / 4) + first % 4 * 4;
      *reinterpret_cast<float2*>(staged[i / 16] + place) = make_float2(dq[i], dq[i + 1]);
    }
    fence_async_proxy();
    named_barrier_sync(kOfGroup + group_, kGroup);
    if (thread_ > 0) return;
    for (int panel = 0; panel < 2; panel++) tma_add(a_.dq, staged[panel], column + panel * kFloatPanel, m, h, work_.b);
    bulk_commit();
  }

  // Which queries of the tile see the thread's two keys.
  __device__ __forceinline__ void look(int h, int m0, uint32_t (&bits)[2]) const {
    const Visibility& who = a_.p.by_key;
    const int n = work_.n0 + group_ * kRowsOfGroup + thread_ / 32 * 16 + thread_ % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++)
      bits[r] = sees<kBlockM>(who, work_.b, h, n + 8 * r, a_.p.shape.seqlen_k, m0, a_.p.shape.seqlen_q, -who.band_hi,
                              -who.band_lo);
  }

  // Keys that no query sees may be NaN, and 0 * NaN is NaN: they become zero, for dq. (dP is selected, not multiplied.)
  __device__ __forceinline__ void clean_keys() {
    const Visibility& who = a_.p.by_key;
    if (who.seen == nullptr) return;
    const int line = threadIdx.x - kGroup, n = work_.n0 + line;
    if (line < kBlockN && n < a_.p.shape.seqlen_k) {
      bool seen = false;
      for (int h = work_.h_k * work_.group; h < (work_.h_k + 1) * work_.group; h++) seen |= key_is_seen(who, work_.b, h, n);
      if (!seen) clear_line(shared_.k, line);
    }
    fence_async_proxy();
    named_barrier_sync(kOfBoth, kConsumers * kGroup);
  }

  // Likewise queries that see nothing, and their gradients. Each warpgroup does it for itself.
  __device__ __forceinline__ void clean_queries(int m0) {
    const int stage = queries_.stage;
    const auto blind = [&](int line) { return m0 + line < a_.p.shape.seqlen_q && shared_.shift[stage][line] == kInfinity; };
    bool some = false;
    for (int line = thread_ % 32; line < kBlockM; line += 32) some |= blind(line);
    if (__ballot_sync(0xffffffffu, some) == 0) return;  // every warp says the same
    shared_.full_dout[stage].wait(queries_.phase);
    if (thread_ < kBlockM && blind(thread_)) clear_line(shared_.q[stage], thread_), clear_line(shared_.dout[stage], thread_);
    fence_async_proxy();
    named_barrier_sync(kOfGroup + group_, kGroup);
  }

  // Dropout of the warp's 16 keys, for all queries of the tile.
  __device__ __forceinline__ void draw_dropout(int h, int m0) {
    const int warp = group_ * 4 + thread_ / 32, n = work_.n0 + warp * 16;
    const int64_t row0 = (static_cast<int64_t>(work_.b) * a_.p.shape.heads + h) * a_.p.shape.seqlen_q + m0;
    __syncwarp();
    for (int i = thread_ % 32; i < 2 * kBlockM; i += 32)
      shared_.kept[warp][i / 2][i % 2] = static_cast<unsigned char>(dropout_.kept(row0 + i / 2, n / 8 + i % 2));
    __syncwarp();
  }
  // Of accumulators j .. j + 3: two queries, a byte for each half of the keys.
  __device__ __forceinline__ uint32_t kept_bits(int j) const {
    const auto* const bytes = &shared_.kept[group_ * 4 + thread_ / 32][2 * j + thread_ % 4 * 2][0];
    return *reinterpret_cast<const uint32_t*>(bytes) >> thread_ % 32 / 4;
  }

  static __device__ __forceinline__ bool is_kept(uint32_t kept, int e) { return (kept >> (e % 2 * 16 + e / 2 * 8) & 1) != 0; }

  // p = s, or 0 where it is dropped. Is one of them negative?
  template <bool kDrop>
  __device__ __forceinline__ bool pack(uint32_t (&p)[kBlockM / 16][4], const float (&s)[kBlockM / 2]) const {
    uint32_t any = 0;
#pragma unroll
    for (int j = 0; j < kBlockM / 2; j += 4) {
      const uint32_t kept = kDrop ? kept_bits(j) : ~0u;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int low = 2 * r, high = 2 * r + 1;
        uint32_t& word = p[j / 8][j / 4 % 2 * 2 + r];
        word = pack_word<T>(is_kept(kept, low) ? s[j + low] : 0.0f, is_kept(kept, high) ? s[j + high] : 0.0f);
        any |= word;
      }
    }
    return (any & 0x80008000) != 0;
  }

  // The warpgroup's 64 keys of factor * sum, as lines of a tile.
  template <class Tile>
  __device__ __forceinline__ void stage(Tile& tile, const float (&sum)[kHeadDim / 2], float factor) {
    const int lane = thread_ % 32, line = group_ * kRowsOfGroup + thread_ / 32 * 16 + lane % 16;
#pragma unroll
    for (int column = 0; column < kHeadDim; column += 16) {
      uint32_t words[4];
#pragma unroll
      for (int word = 0; word < 4; word++)
        words[word] = pack_word<T>(sum[column / 2 + 2 * word] * factor, sum[column / 2 + 2 * word + 1] * factor);
      stmatrix(tile[column / kPanel] + swizzled(line, column % kPanel / 8 + lane / 16), words);
    }
  }

  const Arguments& a_;
  Shared<Tiles>& shared_;
  const Work work_;
  const int group_, thread_;
  const DropoutMask dropout_;
  Ring queries_;
  int buffer_ = 0;
};

template <class T, class Tiles, bool kDropout>
__global__ void __launch_bounds__(kSm90Threads, 1) backward_sm90_kernel(const __grid_constant__ Arguments a) {
  Shared<Tiles>& shared = shared_memory<Shared<Tiles>>();
  if (threadIdx.x == 0) {
    shared.full_kv.init(1);
    for (int stage = 0; stage < kStages; stage++)
      shared.full_q[stage].init(1), shared.full_dout[stage].init(1), shared.empty[stage].init(kConsumers);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    fewer_registers<24>();
    if (threadIdx.x == 0) produce<Tiles>(a, shared);
  } else {
    more_registers<240>();
    Consumer<T, Tiles, kDropout>(a, shared).run();
  }
}

constexpr int kRowThreads = 128;

// shift and delta of the rows of (b, h), padded to kRowBlock; a quad a row.
template <class T>
__global__ void __launch_bounds__(kRowThreads) backward_sm90_rows_kernel(const Backward p, float* shift, float* delta) {
  const int padded = blocks_of(p.shape.seqlen_q, kRowBlock) * kRowBlock, head = blockIdx.y;
  const int m = blockIdx.x * (kRowThreads / 4) + threadIdx.x / 4, last = p.shape.seqlen_q - 1;
  const int64_t row = static_cast<int64_t>(head) * p.shape.seqlen_q + min(m, last);
  const int b = head / p.shape.heads, h = head % p.shape.heads;
  const Matrix<T> out(p.out, b, h, p.shape.seqlen_q, p.shape.head_dim_v), dout(p.dout, b, h, p.shape.seqlen_q, p.shape.head_dim_v);
  const float product = row_product(out, dout, min(m, last)), lse = m > last ? -kInfinity : p.lse[row];
  if (threadIdx.x % 4 != 0) return;
  const bool blind = lse == -kInfinity;
  shift[static_cast<int64_t>(head) * padded + m] = blind ? kInfinity : lse * kLog2e;
  delta[static_cast<int64_t>(head) * padded + m] = blind ? 0.0f : product - (p.dlse != nullptr ? p.dlse[row] : 0.0f);
}

// dq = softmax_scale * sum, rounded. One thread takes kChunk columns of a row.
template <class T>
__global__ void __launch_bounds__(kRowThreads) backward_sm90_round_kernel(const Backward p, const float* sum) {
  const int chunks = p.shape.head_dim_k / kChunk;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x, row = i / chunks;
  const int64_t head = row / p.shape.seqlen_q;
  if (head >= static_cast<int64_t>(p.shape.batch) * p.shape.heads) return;
  Chunk<float> chunk;
  chunk.template load<true>(sum + i * kChunk, kChunk);
#pragma unroll
  for (int j = 0; j < kChunk; j++) chunk.at[j] *= p.softmax_scale;
  Chunk<T> rounded;
  rounded.pack(chunk.at);
  const Matrix<T> dq(p.dq, head / p.shape.heads, head % p.shape.heads, p.shape.seqlen_q, p.shape.head_dim_k);
  rounded.template store<true>(dq.row(static_cast<int>(row % p.shape.seqlen_q)) + i % chunks * kChunk, kChunk);
}

template <class T, class Tiles>
void run(const Backward& p, const BackwardScratch& scratch, cudaStream_t stream) {
  const Shape& s = p.shape;
  const int heads = s.batch * s.heads;
  const int64_t row_bytes = int64_t{4} * s.head_dim_k, elements = int64_t{heads} * s.seqlen_q * s.head_dim_k;
  const KeyRange keys = keys_in_band(s, p.by_key.band_lo, p.by_key.band_hi);
  const TensorMap sum = make_tensor_map(
      {scratch.dq,
       {uint64_t(s.head_dim_k), uint64_t(s.seqlen_q), uint64_t(s.heads), uint64_t(s.batch)},
       {uint64_t(row_bytes), uint64_t(row_bytes * s.seqlen_q), uint64_t(row_bytes * s.seqlen_q * s.heads)},
       {kFloatPanel, kRowsOfGroup, 1, 1},
       true,
       true});
  const Arguments a{p,
                    scratch.shift,
                    scratch.delta,
                    map_of(p.q, s.head_dim_k, 0, s.seqlen_q, s.heads, s.batch, Tiles::kBlockM),
                    map_of(p.k, s.head_dim_k, keys.first, keys.count, s.key_heads, s.batch, kBlockN),
                    map_of(p.v, s.head_dim_v, keys.first, keys.count, s.key_heads, s.batch, kBlockN),
                    map_of(p.dout, s.head_dim_v, 0, s.seqlen_q, s.heads, s.batch, Tiles::kBlockM),
                    sum,
                    map_of(p.dk, s.head_dim_k, 0, s.seqlen_k, s.key_heads, s.batch, kRowsOfGroup),
                    map_of(p.dv, s.head_dim_v, 0, s.seqlen_k, s.key_heads, s.batch, kRowsOfGroup),
                    keys.first};
  FASTATTN_CHECK(cudaMemsetAsync(scratch.dq, 0, elements * sizeof(float), stream));
  const dim3 row_grid(blocks_of(s.seqlen_q, kRowBlock) * (kRowBlock / (kRowThreads / 4)), heads);
  launch(backward_sm90_rows_kernel<T>, row_grid, dim3(kRowThreads), 0, stream, p, scratch.shift, scratch.delta);
  launch(p.dropout.rng_state != nullptr ? backward_sm90_kernel<T, Tiles, true> : backward_sm90_kernel<T, Tiles, false>,
         dim3(s.batch * s.key_heads * blocks_of(s.seqlen_k, kBlockN)), dim3(kSm90Threads), sizeof(Shared<Tiles>), stream, a);
  const int64_t chunks = elements / kChunk;
  launch(backward_sm90_round_kernel<T>, dim3(static_cast<unsigned>((chunks + kRowThreads - 1) / kRowThreads)), dim3(kRowThreads),
         0, stream, p, static_cast<const float*>(scratch.dq));
}

}  // namespace

BackwardTile backward_sm90_tile(int head_dim) { return {kBlockN, head_dim <= 64 ? Tiles<64>::kBlockM : Tiles<128>::kBlockM}; }

void backward_sm90(const Backward& p, const BackwardScratch& scratch, cudaStream_t stream) {
  const auto with_type = [&](auto t) {
    std::max(p.shape.head_dim_k, p.shape.head_dim_v) <= 64 ? run<decltype(t), Tiles<64>>(p, scratch, stream)
                                                          : run<decltype(t), Tiles<128>>(p, scratch, stream);
  };
  p.dtype == DType::bfloat16 ? with_type(__nv_bfloat16{}) : with_type(__half{});
}

}  // namespace fastattn::attention
