// fastattn._C: one line an op. The same file, built with g++ and csrc/emulator, is the emulator's module.
#include "add_layer_norm/bind.h"
#include "attention/bind.h"
#include "common/bind.h"
#include "feed_forward/bind.h"

#ifdef FASTATTN_EMULATOR
#include "common/launch.cuh"

// Launches are recorded from now on and do not run, or run again.
static void record_launches(bool on) { fastattn::emulator::recording() = on; }

// (kernel's address, blocks, threads of a block, its bytes of shared memory) of each launch since the last call.
static pybind11::list take_launches() {
  pybind11::list taken;
  for (const auto& launch : fastattn::emulator::recorded())
    taken.append(pybind11::make_tuple(launch.kernel, launch.blocks, launch.threads, launch.shared_bytes));
  fastattn::emulator::recorded().clear();
  return taken;
}
#endif

PYBIND11_MODULE(_C, m) {
  fastattn::load_python();
#ifdef FASTATTN_EMULATOR
  m.attr("device_type") = "cpu";
  m.def("record_launches", record_launches);
  m.def("take_launches", take_launches);
#else
  m.attr("device_type") = "cuda";
#endif
  m.def("device_problem", fastattn::device_problem);
  m.def("compute_capability", fastattn::compute_capability);
  fastattn::add_layer_norm::bindings::bind(m);
  fastattn::attention::bindings::bind(m);
  fastattn::feed_forward::bindings::bind(m);
}
