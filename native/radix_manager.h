// RadixAttention as SGLang does it: a radix tree over blocks that evicts the least recent leaf whole.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "block_manager.h"
#include "radix_index.h"

namespace prefixkv {

// A page of the tree is a block, its value the block's id. A table's full computed blocks are the
// tree's, held by a lock on the node where they end; the others are its own. The pool's free queue has
// the blank blocks only: it counts the tree as a holder of each block in it.
class RadixManager : public BlockManager {
 public:
  RadixManager(int64_t num_blocks, int64_t num_groups, std::shared_ptr<const Hasher> hasher, bool events)
      : BlockManager(num_blocks, num_groups, std::move(hasher), events),
        tree_(block_size(), 1, hasher_->seed()),
        node_of_(pool_.num_blocks(), kNone) {}

  int64_t num_free_blocks() const override { return pool_.num_free() + tree_.num_evictable_pages(); }
  std::vector<BlockId> free_blocks() const override;

 private:
  static constexpr NodeId kNone = RadixIndex::kNoRoot;

  void find(Hit& hit) const override;
  std::optional<int64_t> num_free_in(const Hit& hit) const override;
  void take_hit(BlockTable& table, const Hit& hit) override;
  void evict(int64_t count) override;
  void publish(BlockTable& table, int64_t first, int64_t stop) override;
  void hold(BlockTable& copy, const BlockTable& of) override;
  void drop(BlockTable& table) override;
  void forget() override;
  int32_t ref_cnt(BlockId block) const override {
    return is_cached(block) ? tree_.locks(node_of_[block]) : pool_.ref_cnt(block);
  }
  bool is_cached(BlockId block) const override { return node_of_[block] != kNone; }
  std::optional<Digest> digest_of(BlockId block) const override;
  void check_system() const override;

  Pages pages(const Sequence& seq, int64_t first, int64_t stop) const {
    return {seq.tokens() + first * block_size(), stop - first, &seq, first};
  }
  RadixIndex::End walk(const Hit& hit, int64_t num_blocks, std::vector<BlockId>& blocks) const;
  NodeId arrive(const RadixIndex::End& end);
  NodeId split(NodeId lower, int32_t at);
  NodeId node_at(const BlockTable& table, int64_t num_blocks);
  bool may_extend(const BlockTable& table) const;
  void note_stored(const BlockTable& table, int64_t first, int64_t stop);
  void let_go(NodeId leaf);

  RadixIndex tree_;
  std::vector<NodeId> node_of_;  // of each block in the tree
};

}  // namespace prefixkv
