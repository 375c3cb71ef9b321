// The inner loops of linear.h, compiled once for each instruction set.
//
// A micro-kernel holds a tile of y (rows x panels) in registers and walks k once: for each k it loads
// the panels' weights and multiplies them by one broadcast x per row. All sizes, remainders included,
// are instances of one template, so the arithmetic of an element is the same in all of them.
#include "linear.h"
#include "simd.h"

namespace prefixkv::PREFIXKV_ISA {

extern const LinearKernels kLinearKernels;

namespace {

constexpr int kPanel = 2 * kWidth;  // columns in a panel

// Accumulators, weights and one x must fit the registers: 32 of AVX-512 and NEON, else 16.
#if PREFIXKV_WIDTH == 16 || defined(__aarch64__)
constexpr int kTileRows = 12;
constexpr int kFewVectors = 24;
#else
constexpr int kTileRows = 6;
constexpr int kFewVectors = 12;
#endif
constexpr int kFewRows = 4;

// k is taken in blocks, so that a panel's block (32 KiB) stays in L1 while the tiles of x pass by.
constexpr int64_t kBlock = 256;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// The weights of one panel at one k. Pairs of bfloat16 share a 32-bit lane: column c in the lower half
// of lane c, column c + kWidth in the upper half.
inline void load_panel(const float* w, vfloat& low, vfloat& high) {
  low = load(w);
  high = load(w + kWidth);
}

typedef uint32_t vuint_u __attribute__((vector_size(PREFIXKV_WIDTH * 4), aligned(4), may_alias));

inline void load_panel(const uint16_t* w, vfloat& low, vfloat& high) {
  const vuint pair = *reinterpret_cast<const vuint_u*>(w);
  low = __builtin_bit_cast(vfloat, pair << 16);
  high = __builtin_bit_cast(vfloat, pair & 0xffff0000u);
}

// Packed x is [k][kRows]; else its rows are x_stride apart.
template <int kRows, int kPanels, bool kPacked, typename W>
[[gnu::always_inline]] inline void accumulate(vfloat (&acc)[kRows][2 * kPanels], const float* x,
                                              int64_t x_stride, const W* w, int64_t panel_stride,
                                              int64_t k) {
  for (int64_t i = 0; i < k; ++i) {
    vfloat weight[2 * kPanels];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      load_panel(w + p * panel_stride + i * kPanel, weight[2 * p], weight[2 * p + 1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float value = kPacked ? x[i * kRows + r] : x[r * x_stride + i];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kPanels; ++v) acc[r][v] += value * weight[v];
    }
  }
}

// The first `columns` (1..kPanel) of a panel's row in y.
inline void load_row(const float* y, int64_t columns, vfloat* acc) {
  if (columns == kPanel) {
    acc[0] = load(y);
    acc[1] = load(y + kWidth);
    return;
  }
  float padded[kPanel] = {};
  for (int64_t c = 0; c < columns; ++c) padded[c] = y[c];
  acc[0] = load(padded);
  acc[1] = load(padded + kWidth);
}

inline void store_row(float* y, int64_t columns, const vfloat* acc) {
  if (columns == kPanel) {
    store(y, acc[0]);
    store(y + kWidth, acc[1]);
    return;
  }
  float padded[kPanel];
  store(padded, acc[0]);
  store(padded + kWidth, acc[1]);
  for (int64_t c = 0; c < columns; ++c) y[c] = padded[c];
}

// ---- few rows: bound by reading the weight, several panels at once to hide the FMA latency

template <int kRows, int kPanels, typename W>
void multiply_panels(const Product& product, int64_t panel) {
  const int64_t k = product.k, panel_stride = k * kPanel;
  vfloat acc[kRows][2 * kPanels] = {};
  accumulate<kRows, kPanels, false>(acc, product.x, product.x_stride,
                                    static_cast<const W*>(product.weight) + panel * panel_stride,
                                    panel_stride, k);
  for (int p = 0; p < kPanels; ++p) {
    const int64_t column = (panel + p) * kPanel;
    const int64_t columns = min(kPanel, product.n - column);
    for (int r = 0; r < kRows; ++r) {
      vfloat out[2] = {acc[r][2 * p], acc[r][2 * p + 1]};
      if (product.bias != nullptr) {
        out[0] += load(product.bias + column);
        out[1] += load(product.bias + column + kWidth);
      }
      store_row(product.y + r * product.n + column, columns, out);
    }
  }
}

template <int kRows, int kPanels, typename W>
void multiply_range(const Product& product, Range panels) {
  int64_t panel = panels.begin;
  for (; panel + kPanels <= panels.end; panel += kPanels) {
    multiply_panels<kRows, kPanels, W>(product, panel);
  }
  if constexpr (kPanels > 1) {
    multiply_range<kRows, kPanels / 2, W>(product, {panel, panels.end});
  }
}

template <int kRows, typename W>
void multiply_few_rows(const Product& product, Range panels) {
  if (product.m == kRows) {
    constexpr int kFit = kFewVectors / (2 * kRows);
    multiply_range<kRows, kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1, W>(product, panels);
  } else if constexpr (kRows > 1) {
    multiply_few_rows<kRows - 1, W>(product, panels);
  }
}

void multiply_few(const Product& product, Range panels) {
  if (product.bfloat16) {
    multiply_few_rows<kFewRows, uint16_t>(product, panels);
  } else {
    multiply_few_rows<kFewRows, float>(product, panels);
  }
}

// ---- many rows: x packed in tiles, k in blocks, sums carried from block to block in y

void pack_tiles(const Product& product, float* packed, int64_t tiles, Range some) {
  const int64_t k = product.k;
  for (int64_t tile = some.begin; tile < some.end; ++tile) {
    const int64_t begin = product.tile_begin(tile, tiles);
    const int64_t height = product.tile_begin(tile + 1, tiles) - begin;
    float* out = packed + begin * k;
    for (int64_t r = 0; r < height; ++r) {
      const float* row = product.x + (begin + r) * product.x_stride;
      for (int64_t i = 0; i < k; ++i) out[i * height + r] = row[i];
    }
  }
}

// A step over k of one tile and one panel. `bias` is null but at the last step.
template <typename W>
struct TileStep {
  const float* x;
  const W* w;
  const float* bias;
  float* y;
  int64_t y_stride, columns, k;
  bool first;
};

template <int kRows, typename W>
void multiply_tile(const TileStep<W>& step) {
  vfloat acc[kRows][2] = {};
  if (!step.first) {
    for (int r = 0; r < kRows; ++r) load_row(step.y + r * step.y_stride, step.columns, acc[r]);
  }
  accumulate<kRows, 1, true>(acc, step.x, 0, step.w, 0, step.k);
  if (step.bias != nullptr) {
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] += load(step.bias);
      acc[r][1] += load(step.bias + kWidth);
    }
  }
  for (int r = 0; r < kRows; ++r) store_row(step.y + r * step.y_stride, step.columns, acc[r]);
}

