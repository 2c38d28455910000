// Kernels with all that Hopper's kernels are made of, and the same with one classic error each, for test_hopper.py. The
// enums of errors have the order of its table BUGS. A GPU runs the sound kernels only.
//
// products:
//   out_h = round(q_h k_h^T) v_h for each head h; q (H, 64, Dx), k and v (H, Lk, Dx), out (H, 64, Dx), any strides of
//   rows
//
// One block: a producer warp loads by TMA, a warpgroup multiplies, stages the result in shared memory and stores it by
// TMA. It takes Dx as D >= Dx columns, and may begin before the first key and end behind the last: boxes then lie
// outside, partly or as a whole.
#include "../tests/cuda/kernel_table.h"
#include "common/mma.cuh"
#include "common/philox.cuh"
#include "common/sm90/tma.cuh"
#include "common/sm90/wgmma.cuh"

using namespace fastattn;
using namespace fastattn::sm90;

namespace {

#ifdef FASTATTN_EMULATOR
__device__ constexpr bool is_bug(int bug, int which) { return bug == which; }
#else
__device__ constexpr bool is_bug(int, int) { return false; }
#endif

enum Bug {
  kSound,
  kNoFullWait,
  kWrongParity,
  kNoRelease,
  kReleasedTwice,
  kNoEmptyWait,
  kReleaseBeforeWait,
  kNoProductWait,
  kOperandOverwritten,
  kNoProductFence,
  kNoProxyFence,
  kFenceBehindBarrier,
  kNoStoreBarrier,
  kNoReadWait,
  kNoStoreWait,
  kWrongBytes,
  kNoInitFence,
  kNotInitialised,
  kHalfABarrier,
  kTwoCounts,
  kDescriptorOutside,
};

constexpr int kRows = 64, kStages = 2;

template <int D, int N>
struct alignas(1024) Shared {
  static constexpr int kPanels = (D + 63) / 64;
  unsigned char q[kPanels * kRows * 128], out[kPanels * kRows * 128], k[kStages][kPanels * N * 128],
      v[kStages][kPanels * N * 128];
  Barrier full_q, empty_q, full[kStages], empty[kStages];
};

struct Arguments {
  TensorMap q, k, v, out;
  int heads, first, tiles, bug;  // first: the key that the first tile begins with, 0 or less
};

// d += a B with 96 columns of a transposed B in two products, of 64 and of 32. One product reads one and a half
// patterns of the swizzle, which PTX's rule for addresses covers and CUTLASS never does; no kernel of ours does it
// either (csrc/attention/sm90.cuh). If a chip gets "bf16 96 64" wrong and this right, tiles of 96 may come back by this
// way.
template <class T>
__device__ __forceinline__ void multiply_in_two(float (&d)[48], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  const uint64_t next_panel = b >> 16 & 0x3fff;
  wgmma<T, 64, true>(reinterpret_cast<float (&)[32]>(d[0]), a, b, accumulate);
  wgmma<T, 32, true>(reinterpret_cast<float (&)[16]>(d[32]), a, b + next_panel, accumulate);
}

template <class T, int D, int N, bool kInTwo>
__global__ void __launch_bounds__(256, 1) products(const __grid_constant__ Arguments p) {
  using S = Shared<D, N>;
  S& shared = shared_memory<S>();
  const auto bug = [&](Bug which) { return is_bug(p.bug, which); };
  if (threadIdx.x == 0) {
    if (!bug(kNotInitialised)) shared.full_q.init(1);
    shared.empty_q.init(1);
    for (int stage = 0; stage < kStages; stage++) shared.full[stage].init(1), shared.empty[stage].init(1);
    if (!bug(kNoInitFence)) fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    fewer_registers<24>();
    if (threadIdx.x > 0) return;
    for (int head = 0, i = 0; head < p.heads; head++) {
      shared.empty_q.wait(head % 2 ^ 1);
      shared.full_q.arrive_expect(bug(kWrongBytes) ? 16 : sizeof shared.q);
      for (int panel = 0; panel < S::kPanels; panel++)
        tma_load(shared.q + panel * kRows * 128, p.q, shared.full_q, 64 * panel, 0, head, 0);
      for (int tile = 0; tile < p.tiles; tile++, i++) {
        const int stage = i % kStages;
        if (!bug(kNoEmptyWait)) shared.empty[stage].wait(i / kStages % 2 ^ 1);
        shared.full[stage].arrive_expect(2 * sizeof shared.k[0]);
        for (int panel = 0; panel < S::kPanels; panel++) {
          tma_load(shared.k[stage] + panel * N * 128, p.k, shared.full[stage], 64 * panel, p.first + tile * N, head, 0);
          tma_load(shared.v[stage] + panel * N * 128, p.v, shared.full[stage], 64 * panel, p.first + tile * N, head, 0);
        }
      }
    }
    return;
  }
  more_registers<256>();
  const int thread = threadIdx.x - 128, warp = thread / 32, lane = thread % 32;
  for (int head = 0, i = 0; head < p.heads; head++) {
    float out[D / 2], s[N / 2];
    uint32_t words[N / 16][4];
    shared.full_q.wait(head % 2);
    for (int tile = 0; tile < p.tiles; tile++, i++) {
      const int stage = i % kStages;
      if (!bug(kNoFullWait)) shared.full[stage].wait(i / kStages % 2 ^ (bug(kWrongParity)));
      if (!bug(kNoProductFence)) wgmma_fence();
      for (int step = 0; step < D / 16; step++)
        wgmma<T, N, false, false>(s, along_columns<kRows>(shared.q, 0, 16 * step),
                                  along_columns<N>(shared.k[stage], bug(kDescriptorOutside) ? 512 : 0, 16 * step),
                                  step > 0);
      wgmma_commit();
      if (!bug(kNoProductWait)) wgmma_wait<0>(s);
      for (int step = 0; step < N / 16; step++)
        for (int word = 0; word < 4; word++)
          words[step][word] = pack_word<T>(s[8 * step + 2 * word], s[8 * step + 2 * word + 1]);
      wgmma_fence(words);
      for (int step = 0; step < N / 16; step++) {
        const uint64_t v = along_lines<N>(shared.v[stage], 16 * step, 0);
        if constexpr (kInTwo)
          multiply_in_two<T>(out, words[step], v, tile + step > 0);
        else
          wgmma<T, D, true>(out, words[step], v, tile + step > 0);
      }
      wgmma_commit();
      if (bug(kReleaseBeforeWait) && thread == 0) shared.empty[stage].arrive();
      if (bug(kOperandOverwritten)) words[0][0] = 0;
      // Here nothing but the wait keeps the next tile from overwriting what the product still reads.
      if (!bug(kReleaseBeforeWait) || tile + 1 == p.tiles) wgmma_wait<0>(out);
      if (!bug(kReleaseBeforeWait) && !bug(kNoRelease) && thread == 0) shared.empty[stage].arrive();
      if (bug(kReleasedTwice) && thread == 1) shared.empty[stage].arrive();
    }
    if (thread == 0) shared.empty_q.arrive();
    if (bug(kHalfABarrier) && thread < 32) continue;
    if (bug(kTwoCounts) && thread < 32) {
      named_barrier_sync(1, 64);
    } else {
      named_barrier_sync(1, 128);  // the last store has read what is overwritten now
    }
    for (int column = 0; column < D; column += 16) {  // four matrices: rows 0 and 8, columns 0 and 8
      uint32_t four[4];
      for (int word = 0; word < 4; word++)
        four[word] = pack_word<T>(out[column / 2 + 2 * word], out[column / 2 + 2 * word + 1]);
      const int line = warp * 16 + lane % 16, chunk = column % 64 / 8 + lane / 16;
      stmatrix(shared.out + column / 64 * kRows * 128 + swizzled(line, chunk), four);
    }
    if (!bug(kNoProxyFence) && !bug(kFenceBehindBarrier)) fence_async_proxy();
    if (!bug(kNoStoreBarrier)) named_barrier_sync(2, 128);
    if (thread == 0) {
      if (bug(kFenceBehindBarrier)) fence_async_proxy();
      for (int panel = 0; panel < S::kPanels; panel++)
        tma_store(p.out, shared.out + panel * kRows * 128, 64 * panel, 0, head, 0);
      bulk_commit();
      if (!bug(kNoReadWait) && !bug(kNoStoreWait)) bulk_wait_read<0>();
    }
    __syncwarp();
  }
  if (thread == 0 && !bug(kNoStoreWait)) bulk_wait<0>();
}

// 384 threads start with 168 registers each, 64512 in all.
template <int kFewer, int kMore>
__global__ void __launch_bounds__(384, 1) registers() {
  if (threadIdx.x < 128) return fewer_registers<kFewer>();
  more_registers<kMore>();
}

// A product of a tile that the threads have written, and a word from each warp to the next one: out[i] = 0.
enum SlipBug { kNoBarrier = 1, kOneFence, kWaitIsNoBarrier, kInsideAPattern, kUnevenOperand };
struct alignas(1024) SlipShared {
  unsigned char tile[72 * 128];
  float row[128];
};
__global__ void __launch_bounds__(128, 1) slip(float* out, int which) {
  SlipShared& shared = shared_memory<SlipShared>();
  const auto bug = [&](SlipBug one) { return is_bug(which, one); };
  const int thread = threadIdx.x;
  for (int i = thread; i < 72 * 8; i += 128) *reinterpret_cast<uint4*>(shared.tile + 16 * i) = make_uint4(0, 0, 0, 0);
  if (!bug(kOneFence) || thread == 0) fence_async_proxy();
  if (!bug(kNoBarrier)) __syncthreads();
  const uint64_t x = along_columns<72>(shared.tile, bug(kInsideAPattern) ? 1 : 0, bug(kUnevenOperand) ? 4 : 0);
  float d[32];
  wgmma_fence();
  wgmma<__nv_bfloat16, 64, false, false>(d, x, along_columns<72>(shared.tile, 0, 0), false);
  wgmma_commit();
  shared.row[thread] = static_cast<float>(thread);
  wgmma_wait<0>(d);
  if (!bug(kWaitIsNoBarrier)) __syncthreads();
  const int other = (thread + 32) % 128;
  out[thread] = d[0] + shared.row[other] - static_cast<float>(other);
}

// What named barriers are misused for, by the first warp of two.
enum Misuse { kTwice = 1, kDiverged, kNoSuchBarrier, kNotWholeWarps };
__global__ void __launch_bounds__(64, 1) misuse(int bug) {
  if (bug == kTwice) return named_barrier_arrive(1, 96), named_barrier_sync(1, 96);
  if (threadIdx.x >= 32) return named_barrier_sync(1, 64);
  if (bug == kDiverged && threadIdx.x < 16) return named_barrier_sync(2, 64);
  if (bug == kDiverged) return named_barrier_sync(2, 64);
  named_barrier_sync(bug == kNoSuchBarrier ? 16 : 1, bug == kNotWholeWarps ? 40 : 64);
}

// out (64, 64) = x^T y of bfloat16 tiles (64, 64): both operands along the lines of their tiles. Then `sums` (64, 64)
// floats += out, by a bulk copy.
struct Transposed {
  TensorMap x;
  const void* y;
  float *out, *sums;
};
struct alignas(1024) TransposedShared {
  unsigned char x[64 * 128], y[64 * 128], loaded[64 * 128];
  float out[64][64];
  Barrier full;
};
__global__ void __launch_bounds__(128, 1) transposed(const __grid_constant__ Transposed p) {
  TransposedShared& shared = shared_memory<TransposedShared>();
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread == 0) {
    shared.full.init(1);
    fence_barrier_init();
    shared.full.arrive_expect(2 * sizeof shared.x);
    tma_load(shared.x, p.x, shared.full, 0, 0, 0, 0);
    bulk_load(shared.loaded, p.y, sizeof shared.loaded, shared.full);
  }
  __syncthreads();
  shared.full.wait(0);
  for (int i = thread; i < 64 * 8; i += 128)  // a bulk copy does not swizzle
    *reinterpret_cast<uint4*>(shared.y + swizzled(i / 8, i % 8)) =
        *reinterpret_cast<const uint4*>(shared.loaded + 16 * i);
  fence_async_proxy();
  __syncthreads();
  float out[32];
  wgmma_fence();
  for (int line = 0; line < 64; line += 16)
    wgmma<__nv_bfloat16, 64, true, true>(out, along_lines<64>(shared.x, line, 0), along_lines<64>(shared.y, line, 0),
                                         line > 0);
  wgmma_commit();
  wgmma_wait<0>(out);
  for (int i = 0; i < 32; i++) {
    const int row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    shared.out[row][column] = out[i];
  }
  fence_async_proxy();
  __syncthreads();
  if (thread > 0) return;
  bulk_store(p.out, shared.out, sizeof shared.out);
  bulk_add(p.sums, &shared.out[0][0], sizeof shared.out);
  bulk_commit();
  bulk_wait<0>();
}

