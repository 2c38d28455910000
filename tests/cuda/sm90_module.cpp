// fastattn._C with attention on Hopper alone: quick to build, for test_planted_sm90.py.
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "attention/backward.h"
#include "common/device.h"

namespace fastattn {
namespace attention {
// Wanted where a bias moves single rows far.
void backward_rows(const Backward&, cudaStream_t) { throw std::logic_error("not in this module"); }
}  // namespace attention

void bind_attention_sm90(pybind11::module_& m);
}

PYBIND11_MODULE(_C, m) {
  m.attr("device_type") = "cpu";
  m.def("device_problem", fastattn::device_problem);
  m.def("compute_capability", fastattn::compute_capability);
  fastattn::bind_attention_sm90(m);
}
