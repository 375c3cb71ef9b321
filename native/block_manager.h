// The seam between an engine and a cache: block tables over one pool of blocks, all-or-nothing
// allocation, copy-on-write, reservations. How content is found, who holds a block and what goes first
// is for the systems: hash_manager.h, radix_manager.h, paged_manager.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "block_pool.h"
#include "block_table.h"
#include "event_log.h"
#include "hash.h"
#include "names.h"

namespace prefixkv {

// Not thread-safe: calls must be serialised (in Python the GIL does it).
class BlockManager {
 public:
  virtual ~BlockManager() = default;
  BlockManager(const BlockManager&) = delete;
  BlockManager& operator=(const BlockManager&) = delete;

  const std::shared_ptr<const Hasher>& hasher() const { return hasher_; }
  int32_t num_blocks() const { return pool_.num_blocks(); }
  int block_size() const { return hasher_->block_size(); }
  // Blank and evictable.
  virtual int64_t num_free_blocks() const { return pool_.num_free(); }
  // Those, in the order of reuse.
  virtual std::vector<BlockId> free_blocks() const { return pool_.free_blocks(); }

  Hit lookup(const std::shared_ptr<Sequence>& seq, int group) const;
  std::unique_ptr<BlockTable> table(const std::optional<std::string>& owner, int group);
  std::unique_ptr<BlockTable> fork(const BlockTable& table);
  // nullopt when the pool cannot give it; nothing changed then.
  std::optional<Grant> allocate(BlockTable& table, int64_t num_tokens, const Hit* hit);
  void commit(BlockTable& table, const std::shared_ptr<Sequence>& seq, int64_t num_computed_tokens);
  void free(BlockTable& table);

  // In order; from the first refusal on all are refused.
  std::vector<std::optional<Grant>> allocate_many(const std::vector<BlockTable*>& tables,
                                                  const std::vector<int64_t>& num_tokens);
  // One more token of each is computed, and one is appended to each sequence.
  void commit_many(const std::vector<BlockTable*>& tables,
                   const std::vector<std::shared_ptr<Sequence>>& seqs,
                   const std::vector<Token>& token_ids);

  Pin reserve(const BlockTable& table, int64_t num_tokens);
  void release(const Pin& pin);

  bool reset();
  BlockInfo block(int64_t block) const;
  std::vector<Event> drain_events() { return events_ ? events_->drain() : std::vector<Event>(); }
  void check() const;

 protected:
  BlockManager(int64_t num_blocks, int64_t num_groups, std::shared_ptr<const Hasher> hasher,
               bool events);

  int64_t blocks_for(int64_t num_tokens) const {
    return num_tokens / block_size() + (num_tokens % block_size() != 0);
  }
  // Those of a sequence that a hit may cover: full ones, without that of its last token, whose logits
  // are needed.
  int64_t most_blocks(const Sequence& seq) const {
    return seq.num_tokens() > 0 ? (seq.num_tokens() - 1) / block_size() : 0;
  }
  // Drops a reference of each block from `first` on. Those without another holder then are blank, and
  // go to the front of the free queue as one run, the last block first.
  void drop_blank(const std::vector<BlockId>& blocks, int64_t first);

  // ---- what a system says ----

  // Whether it needs the digests of what is committed or reserved; then they are there before any
  // state is looked at, because to make them may run other calls.
  virtual bool hashes() const { return events_ != nullptr; }
  // Fills in where the longest prefix of hit.seq is, in hit.group.
  virtual void find(Hit& hit) const = 0;
  // How many blocks of the hit are free; nullopt if it is stale.
  virtual std::optional<int64_t> num_free_in(const Hit& hit) const = 0;
  // Gives an empty table the blocks of a hit that is not stale.
  virtual void take_hit(BlockTable& table, const Hit& hit);
  // Makes the first `count` blocks of the free queue blank; num_free_blocks() is at least that.
  virtual void evict(int64_t) {}
  // Blocks [first, stop) of the table have become full; there is at least one.
  virtual void publish(BlockTable& table, int64_t first, int64_t stop) = 0;
  // Holds each block of `copy`, which are the first of the table `of`, once more.
  virtual void hold(BlockTable& copy, const BlockTable& of);
  // Gives back each block of the table.
  virtual void drop(BlockTable& table) { drop_blank(table.blocks, 0); }
  // How many of so many computed tokens could be found again; throws CacheError where none ever is.
  virtual int64_t reservable(int64_t num_tokens) const { return num_tokens - num_tokens % block_size(); }
  virtual void reserved(const BlockTable&) {}
  virtual void released(const BlockTable&) {}
  // Makes every block blank, in the order of reuse; none is held.
  virtual void forget() {}
  virtual int32_t ref_cnt(BlockId block) const { return pool_.ref_cnt(block); }
  virtual bool is_cached(BlockId block) const = 0;
  virtual std::optional<Digest> digest_of(BlockId) const { return std::nullopt; }
  virtual void check_system() const {}
  // For its use: that what is full and committed is cached.
  void check_cached() const;

  std::shared_ptr<const Hasher> hasher_;
  BlockPool pool_;
  std::unique_ptr<EventLog> events_;  // null: none are asked for
  std::map<uint64_t, std::unique_ptr<BlockTable>> pins_;  // by id, so the oldest first
  uint64_t epoch_ = 0;  // grows when something stops being findable

 private:
  void check_group(int64_t group) const;
  void check_live(const BlockTable& table) const;
  void check_sequence(const Sequence& seq) const;
  void check_room(const BlockTable& table, int64_t num_tokens) const;
  int64_t check_hit(const BlockTable& table, int64_t num_tokens, const Hit& hit) const;
  void check_commit(const BlockTable& table, const Sequence& seq, int64_t num_computed_tokens,
                    int64_t num_known) const;
  void check_reserve(const BlockTable& table, int64_t num_tokens) const;
  void check_tables() const;
  void list(BlockTable& table);  // after all that may throw: what is listed must live until it is given back
  void give_back(BlockTable& table);
  std::optional<Grant> allocate_checked(BlockTable& table, int64_t num_tokens, const Hit* hit,
                                        int64_t num_free_in_hit);
  void set_owner(BlockId block, int32_t owner);

  int num_groups_;
  Names owners_;
  std::vector<int32_t> block_owner_;  // of the table that took the block last, or -1
  std::vector<BlockTable*> tables_;   // live ones, and those of pins
  uint64_t last_pin_ = 0;
  uint64_t last_call_ = 0;  // over many tables
};

enum class System { kHash, kRadix, kPaged, kOff };

// Throws ConfigError when an argument is out of its limits.
std::unique_ptr<BlockManager> make_manager(System system, int64_t num_blocks, int64_t num_groups,
                                           std::shared_ptr<const Hasher> hasher, bool events);

}  // namespace prefixkv
