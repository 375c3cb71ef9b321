// Reference counts and the free queue of a fixed set of blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "huge_pages.h"

namespace prefixkv {

using BlockId = int32_t;

// A free block (ref_cnt 0) is in the queue, a held one is not. The queue is a doubly linked list
// threaded through flat arrays, with one sentinel: every operation is O(1) and allocates nothing.
class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_free() const { return num_free_; }
  int32_t ref_cnt(BlockId block) const { return ref_cnt_[block]; }

  // Next to be reused; the queue must not be empty.
  BlockId front() const { return next_[num_blocks_]; }
  BlockId after(BlockId block) const { return next_[block]; }

  // Takes one more reference; a free block leaves the queue.
  void touch(BlockId block) {
    if (ref_cnt_[block]++ == 0) unlink(block);
  }
  // Drops one reference; true if it was the last, and then the caller must push the block.
  bool drop(BlockId block) { return --ref_cnt_[block] == 0; }
  void push_back(BlockId block) { link(block, prev_[num_blocks_], num_blocks_); }
  // Puts the block before `next` (num_blocks() for the end).
  void push_before(BlockId block, BlockId next) { link(block, prev_[next], next); }

  // In the order of reuse.
  std::vector<BlockId> free_blocks() const;

  // Walks the queue and throws CacheError if it is not exactly the blocks with ref_cnt 0.
  void check() const;

 private:
  void unlink(BlockId block) {
    next_[prev_[block]] = next_[block];
    prev_[next_[block]] = prev_[block];
    --num_free_;
  }
  void link(BlockId block, BlockId prev, BlockId next) {
    prev_[block] = prev, next_[block] = next;
    next_[prev] = block, prev_[next] = block;
    ++num_free_;
  }

  int32_t num_blocks_;
  int32_t num_free_;
  HugeVector<int32_t> ref_cnt_;
  HugeVector<BlockId> prev_;  // [num_blocks + 1], the last is the sentinel
  HugeVector<BlockId> next_;
};

}  // namespace prefixkv
