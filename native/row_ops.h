// Operations on the rows of activations, in float32 on the CPU. Each row is a function of itself
// alone and is computed by one thread in one order, so its bits do not depend on its company.
//
// Strides count elements; the last dimension of every array is contiguous.
#pragma once

#include <cstdint>

#include "thread_pool.h"

namespace prefixkv {

// What row_ops_kernels.cpp offers for one instruction set; all of one row of k elements.
struct RowKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight. out may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, float* out, int64_t k);
  // to += x
  void (*add)(const float* x, float* to, int64_t k);
  // (a, b) = (a cos - b sin, b cos + a sin) for the first and second half of a row of 2 * half.
  void (*rotate)(float* row, const float* cos, const float* sin, int64_t half);
  // out = gate / (1 + exp(-gate)) * up
  void (*silu_mul)(const float* gate, const float* up, float* out, int64_t k);
};

// Vectors of k elements at data + i * stride + j * inner_stride for i < count, j < inner.
struct Vectors {
  float* data;
  int64_t count, inner, stride, inner_stride;

  float* at(int64_t index) const {
    return data + index / inner * stride + index % inner * inner_stride;
  }
};

// out is contiguous, [count * inner, k].
void rms_norm(const Vectors& x, int64_t k, const float* weight, float eps, float* out,
              ThreadPool& pool);

// residual += x, out = rms_norm(residual).
void add_rms_norm(const Vectors& x, const Vectors& residual, int64_t k, const float* weight,
                  float eps, float* out, ThreadPool& pool);

// cos, sin: [max_positions, half].
struct RotaryTable {
  const float* cos;
  const float* sin;
  int64_t max_positions, half;
};

// Rotates every head of q and k by the position of its token, in place; both have one count.
// Throws std::out_of_range, naming the position, before anything is written.
void rope(const Vectors& q, const Vectors& k, const RotaryTable& table, const int64_t* positions,
          ThreadPool& pool);

// gate_up: rows of 2k elements, out contiguous [count, k].
void silu_mul(const Vectors& gate_up, int64_t k, float* out, ThreadPool& pool);

}  // namespace prefixkv
