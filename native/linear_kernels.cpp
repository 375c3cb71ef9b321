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
constexpr int kAccumulators = 24;
#else
constexpr int kAccumulators = 12;
#endif
constexpr int kTileRows = kAccumulators / 2;
constexpr int kFewRows = 4;

// k is taken in blocks, so that a panel's block (32 KiB) stays in L1 while the tiles of x pass by.
constexpr int64_t kBlock = 256;

// Panels that walk the blocks together, so that their part of y stays in the second-level cache.
constexpr int64_t kGroup = 8;

// From so many tiles on, widening a bfloat16 block once costs less than doing it for each tile.
constexpr int64_t kWidenTiles = 5;

constexpr int64_t kCacheLine = 64;
constexpr int64_t kAheadBytes = 4096;  // in flight from memory: its latency times a core's bandwidth

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

// What a walk over k fetches ahead of use: its own panels, which come from memory, or one cache line
// each k of `next`, because its own panel is in the cache.
enum class Ahead { kOwn, kNext };

// x is [k][kRows] if packed, else its rows are x_stride apart. Panels are panel_stride apart.
template <typename W>
struct Walk {
  const float* x;
  int64_t x_stride;
  const W* w;
  int64_t panel_stride;
  int64_t k;
  const char* next;
  int64_t next_step;
};

template <int kRows, int kPanels, bool kPacked, Ahead kAhead, typename W>
[[gnu::always_inline]] inline void accumulate(vfloat (&acc)[kRows][2 * kPanels],
                                              const Walk<W>& walk) {
  const float* x = walk.x;
  const W* w = walk.w;
  const char* next = walk.next;
  for (int64_t i = 0; i < walk.k; ++i) {
    vfloat weight[2 * kPanels];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      const W* row = w + p * walk.panel_stride;
      if constexpr (kAhead == Ahead::kOwn) {
        const char* far = reinterpret_cast<const char*>(row) + kAheadBytes / kPanels;
        __builtin_prefetch(far);
        if constexpr (kPanel * sizeof(W) > kCacheLine) __builtin_prefetch(far + kCacheLine);
      }
      load_panel(row, weight[2 * p], weight[2 * p + 1]);
    }
    if constexpr (kAhead == Ahead::kNext) __builtin_prefetch(next);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float value = kPacked ? x[r] : x[r * walk.x_stride];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kPanels; ++v) acc[r][v] += value * weight[v];
    }
    x += kPacked ? kRows : 1;
    w += kPanel;
    next += walk.next_step;
  }
}

// ---- few rows: bound by reading the weight, several panels at once to hide the FMA latency

// The first `columns` (1..kPanel) of a panel's row in y.
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

template <int kRows, int kPanels, typename W>
void multiply_panels(const Product& product, int64_t panel) {
  const int64_t stride = product.k * kPanel;
  const W* w = static_cast<const W*>(product.weight) + panel * stride;
  vfloat acc[kRows][2 * kPanels] = {};
  accumulate<kRows, kPanels, false, Ahead::kOwn, W>(
      acc, {product.x, product.x_stride, w, stride, product.k, nullptr, 0});
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
    constexpr int kFit = kAccumulators / (2 * kRows);
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

Range block_of(int64_t k, int64_t index) {
  const int64_t blocks = (k + kBlock - 1) / kBlock;
  return {index * k / blocks, (index + 1) * k / blocks};
}

// Packed x: block after block, in it tile after tile, each k-major.
inline int64_t packed_offset(const Product& product, Range block, int64_t first_row) {
  return block.begin * product.m + first_row * (block.end - block.begin);
}

typedef float quad __attribute__((vector_size(16)));
typedef float quad_u __attribute__((vector_size(16), aligned(4), may_alias));

// out[i * out_stride + r] = x[r * x_stride + i] for r, i < 4
inline void transpose(const float* x, int64_t x_stride, float* out, int64_t out_stride) {
  quad row[4];
  for (int r = 0; r < 4; ++r) row[r] = *reinterpret_cast<const quad_u*>(x + r * x_stride);
  const quad a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
  const quad b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
  const quad c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
  const quad d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
  const quad column[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5),
                          __builtin_shufflevector(a, b, 2, 3, 6, 7),
                          __builtin_shufflevector(c, d, 0, 1, 4, 5),
                          __builtin_shufflevector(c, d, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) *reinterpret_cast<quad_u*>(out + i * out_stride) = column[i];
}

void pack_tile(const float* x, int64_t x_stride, int64_t rows, int64_t depth, float* out) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    int64_t i = 0;
    for (; i + 4 <= depth; i += 4) {
      transpose(x + r * x_stride + i, x_stride, out + i * rows + r, rows);
    }
    for (; i < depth; ++i) {
      for (int64_t j = r; j < r + 4; ++j) out[i * rows + j] = x[j * x_stride + i];
    }
  }
  for (; r < rows; ++r) {
    for (int64_t i = 0; i < depth; ++i) out[i * rows + r] = x[r * x_stride + i];
  }
}

void pack_tiles(const Product& product, float* packed, int64_t tiles, Range some) {
  for (int64_t tile = some.begin; tile < some.end; ++tile) {
    const int64_t begin = product.tile_begin(tile, tiles);
    const int64_t rows = product.tile_begin(tile + 1, tiles) - begin;
    const float* x = product.x + begin * product.x_stride;
    for (int64_t b = 0; b * kBlock < product.k; ++b) {
      const Range block = block_of(product.k, b);
      pack_tile(x + block.begin, product.x_stride, rows, block.end - block.begin,
                packed + packed_offset(product, block, begin));
    }
  }
}

