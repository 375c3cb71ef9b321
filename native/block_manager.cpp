#include "block_manager.h"

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace prefixkv {
namespace {

constexpr int64_t kMaxBlocks = INT32_MAX - 1;
constexpr int64_t kMaxBlockSize = 1024;
constexpr int64_t kMaxGroups = 1 << 20;

std::string text(int64_t value) { return std::to_string(value); }

// Stands for the tokens of a block that is not full, and for what else makes its K/V.
uint64_t partial_hash(const Sequence& seq, int64_t num_computed_tokens) {
  const int64_t block = num_computed_tokens / seq.hasher()->block_size();
  const int64_t start = block * seq.hasher()->block_size();
  if (start == num_computed_tokens) return 0;
  return seq.hasher()->hash_part(seq.tokens() + start, num_computed_tokens - start,
                                 seq.extra_cbor(block));
}

int64_t checked(const char* name, int64_t value, int64_t most) {
  if (value < 1 || value > most) {
    throw ConfigError(std::string(name) + " is " + text(value) + "; it must be from 1 to " + text(most));
  }
  return value;
}

}  // namespace

int checked_block_size(int64_t block_size) {
  return static_cast<int>(checked("block_size", block_size, kMaxBlockSize));
}

int32_t OwnerNames::add(const std::string& name) {
  int32_t owner = unused_.empty() ? static_cast<int32_t>(names_.size()) : unused_.back();
  const auto [it, added] = ids_.try_emplace(name, owner);
  if (!added) {
    owner = it->second;
  } else if (unused_.empty()) {
    names_.push_back({&it->first, 0});
  } else {
    unused_.pop_back();
    names_[owner].name = &it->first;
  }
  count(owner, 1);
  return owner;
}

void OwnerNames::drop(int32_t owner) {
  count(owner, -1);
  if (owner < 0 || names_[owner].references > 0) return;
  ids_.erase(ids_.find(*names_[owner].name));
  names_[owner].name = nullptr;
  unused_.push_back(owner);
}

BlockManager::BlockManager(int64_t num_blocks, int64_t num_groups,
                           std::shared_ptr<const Hasher> hasher)
    : hasher_(std::move(hasher)),
      num_groups_(static_cast<int>(checked("num_groups", num_groups, kMaxGroups))),
      pool_(static_cast<int32_t>(checked("num_blocks", num_blocks, kMaxBlocks))),
      index_(pool_.num_blocks(), hasher_),
      block_owner_(pool_.num_blocks(), -1) {}

void BlockManager::check_group(int64_t group) const {
  if (group < 0 || group >= num_groups_) {
    throw CacheError("group is " + text(group) + "; this cache has groups 0 to " + text(num_groups_ - 1));
  }
}

void BlockManager::check_live(const BlockTable& table) const {
  if (table.freed) throw CacheError("the table was freed; make another one with cache.table()");
  if (table.index >= tables_.size() || tables_[table.index] != &table) {
    throw CacheError("the table belongs to another cache");
  }
}

void BlockManager::check_sequence(const Sequence& seq) const {
  if (seq.hasher() != hasher_) throw CacheError("the sequence belongs to another cache");
}

Hit BlockManager::lookup(const std::shared_ptr<Sequence>& seq, int group) const {
  check_sequence(*seq);
  check_group(group);
  Hit hit{seq, group, epoch_, {}, 0};
  const int block_size = hasher_->block_size();
  const int64_t most = caching() && seq->num_tokens() > 0 ? (seq->num_tokens() - 1) / block_size : 0;
  if (most == 0) return hit;
  // Hashes are made a stretch ahead of the walk, so that a miss early in a long prompt is cheap.
  constexpr int64_t kAhead = 32;
  EntryId parent = HashIndex::root(group);
  for (int64_t start = 0; start < most; start += kAhead) {
    const int64_t stop = std::min(start + kAhead, most);
    const Digest* digests = seq->digests(stop);
    for (int64_t i = start; i < stop; ++i) index_.prefetch(digests[i]);
    for (int64_t i = start; i < stop; ++i) {
      const std::string extra = seq->extra_cbor(i);
      parent = index_.find({parent, digests[i], seq->tokens() + i * block_size, extra});
      const BlockId block = parent == HashIndex::kNone ? -1 : index_.block_of(parent);
      if (block < 0) return hit;
      hit.blocks.push_back(block);
      hit.num_tokens += block_size;
    }
  }
  return hit;
}

std::unique_ptr<BlockTable> BlockManager::table(const std::optional<std::string>& owner, int group) {
  check_group(group);
  auto table = std::make_unique<BlockTable>();
  table->group = group;
  if (owner) table->owner = owners_.add(*owner);
  table->index = tables_.size();
  tables_.push_back(table.get());
  return table;
}

bool BlockManager::is_stale(const Hit& hit) const {
  if (hit.epoch == epoch_) return false;
  const int64_t count = static_cast<int64_t>(hit.blocks.size());
  const Digest* digests = hit.seq->digests(count);
  EntryId parent = HashIndex::root(hit.group);
  for (int64_t i = 0; i < count; ++i) {
    const std::string extra = hit.seq->extra_cbor(i);
    const Token* tokens = hit.seq->tokens() + i * hasher_->block_size();
    parent = index_.find({parent, digests[i], tokens, extra});
    if (parent == HashIndex::kNone || index_.entry_of(hit.blocks[i]) != parent) return true;
  }
  return false;
}

void BlockManager::check_hit(const BlockTable& table, int64_t num_tokens, const Hit& hit) const {
  if (hit.seq->hasher() != hasher_) throw CacheError("the hit belongs to another cache");
  if (hit.group != table.group) {
    throw CacheError("the hit is of group " + text(hit.group) + ", the table of group " + text(table.group));
  }
  if (hit.blocks.empty()) return;
  if (!table.blocks.empty()) {
    throw CacheError("a hit starts a table, and this one has " + text(table.blocks.size()) +
                     " blocks already");
  }
  if (num_tokens < hit.num_tokens) {
    throw CacheError("num_tokens is " + text(num_tokens) + ", below the hit's " + text(hit.num_tokens));
  }
  if (is_stale(hit)) {
    throw StaleHitError("a block of the hit was evicted since the lookup; look up again");
  }
}

BlockId BlockManager::take(int32_t owner) {
  const BlockId block = pool_.front();
  pool_.touch(block);
  if (index_.is_cached(block)) {
    index_.remove_block(block);
    ++epoch_;
  }
  owners_.add(owner);
  owners_.drop(block_owner_[block]);
  block_owner_[block] = owner;
  return block;
}

std::optional<Grant> BlockManager::allocate(BlockTable& table, int64_t num_tokens, const Hit* hit) {
  check_live(table);
  if (num_tokens < table.num_tokens) {
    throw CacheError("num_tokens is " + text(num_tokens) + ", below the " + text(table.num_tokens) +
                     " that the table has room for; it is the number in all, not of more");
  }
  if (hit != nullptr) check_hit(table, num_tokens, *hit);
  const bool takes_hit = hit != nullptr && !hit->blocks.empty();
  const int64_t from_hit = takes_hit ? static_cast<int64_t>(hit->blocks.size()) : 0;
  const int64_t have = static_cast<int64_t>(table.blocks.size());
  const int64_t more = std::max<int64_t>(blocks_for(num_tokens) - have - from_hit, 0);
  int64_t available = pool_.num_free();
  if (more > available) return std::nullopt;
  if (takes_hit) {
    for (const BlockId block : hit->blocks) available -= pool_.ref_cnt(block) == 0;
    if (more > available) return std::nullopt;
    table.blocks.reserve(from_hit + more);
    for (const BlockId block : hit->blocks) pool_.touch(block);
    table.blocks = hit->blocks;
    table.num_computed_tokens = hit->num_tokens;
    table.num_cached_blocks = from_hit;
  }
  Grant grant;
  grant.new_blocks.reserve(more);
  for (int64_t i = 0; i < more; ++i) grant.new_blocks.push_back(take(table.owner));
  table.blocks.insert(table.blocks.end(), grant.new_blocks.begin(), grant.new_blocks.end());
  table.num_tokens = num_tokens;
  return grant;
}

void BlockManager::check_commit(const BlockTable& table, Sequence& seq,
                                int64_t num_computed_tokens) const {
  check_live(table);
  check_sequence(seq);
  const auto refuse = [num_computed_tokens](const std::string& why) {
    throw CacheError("num_computed_tokens is " + text(num_computed_tokens) + ", " + why);
  };
  if (num_computed_tokens < table.num_computed_tokens) {
    refuse("below the " + text(table.num_computed_tokens) + " committed before");
  }
  if (num_computed_tokens > table.num_tokens) {
    refuse("above the " + text(table.num_tokens) + " tokens that the table has room for");
  }
  if (num_computed_tokens > seq.num_tokens()) {
    refuse("above the sequence's " + text(seq.num_tokens()) + " tokens");
  }
  if (!caching()) return;
  // The chain makes the last cached block's hash stand for everything before it.
  const int64_t last = table.num_cached_blocks - 1;
  const bool same_blocks =
      last < 0 || index_.digest(index_.entry_of(table.blocks[last])) == seq.digests(last + 1)[last];
  if (!same_blocks || table.partial != partial_hash(seq, table.num_computed_tokens)) {
    throw CacheError("the sequence is not the one that filled the table");
  }
}

void BlockManager::commit(BlockTable& table, Sequence& seq, int64_t num_computed_tokens) {
  check_commit(table, seq, num_computed_tokens);
  table.num_computed_tokens = num_computed_tokens;
  if (!caching()) return;
  table.partial = partial_hash(seq, num_computed_tokens);
  const int block_size = hasher_->block_size();
  const int64_t first = table.num_cached_blocks, full = num_computed_tokens / block_size;
  if (first >= full) return;
  const Digest* digests = seq.digests(full);
  EntryId parent = first == 0 ? HashIndex::root(table.group) : index_.entry_of(table.blocks[first - 1]);
  for (int64_t i = first; i < full; ++i) {
    const std::string extra = seq.extra_cbor(i);
    parent = index_.find_or_add({parent, digests[i], seq.tokens() + i * block_size, extra});
    index_.add_block(parent, table.blocks[i]);
  }
  table.num_cached_blocks = full;
}

void BlockManager::free(BlockTable& table) {
  check_live(table);
  // Blank blocks go to the front as one run, the table's last block first; cached ones to the back.
  BlockId old_front = pool_.front();
  for (auto block = table.blocks.rbegin(); block != table.blocks.rend(); ++block) {
    if (!pool_.drop(*block)) continue;
    if (index_.is_cached(*block)) {
      pool_.push_back(*block);
      if (old_front == pool_.num_blocks()) old_front = *block;
    } else {
      pool_.push_before(*block, old_front);
    }
  }
  table.blocks.clear();
  table.freed = true;
  owners_.drop(table.owner);
  tables_[table.index] = tables_.back();
  tables_[table.index]->index = table.index;
  tables_.pop_back();
}

bool BlockManager::reset() {
  if (pool_.num_free() != pool_.num_blocks()) return false;
  for (BlockId block = 0; block < pool_.num_blocks(); ++block) {
    if (index_.is_cached(block)) index_.remove_block(block);
  }
  ++epoch_;
  return true;
}

BlockInfo BlockManager::block(int64_t block) const {
  if (block < 0 || block >= pool_.num_blocks()) {
    throw CacheError("block is " + text(block) + "; this cache has blocks 0 to " +
                     text(pool_.num_blocks() - 1));
  }
  const BlockId id = static_cast<BlockId>(block);
  const Digest* digest = index_.is_cached(id) ? &index_.digest(index_.entry_of(id)) : nullptr;
  const int32_t owner = block_owner_[id];
  return {pool_.ref_cnt(id), digest,
          owner < 0 ? std::nullopt : std::optional<std::string>(owners_.name(owner))};
}

void BlockManager::check() const {
  std::vector<int32_t> holders(pool_.num_blocks(), 0);
  for (size_t i = 0; i < tables_.size(); ++i) {
    const BlockTable& table = *tables_[i];
    if (table.index != i || table.freed) throw CacheError("the list of live tables is broken");
    if (static_cast<int64_t>(table.blocks.size()) < blocks_for(table.num_tokens)) {
      throw CacheError("a table has fewer blocks than its tokens need");
    }
    if (table.num_computed_tokens > table.num_tokens) {
      throw CacheError("a table has more computed tokens than tokens");
    }
    for (const BlockId block : table.blocks) ++holders[block];
    for (int64_t b = 0; b < table.num_cached_blocks; ++b) {
      if (!index_.is_cached(table.blocks[b])) {
        throw CacheError("block " + text(table.blocks[b]) + " is held as cached but is blank");
      }
    }
  }
  for (BlockId block = 0; block < pool_.num_blocks(); ++block) {
    if (holders[block] != pool_.ref_cnt(block)) {
      throw CacheError("block " + text(block) + " has ref_cnt " + text(pool_.ref_cnt(block)) + ", but " +
                       text(holders[block]) + " tables hold it");
    }
  }
  pool_.check();
  index_.check();
}

}  // namespace prefixkv
