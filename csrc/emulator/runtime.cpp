// Runs a grid on the CPU, and has the few CUDA runtime functions that the library calls, without a driver.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/launch.cuh"

static int setting(const char* name, int without) {
  const char* const value = std::getenv((std::string("FASTATTN_EMULATOR_") + name).c_str());
  return value != nullptr ? std::atoi(value) : without;
}

static int capability() { return setting("CAPABILITY", 80); }

// The shared memory of a block. Chips for desktops have less than those for data centres.
static int shared_limit() {
  switch (capability()) {
    case 80:
    case 87: return 163 << 10;
    case 86:
    case 89:
    case 120:
    case 121: return 99 << 10;
    default: return 227 << 10;
  }
}

namespace fastattn::emulator {

// The context of this thread: CUDA's runtime makes one when it needs it, and in cudaSetDevice.
static thread_local bool has_context = false;

bool has_current_context() { return has_context; }

static thread_local int current_device = 0;
// What cudaFuncSetAttribute allowed a kernel on a device; 48 KiB need no permission.
static std::map<std::pair<const void*, int>, size_t> allowed_bytes;

static uint64_t size_of(dim3 of) { return uint64_t{of.x} * of.y * of.z; }

bool& recording() {
  static bool is_on = false;
  return is_on;
}

std::vector<Launch>& recorded() {
  static std::vector<Launch> launches;
  return launches;
}

void run_grid(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body) {
  has_context = true;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || grid.x > 0x7fffffffu)
    throw std::runtime_error("emulator: a grid has 1 to 2^31 - 1, 65535 and 65535 blocks");
  if (shared_bytes > static_cast<size_t>(shared_limit()))
    throw std::runtime_error("emulator: " + std::to_string(shared_bytes) +
                             " bytes of shared memory for a block, of the " + std::to_string(shared_limit()) +
                             " of compute capability " + std::to_string(capability()));
  if (shared_bytes > std::max(size_t{48} << 10, allowed_bytes[{kernel, current_device}]))
    throw std::runtime_error("emulator: " + std::to_string(shared_bytes) + " bytes of shared memory were not allowed");
  if (recording()) {
    recorded().push_back({reinterpret_cast<uintptr_t>(kernel), size_of(grid), size_of(block), shared_bytes});
    return;
  }
  std::vector<Order> orders = Order::from_environment();
  const struct Release {  // a stack is two mappings; a process with many libraries of kernels would run out of them
    ~Release() { release_stacks(); }
  } release;
  const std::vector<uint64_t> order = orders[0].permutation(size_of(grid));
  size_t started = 0;
  std::vector<std::unique_ptr<Block>> resident;  // the last one started last
  std::vector<int> free_places(kMaxResident);
  std::iota(free_places.rbegin(), free_places.rend(), 0);
  while (started < order.size() || !resident.empty()) {
    const bool starts = started < order.size() && !free_places.empty();
    if (starts) {
      const uint64_t i = order[started++];
      const uint3 index = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                           static_cast<unsigned>(i / grid.x / grid.y)};
      resident.push_back(std::make_unique<Block>(grid, block, index, free_places.back(), shared_bytes,
                                                 orders[i % orders.size()], body));
      free_places.pop_back();
    }
    auto chosen = resident.end();  // a new block, or the last one that does not wait
    Block::State state;
    do state = (*--chosen)->run();
    while (state == Block::State::waits && chosen != resident.begin() && !starts);
    if (state == Block::State::waits && !starts) (*chosen)->report_wait();
    if (state != Block::State::finished) continue;
    free_places.push_back((*chosen)->place);
    resident.erase(chosen);
  }
}

}  // namespace fastattn::emulator

// All devices are equal. They have two multiprocessors, so few that the kernels' loops over blocks run several times.
// Their compute capability is 8.0, or FASTATTN_EMULATOR_CAPABILITY, such as 90.
extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = fastattn::emulator::current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  fastattn::emulator::has_context = true;
  return fastattn::emulator::current_device = device, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = setting("DRIVER", 13010), cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13010, cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  fastattn::emulator::has_context = true;
  return std::memset(to, value, bytes), cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid value"; }

// A compiler gives a kernel as many registers as its launch bounds allow; tests set fewer.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->numRegs = setting("REGISTERS", 255);
  return cudaSuccess;
}

// Refuses what is already allowed: launch() must not ask at each launch.
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  size_t& allowed = fastattn::emulator::allowed_bytes[{kernel, fastattn::emulator::current_device}];
  if (static_cast<size_t>(bytes) <= allowed) return cudaErrorInvalidValue;
  return allowed = bytes, cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: return *value = 2, cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: return *value = capability() / 10, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: return *value = capability() % 10, cudaSuccess;
    default: return cudaErrorInvalidValue;
  }
}
}