// kept (rows, 32): the halves of pair_mask() in the order of their columns. A quad has a row.
__global__ void __launch_bounds__(128, 1) kept_columns(const Dropout dropout, uint32_t (*kept)[16], int rows) {
  const DropoutMask mask(dropout);
  for (int row = threadIdx.x / 4; row < rows; row += 32) {
    const uint32_t words = mask.kept_in_quad(row, 0);
    for (int k = 0; k < 4; k++) kept[row][4 * k + threadIdx.x % 4] = DropoutMask::pair_mask(words, k);
  }
}

// Each block adds its item + 1 to `sums`, in turn; item 0 stores it. seen[item]: a sum when its terms had been read.
enum TurnBug { kNoTurn = 1, kRaisedBeforeWait, kWrongTurn, kReadWaitOnly };
struct TurnShared {
  float terms[32];
  int item;
};
struct Turns {
  float *sums, *seen;
  int* counters;  // the next item, and how many have added
  int bug;
};
__global__ void __launch_bounds__(32, 1) turns(const Turns p) {
  TurnShared& shared = shared_memory<TurnShared>();
  const auto bug = [&](TurnBug which) { return is_bug(p.bug, which); };
  int* const count = p.counters + 1;
  if (threadIdx.x == 0) shared.item = atomicAdd(p.counters, 1);
  __syncthreads();
  const int item = shared.item;
  shared.terms[threadIdx.x] = static_cast<float>(item + 1);
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x > 0) return;
  if (!bug(kNoTurn)) wait_for_count(count, bug(kWrongTurn) ? gridDim.x - 1 - item : item);
  if (item == 0)
    bulk_store(p.sums, shared.terms, sizeof shared.terms);
  else
    bulk_add(p.sums, shared.terms, sizeof shared.terms);
  bulk_commit();
  bulk_wait_read<0>();
  p.seen[item] = p.sums[31];
  if (bug(kReadWaitOnly)) return;
  if (!bug(kRaisedBeforeWait)) bulk_wait<0>();
  raise_count(count);
  bulk_wait<0>();
}

