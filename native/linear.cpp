#include "linear.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu.h"

namespace prefixkv {

namespace base {
extern const LinearKernels kLinearKernels;
}
#ifdef PREFIXKV_X86
namespace avx2 {
extern const LinearKernels kLinearKernels;
}
namespace avx512 {
extern const LinearKernels kLinearKernels;
}
#endif

const LinearKernels& linear_kernels() {
#ifdef PREFIXKV_X86
  if (best_isa() == Isa::kAvx512) return avx512::kLinearKernels;
  if (best_isa() == Isa::kAvx2) return avx2::kLinearKernels;
#endif
  return base::kLinearKernels;
}

namespace {

// Rows of y in a task, at most: more would not stay in the second-level cache between blocks of k.
constexpr int64_t kTaskRows = 256;

// Tasks a thread: enough that an uneven machine evens out, few enough that claiming costs nothing.
constexpr int64_t kTasksPerThread = 4;

float widen(uint16_t bfloat16) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bfloat16) << 16);
}

uint16_t narrow(float x) {  // to bfloat16, nearest even, a NaN stays one
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float widen_half(uint16_t half) {  // IEEE binary16
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u, fraction = half & 1023u;
  if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) {
    return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | fraction << 13);
  }
  const float tiny = static_cast<float>(fraction) * 0x1p-24f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, tiny));
}

template <WeightType kType>
float read(const void* source, int64_t index) {
  if constexpr (kType == WeightType::kFloat32) return static_cast<const float*>(source)[index];
  const uint16_t bits = static_cast<const uint16_t*>(source)[index];
  return kType == WeightType::kBFloat16 ? widen(bits) : widen_half(bits);
}

void write(float* out, float x) { *out = x; }
void write(uint16_t* out, float x) { *out = narrow(x); }

// Source row `row` into a panel's column, k in [begin, end).
template <WeightType kType, typename W>
void pack_column(const void* source, int64_t row, int64_t begin, int64_t end, W* column,
                 int64_t width) {
  for (int64_t k = begin; k < end; ++k) write(column + k * width, read<kType>(source, row + k));
}

