#include "attention_kernels.h"

#include "simd.h"

namespace prefixkv::PREFIXKV_ISA {
namespace {

static_assert(kMaxWidth % kWidth == 0 && kTile % kWidth == 0);

constexpr int kColumns = kWidth == 16 ? 4 : 2;  // vectors a register block is wide

// 2^x for x <= 0, relative error below 2e-7; 2^0 is exactly 1. Anything below 2^-126 is 2^-126.
inline vfloat exp2_nonpositive(vfloat x) {
  const vfloat low = splat(-126.0f);
  x = low > x ? low : x;  // a NaN stays one
  // Adding 1.5 * 2^23 rounds to an integer; 127 more is the exponent's bias.
  const vfloat magic = splat(12582912.0f + 127.0f);
  const vfloat biased = x + magic;
  const vfloat f = x - (biased - magic);  // in [-0.5, 0.5]
  vfloat p = splat(0x1.5bba14p-10f);
  p = p * f + splat(0x1.3cea88p-7f);
  p = p * f + splat(0x1.c6b752p-5f);
  p = p * f + splat(0x1.ebf9bcp-3f);
  p = p * f + splat(0x1.62e42ap-1f);
  p = p * f + splat(1.0f);
  return p * __builtin_bit_cast(vfloat, __builtin_bit_cast(vuint, biased) << 23);
}

// Lane numbers as a parameter pack, for shuffles.
template <int... L>
struct Lanes {};
#if PREFIXKV_WIDTH == 16
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif PREFIXKV_WIDTH == 8
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using AllLanes = Lanes<0, 1, 2, 3>;
#endif

template <int Step, int... L>
inline vfloat swap_lanes(vfloat x, Lanes<L...>) {
  return __builtin_shufflevector(x, x, (L ^ Step)...);
}

template <int Step = kWidth / 2>
inline float horizontal_max(vfloat x) {
  const vfloat y = swap_lanes<Step>(x, AllLanes{});
  x = x < y ? y : x;
  if constexpr (Step > 1) return horizontal_max<Step / 2>(x);
  return x[0];
}

template <int Step = kWidth / 2>
inline float horizontal_sum(vfloat x) {
  x += swap_lanes<Step>(x, AllLanes{});
  if constexpr (Step > 1) return horizontal_sum<Step / 2>(x);
  return x[0];
}

// Swaps the off-diagonal Step x Step squares of each 2 Step x 2 Step square.
template <int Step, int... L>
inline void transpose_step(vfloat (&x)[kWidth], Lanes<L...>) {
  for (int i = 0; i < kWidth; ++i) {
    if (i & Step) continue;
    const vfloat a = x[i];
    const vfloat b = x[i + Step];
    x[i] = __builtin_shufflevector(a, b, (L & Step ? kWidth + L - Step : L)...);
    x[i + Step] = __builtin_shufflevector(a, b, (L & Step ? kWidth + L : L + Step)...);
  }
}

template <int Step = kWidth / 2>
inline void transpose(vfloat (&x)[kWidth]) {
  transpose_step<Step>(x, AllLanes{});
  if constexpr (Step > 1) transpose<Step / 2>(x);
}

inline float load_one(const float* p) { return *p; }
inline float load_one(const uint16_t* p) { return to_float(*p); }

// Where the keys of one head's tile lie: key j at base + here[j]. The next tile's, at
// base + next[j], is fetched into the CPU's cache on the way.
template <typename T>
struct CacheTile {
  const T* base;
  const int64_t* here;
  const int64_t* next;