// --- launches, with the tensors and numbers of a call ------------------------------------------------------------------

// q, k, v, out; how many keys and columns there are, how many keys the tiles begin before the first and end after the
// last, and the stride of a row. Two heads.
template <class T, int D, int N, bool kInTwo = false>
void run_products(const Call& call) {
  if (call.bug >= 0) cudaSetDevice(0);  // -1: on a thread that has no context
  constexpr int kHeads = 2;
  const int keys = call.numbers[0], columns = call.numbers[1], margin = call.numbers[2], stride = call.numbers[3];
  const auto map = [&](int i, int rows, int lines) {
    const uint64_t row = static_cast<uint64_t>(stride) * 2;
    return make_tensor_map({call.tensors[i],
                            {uint64_t(columns), uint64_t(rows), kHeads, 1},
                            {row, row * rows, row * rows * kHeads},
                            {64, uint32_t(lines), 1, 1}});
  };
  const Arguments arguments{map(0, kRows, kRows), map(1, keys, N),    map(2, keys, N),
                            map(3, kRows, kRows), kHeads,             -margin,
                            (keys + 2 * margin + N - 1) / N, call.bug};
  launch(products<T, D, N, kInTwo>, dim3(1), dim3(256), sizeof(Shared<D, N>), nullptr, arguments);
}

