// fastattn._C: one line an op. The same file, built with g++ and csrc/host, is the CPU runner's module.
#include <pybind11/pybind11.h>

#include "common/device.h"

namespace fastattn {
void bind_add_layer_norm(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_attention_sm90(pybind11::module_& m);
void bind_embed_layer_norm(pybind11::module_& m);
void bind_feed_forward(pybind11::module_& m);
void bind_linear_cross_entropy(pybind11::module_& m);
}

PYBIND11_MODULE(_C, m) {
#ifdef FASTATTN_HOST
  m.attr("device_type") = "cpu";
#else
  m.attr("device_type") = "cuda";
#endif
  m.def("device_problem", fastattn::device_problem);
  m.def("compute_capability", fastattn::compute_capability);
  fastattn::bind_add_layer_norm(m);
  fastattn::bind_attention(m);
  fastattn::bind_attention_sm90(m);
  fastattn::bind_embed_layer_norm(m);
  fastattn::bind_feed_forward(m);
  fastattn::bind_linear_cross_entropy(m);
}
