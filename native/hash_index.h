// From a block's content to the blocks that hold its K/V.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "block_pool.h"
#include "hash.h"
#include "huge_pages.h"
#include "slot_table.h"

namespace prefixkv {

using EntryId = int32_t;

// One entry for each content, that is for each (parent entry, tokens, extra keys). It lives while a
// block holds that content or a longer content extends it. Blocks with equal content are listed in
// the order in which they were added; the first serves hits.
//
// A hash table finds entries by digest. With xxh3 a digest only narrows the search: parent, tokens and
// extra keys are compared too, so a collision cannot serve another's K/V. Parents make groups differ:
// group g's first blocks have the parent root(g).
class HashIndex {
 public:
  static constexpr EntryId kNone = SlotTable::kNone;
  static EntryId root(int group) { return -1 - group; }

  HashIndex(int32_t num_blocks, std::shared_ptr<const Hasher> hasher);

  // What is looked up: the content of one block.
  struct Content {
    EntryId parent;
    const Digest& digest;
    const Token* tokens;
    const std::string& extra;
  };

  EntryId find(const Content& content) const;
  // Must not be there.
  EntryId add(const Content& content);

  // Brings the first cache line of a later find.
  void prefetch(const Digest& digest) const { slots_.prefetch(tag_of(digest)); }
  // Whether contents are compared, and not only their digests.
  bool compares_tokens() const { return !hasher_->collision_resistant(); }
  // The last entry that was added below this one, which may be used no more or for something else.
  EntryId last_child(EntryId entry) const { return entry < 0 ? kNone : entries_[entry].last_child; }
  // Whether an entry has this content; false for one that is used no more, and where digests tell.
  bool has_content(EntryId entry, EntryId parent, const Token* tokens, const std::string& extra) const;

  Digest digest(EntryId entry) const;
  // The block that serves hits, or -1.
  BlockId block_of(EntryId entry) const { return entries_[entry].first_block; }
  // The entry of a cached block, or kNone of a blank one.
  EntryId entry_of(BlockId block) const { return block_entry_[block]; }
  bool is_cached(BlockId block) const { return block_entry_[block] != kNone; }
  // Whether no other block has the content of this cached one.
  bool is_only(BlockId block) const { return next_same_[block] == block; }

  // Makes a blank block findable as the entry's content.
  void add_block(EntryId entry, BlockId block);
  // Makes a cached block blank; entries that nothing refers to any more go with it.
  void remove_block(BlockId block);

  void check() const;

 private:
  struct Entry {
    EntryId parent = kNone;
    int32_t num_children = 0;
    BlockId first_block = -1;
    EntryId last_child = kNone;
    uint64_t digest[2] = {};  // its first words; xxh3 has no more
  };
  // Not to be foreseen, so that nobody can choose prompts that crowd one part of the table: SHA-256, which
  // has no seed, can be tried out at home.
  uint32_t tag_of(const Digest& digest) const { return tag_of(digest.word[0]); }
  uint32_t tag_of(uint64_t word) const {
    return static_cast<uint32_t>(((word ^ hasher_->seed()) * 0x9e3779b97f4a7c15u) >> 32);
  }
  bool equals(EntryId entry, const Content& content) const;
  void make_room(size_t num_entries);
  void release(EntryId entry);

  std::shared_ptr<const Hasher> hasher_;
  size_t block_size_;
  SlotTable slots_;
  HugeVector<Entry> entries_;     // room for them
  size_t num_entries_ = 0;        // the first of these, used or unused
  HugeVector<uint64_t> tails_;    // last words of the digest of entry e at 2 * e; empty for xxh3
  std::vector<EntryId> unused_;   // indices in entries_ free for reuse
  HugeVector<Token> tokens_;      // of entry e at e * block_size; empty if digests are proof enough
  std::unordered_map<EntryId, std::string> extra_;  // of the few entries that have extra keys
  HugeVector<EntryId> block_entry_;
  // Blocks of one entry form a ring; its first block's predecessor is its last.
  HugeVector<BlockId> next_same_;
  HugeVector<BlockId> prev_same_;
};

// Here, because a lookup does it once a block.
inline bool HashIndex::has_content(EntryId entry, EntryId parent, const Token* tokens,
                                   const std::string& extra) const {
  if (entries_[entry].parent != parent || tokens_.empty()) return false;
  const Token* own = &tokens_[entry * block_size_];
  uint64_t differ = 0;
  size_t i = 0;
  for (; i + 8 <= block_size_; i += 8) {
    uint64_t a[4], b[4];
    std::memcpy(a, own + i, sizeof a);
    std::memcpy(b, tokens + i, sizeof b);
    differ |= (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]);
  }
  for (; i < block_size_; ++i) differ |= static_cast<uint32_t>(own[i] ^ tokens[i]);
  if (differ != 0) return false;
  if (extra_.empty()) return extra.empty();
  const auto found = extra_.find(entry);
  return found == extra_.end() ? extra.empty() : found->second == extra;
}

}  // namespace prefixkv
