// Asynchronous work on the CPU: what cp.async, TMA or wgmma starts, and a later wait completes.
//
// A GPU may finish such work any time between its start and the wait. FASTATTN_EMULATOR_ASYNC picks an end: eager does it where
// it starts, lazy (the default) where it is waited for, or, where a barrier tells of its end, when no thread can go on
// without it; crossed does what writes shared memory at once and what reads it late. Data read before the wait is missing in
// lazy, data overwritten while threads still use it is lost in eager, and while a product still uses it in crossed: a kernel
// is right only if all give the same.
#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace fastattn::emulator {

using Work = std::function<void()>;

// Work in groups that finish in order: cp.async and bulk stores of a thread, wgmma of a warpgroup.
class AsyncGroups {
 public:
  void add(Work work) { open_.push_back(std::move(work)); }
  void commit() { closed_.push_back(std::exchange(open_, {})); }
  // Completes the oldest groups, so that at most `left` remain.
  void wait(size_t left) {
    const size_t done = closed_.size() - std::min(left, closed_.size());
    for (size_t i = 0; i < done; i++)
      for (const Work& work : closed_[i]) work();
    closed_.erase(closed_.begin(), closed_.begin() + static_cast<std::ptrdiff_t>(done));
  }
  bool idle() const {
    return open_.empty() && std::all_of(closed_.begin(), closed_.end(), [](const auto& group) { return group.empty(); });
  }

 private:
  std::vector<Work> open_;
  std::vector<std::vector<Work>> closed_;
};

}  // namespace fastattn::emulator