// One tile, panel and block of k. `bias` is null but in the last block.
template <typename W>
struct TileStep {
  Walk<W> walk;
  const float* bias;
  float* y;
  int64_t y_stride, columns;
  bool first;  // block: nothing to carry over
};

template <int kRows, Ahead kAhead, typename W>
void multiply_full_tile(const TileStep<W>& step) {
  vfloat acc[kRows][2] = {};
  if (!step.first) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] = load(step.y + r * step.y_stride);
      acc[r][1] = load(step.y + r * step.y_stride + kWidth);
    }
  }
  accumulate<kRows, 1, true, kAhead>(acc, step.walk);
  if (step.bias != nullptr) {
    const vfloat low = load(step.bias), high = load(step.bias + kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] += low;
      acc[r][1] += high;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    store(step.y + r * step.y_stride, acc[r][0]);
    store(step.y + r * step.y_stride + kWidth, acc[r][1]);
  }
}

inline void copy(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
                 int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[r * to_stride + c] = from[r * from_stride + c];
  }
}

template <int kRows, Ahead kAhead, typename W>
void multiply_tile(int64_t rows, const TileStep<W>& step) {
  if (rows != kRows) {
    if constexpr (kRows > 1) multiply_tile<kRows - 1, kAhead>(rows, step);
    return;
  }
  if (step.columns == kPanel) return multiply_full_tile<kRows, kAhead>(step);
  // The last panel may be wider than what is left of y: by way of a full tile.
  alignas(64) float full[kRows * kPanel] = {};
  if (!step.first) copy(step.y, step.y_stride, full, kPanel, kRows, step.columns);
  TileStep<W> inner = step;
  inner.y = full;
  inner.y_stride = kPanel;
  multiply_full_tile<kRows, kAhead>(inner);
  copy(full, kPanel, step.y, step.y_stride, kRows, step.columns);
}

// A piece of the work of multiply_tiles: some tiles against one block of one panel.
struct Piece {
  const Product& product;
  const float* packed;
  int64_t tiles;
  Range some;
  int64_t panel;
  Range block;

  int64_t depth() const { return block.end - block.begin; }

  template <typename W>
  const W* weight() const {
    return static_cast<const W*>(product.weight) + (panel * product.k + block.begin) * kPanel;
  }
};

// `w` is the block; `next` is fetched ahead as the tiles pass by, if there are several.
template <Ahead kAhead, typename W>
void multiply_piece(const Piece& piece, const W* w, const char* next, int64_t next_bytes) {
  const Product& product = piece.product;
  const int64_t k = product.k, column = piece.panel * kPanel;
  for (int64_t tile = piece.some.begin; tile < piece.some.end; ++tile) {
    const int64_t begin = product.tile_begin(tile, piece.tiles);
    const int64_t rows = product.tile_begin(tile + 1, piece.tiles) - begin;
    const int64_t fetched = (tile - piece.some.begin) * piece.depth() * kCacheLine;
    const bool more = fetched < next_bytes;
    TileStep<W> step;
    step.walk = {piece.packed + packed_offset(product, piece.block, begin), 0, w, 0,
                 piece.depth(), more ? next + fetched : next, more ? kCacheLine : 0};
    step.bias = product.bias != nullptr && piece.block.end == k ? product.bias + column : nullptr;
    step.y = product.y + begin * product.n + column;
    step.y_stride = product.n;
    step.columns = min(kPanel, product.n - column);
    step.first = piece.block.begin == 0;
    multiply_tile<kTileRows, kAhead>(rows, step);
  }
}

template <typename W>
void multiply_piece(const Piece& piece, const Piece& following) {
  const int64_t tiles = piece.some.end - piece.some.begin, size = piece.depth() * kPanel;
  const W* w = piece.weight<W>();
  if (tiles == 1) return multiply_piece<Ahead::kOwn>(piece, w, nullptr, 0);
  const char* next = reinterpret_cast<const char*>(following.weight<W>());
  const int64_t next_bytes = following.depth() * kPanel * static_cast<int64_t>(sizeof(W));
  if (sizeof(W) == sizeof(float) || tiles < kWidenTiles) {
    return multiply_piece<Ahead::kNext>(piece, w, next, next_bytes);
  }
  alignas(64) float wide[kBlock * kPanel];
  for (int64_t i = 0; i < size; i += kPanel) {
    vfloat low, high;
    load_panel(w + i, low, high);
    store(wide + i, low);
    store(wide + i + kWidth, high);
  }
  multiply_piece<Ahead::kNext>(piece, static_cast<const float*>(wide), next, next_bytes);
}

void multiply_tiles(const Product& product, const float* packed, int64_t tiles, Range some,
                    Range panels) {
  const int64_t blocks = (product.k + kBlock - 1) / kBlock;
  const auto piece = [&](int64_t panel, int64_t b) {
    return Piece{product, packed, tiles, some, panel, block_of(product.k, b)};
  };
  for (int64_t begin = panels.begin; begin < panels.end; begin += kGroup) {
    const int64_t end = min(begin + kGroup, panels.end);
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const Piece now = piece(panel, b);
        const Piece next = panel + 1 < end    ? piece(panel + 1, b)
                           : b + 1 < blocks   ? piece(begin, b + 1)
                           : end < panels.end ? piece(end, 0)
                                              : now;
        if (product.bfloat16) {
          multiply_piece<uint16_t>(now, next);
        } else {
          multiply_piece<float>(now, next);
        }
      }
    }
  }
}

}  // namespace

const LinearKernels kLinearKernels = {kPanel,       kTileRows,  kFewRows,
                                      multiply_few, pack_tiles, multiply_tiles};

}  // namespace prefixkv::PREFIXKV_ISA
