#include "attention_kernels.h"

#include "simd.h"

namespace prefixkv::PREFIXKV_ISA {
namespace {

static_assert(kMaxWidth % kWidth == 0 && kTile % kWidth == 0);

constexpr int kColumns = kWidth == 16 ? 4 : 2;  // vectors a register block is wide

// 2^x for x <= 0, relative error below 2e-7; 2^0 is exactly 1. Anything below 2^-126 is 2^-126.
inline vfloat exp2_nonpositive(vfloat x) {
  const vfloat low = splat(-126.0f);
  x = x < low ? low : x;
  const vfloat magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 rounds to an integer; + exponent bias
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

template <typename T>
inline void prefetch_row(const T* row, int head_dim) {
  for (int d = 0; d < head_dim; d += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + d);
}

// out [head_dim][kTile]: key j of the tile lies at base + offsets[j].
template <typename T>
void pack_k(float* out, const T* base, const int64_t* offsets, int head_dim) {
  const int whole = head_dim - head_dim % kWidth;
  for (int j = 0; j < kTile; j += kWidth) {
    for (int d = 0; d < whole; d += kWidth) {
      vfloat x[kWidth];
      for (int i = 0; i < kWidth; ++i) x[i] = load(base + offsets[j + i] + d);
      transpose(x);
      for (int i = 0; i < kWidth; ++i) store(out + (d + i) * kTile + j, x[i]);
    }
    for (int d = whole; d < head_dim; ++d) {
      for (int i = 0; i < kWidth; ++i) {
        out[d * kTile + j + i] = load_one(base + offsets[j + i] + d);
      }
    }
  }
}

// out [keys][padded_dim], zeros beyond head_dim.
template <typename T>
void pack_v(float* out, const T* base, const int64_t* offsets, int keys, int head_dim,
            int padded_dim) {
  const int whole = head_dim - head_dim % kWidth;
  for (int j = 0; j < keys; ++j) {
    const T* row = base + offsets[j];
    for (int d = 0; d < whole; d += kWidth) store(out + d, load(row + d));
    for (int d = whole; d < padded_dim; ++d) out[d] = d < head_dim ? load_one(row + d) : 0.0f;
    out += padded_dim;
  }
}

// c [R][V vectors] (+)= a [R][depth] times b [depth][V vectors], depth in increasing order.
template <int R, int V, bool Add>
inline void multiply_block(const float* a, int lda, const float* b, int ldb, int depth, float* c,
                           int ldc) {
  vfloat sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sum[r][v] = Add ? load(c + r * ldc + v * kWidth) : vfloat{};
  }
  for (int i = 0; i < depth; ++i) {
    vfloat row[V];
    for (int v = 0; v < V; ++v) row[v] = load(b + i * ldb + v * kWidth);
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) sum[r][v] += a[r * lda + i] * row[v];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(c + r * ldc + v * kWidth, sum[r][v]);
  }
}

template <int R, bool Add>
void multiply_rows(const float* a, int lda, const float* b, int ldb, int depth, float* c, int ldc,
                   int columns) {
  int j = 0;
  for (; j + kColumns * kWidth <= columns; j += kColumns * kWidth) {
    multiply_block<R, kColumns, Add>(a, lda, b + j, ldb, depth, c + j, ldc);
  }
  for (; j < columns; j += kWidth) {
    multiply_block<R, 1, Add>(a, lda, b + j, ldb, depth, c + j, ldc);
  }
}

template <bool Add>
void multiply(int rows, const float* a, int lda, const float* b, int ldb, int depth, float* c,
              int ldc, int columns) {
  static_assert(kRows == 6);
  switch (rows) {
    case 1: return multiply_rows<1, Add>(a, lda, b, ldb, depth, c, ldc, columns);
    case 2: return multiply_rows<2, Add>(a, lda, b, ldb, depth, c, ldc, columns);
    case 3: return multiply_rows<3, Add>(a, lda, b, ldb, depth, c, ldc, columns);
    case 4: return multiply_rows<4, Add>(a, lda, b, ldb, depth, c, ldc, columns);
    case 5: return multiply_rows<5, Add>(a, lda, b, ldb, depth, c, ldc, columns);
    case 6: return multiply_rows<6, Add>(a, lda, b, ldb, depth, c, ldc, columns);
  }
}

// o *= factor over a row.
inline void rescale_row(float* o, float factor, int padded_dim) {
  for (int d = 0; d < padded_dim; d += kWidth) store(o + d, load(o + d) * factor);
}

inline float exp2_one(float x) { return exp2_nonpositive(splat(x))[0]; }

// Turns the tile's scores s of one row into weights relative to the row's new maximum, of which only
// the first `visible` count. Never inlined: every row must meet the same instructions.
[[gnu::noinline]] void softmax_row(float* s, int visible, const RowState& state, int64_t row,
                                   int padded_dim) {
  for (int j = visible; j < kTile; ++j) s[j] = -__builtin_inff();
  vfloat top = load(s);
  for (int j = kWidth; j < kTile; j += kWidth) {
    const vfloat x = load(s + j);
    top = top < x ? x : top;
  }
  const float tile_max = horizontal_max(top);
  const float old_max = state.m[row];
  const float new_max = old_max < tile_max ? tile_max : old_max;
  vfloat sum{};
  for (int j = 0; j < kTile; j += kWidth) {
    const vfloat weight = exp2_nonpositive(load(s + j) - new_max);
    store(s + j, weight);
    sum += weight;
  }
  const float tile_sum = horizontal_sum(sum);
  if (new_max == old_max) {
    state.l[row] += tile_sum;
    return;
  }
  const float factor = exp2_one(old_max - new_max);
  state.m[row] = new_max;
  state.l[row] = state.l[row] * factor + tile_sum;
  rescale_row(state.o + row * padded_dim, factor, padded_dim);
}

// The packed tile that all rows of a head meet, and the scores of one register block.
struct Scratch {
  float* k;  // [head_dim][kTile]
  float* v;  // [kTile][padded_dim]
  float* s;  // [kRows][kTile]
};

// Rows [row, row + rows) of head `head`, all of which see the tile's first key at least.
void attend_block(const SegmentArgs& args, const Scratch& scratch, int64_t row, int rows,
                  const int* visible) {
  const int d = args.head_dim;
  const int padded = args.padded_dim;
  multiply<false>(rows, args.q + row * d, d, scratch.k, kTile, d, scratch.s, kTile, kTile);
  for (int r = 0; r < rows; ++r) {
    softmax_row(scratch.s + r * kTile, visible[r], args.state, row + r, padded);
  }
  for (int r = 0, end = 0; r < rows; r = end) {  // a key that a row may not see never meets it
    while (end < rows && visible[end] == visible[r]) ++end;
    multiply<true>(end - r, scratch.s + r * kTile, kTile, scratch.v, padded, visible[r],
                   args.state.o + (row + r) * padded, padded, padded);
  }
}

// All rows of one head that see the tile at `key`.
void attend_tile(const SegmentArgs& args, const Scratch& scratch, int head, int64_t key) {
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
    attend_block(args, scratch, head * rows + row, count, visible);
    row += count;
  }
}

// Element offsets of the tile's keys; those beyond key_end repeat the last one and are never used.
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
  int64_t offsets[2][kTile];
  int keys = locate(args, args.key_begin, offsets[0]);
  int current = 0;
  for (int64_t key = args.key_begin; key < args.key_end; key += kTile) {
    const bool more = key + kTile < args.key_end;
    const int next_keys = more ? locate(args, key + kTile, offsets[current ^ 1]) : 0;
    for (int head = 0; head < args.heads; ++head) {
      const T* k = static_cast<const T*>(args.k) + static_cast<int64_t>(head) * d;
      const T* v = static_cast<const T*>(args.v) + static_cast<int64_t>(head) * d;
      for (int j = 0; j < next_keys; ++j) {
        prefetch_row(k + offsets[current ^ 1][j], d);
        prefetch_row(v + offsets[current ^ 1][j], d);
      }
      pack_k(scratch.k, k, offsets[current], d);
      pack_v(scratch.v, v, offsets[current], keys, d, args.padded_dim);
      attend_tile(args, scratch, head, key);
    }
    keys = next_keys;
    current ^= 1;
  }
}

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
