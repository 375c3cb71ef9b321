#include "block_manager.h"

#include <algorithm>

#include "checks.h"
#include "errors.h"

namespace prefixkv {
namespace {

constexpr int64_t kMaxBlocks = INT32_MAX - 1;
constexpr int64_t kMaxGroups = 1 << 20;

}  // namespace

BlockManager::BlockManager(int64_t num_blocks, int64_t num_groups,
                           std::shared_ptr<const Hasher> hasher, bool events)
    : hasher_(std::move(hasher)),
      pool_(static_cast<int32_t>(checked("num_blocks", num_blocks, kMaxBlocks))),
      events_(events ? std::make_unique<EventLog>(pool_.num_blocks()) : nullptr),
      num_groups_(static_cast<int>(checked("num_groups", num_groups, kMaxGroups))),
      block_owner_(pool_.num_blocks(), -1) {}

// ---- misuse ----

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

void BlockManager::check_room(const BlockTable& table, int64_t num_tokens) const {
  check_live(table);
  if (num_tokens < table.num_tokens) {
    throw CacheError("num_tokens is " + text(num_tokens) + ", below the " + text(table.num_tokens) +
                     " that the table has room for; it is the number in all, not of more");
  }
}

// Of the hit's blocks, those that are free.
int64_t BlockManager::check_hit(const BlockTable& table, int64_t num_tokens, const Hit& hit) const {
  if (hit.seq->hasher() != hasher_) throw CacheError("the hit belongs to another cache");
  if (hit.group != table.group) {
    throw CacheError("the hit is of group " + text(hit.group) + ", the table of group " + text(table.group));
  }
  if (hit.blocks.empty()) return 0;
  if (!table.blocks.empty()) {
    throw CacheError("a hit starts a table, and this one has " +
                     text(static_cast<int64_t>(table.blocks.size())) + " blocks already");
  }
  if (num_tokens < hit.num_tokens) {
    throw CacheError("num_tokens is " + text(num_tokens) + ", below the hit's " + text(hit.num_tokens));
  }
  const std::optional<int64_t> num_free = num_free_in(hit);
  if (!num_free) {
    throw StaleHitError("a block of the hit was evicted or released since the lookup; look up again");
  }
  return *num_free;
}

void BlockManager::check_commit(const BlockTable& table, const Sequence& seq,
                                int64_t num_computed_tokens, int64_t num_known) const {
  check_live(table);
  check_sequence(seq);
  const int64_t before = table.num_computed_tokens;
  const auto refuse = [num_computed_tokens](const std::string& why) {
    throw CacheError("num_computed_tokens is " + text(num_computed_tokens) + ", " + why);
  };
  if (num_computed_tokens < before) refuse("below the " + text(before) + " committed before");
  if (num_computed_tokens > table.num_tokens) {
    refuse("above the " + text(table.num_tokens) + " tokens that the table has room for");
  }
  if (num_computed_tokens > num_known) {
    refuse("above the sequence's " + text(num_known) + " tokens");
  }
  if (before > 0 && table.seq.get() != &seq && table.seq->shared_prefix(seq) < before) {
    throw CacheError("the sequence is not the one that filled the table: they do not share its " +
                     text(before) + " computed tokens");
  }
  // Nobody else's blocks may have been written.
  const int64_t stop = num_computed_tokens > before ? blocks_for(num_computed_tokens) : 0;
  for (int64_t i = before / block_size(); i < stop; ++i) {
    if (pool_.ref_cnt(table.blocks[i]) == 1) continue;
    throw CacheError("block " + text(table.blocks[i]) + " is shared by " +
                     text(pool_.ref_cnt(table.blocks[i])) +
                     " holders; allocate again before writing, which copies it");
  }
}

void BlockManager::check_reserve(const BlockTable& table, int64_t num_tokens) const {
  check_live(table);
  if (num_tokens >= 1 && num_tokens <= table.num_computed_tokens) return;
  throw CacheError("num_tokens is " + text(num_tokens) + "; from 1 to the table's " +
                   text(table.num_computed_tokens) + " computed tokens can be reserved");
}

// ---- lookup and allocation ----

Hit BlockManager::lookup(const std::shared_ptr<Sequence>& seq, int group) const {
  check_sequence(*seq);
  check_group(group);
  Hit hit{.seq = seq, .group = group};
  find(hit);
  hit.epoch = epoch_;
  return hit;
}

std::unique_ptr<BlockTable> BlockManager::table(const std::optional<std::string>& owner, int group) {
  check_group(group);
  auto table = std::make_unique<BlockTable>();
  table->group = group;
  if (owner) table->owner = owners_.add(*owner);
  list(*table);
  return table;
}

std::unique_ptr<BlockTable> BlockManager::fork(const BlockTable& table) {
  check_live(table);
  auto child = std::make_unique<BlockTable>(table);
  child->owns_leaf = false;
  owners_.add(child->owner);
  hold(*child, table);
  list(*child);
  return child;
}

std::optional<Grant> BlockManager::allocate(BlockTable& table, int64_t num_tokens, const Hit* hit) {
  check_room(table, num_tokens);
  const int64_t num_free = hit != nullptr ? check_hit(table, num_tokens, *hit) : 0;
  return allocate_checked(table, num_tokens, hit != nullptr && hit->blocks.empty() ? nullptr : hit,
                          num_free);
}

std::optional<Grant> BlockManager::allocate_checked(BlockTable& table, int64_t num_tokens,
                                                    const Hit* hit, int64_t num_free_in_hit) {
  const int64_t computed = hit != nullptr ? hit->num_tokens : table.num_computed_tokens;
  const std::vector<BlockId>& have = hit != nullptr ? hit->blocks : table.blocks;
  const int64_t num_have = static_cast<int64_t>(have.size()), first = computed / block_size();
  const int32_t own = hit != nullptr ? 0 : 1;
  int64_t need = blocks_for(num_tokens) - num_have;
  const bool writes = num_tokens > computed;
  for (int64_t i = first; writes && i < num_have; ++i) need += pool_.ref_cnt(have[i]) > own;
  if (need > num_free_blocks() - num_free_in_hit) return std::nullopt;

  Grant grant;
  grant.new_blocks.reserve(need);  // before anything changes, because there may be no memory for it
  if (hit != nullptr) {
    take_hit(table, *hit);
    table.num_computed_tokens = computed;
    table.seq = hit->seq;
  }
  evict(need);
  for (int64_t i = 0; i < need; ++i) {
    const BlockId block = pool_.front();
    pool_.touch(block);
    set_owner(block, table.owner);
    grant.new_blocks.push_back(block);
  }
  // Own blocks for those that others hold too; the first may have K/V that this table needs, the
  // later ones are room that nobody has written for it.
  auto next = grant.new_blocks.begin();
  for (int64_t i = first; writes && i < num_have; ++i) {
    BlockId& block = table.blocks[i];
    if (pool_.ref_cnt(block) == 1) continue;
    pool_.drop(block);
    if (i * block_size() < computed) grant.copies.emplace_back(block, *next);
    block = *next++;
  }
  table.blocks.insert(table.blocks.end(), next, grant.new_blocks.end());
  grant.new_blocks.erase(grant.new_blocks.begin(),
                         grant.new_blocks.begin() + static_cast<ptrdiff_t>(grant.copies.size()));
  table.num_tokens = num_tokens;
  return grant;
}

void BlockManager::set_owner(BlockId block, int32_t owner) {
  owners_.add(owner);
  owners_.drop(block_owner_[block]);
  block_owner_[block] = owner;
}

void BlockManager::take_hit(BlockTable& table, const Hit& hit) {
  for (const BlockId block : hit.blocks) pool_.touch(block);
  table.blocks = hit.blocks;
}

// ---- commit and free ----

void BlockManager::commit(BlockTable& table, const std::shared_ptr<Sequence>& seq,
                          int64_t num_computed_tokens) {
  check_sequence(*seq);
  const int64_t known = std::min(num_computed_tokens, seq->num_tokens());
  if (hashes() && known > 0) seq->digests(known / block_size());
  check_commit(table, *seq, num_computed_tokens, seq->num_tokens());
  const int64_t first = table.num_computed_tokens / block_size();
  const int64_t stop = num_computed_tokens / block_size();
  table.num_computed_tokens = num_computed_tokens;
  table.seq = seq;
  if (first < stop) publish(table, first, stop);
}

void BlockManager::free(BlockTable& table) {
  check_live(table);
  give_back(table);
}

void BlockManager::give_back(BlockTable& table) {
  drop(table);
  table.blocks.clear();
  table.seq.reset();
  table.freed = true;
  tables_[table.index] = tables_.back();
  tables_[table.index]->index = table.index;
  tables_.pop_back();
  owners_.drop(table.owner);
}

void BlockManager::list(BlockTable& table) {
  table.index = tables_.size();
  tables_.push_back(&table);
}

void BlockManager::hold(BlockTable& copy, const BlockTable&) {
  for (const BlockId block : copy.blocks) pool_.touch(block);
}

void BlockManager::drop_blank(const std::vector<BlockId>& blocks, int64_t first) {
  const BlockId old_front = pool_.front();
  for (int64_t i = static_cast<int64_t>(blocks.size()) - 1; i >= first; --i) {
    if (pool_.drop(blocks[i])) pool_.push_before(blocks[i], old_front);
  }
}

// ---- many tables at once ----

std::vector<std::optional<Grant>> BlockManager::allocate_many(const std::vector<BlockTable*>& tables,
                                                              const std::vector<int64_t>& num_tokens) {
  check_as_many("tables", tables.size(), "num_tokens", num_tokens.size());
  ++last_call_;
  for (size_t i = 0; i < tables.size(); ++i) {
    check_room(*tables[i], num_tokens[i]);
    if (std::exchange(tables[i]->mark, last_call_) == last_call_) {
      throw CacheError("table " + text(static_cast<int64_t>(i)) + " is listed twice");
    }
  }
  std::vector<std::optional<Grant>> grants(tables.size());
  for (size_t i = 0; i < tables.size(); ++i) {
    grants[i] = allocate_checked(*tables[i], num_tokens[i], nullptr, 0);
    if (!grants[i]) break;
  }
  return grants;
}

void BlockManager::commit_many(const std::vector<BlockTable*>& tables,
                               const std::vector<std::shared_ptr<Sequence>>& seqs,
                               const std::vector<Token>& token_ids) {
  check_as_many("tables", tables.size(), "seqs", seqs.size());
  check_as_many("tables", tables.size(), "token_ids", token_ids.size());
  check_not_negative("token id", token_ids);
  ++last_call_;
  for (size_t i = 0; i < tables.size(); ++i) {
    check_commit(*tables[i], *seqs[i], tables[i]->num_computed_tokens + 1, seqs[i]->num_tokens() + 1);
    const bool table_twice = std::exchange(tables[i]->mark, last_call_) == last_call_;
    if (table_twice || std::exchange(seqs[i]->mark, last_call_) == last_call_) {
      throw CacheError((table_twice ? "table " : "sequence ") + text(static_cast<int64_t>(i)) +
                       " is listed twice");
    }
  }
  for (size_t i = 0; i < tables.size(); ++i) seqs[i]->mutable_tokens().push_back(token_ids[i]);
  for (size_t i = 0; i < tables.size(); ++i) {
    commit(*tables[i], seqs[i], tables[i]->num_computed_tokens + 1);
  }
}

// ---- reservations ----

Pin BlockManager::reserve(const BlockTable& table, int64_t num_tokens) {
  check_reserve(table, num_tokens);
  if (hashes()) {
    const std::shared_ptr<Sequence> seq = table.seq;
    seq->digests(num_tokens / block_size());
    check_reserve(table, num_tokens);
  }
  auto pin = std::make_unique<BlockTable>();
  pin->num_tokens = pin->num_computed_tokens = reservable(num_tokens);
  pin->blocks.assign(table.blocks.begin(), table.blocks.begin() + blocks_for(pin->num_tokens));
  pin->seq = table.seq;
  pin->group = table.group;
  Pin made{++last_pin_, pin->num_tokens, pin->blocks, pin->group};
  hold(*pin, table);
  BlockTable& kept = *pins_.emplace(made.id, std::move(pin)).first->second;
  list(kept);
  reserved(kept);
  return made;
}

void BlockManager::release(const Pin& pin) {
  const auto found = pins_.find(pin.id);
  if (found == pins_.end()) throw CacheError("the pin was released already");
  released(*found->second);
  give_back(*found->second);
  pins_.erase(found);
}

// ---- the whole cache ----

bool BlockManager::reset() {
  if (num_free_blocks() != num_blocks()) return false;
  forget();
  ++epoch_;
  if (events_) events_->cleared();
  return true;
}

BlockInfo BlockManager::block(int64_t block) const {
  if (block < 0 || block >= num_blocks()) {
    throw CacheError("block is " + text(block) + "; this cache has blocks 0 to " + text(num_blocks() - 1));
  }
  const BlockId id = static_cast<BlockId>(block);
  const int32_t owner = block_owner_[id];
  return {ref_cnt(id), is_cached(id), digest_of(id),
          owner < 0 ? std::nullopt : std::optional<std::string>(owners_.name(owner))};
}

void BlockManager::check_tables() const {
  std::vector<int32_t> holders(num_blocks(), 0);
  for (size_t i = 0; i < tables_.size(); ++i) {
    const BlockTable& table = *tables_[i];
    if (table.index != i || table.freed) throw CacheError("the list of live tables is broken");
    if (static_cast<int64_t>(table.blocks.size()) != blocks_for(table.num_tokens)) {
      throw CacheError("a table has more or fewer blocks than its tokens need");
    }
    if (table.num_computed_tokens > table.num_tokens) {
      throw CacheError("a table has more computed tokens than tokens");
    }
    if (table.num_computed_tokens > 0 && table.seq == nullptr) {
      throw CacheError("a table has computed tokens of no sequence");
    }
    for (const BlockId block : table.blocks) ++holders[block];
  }
  for (BlockId block = 0; block < num_blocks(); ++block) {
    if (holders[block] == ref_cnt(block)) continue;
    throw CacheError("block " + text(block) + " has ref_cnt " + text(ref_cnt(block)) + ", but " +
                     text(holders[block]) + " tables and pins hold it");
  }
}

void BlockManager::check_cached() const {
  for (const BlockTable* table : tables_) {
    const int64_t full = table->num_computed_tokens / block_size();
    for (int64_t i = 0; i < full; ++i) {
      if (!is_cached(table->blocks[i])) {
        throw CacheError("block " + text(table->blocks[i]) + " is full and committed, but blank");
      }
    }
  }
}

void BlockManager::check() const {
  check_tables();
  std::vector<bool> seen(num_blocks(), false);
  const std::vector<BlockId> free = free_blocks();
  for (const BlockId block : free) {
    if (ref_cnt(block) != 0) throw CacheError("block " + text(block) + " is free and held");
    if (seen[block]) throw CacheError("block " + text(block) + " is free twice");
    seen[block] = true;
  }
  int64_t unheld = 0;
  for (BlockId block = 0; block < num_blocks(); ++block) unheld += ref_cnt(block) == 0;
  if (unheld != static_cast<int64_t>(free.size()) || unheld != num_free_blocks()) {
    throw CacheError(text(unheld) + " blocks have no holder, " + text(static_cast<int64_t>(free.size())) +
                     " are free, num_free_blocks is " + text(num_free_blocks()));
  }
  pool_.check();
  check_system();
}

}  // namespace prefixkv
