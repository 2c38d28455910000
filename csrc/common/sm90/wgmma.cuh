// Hopper's matrix product of a warpgroup: accumulator (64 x kN, float) += A (64 x 16) * B (16 x kN), of bfloat16 or
// float16.
//
// wgmma is asynchronous, in groups like those of cp.async:
//   wgmma_fence(d);  wgmma(d, ...); ...  wgmma_commit();  ...  wgmma_wait<0>(d);
// The fence is needed before the first product after any access to the registers of a product. Between a product and
// its wait its registers must not be used, and the shared memory that it reads must not be written. For the compiler
// the accumulators are plain values, which it could write after a fence or read before a wait: fence and wait get as
// arguments those that were written, or are read next. With warp w of the warpgroup, g = lane / 4 and c = lane % 4, a
// thread has
//   accumulator  float[kN / 2]  at 4 * j + 2 * i + e: row 16 * w + g + 8 * i, column 8 * j + 2 * c + e
//   A            uint32_t[4]    accumulators 8 * k .. 8 * k + 7 packed in pairs, for its columns 16 * k ..
// Operands in shared memory are swizzled tiles (tma.cuh), given as descriptors: where they start, and two strides.
#pragma once
#include "common/check.h"
#include "common/cp_async.cuh"
#include "common/launch.cuh"

#include <set>
#include <type_traits>

#ifdef FASTATTN_EMULATOR
#include "emulator/wgmma.h"
#else

namespace fastattn::sm90 {

// Where an operand starts, `offset` bytes after `at`, in units of 16 bytes. Addresses of shared memory are below 2^18, so
// that the sum fits: the compiler computes one address a tile, and adds constants.
__device__ __forceinline__ uint32_t descriptor_address(const void* at, uint32_t offset) {
  return (shared_address(at) >> 4) + (offset >> 4);
}

// For the compiler only: code that uses these registers stays after this line, and code that sets them before it.
template <class T>
__device__ __forceinline__ void pin(T& x) {
  if constexpr (std::is_array_v<T>) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(std::extent_v<T>); i++) pin(x[i]);
  } else if constexpr (std::is_same_v<T, float>) {
    asm volatile("" : "+f"(x)::"memory");
  } else {
    asm volatile("" : "+r"(x)::"memory");
  }
}

// written: up to two arrays of registers, accumulators or an A, that were written since the last product with them.
template <class... Registers>
__device__ __forceinline__ void wgmma_fence(Registers&... written) {
  (pin(written), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kUnderWay groups are not done. ended: up to two accumulators of the others, which are read next.
template <int kUnderWay, class... Registers>
__device__ __forceinline__ void wgmma_wait(Registers&... ended) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kUnderWay) : "memory");
  (pin(ended), ...);
}

// How many registers each thread of the warpgroup has from now on: a multiple of 8, of at most 64 K for all threads.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8 x 8 matrices of 16-bit elements, each a word of every lane, to shared memory: lane i gives the address of row
// i % 8 of matrix i / 8, and holds elements 2 * (i % 4) and the next of row i / 4 of each.
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// The operands of the asm statements: registers 0 to kN / 2 - 1 are the accumulator, the others follow.
#define FASTATTN_8_FROM(i)                                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FASTATTN_16_FROM(i) FASTATTN_8_FROM(i), FASTATTN_8_FROM(i + 8)
#define FASTATTN_F16 FASTATTN_16_FROM(0)
#define FASTATTN_F32 FASTATTN_F16, FASTATTN_16_FROM(16)
#define FASTATTN_F48 FASTATTN_F32, FASTATTN_16_FROM(32)
#define FASTATTN_F64 FASTATTN_F48, FASTATTN_16_FROM(48)
#define FASTATTN_NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FASTATTN_NAMES32 FASTATTN_NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FASTATTN_NAMES48 FASTATTN_NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FASTATTN_NAMES64 FASTATTN_NAMES48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// A from shared memory.
#define FASTATTN_WGMMA_SS(N, TYPE, COUNT, A, B, SCALE, TA, TB)                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " SCALE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               "." TYPE " {" FASTATTN_NAMES##COUNT "}, " A ", " B ", p, 1, 1, " TA ", " TB ";\n}"                     \
               : FASTATTN_F##COUNT                                                                                    \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeA), "n"(kTransposeB))
// A from registers.
#define FASTATTN_WGMMA_RS(N, TYPE, COUNT, A0, A1, A2, A3, B, SCALE, TB)                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " SCALE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               "." TYPE " {" FASTATTN_NAMES##COUNT "}, {" A0 "," A1 "," A2 "," A3 "}, " B ", p, 1, 1, " TB ";\n}"     \
               : FASTATTN_F##COUNT                                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),               \
                 "n"(kTransposeB))