  const T* row(int j) const { return base + here[j]; }
  const T* row_and_fetch(int j, int d) const {
    __builtin_prefetch(base + next[j] + d);
    return base + here[j];
  }
};

// out[d + i][j]: elements [d, d + kWidth) of keys [j, j + kWidth), transposed.
template <typename T>
inline void pack_square(float* out, const CacheTile<T>& tile, int j, int d) {
  vfloat x[kWidth];
  for (int i = 0; i < kWidth; ++i) x[i] = load(tile.row_and_fetch(j + i, d) + d);
  transpose(x);
  for (int i = 0; i < kWidth; ++i) store(out + (d + i) * kTile + j, x[i]);
}

// The same for elements [d, d + 2 * kWidth): bfloat16 travel in pairs.
inline void pack_pairs(float* out, const CacheTile<uint16_t>& tile, int j, int d) {
  typedef float Pairs __attribute__((vector_size(kWidth * 4), aligned(2), may_alias));
  vfloat x[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    x[i] = *reinterpret_cast<const Pairs*>(tile.row_and_fetch(j + i, d) + d);
  }
  transpose(x);
  for (int i = 0; i < kWidth; ++i) {
    const vuint pair = __builtin_bit_cast(vuint, x[i]);
    store(out + (d + 2 * i) * kTile + j, __builtin_bit_cast(vfloat, pair << 16));
    store(out + (d + 2 * i + 1) * kTile + j, __builtin_bit_cast(vfloat, pair & 0xffff0000u));
  }
}

// out [head_dim][kTile]; columns beyond the keys hold anything, and no row sees them.
template <typename T>
void pack_k(float* out, const CacheTile<T>& tile, int keys, int head_dim) {
  for (int j = 0; j < keys; j += kWidth) {
    int d = 0;
    if constexpr (sizeof(T) == 2) {
      for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) pack_pairs(out, tile, j, d);
    }
    for (; d + kWidth <= head_dim; d += kWidth) pack_square(out, tile, j, d);
    for (; d < head_dim; ++d) {
      for (int i = j; i < j + kWidth; ++i) out[d * kTile + i] = load_one(tile.row(i) + d);
    }
  }
}

// out [keys][padded_dim], zeros beyond head_dim.
template <typename T>
void pack_v(float* out, const CacheTile<T>& tile, int keys, int head_dim, int padded_dim) {
  const int whole = head_dim - head_dim % kWidth;
  for (int j = 0; j < keys; ++j, out += padded_dim) {
    for (int d = 0; d < whole; d += kWidth) store(out + d, load(tile.row_and_fetch(j, d) + d));
    for (int d = whole; d < padded_dim; ++d) {
      out[d] = d < head_dim ? load_one(tile.row(j) + d) : 0.0f;
    }
  }
}

// Rows of the right factor of a product: packed one after another, or where they lie in the cache.
struct PackedRows {
  const float* base;
  int stride;
  vfloat load_at(int row, int column) const { return load(base + row * stride + column); }
};

template <typename T>
struct CacheRows {
  CacheTile<T> tile;
  vfloat load_at(int row, int column) const {
    return load(tile.row_and_fetch(row, column) + column);
  }
};

// c [R][V vectors] (+)= a [R][depth] times b [depth][V vectors from `column` on], depth in
// increasing order. The pragmas unroll early enough to keep `sum` in registers all the way.
template <int R, int V, bool Add, typename B>
inline void multiply_block(const float* a, int lda, const B& b, int column, int depth, float* c,
                           int ldc) {
  vfloat sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = Add ? load(c + r * ldc + v * kWidth) : vfloat{};
  }
  for (int i = 0; i < depth; ++i) {
    vfloat row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) row[v] = b.load_at(i, column + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] += a[r * lda + i] * row[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * ldc + v * kWidth, sum[r][v]);
  }
}

template <int R, bool Add, typename B>
void multiply_rows(const float* a, int lda, const B& b, int depth, float* c, int columns) {
  int j = 0;
  for (; j + kColumns * kWidth <= columns; j += kColumns * kWidth) {
    multiply_block<R, kColumns, Add>(a, lda, b, j, depth, c + j, columns);
  }
  for (; j < columns; j += kWidth) {
    multiply_block<R, 1, Add>(a, lda, b, j, depth, c + j, columns);
  }
}

