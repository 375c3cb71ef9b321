// Automatic prefix caching as vLLM V1 does it: block tables over a pool, chained block hashes, a hash
// table and a free queue whose front is evicted first.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "block_pool.h"
#include "hash.h"
#include "hash_index.h"

namespace prefixkv {

// What a lookup found; valid until one of its blocks is evicted.
struct Hit {
  std::shared_ptr<Sequence> seq;
  int group;
  uint64_t epoch;  // the manager's at the lookup
  std::vector<BlockId> blocks;
  int64_t num_tokens;
};

// One sequence's logical to physical map. Only the manager writes it.
struct BlockTable {
  std::vector<BlockId> blocks;
  int64_t num_tokens = 0;           // room was asked for
  int64_t num_computed_tokens = 0;  // K/V exists
  int64_t num_cached_blocks = 0;    // leading blocks that are findable
  int group = 0;
  uint64_t partial = 0;             // what the computed tokens after the last full block were
  int32_t owner = -1;               // in the manager's owners
  bool freed = false;
  size_t index = 0;  // in the manager's list of live tables
};

struct Grant {
  std::vector<BlockId> new_blocks;
};

// Throws ConfigError unless it is from 1 to 1024.
int checked_block_size(int64_t block_size);

struct BlockInfo {
  int32_t ref_cnt;
  const Digest* block_hash;  // null if the block is blank
  std::optional<std::string> owner;
};

// Names of owners as small numbers, each kept while a table or a block refers to it.
class OwnerNames {
 public:
  int32_t add(const std::string& name);  // one more reference
  void add(int32_t owner) { count(owner, 1); }
  void drop(int32_t owner);
  const std::string& name(int32_t owner) const { return *names_[owner].name; }

 private:
  struct Entry {
    const std::string* name = nullptr;  // the key in ids_
    int64_t references = 0;
  };
  void count(int32_t owner, int64_t more) {
    if (owner >= 0) names_[owner].references += more;
  }

  std::vector<Entry> names_;
  std::vector<int32_t> unused_;
  std::unordered_map<std::string, int32_t> ids_;
};

// Not thread-safe: calls must be serialised (in Python the GIL does it).
class BlockManager {
 public:
  // Throws ConfigError when an argument is out of its limits. HashAlgorithm::kNone caches nothing.
  BlockManager(int64_t num_blocks, int64_t num_groups, std::shared_ptr<const Hasher> hasher);

  const std::shared_ptr<const Hasher>& hasher() const { return hasher_; }
  int32_t num_blocks() const { return pool_.num_blocks(); }
  int32_t num_free_blocks() const { return pool_.num_free(); }
  std::vector<BlockId> free_blocks() const { return pool_.free_blocks(); }

  Hit lookup(const std::shared_ptr<Sequence>& seq, int group) const;
  std::unique_ptr<BlockTable> table(const std::optional<std::string>& owner, int group);
  // nullopt when the pool cannot give it; nothing changed then.
  std::optional<Grant> allocate(BlockTable& table, int64_t num_tokens, const Hit* hit);
  void commit(BlockTable& table, Sequence& seq, int64_t num_computed_tokens);
  void free(BlockTable& table);
  bool reset();

  BlockInfo block(int64_t block) const;
  void check() const;

 private:
  bool caching() const { return hasher_->algorithm() != HashAlgorithm::kNone; }
  int64_t blocks_for(int64_t num_tokens) const {
    return num_tokens / hasher_->block_size() + (num_tokens % hasher_->block_size() != 0);
  }
  void check_group(int64_t group) const;
  void check_live(const BlockTable& table) const;
  void check_sequence(const Sequence& seq) const;
  void check_hit(const BlockTable& table, int64_t num_tokens, const Hit& hit) const;
  bool is_stale(const Hit& hit) const;
  void check_commit(const BlockTable& table, Sequence& seq, int64_t num_computed_tokens) const;
  BlockId take(int32_t owner);

  std::shared_ptr<const Hasher> hasher_;
  int num_groups_;
  BlockPool pool_;
  HashIndex index_;
  std::vector<int32_t> block_owner_;  // of the table that last took the block, or -1
  OwnerNames owners_;
  std::vector<BlockTable*> tables_;
  uint64_t epoch_ = 0;  // grows when a block stops being findable
};

}  // namespace prefixkv
