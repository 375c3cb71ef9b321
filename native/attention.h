// Paged attention on the CPU: causal, grouped-query, over K/V that lie in blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention_kernels.h"
#include "thread_pool.h"

namespace prefixkv {

struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int num_blocks;
  int block_size;
  bool bfloat16;  // of the stored K/V, else float32
  float scale;
};

// One layer's call. q [tokens, heads, head_dim], k and v [tokens, kv heads, head_dim], each with a
// row stride in elements; out is contiguous.
struct AttentionCall {
  void* k_cache;  // [num_blocks, block_size, kv heads, head_dim]
  void* v_cache;
  const float* q;
  const float* k;
  const float* v;
  float* out;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
};

// What a step works on, sequence after sequence (StepLayout of prefixkv.model.attention).
struct Layout {
  std::vector<int32_t> query_start;
  std::vector<int32_t> num_computed;
  std::vector<int32_t> table_start;
  std::vector<int32_t> block_ids;
};

// The slot of every new token. Throws std::invalid_argument that names the first fault: lengths,
// order, a block id outside [0, num_blocks), a table too short, a slot that is written twice.
std::vector<int64_t> check_layout(const Layout& layout, int num_blocks, int block_size);

// Cuts a step into tasks and runs them; one step and one call at a time.
class PagedAttention {
 public:
  PagedAttention(ThreadPool& pool, const AttentionShape& shape);

  // Checks the layout (see check_layout) and plans the step. After a throw there is no step.
  void begin(Layout layout);

  // Writes k and v to their slots, then attends. Any number of times after begin.
  void run(const AttentionCall& call);

 private:
  // Some tokens of a sequence with some of its K/V heads. A split unit is one task a segment,
  // merged by whoever ends last; any other is one task.
  struct Unit {
    int sequence;
    int first_head;
    int heads;
    int64_t first_token;  // row of q
    int64_t tokens;
    int64_t first_position;
    int segments;
    bool split;
    int64_t workspace;  // where a split unit's states begin
  };
  struct Task {
    int unit;
    int segment;  // of a split unit
    int64_t cost;
  };
  struct AlignedDelete {
    void operator()(float* p) const;
  };
  using Buffer = std::unique_ptr<float[], AlignedDelete>;

  static Buffer make_buffer(int64_t floats);
  void add_units(int sequence, int64_t tokens_a_unit, int heads_a_unit);
  int64_t add_tasks();  // returns the floats that split units need
  void make_room(int64_t workspace);
  void write_kv(const AttentionCall& call, int64_t begin, int64_t end) const;
  void run_task(const AttentionCall& call, const Task& task, float* scratch);
  void run_segment(const AttentionCall& call, const Unit& unit, int segment, const float* q,
                   const RowState& state, float* scratch) const;
  void load_q(const AttentionCall& call, const Unit& unit, float* q) const;
  void store_out(const AttentionCall& call, const Unit& unit, const RowState& total) const;

  int64_t rows(const Unit& unit) const { return unit.heads * unit.tokens * group_; }
  int64_t state_floats(int64_t rows) const;
  RowState state_at(float* p, int64_t rows) const;
  void clear(const RowState& state, int64_t rows) const;

  ThreadPool& pool_;
  const AttentionShape shape_;
  const AttentionKernels& kernels_;
  const int group_;
  const int padded_dim_;
  const int64_t tile_floats_;

  Layout layout_;
  std::vector<int64_t> slots_;  // of each new token
  std::vector<Unit> units_;
  std::vector<Task> tasks_;
  std::vector<std::atomic<int>> open_segments_;  // of each unit
  std::vector<std::atomic_flag> scratch_busy_;   // of each thread
  std::vector<Buffer> scratch_;
  int64_t scratch_floats_ = 0;
  Buffer workspace_;
  int64_t workspace_floats_ = 0;
};

}  // namespace prefixkv