template <int kRows, typename W>
void multiply_tile_of(int64_t rows, const TileStep<W>& step) {
  if (rows == kRows) {
    multiply_tile<kRows>(step);
  } else if constexpr (kRows > 1) {
    multiply_tile_of<kRows - 1>(rows, step);
  }
}

// All tiles against one block of one panel.
template <typename W>
void multiply_block(const Product& product, const float* packed, int64_t tiles, Range some,
                    int64_t panel, Range block, const W* w) {
  const int64_t k = product.k, column = panel * kPanel;
  for (int64_t tile = some.begin; tile < some.end; ++tile) {
    const int64_t begin = product.tile_begin(tile, tiles);
    const int64_t rows = product.tile_begin(tile + 1, tiles) - begin;
    TileStep<W> step;
    step.x = packed + begin * k + block.begin * rows;
    step.w = w;
    step.bias = product.bias != nullptr && block.end == k ? product.bias + column : nullptr;
    step.y = product.y + begin * product.n + column;
    step.y_stride = product.n;
    step.columns = min(kPanel, product.n - column);
    step.k = block.end - block.begin;
    step.first = block.begin == 0;
    multiply_tile_of<kTileRows>(rows, step);
  }
}

void multiply_tiles(const Product& product, const float* packed, int64_t tiles, Range some,
                    Range panels) {
  const int64_t k = product.k, blocks = (k + kBlock - 1) / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    const Range block{b * k / blocks, (b + 1) * k / blocks};
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      const int64_t offset = (panel * k + block.begin) * kPanel;
      if (!product.bfloat16) {
        const float* w = static_cast<const float*>(product.weight) + offset;
        multiply_block(product, packed, tiles, some, panel, block, w);
        continue;
      }
      const uint16_t* w = static_cast<const uint16_t*>(product.weight) + offset;
      if (some.end - some.begin <= 2) {
        multiply_block(product, packed, tiles, some, panel, block, w);
        continue;
      }
      // Widened once for all tiles.
      alignas(64) float wide[kBlock * kPanel];
      for (int64_t i = 0; i < block.end - block.begin; ++i) {
        vfloat low, high;
        load_panel(w + i * kPanel, low, high);
        store(wide + i * kPanel, low);
        store(wide + i * kPanel + kWidth, high);
      }
      multiply_block(product, packed, tiles, some, panel, block,
                     static_cast<const float*>(wide));
    }
  }
}

}  // namespace

const LinearKernels kLinearKernels = {kPanel,       kTileRows,  kFewRows,
                                      multiply_few, pack_tiles, multiply_tiles};

}  // namespace prefixkv::PREFIXKV_ISA