// c [rows][columns] (+)= a [rows][depth], lda apart, times b [depth][columns].
template <bool Add, typename B>
void multiply(int rows, const float* a, int lda, const B& b, int depth, float* c, int columns) {
  static_assert(kRows == 6);
  switch (rows) {
    case 1: return multiply_rows<1, Add>(a, lda, b, depth, c, columns);
    case 2: return multiply_rows<2, Add>(a, lda, b, depth, c, columns);
    case 3: return multiply_rows<3, Add>(a, lda, b, depth, c, columns);
    case 4: return multiply_rows<4, Add>(a, lda, b, depth, c, columns);
    case 5: return multiply_rows<5, Add>(a, lda, b, depth, c, columns);
    case 6: return multiply_rows<6, Add>(a, lda, b, depth, c, columns);
  }
}

// The packed tile that all rows of a head meet, and what one register block of rows needs.
struct Scratch {
  float* k;  // [head_dim][kTile]
  float* v;  // [kTile][padded_dim]
  float* s;  // [kRows][kTile]
};

// Turns the tile's scores s of some rows into weights relative to each row's new maximum; of a row
// only the first visible[r] count. One function for any number of rows, never inlined, so that
// every row meets the same instructions.
[[gnu::noinline]] void softmax(float* s, int rows, const int* visible, const RowState& state,
                               int padded_dim) {
  static_assert(kRows <= kMaxWidth);
  float old_max[kMaxWidth] = {};
  float new_max[kMaxWidth] = {};
  float factor[kMaxWidth];
  for (int r = 0; r < rows; ++r) {
    float* row = s + r * kTile;
    for (int j = visible[r]; j < kTile; ++j) row[j] = -__builtin_inff();
    vfloat top = load(row);
    for (int j = kWidth; j < kTile; j += kWidth) {
      const vfloat x = load(row + j);
      top = top < x ? x : top;
    }
    const float tile_max = horizontal_max(top);
    old_max[r] = state.m[r];
    new_max[r] = old_max[r] < tile_max ? tile_max : old_max[r];
  }
  for (int r = 0; r < kRows; r += kWidth) {
    store(factor + r, exp2_nonpositive(load(old_max + r) - load(new_max + r)));
  }
  for (int r = 0; r < rows; ++r) {
    float* row = s + r * kTile;
    vfloat sum{};
    for (int j = 0; j < kTile; j += kWidth) {
      const vfloat weight = exp2_nonpositive(load(row + j) - new_max[r]);
      store(row + j, weight);
      sum += weight;
    }
    state.m[r] = new_max[r];
    state.l[r] = state.l[r] * factor[r] + horizontal_sum(sum);
    float* o = state.o + r * padded_dim;
    for (int d = 0; d < padded_dim; d += kWidth) store(o + d, load(o + d) * factor[r]);
  }
}

// Rows [row, row + rows) of the task, which see visible[r] >= 1 of the tile's keys.
template <typename V>
void attend_block(const SegmentArgs& args, const Scratch& scratch, const V& values, int64_t row,
                  int rows, const int* visible) {
  const int d = args.head_dim;
  const int padded = args.padded_dim;
  const RowState state{args.state.m + row, args.state.l + row, args.state.o + row * padded};
  multiply<false>(rows, args.q + row * d, d, PackedRows{scratch.k, kTile}, d, scratch.s, kTile);
  softmax(scratch.s, rows, visible, state, padded);
  for (int r = 0, end = 0; r < rows; r = end) {  // a key that a row may not see never meets it
    while (end < rows && visible[end] == visible[r]) ++end;
    multiply<true>(end - r, scratch.s + r * kTile, kTile, values, visible[r], state.o + r * padded,
                   padded);
  }
}

// All rows of one head that see the tile at `key`.
template <typename V>
void attend_tile(const SegmentArgs& args, const Scratch& scratch, const V& values, int head,
                 int64_t key) {
  const int64_t hidden = key > args.first_position ? key - args.first_position : 0;  // tokens
  const int64_t rows = args.tokens * args.group;
  for (int64_t row = hidden * args.group; row < rows;) {
    const int64_t left = rows - row;
    const int count = left >= 2 * kRows || left <= kRows ? (left < kRows ? left : kRows)
                                                         : (left + 1) / 2;
    int visible[kRows];
    for (int r = 0; r < count; ++r) {
      const int64_t keys = args.first_position + (row + r) / args.group - key + 1;
      visible[r] = keys < kTile ? static_cast<int>(keys) : kTile;
    }
    attend_block(args, scratch, values, head * rows + row, count, visible);
    row += count;
  }
}

