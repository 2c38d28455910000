// fastattn._C with the feed-forward alone: quick to build, for test_planted_feed_forward.py.
#include <pybind11/pybind11.h>

#include "common/device.h"

namespace fastattn {
void bind_feed_forward(pybind11::module_& m);
}

PYBIND11_MODULE(_C, m) {
  m.attr("device_type") = "cpu";
  m.def("device_problem", fastattn::device_problem);
  m.def("compute_capability", fastattn::compute_capability);
  fastattn::bind_feed_forward(m);
}
