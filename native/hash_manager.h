// Automatic prefix caching as vLLM V1 does it: chained hashes of full blocks, a hash table, a free queue.
#pragma once

#include <memory>
#include <optional>

#include "block_manager.h"
#include "hash_index.h"

namespace prefixkv {

// A cached block that nobody holds waits at the back of the free queue, and stays findable until it
// comes to the front and is taken. Copies of the same content all stay; the first serves hits.
class HashManager : public BlockManager {
 public:
  HashManager(int64_t num_blocks, int64_t num_groups, std::shared_ptr<const Hasher> hasher, bool events)
      : BlockManager(num_blocks, num_groups, std::move(hasher), events),
        index_(pool_.num_blocks(), hasher_) {}

 private:
  bool hashes() const override { return true; }
  void find(Hit& hit) const override;
  std::optional<int64_t> num_free_in(const Hit& hit) const override;
  void evict(int64_t count) override;
  void publish(BlockTable& table, int64_t first, int64_t stop) override;
  void drop(BlockTable& table) override;
  void forget() override;
  bool is_cached(BlockId block) const override { return index_.is_cached(block); }
  std::optional<Digest> digest_of(BlockId block) const override;
  void check_system() const override {
    check_cached();
    index_.check();
  }

  // The entry of block i of the sequence below that of block i - 1, probably the one that is guessed.
  EntryId find_entry(Sequence& seq, int64_t i, EntryId parent, EntryId guessed) const;
  bool is_stale(const Hit& hit) const;

  HashIndex index_;
};

}  // namespace prefixkv
