// The CPU version is in csrc/emulator/tma.cpp.
#ifndef FASTATTN_EMULATOR
#include "common/sm90/tensor_map.h"

#include "common/check.h"

namespace fastattn::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, from the runtime: the library is not linked against the driver, and loads without one.
Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    FASTATTN_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
#else
    FASTATTN_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result));
#endif
    if (result != cudaDriverEntryPointSuccess)
      throw std::runtime_error("fastattn: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

}  // namespace

TensorMap make_tensor_map(const TensorLayout& layout) {
  constexpr uint32_t kSteps[4] = {1, 1, 1, 1};
  TensorMap map;
  const CUresult result = encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(layout.data), layout.size, layout.stride, layout.box,
      kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("fastattn: cuTensorMapEncodeTiled refused a tensor, error " + std::to_string(result));
  return map;
}

}  // namespace fastattn::sm90
#endif
