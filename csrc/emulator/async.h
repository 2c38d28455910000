// Asynchronous work on the CPU: cp.async, TMA or wgmma starts it, and a later wait completes it.
//
// A GPU may do such work at any time between its start and the wait. FASTATTN_EMULATOR_ASYNC chooses the time: eager
// does it at its start; lazy (the default) at the wait or, if a barrier signals its end, when no thread can continue
// without it; crossed does writes of shared memory at once and reads late. lazy finds reads before the wait, eager
// finds writes over data that threads still use, crossed finds writes over data that a product still uses. A kernel is
// right only if all give the same results.
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
  // Does the work now; its group is under way until a wait.
  void add_done(const Work& work) {
    work();
    add([] {});
  }
  void commit() { closed_.push_back(std::exchange(open_, {})); }
  // Completes the oldest groups, so that at most `left` remain.
  void wait(size_t left) {
    const size_t done = closed_.size() - std::min(left, closed_.size());
    for (size_t i = 0; i < done; i++)
      for (const Work& work : closed_[i]) work();
    closed_.erase(closed_.begin(), closed_.begin() + static_cast<std::ptrdiff_t>(done));
  }
  bool idle() const {
    return open_.empty() &&
           std::all_of(closed_.begin(), closed_.end(), [](const auto& group) { return group.empty(); });
  }

 private:
  std::vector<Work> open_;
  std::vector<std::vector<Work>> closed_;
};

}  // namespace fastattn::emulator
