// Matrix product with a packed weight: y = x * weight^T + bias on the CPU.
//
// Every element of y is one accumulator that starts at 0 and takes fma(x[k], weight[k], acc) for k in
// increasing order, then the bias. So a row of y has the same bits whatever rows come with it and
// however the work is cut over threads. (Where the instruction set has no FMA it is a product and a
// sum, each rounded: other bits, the same promise.)
//
// The weight [n, k] is cut into panels of `panel_width` rows, each stored k-major, so that a kernel
// reads it as one stream: [panel][k][panel_width]. bfloat16 weights are stored as such and widened,
// exactly, as they are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "thread_pool.h"

namespace prefixkv {

struct Range {
  int64_t begin, end;
};

// One product: x [m, k] with a row stride, y [m, n] contiguous, bias null or padded to whole panels.
struct Product {
  const float* x;
  int64_t x_stride;
  const void* weight;
  bool bfloat16;
  const float* bias;
  float* y;
  int64_t m, n, k;

  // Rows of x are taken in tiles of nearly equal height; tile i starts at this row.
  int64_t tile_begin(int64_t tile, int64_t tiles) const { return tile * m / tiles; }
};

// What linear_kernels.cpp offers for one instruction set.
struct LinearKernels {
  int panel_width;  // columns of y, twice the floats in a vector
  int tile_rows;    // rows of y in a tile, at most
  int few_rows;     // up to this many rows, multiply_few is the faster
  // All rows (at most few_rows), some panels, x as it is.
  void (*multiply_few)(const Product&, Range panels);
  // Writes tiles of x to packed, k-major: tile t of height h is [k][h] at tile_begin(t) * k.
  void (*pack_tiles)(const Product&, float* packed, int64_t tiles, Range some);
  void (*multiply_tiles)(const Product&, const float* packed, int64_t tiles, Range some,
                         Range panels);
};

// The kernels of best_isa().
const LinearKernels& linear_kernels();

// Memory that is not initialised, aligned to 64 bytes, and on huge pages as far as it fills them and
// the system has some: reading weights from memory is up to a fifth faster so.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);  // throws std::bad_alloc

  template <typename T>
  T* as() const { return static_cast<T*>(data_.get()); }
  size_t bytes() const { return bytes_; }

  // At least this many bytes; what was there is lost.
  void reserve(size_t bytes) {
    if (bytes > bytes_) *this = Buffer(bytes);
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

enum class WeightType { kFloat32, kBFloat16, kFloat16 };

class PackedLinear {
 public:
  // weight [n, k], kept as bfloat16 or float32. Throws std::invalid_argument unless n, k >= 1.
  PackedLinear(int64_t n, int64_t k, bool bfloat16, bool bias);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  size_t bytes() const { return weight_.bytes() + bias_.bytes(); }

  // Fills rows [first, first + rows) of the weight from a source whose rows are `stride` elements
  // apart. Narrowing to bfloat16 rounds to nearest even. Throws std::out_of_range.
  void pack(int64_t first, int64_t rows, const void* source, int64_t stride, WeightType type,
            ThreadPool& pool);
  // Fills bias[first, first + rows). Throws std::out_of_range, std::invalid_argument without a bias.
  void set_bias(int64_t first, int64_t rows, const float* source);

  // x [m, k] float32, rows `x_stride` elements apart, to y [m, n] contiguous. scratch is the caller's
  // and grows as needed.
  void multiply(const float* x, int64_t x_stride, int64_t m, float* y, Buffer& scratch,
                ThreadPool& pool) const;

  // out [count, k]: those rows of the weight, widened exactly. Throws std::out_of_range, naming the
  // id, before anything is written.
  void read_rows(const int64_t* ids, int64_t count, float* out) const;

 private:
  template <typename T>
  T* panel(int64_t index) const;
  int64_t offset_in_panel(int64_t column) const;
  void check_rows(int64_t first, int64_t rows) const;

  const LinearKernels& kernels_;
  int64_t n_, k_;
  bool bfloat16_;
  int64_t width_, panels_;
  Buffer weight_, bias_;
};

}  // namespace prefixkv
