#include "attention.h"

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "cpu.h"

namespace prefixkv {

namespace base { extern const AttentionKernels kAttention; }
#if PREFIXKV_X86
namespace avx2 { extern const AttentionKernels kAttention; }
namespace avx512 { extern const AttentionKernels kAttention; }
#endif

namespace {

// Rows of a prefill task: enough to make packing a tile cheap, few enough that q and o stay in L2.
constexpr int64_t kRowsATask = 384;
// At most so many rows a K/V head and the task is bound by reading K/V: cut it by segments.
constexpr int64_t kFewRows = 2 * kRows;
constexpr int64_t kTokensAWrite = 64;
constexpr float kLog2E = 1.44269504088896340736f;

const AttentionKernels& best_kernels() {
#if PREFIXKV_X86
  switch (best_isa()) {
    case Isa::kAvx512: return avx512::kAttention;
    case Isa::kAvx2: return avx2::kAttention;
    default: break;
  }
#endif
  return base::kAttention;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument(what); }

void check_starts(const char* name, const std::vector<int32_t>& starts, size_t sequences,
                  size_t total) {
  const std::string field = name;
  if (starts.size() != sequences + 1) {
    fail(field + " has " + std::to_string(starts.size()) + " entries; " +
         std::to_string(sequences) + " sequences need one more than that");
  }
  if (starts.front() != 0) {
    fail(field + " begins with " + std::to_string(starts.front()) + ", not 0");
  }
  if (!std::is_sorted(starts.begin(), starts.end())) fail(field + " decreases");
  if (static_cast<size_t>(starts.back()) != total) {
    fail(field + " ends with " + std::to_string(starts.back()) + ", not " + std::to_string(total));
  }
}

void check_sequence(const Layout& layout, size_t s, int block_size) {
  if (layout.num_computed[s] < 0) {
    fail("num_computed of sequence " + std::to_string(s) + " is " +
         std::to_string(layout.num_computed[s]) + "; it cannot be negative");
  }
  const int64_t tokens = static_cast<int64_t>(layout.num_computed[s]) + layout.query_start[s + 1] -
                         layout.query_start[s];
  const int64_t blocks = layout.table_start[s + 1] - layout.table_start[s];
  if (blocks * block_size < tokens) {
    fail("the table of sequence " + std::to_string(s) + " has " + std::to_string(blocks) +
         " blocks of " + std::to_string(block_size) + " slots; it has " + std::to_string(tokens) +
         " tokens");
  }
}

// The slot of every new token, sequence after sequence.
std::vector<int64_t> slots_of(const Layout& layout, int block_size) {
  std::vector<int64_t> slots;
  slots.reserve(static_cast<size_t>(layout.query_start.back()));
  for (size_t s = 0; s < layout.num_computed.size(); ++s) {
    const int32_t* table = layout.block_ids.data() + layout.table_start[s];
    int64_t position = layout.num_computed[s];
    for (int32_t t = layout.query_start[s]; t < layout.query_start[s + 1]; ++t, ++position) {
      slots.push_back(static_cast<int64_t>(table[position / block_size]) * block_size +
                      position % block_size);
    }
  }
  return slots;
}

void check_distinct(std::vector<int64_t> slots, int block_size) {
  std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  if (twice == slots.end()) return;
  fail("slot " + std::to_string(*twice % block_size) + " of block " +
       std::to_string(*twice / block_size) +
       " would be written twice in one step; a block that is written belongs to one sequence");
}

}  // namespace

std::vector<int64_t> check_layout(const Layout& layout, int num_blocks, int block_size) {
  const size_t sequences = layout.num_computed.size();
  if (layout.query_start.empty()) fail("query_start is empty; it has at least the entry 0");
  check_starts("query_start", layout.query_start, sequences,
               static_cast<size_t>(std::max(layout.query_start.back(), 0)));
  check_starts("table_start", layout.table_start, sequences, layout.block_ids.size());
  for (size_t s = 0; s < sequences; ++s) check_sequence(layout, s, block_size);
  for (int32_t id : layout.block_ids) {
    if (id < 0 || id >= num_blocks) {
      fail("block id " + std::to_string(id) + " is outside the pool of " +
           std::to_string(num_blocks) + " blocks");
    }
  }
  std::vector<int64_t> slots = slots_of(layout, block_size);
  check_distinct(slots, block_size);
  return slots;
}

PagedAttention::PagedAttention(ThreadPool& pool, const AttentionShape& shape)
    : pool_(pool),
      shape_(shape),
      kernels_(best_kernels()),
      group_(shape.num_heads / shape.num_kv_heads),
      padded_dim_(static_cast<int>(round_up(shape.head_dim, kMaxWidth))),
      tile_floats_(static_cast<int64_t>(kTile) * (shape.head_dim + padded_dim_ + kRows)),
      scratch_busy_(static_cast<size_t>(pool.size())),
      scratch_(static_cast<size_t>(pool.size())) {}

void PagedAttention::AlignedDelete::operator()(float* p) const {
  ::operator delete[](p, std::align_val_t{64});
}

PagedAttention::Buffer PagedAttention::make_buffer(int64_t floats) {
  return Buffer(new (std::align_val_t{64}) float[static_cast<size_t>(floats)]);
}

void PagedAttention::begin(Layout layout) {
  units_.clear();
  tasks_.clear();
  slots_.clear();
  slots_ = check_layout(layout, shape_.num_blocks, shape_.block_size);
  layout_ = std::move(layout);

  const int sequences = static_cast<int>(layout_.num_computed.size());
  int64_t few_segments = 0;  // tasks of the sequences with few rows, if heads stay together
  const auto tokens_of = [&](int s) { return layout_.query_start[s + 1] - layout_.query_start[s]; };
  const auto few_rows = [&](int s) { return tokens_of(s) * group_ <= kFewRows; };
  for (int s = 0; s < sequences; ++s) {
    if (few_rows(s)) few_segments += ceil_div(layout_.num_computed[s] + tokens_of(s), kSegment);
  }
  // All heads of a token lie together, so reading them together is fastest; but no thread may idle.
  const int64_t cuts = few_segments == 0 ? 1 : ceil_div(2 * pool_.size(), few_segments);
  const int few_heads = static_cast<int>(ceil_div(shape_.num_kv_heads, cuts));
  for (int s = 0; s < sequences; ++s) {
    const bool few = few_rows(s);
    add_units(s, few ? kFewRows : std::max<int64_t>(1, kRowsATask / group_), few ? few_heads : 1);
  }
  make_room(add_tasks());
}

void PagedAttention::add_units(int sequence, int64_t tokens_a_unit, int heads_a_unit) {
  const int64_t begin = layout_.query_start[sequence];
  const int64_t end = layout_.query_start[sequence + 1];
  for (int64_t token = begin; token < end; token += tokens_a_unit) {
    for (int head = 0; head < shape_.num_kv_heads; head += heads_a_unit) {
      Unit unit{};
      unit.sequence = sequence;
      unit.first_head = head;
      unit.heads = std::min(heads_a_unit, shape_.num_kv_heads - head);
      unit.first_token = token;
      unit.tokens = std::min(tokens_a_unit, end - token);
      unit.first_position = layout_.num_computed[sequence] + token - begin;
      unit.segments = static_cast<int>(ceil_div(unit.first_position + unit.tokens, kSegment));
      units_.push_back(unit);
    }
  }
}

int64_t PagedAttention::add_tasks() {
  const bool scarce = static_cast<int>(units_.size()) < 2 * pool_.size();
  int64_t workspace = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    Unit& unit = units_[u];
    unit.split = unit.segments > 1 && (scarce || unit.tokens * group_ <= kFewRows);
    unit.workspace = workspace;
    const int count = unit.split ? unit.segments : 1;
    if (unit.split) workspace += count * state_floats(rows(unit));
    const int64_t keys = unit.split ? kSegment : unit.first_position + unit.tokens;
    const int64_t work = (rows(unit) + 4 * unit.heads) * keys;  // packing a tile costs some rows
    for (int segment = 0; segment < count; ++segment) {
      tasks_.push_back({static_cast<int>(u), segment, work});
    }
  }
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [](const Task& a, const Task& b) { return a.cost > b.cost; });
  return workspace;
}

