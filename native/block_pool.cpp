#include "block_pool.h"

#include "errors.h"

namespace prefixkv {

BlockPool::BlockPool(int32_t num_blocks)
    : num_blocks_(num_blocks),
      num_free_(num_blocks),
      ref_cnt_(num_blocks, 0),
      prev_(num_blocks + 1),
      next_(num_blocks + 1) {
  for (BlockId block = 0; block <= num_blocks; ++block) {
    prev_[block] = block == 0 ? num_blocks : block - 1;
    next_[block] = block == num_blocks ? 0 : block + 1;
  }
}

std::vector<BlockId> BlockPool::free_blocks() const {
  std::vector<BlockId> blocks;
  blocks.reserve(num_free_);
  for (BlockId block = front(); block != num_blocks_; block = next_[block]) blocks.push_back(block);
  return blocks;
}

void BlockPool::check() const {
  int32_t found = 0;
  BlockId before = num_blocks_;
  for (BlockId block = front(); block != num_blocks_; before = block, block = next_[block]) {
    const std::string name = "block " + std::to_string(block);
    if (prev_[block] != before) throw CacheError(name + " has a broken link in the free queue");
    if (ref_cnt_[block] != 0) throw CacheError(name + " is held and in the free queue");
    if (++found > num_blocks_) throw CacheError("the free queue has a cycle");
  }
  if (found != num_free_) {
    throw CacheError("the free queue holds " + std::to_string(found) + " blocks, num_free is " +
                     std::to_string(num_free_));
  }
  int32_t unheld = 0;
  for (const int32_t count : ref_cnt_) {
    if (count < 0) throw CacheError("a reference count is negative");
    unheld += count == 0;
  }
  if (unheld != found) {
    throw CacheError(std::to_string(unheld) + " blocks have no holder, " + std::to_string(found) +
                     " are in the free queue");
  }
}

}  // namespace prefixkv
