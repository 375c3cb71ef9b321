// The arithmetic of paged attention, one table of functions for each instruction set.
//
// A query token's output is the same bits whatever comes with it, because nothing in its arithmetic
// depends on anything but its position and its keys:
//
//   segments  kSegment keys each, cut at multiples of kSegment, every one with an own running
//             maximum m, sum l and output o (online softmax); merged from the first to the last.
//   tiles     kTile keys each, cut at multiples of kTile, taken in order inside a segment.
//   sums      over the head dimension for scores, over keys for outputs: one accumulator, in order.
//
// A row is one query head of one token. Rows that share a K/V head share packed tiles, but each has
// accumulators of its own, and a key that a row may not see never meets it. How rows and segments
// are grouped into tasks is free, hence any chunking, company, block size, placement or number of
// threads gives the same bits.
#pragma once

#include <cstdint>

namespace prefixkv {

inline constexpr int kTile = 64;
inline constexpr int kSegment = 256;
inline constexpr int kRows = 6;       // of a register block
inline constexpr int kMaxWidth = 16;  // floats of the widest vector

// Running softmax of some rows: m, l [rows], o [rows][padded head dimension].
struct RowState {
  float* m;
  float* l;
  float* o;
};

// Rows of one sequence against the keys [key_begin, key_end), a range inside one segment. Row
// (head, token, member of the group) has index (head * tokens + token) * group + member.
struct SegmentArgs {
  const void* k;            // [slots][kv heads][head_dim], the first K/V head of the task
  const void* v;
  int64_t slot_stride;      // elements from slot to slot
  const int32_t* table;     // the sequence's block table
  int block_size;
  int head_dim;
  int padded_dim;           // head_dim rounded up to kMaxWidth
  int heads;                // K/V heads of the task
  int group;                // query heads a K/V head
  int64_t first_position;   // of the first token
  int64_t tokens;
  int64_t key_begin;
  int64_t key_end;
  const float* q;           // [rows][head_dim], times scale * log2(e)
  RowState state;
  float* scratch;           // kTile * (head_dim + padded_dim + kRows) floats
};

struct AttentionKernels {
  void (*segment_f32)(const SegmentArgs& args);
  void (*segment_bf16)(const SegmentArgs& args);
  // total = total merged with part, rows [0, rows); a row that part does not touch stays as it is.
  void (*merge)(const RowState& total, const RowState& part, int64_t rows, int padded_dim);
  // out = o / l of one row.
  void (*finish)(float* out, const float* o, float l, int head_dim);
  void (*scale)(float* out, const float* x, float factor, int64_t n);
  void (*to_bf16)(uint16_t* out, const float* x, int64_t n);
};

}  // namespace prefixkv
