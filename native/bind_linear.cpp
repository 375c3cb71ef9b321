// Binding of linear.h and row_ops.h. Arrays are addresses: prefixkv/model/ops.py owns and checks the
// tensors, because a tensor argument would cost more than a small product.
#include "bind.h"
#include "linear.h"
#include "row_ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace prefixkv {
namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// A packed weight with what a product needs, so that a call passes four numbers.
struct BoundLinear {
  BoundLinear(int64_t n, int64_t k, bool bfloat16, bool bias, Buffer& scratch, ThreadPool& pool)
      : linear(n, k, bfloat16, bias), scratch(scratch), pool(pool) {}

  PackedLinear linear;
  Buffer& scratch;
  ThreadPool& pool;
};

Vectors vectors(Address data, int64_t count, int64_t stride) {
  return {at<float>(data), count, 1, stride, 0};
}

Vectors heads(Address data, int64_t count, int64_t inner, int64_t stride, int64_t inner_stride) {
  return {at<float>(data), count, inner, stride, inner_stride};
}

void bind_packed_linear(nb::module_& m) {
  nb::enum_<WeightType>(m, "WeightType", "Element type of a source weight.")
      .value("float32", WeightType::kFloat32)
      .value("bfloat16", WeightType::kBFloat16)
      .value("float16", WeightType::kFloat16);

  nb::class_<Buffer>(m, "Scratch", "Memory that kernels reuse from call to call; grows as needed.")
      .def(nb::init<>())
      .def_prop_ro("num_bytes", &Buffer::bytes);

  nb::class_<BoundLinear>(m, "PackedLinear", "A weight [n, k] packed for the CPU kernels.")
      .def(nb::init<int64_t, int64_t, bool, bool, Buffer&, ThreadPool&>(), "n"_a, "k"_a,
           "bfloat16"_a, "bias"_a, "scratch"_a, "pool"_a, nb::keep_alive<1, 6>(),
           nb::keep_alive<1, 7>())
      .def_prop_ro("num_bytes", [](const BoundLinear& self) { return self.linear.bytes(); })
      .def(
          "pack",
          [](BoundLinear& self, int64_t first, int64_t rows, Address source, int64_t stride,
             WeightType type) {
            self.linear.pack(first, rows, at<void>(source), stride, type, self.pool);
          },
          "first"_a, "rows"_a, "source"_a, "stride"_a, "type"_a,
          nb::call_guard<nb::gil_scoped_release>(), "Fills rows [first, first + rows).")
      .def(
          "set_bias",
          [](BoundLinear& self, int64_t first, int64_t rows, Address source) {
            self.linear.set_bias(first, rows, at<float>(source));
          },
          "first"_a, "rows"_a, "source"_a)
      .def(
          "multiply",
          [](const BoundLinear& self, Address x, int64_t x_stride, int64_t rows, Address y) {
            self.linear.multiply(at<float>(x), x_stride, rows, at<float>(y), self.scratch,
                                 self.pool);
          },
          "x"_a, "x_stride"_a, "rows"_a, "y"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "read_rows",
          [](const BoundLinear& self, Address ids, int64_t count, Address out) {
            self.linear.read_rows(at<int64_t>(ids), count, at<float>(out));
          },
          "ids"_a, "count"_a, "out"_a, nb::call_guard<nb::gil_scoped_release>());
}

void bind_row_ops(nb::module_& m) {
  m.def(
      "rms_norm",
      [](Address x, int64_t count, int64_t inner, int64_t stride, int64_t inner_stride, int64_t k,
         Address weight, float eps, Address out, ThreadPool& pool) {
        rms_norm(heads(x, count, inner, stride, inner_stride), k, at<float>(weight), eps,
                 at<float>(out), pool);
      },
      "x"_a, "count"_a, "inner"_a, "stride"_a, "inner_stride"_a, "k"_a, "weight"_a, "eps"_a,
      "out"_a, "pool"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "add_rms_norm",
      [](Address x, int64_t x_stride, Address residual, int64_t residual_stride, int64_t count,
         int64_t k, Address weight, float eps, Address out, ThreadPool& pool) {
        add_rms_norm(vectors(x, count, x_stride), vectors(residual, count, residual_stride), k,
                     at<float>(weight), eps, at<float>(out), pool);
      },
      "x"_a, "x_stride"_a, "residual"_a, "residual_stride"_a, "count"_a, "k"_a, "weight"_a, "eps"_a,
      "out"_a, "pool"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "rope",
      [](Address q, int64_t q_heads, int64_t q_stride, int64_t q_head_stride, Address k,
         int64_t k_heads, int64_t k_stride, int64_t k_head_stride, int64_t count, Address cos,
         Address sin, int64_t max_positions, int64_t half, Address positions, ThreadPool& pool) {
        rope(heads(q, count, q_heads, q_stride, q_head_stride),
             heads(k, count, k_heads, k_stride, k_head_stride),
             {at<float>(cos), at<float>(sin), max_positions, half}, at<int64_t>(positions), pool);
      },
      "q"_a, "q_heads"_a, "q_stride"_a, "q_head_stride"_a, "k"_a, "k_heads"_a, "k_stride"_a,
      "k_head_stride"_a, "count"_a, "cos"_a, "sin"_a, "max_positions"_a, "half"_a, "positions"_a,
      "pool"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "silu_mul",
      [](Address gate_up, int64_t stride, int64_t count, int64_t k, Address out, ThreadPool& pool) {
        silu_mul(vectors(gate_up, count, stride), k, at<float>(out), pool);
      },
      "gate_up"_a, "stride"_a, "count"_a, "k"_a, "out"_a, "pool"_a,
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_linear(nb::module_& m) {
  bind_packed_linear(m);
  bind_row_ops(m);
}

}  // namespace prefixkv
