// The Python module. Binding only: arguments in, results out, errors translated; no logic.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "cpu.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_core, m) {
  m.doc() = "Native core of prefixkv.";
  nb::set_leak_warnings(false);  // an interpreter that ends by an exception keeps objects: no fault

  m.def("isa", [] { return prefixkv::isa_name(prefixkv::best_isa()); },
        "Instruction set that the CPU kernels use: 'avx512', 'avx2' or 'base'.");
  m.def("cpu_has_bfloat16", &prefixkv::cpu_has_bfloat16,
        "Whether this CPU multiplies bfloat16 in hardware.");

  nb::class_<prefixkv::ThreadPool>(
      m, "ThreadPool", "Threads for the CPU kernels, the caller's included. One caller at a time.")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("size", &prefixkv::ThreadPool::size);

  prefixkv::bind_cache(m);
  prefixkv::bind_linear(m);
  prefixkv::bind_attention(m);
}
