// The device of a call: sets it as current, and reads its properties.
#pragma once
#include "common/check.h"

namespace fastattn {

// Makes `device` the calling thread's current device while in scope. This is the only guard: the Python side passes
// tensors of any device and sets nothing. cudaSetDevice() is called even for the current device: a thread that has not
// used CUDA yet has no context, and the driver's functions, such as that for tensor maps, need one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    FASTATTN_CHECK(cudaGetDevice(&previous_));
    FASTATTN_CHECK(cudaSetDevice(device_));
  }
  ~DeviceGuard() {
    if (previous_ != device_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_, previous_ = 0;
};

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  FASTATTN_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// 10 * major + minor.
inline int compute_capability(int device) {
  return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
         device_attribute(cudaDevAttrComputeCapabilityMinor, device);
}

// Why no kernel of this library can run on `device`; empty if they can.
inline std::string device_problem(int device) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const auto text = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  if (driver == 0) return "there is no NVIDIA driver";
  if (driver / 1000 < runtime / 1000)
    return "fastattn._C was built with CUDA " + text(runtime) + ", the driver supports CUDA up to " + text(driver);
  const int capability = compute_capability(device);
  if (capability < 80)
    return "the CUDA kernels need compute capability 8.0, got " + std::to_string(capability / 10) + "." +
           std::to_string(capability % 10);
  return "";
}

}  // namespace fastattn