// Element offsets of the tile's keys, whose number it returns; beyond key_end the last one repeats.
int locate(const SegmentArgs& args, int64_t key, int64_t* offsets) {
  const int64_t left = args.key_end - key;
  const int keys = left < kTile ? static_cast<int>(left) : kTile;
  int64_t block = key / args.block_size;
  int64_t in_block = key % args.block_size;
  for (int j = 0; j < kTile; ++j) {
    if (j >= keys) {
      offsets[j] = offsets[keys - 1];
      continue;
    }
    offsets[j] = (args.table[block] * static_cast<int64_t>(args.block_size) + in_block) *
                 args.slot_stride;
    if (++in_block == args.block_size) {
      in_block = 0;
      ++block;
    }
  }
  return keys;
}

template <typename T>
void segment(const SegmentArgs& args) {
  const int d = args.head_dim;
  const Scratch scratch{args.scratch, args.scratch + d * kTile,
                        args.scratch + (d + args.padded_dim) * kTile};
  // A copy of V, as float32 and padded, pays when a tile meets many rows.
  const bool copy_v = args.padded_dim != d || args.tokens * args.group > 2 * kRows;
  int64_t offsets[2][kTile];
  int keys = locate(args, args.key_begin, offsets[0]);
  int next_keys = 0;
  for (int64_t key = args.key_begin, i = 0; key < args.key_end; key += kTile, ++i) {
    const int64_t* here = offsets[i % 2];
    const int64_t* next = here;
    if (key + kTile < args.key_end) {
      next_keys = locate(args, key + kTile, offsets[(i + 1) % 2]);
      next = offsets[(i + 1) % 2];
    }
    for (int head = 0; head < args.heads; ++head) {
      const int64_t first = static_cast<int64_t>(head) * d;
      const CacheTile<T> k{static_cast<const T*>(args.k) + first, here, next};
      const CacheTile<T> v{static_cast<const T*>(args.v) + first, here, next};
      pack_k(scratch.k, k, keys, d);
      if (copy_v) {
        pack_v(scratch.v, v, keys, d, args.padded_dim);
        attend_tile(args, scratch, PackedRows{scratch.v, args.padded_dim}, head, key);
      } else {
        attend_tile(args, scratch, CacheRows<T>{v}, head, key);
      }
    }
    keys = next_keys;
  }
}

inline float exp2_one(float x) { return exp2_nonpositive(splat(x))[0]; }

[[gnu::noinline]] void merge_row(float* o, float& m, float& l, const float* part_o, float part_m,
                                 float part_l, int padded_dim) {
  const float old_max = m;
  const float new_max = old_max < part_m ? part_m : old_max;
  const float factor = exp2_one(old_max - new_max);
  const float part_factor = exp2_one(part_m - new_max);
  m = new_max;
  l = l * factor + part_l * part_factor;
  for (int d = 0; d < padded_dim; d += kWidth) {
    const vfloat scaled = load(part_o + d) * part_factor;
    store(o + d, load(o + d) * factor + scaled);
  }
}

void merge(const RowState& total, const RowState& part, int64_t rows, int padded_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.l[r] == 0.0f) continue;  // the row sees no key of this part: it stays as it is
    merge_row(total.o + r * padded_dim, total.m[r], total.l[r], part.o + r * padded_dim, part.m[r],
              part.l[r], padded_dim);
  }
}

void finish(float* out, const float* o, float l, int head_dim) {
  for (int d = 0; d < head_dim; ++d) out[d] = o[d] / l;
}

void scale(float* out, const float* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

void to_bf16(uint16_t* out, const float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(x + i));
  for (; i < n; ++i) out[i] = to_bfloat16(x[i]);
}

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention{segment<float>, segment<uint16_t>, merge, finish, scale, to_bf16};

}  // namespace prefixkv::PREFIXKV_ISA