void PagedAttention::make_room(int64_t workspace) {
  int64_t most = 0;
  for (const Unit& unit : units_) most = std::max(most, rows(unit));
  const int64_t floats =
      tile_floats_ + round_up(most * shape_.head_dim, kMaxWidth) + 2 * state_floats(most);
  if (floats > scratch_floats_) {
    for (Buffer& buffer : scratch_) buffer = make_buffer(floats);
    scratch_floats_ = floats;
  }
  if (workspace > workspace_floats_) {
    workspace_ = make_buffer(workspace);
    workspace_floats_ = workspace;
  }
  if (units_.size() > open_segments_.size()) {
    open_segments_ = std::vector<std::atomic<int>>(units_.size());
  }
}

// Of o, m and l, so that the next state is aligned too.
int64_t PagedAttention::state_floats(int64_t rows) const {
  return rows * padded_dim_ + round_up(2 * rows, kMaxWidth);
}

RowState PagedAttention::state_at(float* p, int64_t rows) const {
  return {p + rows * padded_dim_, p + rows * (padded_dim_ + 1), p};
}

void PagedAttention::clear(const RowState& state, int64_t rows) const {
  std::fill_n(state.m, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(state.l, rows, 0.0f);
  std::fill_n(state.o, rows * padded_dim_, 0.0f);
}

void PagedAttention::run(const AttentionCall& call) {
  const int64_t tokens = static_cast<int64_t>(slots_.size());
  if (tokens <= kTokensAWrite) {
    write_kv(call, 0, tokens);
  } else {
    pool_.run(ceil_div(tokens, kTokensAWrite), [&](int64_t i) {
      write_kv(call, i * kTokensAWrite, std::min(tokens, (i + 1) * kTokensAWrite));
    });
  }
  for (size_t u = 0; u < units_.size(); ++u) {
    open_segments_[u].store(units_[u].segments, std::memory_order_relaxed);
  }
  pool_.run(static_cast<int64_t>(tasks_.size()), [&](int64_t i) {
    size_t mine = 0;  // no more tasks run at once than there are threads, so one is free
    while (scratch_busy_[mine].test_and_set(std::memory_order_acquire)) {
      mine = (mine + 1) % scratch_busy_.size();
    }
    run_task(call, tasks_[static_cast<size_t>(i)], scratch_[mine].get());
    scratch_busy_[mine].clear(std::memory_order_release);
  });
}

void PagedAttention::write_kv(const AttentionCall& call, int64_t begin, int64_t end) const {
  const int64_t width = static_cast<int64_t>(shape_.num_kv_heads) * shape_.head_dim;
  const auto write = [&](void* cache, int64_t slot, const float* row) {
    if (shape_.bfloat16) {
      kernels_.to_bf16(static_cast<uint16_t*>(cache) + slot * width, row, width);
    } else {
      std::copy_n(row, width, static_cast<float*>(cache) + slot * width);
    }
  };
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = slots_[static_cast<size_t>(t)];
    write(call.k_cache, slot, call.k + t * call.k_stride);
    write(call.v_cache, slot, call.v + t * call.v_stride);
  }
}