// x, y, out, sums; bytes that x begins after its tensor.
void run_transposed(const Call& call) {
  char* const data = call.tensor<char>(0) + call.numbers[0];
  const TensorMap map = make_tensor_map({data, {64, 64, 1, 1}, {128, 8192, 8192}, {64, 64, 1, 1}});
  launch(transposed, dim3(1), dim3(128), sizeof(TransposedShared), nullptr,
         Transposed{map, call.tensors[1], call.tensor<float>(2), call.tensor<float>(3)});
}

// rng_state, kept; the threshold, and rows, a multiple of 32.
void run_kept_columns(const Call& call) {
  const Dropout dropout{call.tensor<const int64_t>(0), static_cast<uint32_t>(call.numbers[0]), 1.0f};
  launch(kept_columns, dim3(1), dim3(128), 0, nullptr, dropout, call.tensor<uint32_t[16]>(1), call.numbers[1]);
}

using B = __nv_bfloat16;
constexpr Named kKernels[] = {
    {"bf16 64 64", run_products<B, 64, 64>},
    {"bf16 64 128", run_products<B, 64, 128>},
    {"fp16 64 64", run_products<__half, 64, 64>},
    {"bf16 96 64", run_products<B, 96, 64>},
    {"bf16 96 64 in two", run_products<B, 96, 64, true>},
    {"bf16 128 64", run_products<B, 128, 64>},
    {"transposed", run_transposed},
    {"kept columns", run_kept_columns},
    {"turns",
     [](const Call& call) {
       const Turns p{call.tensor<float>(0), call.tensor<float>(1), call.tensor<int>(2), call.bug};
       launch(turns, dim3(call.numbers[0]), dim3(32), sizeof(TurnShared), nullptr, p);
     }},
    {"slip",
     [](const Call& call) {
       launch(slip, dim3(1), dim3(128), sizeof(SlipShared), nullptr, call.tensor<float>(0), call.bug);
     }},
    {"misuse", [](const Call& call) { launch(misuse, dim3(1), dim3(64), 0, nullptr, call.bug); }},
    {"too many registers", [](const Call&) { launch(registers<32, 240>, dim3(1), dim3(384), 0, nullptr); }},
    {"more is fewer", [](const Call&) { launch(registers<24, 160>, dim3(1), dim3(384), 0, nullptr); }},
};

}  // namespace

EXPORT_KERNELS(kKernels)
