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

// Why no kernel of this library can run on `device`; empty if they can. setup.py defines FASTATTN_ARCHS, with machine
// code, which later ones of the same major number run too, and FASTATTN_PTX, from which on there is PTX.
inline std::string device_problem(int device) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const auto text = [](int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); };
  const std::string built = "built with CUDA " + text(runtime / 1000, runtime % 1000 / 10);
  const std::string supported = "the driver supports CUDA up to " + text(driver / 1000, driver % 1000 / 10);
  if (driver == 0) return "there is no NVIDIA driver";
  if (driver / 1000 < runtime / 1000) return "fastattn._C was " + built + ", " + supported;
  const int capability = compute_capability(device);
  const std::string number = text(capability / 10, capability % 10);
  if (capability < 80) return "the CUDA kernels need compute capability 8.0, got " + number;
  for (const int arch : {FASTATTN_ARCHS})
    if (arch / 10 == capability / 10 && arch <= capability) return "";
  const std::string advice = "install fastattn again with FASTATTN_CUDA_ARCHS=" + std::to_string(capability);
  if (capability < FASTATTN_PTX) return "fastattn._C has no code for compute capability " + number + ": " + advice;
  if (driver >= runtime) return "";  // else CUDA promises nothing for PTX, also where only the minor version differs
  return "fastattn._C, " + built + ", has only PTX for compute capability " + number + ", and " + supported +
         ": update the driver, or " + advice;
}

}  // namespace fastattn