void PagedAttention::run_task(const AttentionCall& call, const Task& task, float* scratch) {
  const Unit& unit = units_[static_cast<size_t>(task.unit)];
  const int64_t n = rows(unit);
  const int64_t size = state_floats(n);
  float* q = scratch + tile_floats_;
  float* states = q + round_up(n * shape_.head_dim, kMaxWidth);
  const RowState total = state_at(states, n);
  load_q(call, unit, q);
  const auto part_at = [&](int segment) {
    return state_at(unit.split ? workspace_.get() + unit.workspace + segment * size : states + size,
                    n);
  };
  if (unit.split) {
    run_segment(call, unit, task.segment, q, part_at(task.segment), scratch);
    auto& open = open_segments_[static_cast<size_t>(task.unit)];
    if (open.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  }
  clear(total, n);
  for (int segment = 0; segment < unit.segments; ++segment) {
    if (!unit.split) run_segment(call, unit, segment, q, part_at(segment), scratch);
    kernels_.merge(total, part_at(segment), n, padded_dim_);
  }
  store_out(call, unit, total);
}

void PagedAttention::run_segment(const AttentionCall& call, const Unit& unit, int segment,
                                 const float* q, const RowState& state, float* scratch) const {
  const int64_t first_head = static_cast<int64_t>(unit.first_head) * shape_.head_dim;
  const auto at_head = [&](const void* cache) {
    return static_cast<const char*>(cache) + first_head * (shape_.bfloat16 ? 2 : 4);
  };
  SegmentArgs args{};
  args.k = at_head(call.k_cache);
  args.v = at_head(call.v_cache);
  args.slot_stride = static_cast<int64_t>(shape_.num_kv_heads) * shape_.head_dim;
  args.table = layout_.block_ids.data() + layout_.table_start[static_cast<size_t>(unit.sequence)];
  args.block_size = shape_.block_size;
  args.head_dim = shape_.head_dim;
  args.padded_dim = padded_dim_;
  args.heads = unit.heads;
  args.group = group_;
  args.first_position = unit.first_position;
  args.tokens = unit.tokens;
  args.key_begin = static_cast<int64_t>(segment) * kSegment;
  args.key_end = std::min(args.key_begin + kSegment, unit.first_position + unit.tokens);
  args.q = q;
  args.state = state;
  args.scratch = scratch;
  clear(state, rows(unit));
  (shape_.bfloat16 ? kernels_.segment_bf16 : kernels_.segment_f32)(args);
}

void PagedAttention::load_q(const AttentionCall& call, const Unit& unit, float* q) const {
  const int64_t size = static_cast<int64_t>(group_) * shape_.head_dim;  // one K/V head's of a token
  for (int head = unit.first_head; head < unit.first_head + unit.heads; ++head) {
    for (int64_t t = unit.first_token; t < unit.first_token + unit.tokens; ++t, q += size) {
      kernels_.scale(q, call.q + t * call.q_stride + head * size, shape_.scale * kLog2E, size);
    }
  }
}

void PagedAttention::store_out(const AttentionCall& call, const Unit& unit,
                               const RowState& total) const {
  const int64_t width = static_cast<int64_t>(shape_.num_heads) * shape_.head_dim;
  int64_t row = 0;
  for (int head = unit.first_head; head < unit.first_head + unit.heads; ++head) {
    for (int64_t t = unit.first_token; t < unit.first_token + unit.tokens; ++t) {
      float* out = call.out + t * width + static_cast<int64_t>(head) * group_ * shape_.head_dim;
      for (int member = 0; member < group_; ++member, ++row, out += shape_.head_dim) {
        kernels_.finish(out, total.o + row * padded_dim_, total.l[row], shape_.head_dim);
      }
    }
  }
}

}  // namespace prefixkv
