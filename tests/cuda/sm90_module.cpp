// fastattn._C with attention on Hopper alone: quick to build, for test_planted_sm90.py.
#include <stdexcept>

#include "attention/bind_sm90.h"

namespace fastattn::attention {
// Wanted where a bias moves single rows far.
void backward_rows(const Backward&, cudaStream_t) { throw std::logic_error("not in this module"); }
}  // namespace fastattn::attention

PYBIND11_MODULE(_C, m) {
  m.attr("device_type") = "cpu";
  m.def("device_problem", fastattn::device_problem);
  m.def("compute_capability", fastattn::compute_capability);
  fastattn::attention::bindings_sm90::bind(m);
}