template <typename W>
void pack_column(WeightType type, const void* source, int64_t row, int64_t begin, int64_t end,
                 W* column, int64_t width) {
  switch (type) {
    case WeightType::kFloat32:
      return pack_column<WeightType::kFloat32>(source, row, begin, end, column, width);
    case WeightType::kBFloat16:
      return pack_column<WeightType::kBFloat16>(source, row, begin, end, column, width);
    case WeightType::kFloat16:
      return pack_column<WeightType::kFloat16>(source, row, begin, end, column, width);
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Range part(int64_t index, int64_t parts, int64_t size) {
  return {index * size / parts, (index + 1) * size / parts};
}

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const bool huge = bytes >= kHugePage;
  void* data = nullptr;
  if (posix_memalign(&data, huge ? kHugePage : 64, bytes) != 0) throw std::bad_alloc();
  data_.reset(data);
#if defined(__linux__)
  // Whole huge pages only, so that nothing more becomes resident. A refusal costs speed alone.
  if (huge) madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
}

PackedLinear::PackedLinear(int64_t n, int64_t k, bool bfloat16, bool bias)
    : kernels_(linear_kernels()), n_(n), k_(k), bfloat16_(bfloat16), width_(kernels_.panel_width) {
  if (n < 1 || k < 1) {
    throw std::invalid_argument("a weight must have at least one row and one column, not [" +
                                std::to_string(n) + ", " + std::to_string(k) + "]");
  }
  panels_ = ceil_div(n, width_);
  const size_t size = bfloat16 ? sizeof(uint16_t) : sizeof(float);
  const size_t panel_bytes = static_cast<size_t>(width_ * k) * size;
  weight_ = Buffer(static_cast<size_t>(panels_) * panel_bytes);
  // The columns behind the last row are multiplied like the others.
  std::memset(weight_.as<char>() + static_cast<size_t>(panels_ - 1) * panel_bytes, 0, panel_bytes);
  if (bias) {
    bias_ = Buffer(static_cast<size_t>(panels_ * width_) * sizeof(float));
    std::memset(bias_.as<char>(), 0, bias_.bytes());
  }
}

template <typename T>
T* PackedLinear::panel(int64_t index) const {
  return weight_.as<T>() + index * width_ * k_;
}

int64_t PackedLinear::offset_in_panel(int64_t column) const {
  const int64_t half = width_ / 2;
  return bfloat16_ ? column % half * 2 + column / half : column;
}

void PackedLinear::check_rows(int64_t first, int64_t rows) const {
  if (first < 0 || rows < 0 || first > n_ - rows) {
    throw std::out_of_range("rows [" + std::to_string(first) + ", " + std::to_string(first + rows) +
                            ") are outside a weight of " + std::to_string(n_) + " rows");
  }
}

void PackedLinear::pack(int64_t first, int64_t rows, const void* source, int64_t stride,
                        WeightType type, ThreadPool& pool) {
  check_rows(first, rows);
  if (rows == 0) return;
  constexpr int64_t kChunk = 16;  // of k: whole cache lines are read and written
  const int64_t begin = first / width_, end = ceil_div(first + rows, width_);
  pool.run(end - begin, [&](int64_t task) {
    const int64_t base = (begin + task) * width_;
    const int64_t row_begin = std::max(first, base), row_end = std::min(first + rows, base + width_);
    for (int64_t k = 0; k < k_; k += kChunk) {
      const int64_t k_end = std::min(k + kChunk, k_);
      for (int64_t row = row_begin; row < row_end; ++row) {
        const int64_t at = (row - first) * stride, column = offset_in_panel(row - base);
        if (bfloat16_) {
          pack_column(type, source, at, k, k_end, panel<uint16_t>(begin + task) + column, width_);
        } else {
          pack_column(type, source, at, k, k_end, panel<float>(begin + task) + column, width_);
        }
      }
    }
  });
}

void PackedLinear::set_bias(int64_t first, int64_t rows, const float* source) {
  check_rows(first, rows);
  if (bias_.bytes() == 0) throw std::invalid_argument("this weight was made without a bias");
  std::copy_n(source, rows, bias_.as<float>() + first);
}

void PackedLinear::multiply(const float* x, int64_t x_stride, int64_t m, float* y, Buffer& scratch,
                            ThreadPool& pool) const {
  if (m == 0) return;
  const Product product{x, x_stride, weight_.as<void>(), bfloat16_, bias_.as<float>(), y, m, n_, k_};
  const int64_t threads = pool.size();
  if (m <= kernels_.few_rows) {
    // The same number of tasks for every thread, of four panels or less while that makes sense.
    const int64_t a_thread = std::clamp<int64_t>(ceil_div(panels_, 4 * threads), 1, 16);
    const int64_t tasks = std::min(panels_, threads * a_thread);
    pool.run(tasks, [&](int64_t task) {
      kernels_.multiply_few(product, part(task, tasks, panels_));
    });
    return;
  }
  const int64_t tiles = ceil_div(m, kernels_.tile_rows);
  scratch.reserve(static_cast<size_t>(m * k_) * sizeof(float));
  float* packed = scratch.as<float>();
  const int64_t pack_tasks = m * k_ < 32768 ? 1 : std::min(tiles, threads * kTasksPerThread);
  pool.run(pack_tasks, [&](int64_t task) {
    kernels_.pack_tiles(product, packed, tiles, part(task, pack_tasks, tiles));
  });
  // Cut by panels, so that each weight is read by one thread; by tiles only if there are too few
  // panels or too many rows.
  const int64_t wanted = threads * kTasksPerThread;
  const int64_t columns = std::min(panels_, wanted);
  const int64_t rows = std::min(tiles, std::max(ceil_div(wanted, columns), ceil_div(m, kTaskRows)));
  pool.run(columns * rows, [&](int64_t task) {
    kernels_.multiply_tiles(product, packed, tiles, part(task / columns, rows, tiles),
                            part(task % columns, columns, panels_));
  });
}

void PackedLinear::read_rows(const int64_t* ids, int64_t count, float* out) const {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= n_) {
      throw std::out_of_range("id " + std::to_string(ids[i]) + " is outside a table of " +
                              std::to_string(n_) + " rows");
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = ids[i] / width_, offset = offset_in_panel(ids[i] % width_);
    float* row = out + i * k_;
    if (bfloat16_) {
      const uint16_t* column = panel<uint16_t>(index) + offset;
      for (int64_t k = 0; k < k_; ++k) row[k] = widen(column[k * width_]);
    } else {
      const float* column = panel<float>(index) + offset;
      for (int64_t k = 0; k < k_; ++k) row[k] = column[k * width_];
    }
  }
}

}  // namespace prefixkv