#define FASTATTN_BOTH_TYPES(PRODUCT, N, ...)        \
  if constexpr (kN == N) {                          \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) \
      PRODUCT(N, "bf16", __VA_ARGS__);              \
    else                                            \
      PRODUCT(N, "f16", __VA_ARGS__);               \
  }

// d = A * B, or d += A * B. A transposed operand has its 16-long side along the lines of its tile.
template <class T, int kN, bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kN == 64 || kN == 128);
  FASTATTN_BOTH_TYPES(FASTATTN_WGMMA_SS, 64, 32, "%32", "%33", "%34", "%35", "%36")
  FASTATTN_BOTH_TYPES(FASTATTN_WGMMA_SS, 128, 64, "%64", "%65", "%66", "%67", "%68")
}

// kN of 96 is for the probe of tests/cuda/hopper.cu alone: attention/sm90.cuh.
template <class T, int kN, bool kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(kN == 64 || kN == 96 || kN == 128);
  FASTATTN_BOTH_TYPES(FASTATTN_WGMMA_RS, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
  FASTATTN_BOTH_TYPES(FASTATTN_WGMMA_RS, 96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
  FASTATTN_BOTH_TYPES(FASTATTN_WGMMA_RS, 128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
}

#undef FASTATTN_BOTH_TYPES
}  // namespace fastattn::sm90
#endif

namespace fastattn::sm90 {

constexpr int kGroup = 128;  // threads of a warpgroup

// The registers of each thread after more_registers() and fewer_registers(): one producer warpgroup, and consumers.
template <int kConsumers, int kOfProducer, int kOfConsumer>
struct RegisterSplit {
  static constexpr int kProducer = kOfProducer, kConsumer = kOfConsumer, kThreads = kGroup * (kConsumers + 1);
  static constexpr int kAtLaunch = (kProducer + kConsumers * kConsumer) / (kConsumers + 1);
  static_assert((kProducer + kConsumers * kConsumer) % (8 * (kConsumers + 1)) == 0,
                "a warp gets them by eights a thread");
};

// launch() of a kernel that splits its registers so. If the compiler gave it too few, more_registers() would never
// return: this throws instead. Checked once for each kernel, as all devices run the same code.
template <class Registers, class... Parameters, class... Arguments>
void launch_with_registers(const char* name, void (*kernel)(Parameters...), dim3 grid, size_t shared_bytes,
                           cudaStream_t stream, const Arguments&... arguments) {
  static std::set<void (*)(Parameters...)> checked;  // Python calls one at a time
  if (checked.count(kernel) == 0) {
    cudaFuncAttributes found;
    FASTATTN_CHECK(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)));
    if ((found.numRegs + 7) / 8 * 8 < Registers::kAtLaunch)
      throw std::runtime_error(std::string("fastattn: ") + name + " starts with " + std::to_string(found.numRegs) +
                               " registers a thread and needs " + std::to_string(Registers::kAtLaunch) +
                               ", or it would hang. The nvcc of CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
                               std::to_string(CUDART_VERSION % 1000 / 10) +
                               " compiled it so: reinstall fastattn with another nvcc, or use backend=\"triton\"");
    checked.insert(kernel);
  }
  launch(kernel, grid, dim3(Registers::kThreads), shared_bytes, stream, arguments...);
}

// The thread's warpgroup. From a shuffle, so that the compiler knows that it is equal in a warp.
__device__ __forceinline__ int warpgroup() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / kGroup), 0);
}

// leading: the stride between panels, in units of 16 bytes.
__device__ __forceinline__ uint64_t descriptor(const void* at, uint32_t offset, uint32_t leading) {
  return uint64_t{descriptor_address(at, offset) + (leading << 16)} | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// A tile is panels of 64 columns, one after the other, each of kLines swizzled lines of 128 bytes.
// An operand with 16 columns of the tile along the product's sum, from (line, column) on: 64 or kN lines of it.
template <int kLines>
__device__ __forceinline__ uint64_t along_columns(const void* tile, int line, int column) {
  return descriptor(static_cast<const char*>(tile) + line * 128, column / 64 * (kLines * 128) + column % 64 * 2, 1);
}

// A transposed operand: 16 lines of the tile along the product's sum, from (line, column) on: 64 or kN columns of it.
// `line` is a multiple of 8 and `column` of 64.
template <int kLines>
__device__ __forceinline__ uint64_t along_lines(const void* tile, int line, int column) {
  return descriptor(static_cast<const char*>(tile) + column / 64 * (kLines * 128), line * 128, kLines * 128 >> 4);
}

}  // namespace fastattn::sm90
