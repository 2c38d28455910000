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
static fastattn::Object take_launches() {
  fastattn::Object taken(PyList_New(0));
  for (const auto& [kernel, blocks, threads, shared_bytes] : fastattn::emulator::recorded())
    fastattn::checked(PyList_Append(taken, fastattn::to_python(std::tuple(kernel, blocks, threads, shared_bytes))));
  fastattn::emulator::recorded().clear();
  return taken;
}
#endif

static void fill(PyObject* m) {
  using namespace fastattn;
  load_python();
#ifdef FASTATTN_EMULATOR
  checked(PyModule_AddStringConstant(m, "device_type", "cpu"));
  add_function<record_launches>(m, "record_launches");
  add_function<take_launches>(m, "take_launches");
#else
  checked(PyModule_AddStringConstant(m, "device_type", "cuda"));
#endif
  add_function<device_problem>(m, "device_problem");
  add_function<compute_capability>(m, "compute_capability");
  add_layer_norm::bindings::bind(m);
  attention::bindings::bind(m);
  feed_forward::bindings::bind(m);
}

PyMODINIT_FUNC PyInit__C() {
  const auto execute = +[](PyObject* m) { return fastattn::caught([&] { return fill(m), m; }) == nullptr ? -1 : 0; };
  static PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(execute)}, {}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr};
  return PyModuleDef_Init(&module);
}
