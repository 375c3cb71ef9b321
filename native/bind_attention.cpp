#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "attention.h"
#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace prefixkv {
namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<int32_t> to_vector(const Ids& ids) { return {ids.data(), ids.data() + ids.size()}; }

Layout make_layout(const Ids& query_start, const Ids& num_computed, const Ids& table_start,
                   const Ids& block_ids) {
  return {to_vector(query_start), to_vector(num_computed), to_vector(table_start),
          to_vector(block_ids)};
}

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def(
      "check_layout",
      [](const Ids& query_start, const Ids& num_computed, const Ids& table_start,
         const Ids& block_ids, int num_blocks, int block_size) {
        check_layout(make_layout(query_start, num_computed, table_start, block_ids), num_blocks,
                     block_size);
      },
      "query_start"_a, "num_computed"_a, "table_start"_a, "block_ids"_a, "num_blocks"_a,
      "block_size"_a, "Raises ValueError that names the first fault of a step's layout.");

  nb::class_<PagedAttention>(m, "PagedAttention",
                             "Attention over blocks of K/V on the CPU (prefixkv.model.attention).")
      .def(
          "__init__",
          [](PagedAttention* self, ThreadPool& pool, int num_heads, int num_kv_heads, int head_dim,
             int num_blocks, int block_size, bool bfloat16, float scale) {
            new (self) PagedAttention(pool, {num_heads, num_kv_heads, head_dim, num_blocks,
                                             block_size, bfloat16, scale});
          },
          "pool"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "num_blocks"_a, "block_size"_a,
          "bfloat16"_a, "scale"_a, nb::keep_alive<1, 2>())
      .def(
          "begin",
          [](PagedAttention& self, const Ids& query_start, const Ids& num_computed,
             const Ids& table_start, const Ids& block_ids) {
            self.begin(make_layout(query_start, num_computed, table_start, block_ids));
          },
          "query_start"_a, "num_computed"_a, "table_start"_a, "block_ids"_a,
          "Plans a step. Raises ValueError that names the first fault of the layout.")
      .def(
          "run",
          [](PagedAttention& self, std::uintptr_t k_cache, std::uintptr_t v_cache, std::uintptr_t q,
             int64_t q_stride, std::uintptr_t k, int64_t k_stride, std::uintptr_t v,
             int64_t v_stride, std::uintptr_t out) {
            self.run({pointer<void>(k_cache), pointer<void>(v_cache), pointer<const float>(q),
                      pointer<const float>(k), pointer<const float>(v), pointer<float>(out),
                      q_stride, k_stride, v_stride});
          },
          "k_cache"_a, "v_cache"_a, "q"_a, "q_stride"_a, "k"_a, "k_stride"_a, "v"_a, "v_stride"_a,
          "out"_a, nb::call_guard<nb::gil_scoped_release>(),
          "One layer of the planned step. Addresses; strides in elements from row to row.");
}

}  // namespace prefixkv
