#include "row_ops.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu.h"

namespace prefixkv {

namespace base {
extern const RowKernels kRowKernels;
}
#ifdef PREFIXKV_X86
namespace avx2 {
extern const RowKernels kRowKernels;
}
namespace avx512 {
extern const RowKernels kRowKernels;
}
#endif

namespace {

const RowKernels& kernels() {
#ifdef PREFIXKV_X86
  if (best_isa() == Isa::kAvx512) return avx512::kRowKernels;
  if (best_isa() == Isa::kAvx2) return avx2::kRowKernels;
#endif
  return base::kRowKernels;
}

// Calls f(row) for every row, in tasks of about 16,000 elements: some microseconds.
template <typename F>
void for_rows(int64_t rows, int64_t elements, ThreadPool& pool, const F& f) {
  if (rows == 0) return;
  const int64_t tasks = std::clamp<int64_t>(rows * elements / 16384, 1, rows);
  pool.run(tasks, [&](int64_t task) {
    const int64_t end = (task + 1) * rows / tasks;
    for (int64_t row = task * rows / tasks; row < end; ++row) f(row);
  });
}

}  // namespace

void rms_norm(const Vectors& x, int64_t k, const float* weight, float eps, float* out,
              ThreadPool& pool) {
  const RowKernels& op = kernels();
  for_rows(x.count * x.inner, k, pool,
           [&](int64_t row) { op.rms_norm(x.at(row), weight, eps, out + row * k, k); });
}

void add_rms_norm(const Vectors& x, const Vectors& residual, int64_t k, const float* weight,
                  float eps, float* out, ThreadPool& pool) {
  const RowKernels& op = kernels();
  for_rows(x.count, k, pool, [&](int64_t row) {
    op.add(x.at(row), residual.at(row), k);
    op.rms_norm(residual.at(row), weight, eps, out + row * k, k);
  });
}

void rope(const Vectors& q, const Vectors& k, const RotaryTable& table, const int64_t* positions,
          ThreadPool& pool) {
  for (int64_t i = 0; i < q.count; ++i) {
    if (positions[i] < 0 || positions[i] >= table.max_positions) {
      throw std::out_of_range("position " + std::to_string(positions[i]) +
                              " is outside the rotary table of " +
                              std::to_string(table.max_positions) + " positions");
    }
  }
  const RowKernels& op = kernels();
  for_rows(q.count, (q.inner + k.inner) * 2 * table.half, pool, [&](int64_t token) {
    const float* cos = table.cos + positions[token] * table.half;
    const float* sin = table.sin + positions[token] * table.half;
    for (const Vectors& heads : {q, k}) {
      for (int64_t head = 0; head < heads.inner; ++head) {
        op.rotate(heads.at(token * heads.inner + head), cos, sin, table.half);
      }
    }
  });
}

void silu_mul(const Vectors& gate_up, int64_t k, float* out, ThreadPool& pool) {
  const RowKernels& op = kernels();
  for_rows(gate_up.count, 2 * k, pool, [&](int64_t row) {
    const float* gate = gate_up.at(row);
    op.silu_mul(gate, gate + k, out + row * k, k);
  });
}

}  // namespace prefixkv
