// fastattn._C with the feed-forward alone: quick to build, for test_planted_feed_forward.py.
#include "feed_forward/bind.h"

PYBIND11_MODULE(_C, m) {
  m.attr("device_type") = "cpu";
  m.def("device_problem", fastattn::device_problem);
  m.def("compute_capability", fastattn::compute_capability);
  fastattn::feed_forward::bindings::bind(m);
}
