// fastattn._C: one line an op. The same file, built with g++ and csrc/emulator, is the emulator's module.
#include "add_layer_norm/bind.h"
#include "attention/bind.h"
#include "common/bind.h"
#include "decode_attention/bind.h"
#include "embed_layer_norm/bind.h"
#include "feed_forward/bind.h"
#include "linear_cross_entropy/bind.h"

PYBIND11_MODULE(_C, m) {
#ifdef FASTATTN_EMULATOR
  m.attr("device_type") = "cpu";
#else
  m.attr("device_type") = "cuda";
#endif
  m.def("device_problem", fastattn::device_problem);
  m.def("compute_capability", fastattn::compute_capability);
  fastattn::add_layer_norm::bindings::bind(m);
  fastattn::attention::bindings::bind(m);
  fastattn::decode_attention::bindings::bind(m);
  fastattn::embed_layer_norm::bindings::bind(m);
  fastattn::feed_forward::bindings::bind(m);
  fastattn::linear_cross_entropy::bindings::bind(m);
}
