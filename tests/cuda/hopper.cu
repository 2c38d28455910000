// A kernel with all that Hopper's kernels are made of, and the same with one classic error each, for test_hopper.py. The
// enum of errors has the order of its table BUGS. A GPU runs the sound kernel only.
//
//   out_h = round(q_h k_h^T) v_h for each head h; q (H, 64, Dx), k and v (H, Lk, Dx), out (H, 64, Dx), any strides of
//   rows
//
// One block: a producer warp loads by TMA, a warpgroup multiplies, stages the result in shared memory and stores it by
// TMA. It takes Dx as D >= Dx columns, and may begin before the first key and end behind the last: boxes then lie
// outside, partly or as a whole.
#include "../tests/cuda/kernel_table.h"
#include "common/mma.cuh"
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
  kNoProductFence,
  kNoProxyFence,
  kNoStoreBarrier,
  kNoStoreWait,
  kNoInitFence,
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

template <class T, int D, int N>
__global__ void __launch_bounds__(256, 1) products(const __grid_constant__ Arguments p) {
  using S = Shared<D, N>;
  S& shared = shared_memory<S>();
  const auto bug = [&](Bug which) { return is_bug(p.bug, which); };
  if (threadIdx.x == 0) {
    shared.full_q.init(1);
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
      shared.full_q.arrive_expect(sizeof shared.q);
      for (int panel = 0; panel < S::kPanels; panel++)
        tma_load(shared.q + panel * kRows * 128, p.q, shared.full_q, 64 * panel, 0, head, 0);
      for (int tile = 0; tile < p.tiles; tile++, i++) {
        const int stage = i % kStages;
        shared.empty[stage].wait(i / kStages % 2 ^ 1);
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
      if (!bug(kNoFullWait)) shared.full[stage].wait(i / kStages % 2);
      if (!bug(kNoProductFence)) wgmma_fence();
      const int first_line = bug(kDescriptorOutside) ? 512 : 0;
      for (int step = 0; step < D / 16; step++)
        wgmma<T, N, false, false>(s, along_columns<kRows>(shared.q, 0, 16 * step),
                                  along_columns<N>(shared.k[stage], first_line, 16 * step), step > 0);
      wgmma_commit();
      wgmma_wait<0>(s);
      for (int step = 0; step < N / 16; step++)
        for (int word = 0; word < 4; word++)
          words[step][word] = pack_word<T>(s[8 * step + 2 * word], s[8 * step + 2 * word + 1]);
      wgmma_fence(words);
      for (int step = 0; step < N / 16; step++) {
        const uint64_t v = along_lines<N>(shared.v[stage], 16 * step, 0);
        wgmma<T, D, true>(out, words[step], v, tile + step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>(out);
      if (thread == 0) shared.empty[stage].arrive();
    }
    if (thread == 0) shared.empty_q.arrive();
    named_barrier_sync(1, 128);  // the last store has read what is overwritten now
    for (int column = 0; column < D; column += 16) {  // four matrices: rows 0 and 8, columns 0 and 8
      uint32_t four[4];
      for (int word = 0; word < 4; word++)
        four[word] = pack_word<T>(out[column / 2 + 2 * word], out[column / 2 + 2 * word + 1]);
      const int line = warp * 16 + lane % 16, chunk = column % 64 / 8 + lane / 16;
      stmatrix(shared.out + column / 64 * kRows * 128 + swizzled(line, chunk), four);
    }
    if (!bug(kNoProxyFence)) fence_async_proxy();
    if (!bug(kNoStoreBarrier)) named_barrier_sync(2, 128);
    if (thread == 0) {
      for (int panel = 0; panel < S::kPanels; panel++)
        tma_store(p.out, shared.out + panel * kRows * 128, 64 * panel, 0, head, 0);
      bulk_commit();
      if (!bug(kNoStoreWait)) bulk_wait_read<0>();
    }
    __syncwarp();
  }
  if (thread == 0 && !bug(kNoStoreWait)) bulk_wait<0>();
}

// --- launches, with the tensors and numbers of a call ------------------------------------------------------------------

// q, k, v, out; how many keys and columns there are, how many keys the tiles begin before the first and end after the
// last, and the stride of a row. Two heads.
template <class T, int D, int N>
void run_products(const Call& call) {
  cudaSetDevice(0);  // tensor maps need a context
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
  launch(products<T, D, N>, dim3(1), dim3(256), sizeof(Shared<D, N>), nullptr, arguments);
}

using B = __nv_bfloat16;
constexpr Named kKernels[] = {
    {"bf16 64 64", run_products<B, 64, 64>},
    {"bf16 64 128", run_products<B, 64, 128>},
    {"fp16 64 64", run_products<__half, 64, 64>},
    {"bf16 96 64", run_products<B, 96, 64>},
    {"bf16 128 64", run_products<B, 128, 64>},
};

}  // namespace

EXPORT_KERNELS(kKernels)
