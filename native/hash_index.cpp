#include "hash_index.h"

#include <bit>
#include <cstring>

#include "errors.h"

namespace prefixkv {

HashIndex::HashIndex(int32_t num_blocks, std::shared_ptr<const Hasher> hasher)
    : hasher_(std::move(hasher)),
      slots_(std::bit_ceil(2 * static_cast<size_t>(num_blocks) + 2), Slot{0, kNone}),
      slot_mask_(slots_.size() - 1),
      block_entry_(num_blocks, kNone),
      next_same_(num_blocks, -1),
      prev_same_(num_blocks, -1) {
  entries_.reserve(num_blocks);
  if (!hasher_->collision_resistant()) {
    tokens_.reserve(static_cast<size_t>(num_blocks) * hasher_->block_size());
  }
}

bool HashIndex::equals(EntryId entry, const Content& content) const {
  const Entry& it = entries_[entry];
  if (it.parent != content.parent || it.digest != content.digest) return false;
  if (hasher_->collision_resistant()) return true;
  const size_t block_size = hasher_->block_size();
  if (std::memcmp(&tokens_[entry * block_size], content.tokens, block_size * sizeof(Token)) != 0) {
    return false;
  }
  if (extra_.empty()) return content.extra.empty();
  const auto found = extra_.find(entry);
  return found == extra_.end() ? content.extra.empty() : found->second == content.extra;
}

EntryId HashIndex::find(const Content& content) const {
  const uint32_t tag = tag_of(content.digest);
  for (size_t slot = home(tag);; slot = (slot + 1) & slot_mask_) {
    const Slot& it = slots_[slot];
    if (it.entry == kNone) return kNone;
    if (it.tag == tag && equals(it.entry, content)) return it.entry;
  }
}

EntryId HashIndex::find_or_add(const Content& content) {
  const EntryId found = find(content);
  return found != kNone ? found : add(content);
}

EntryId HashIndex::add(const Content& content) {
  EntryId entry;
  if (unused_.empty()) {
    entry = static_cast<EntryId>(entries_.size());
    entries_.emplace_back();
  } else {
    entry = unused_.back();
    unused_.pop_back();
  }
  entries_[entry] = Entry{content.digest, content.parent, 0, -1, tag_of(content.digest)};
  if (content.parent >= 0) ++entries_[content.parent].num_children;
  if (!hasher_->collision_resistant()) {
    const size_t block_size = hasher_->block_size(), at = entry * block_size;
    if (at == tokens_.size()) {
      tokens_.insert(tokens_.end(), content.tokens, content.tokens + block_size);
    } else {
      std::memcpy(&tokens_[at], content.tokens, block_size * sizeof(Token));
    }
  }
  if (!content.extra.empty()) extra_.emplace(entry, content.extra);
  // Entries outnumber blocks only where a content outlives its prefix, so this is rare.
  if (2 * (entries_.size() - unused_.size()) > slots_.size()) grow_slots();
  insert_slot(entries_[entry].tag, entry);
  return entry;
}

void HashIndex::insert_slot(uint32_t tag, EntryId entry) {
  size_t slot = home(tag);
  while (slots_[slot].entry != kNone) slot = (slot + 1) & slot_mask_;
  slots_[slot] = Slot{tag, entry};
}

void HashIndex::grow_slots() {
  std::vector<Slot> old(2 * slots_.size(), Slot{0, kNone});
  old.swap(slots_);
  slot_mask_ = slots_.size() - 1;
  for (const Slot& slot : old) {
    if (slot.entry != kNone) insert_slot(slot.tag, slot.entry);
  }
}

void HashIndex::erase_slot(EntryId entry) {
  size_t hole = home(entries_[entry].tag);
  while (slots_[hole].entry != entry) hole = (hole + 1) & slot_mask_;
  // Shift back each later slot of the run that a probe from its home would no longer reach.
  for (size_t slot = (hole + 1) & slot_mask_; slots_[slot].entry != kNone;
       slot = (slot + 1) & slot_mask_) {
    const size_t distance = (slot - home(slots_[slot].tag)) & slot_mask_;
    if (distance >= ((slot - hole) & slot_mask_)) {
      slots_[hole] = slots_[slot];
      hole = slot;
    }
  }
  slots_[hole].entry = kNone;
}

void HashIndex::add_block(EntryId entry, BlockId block) {
  block_entry_[block] = entry;
  const BlockId first = entries_[entry].first_block;
  if (first < 0) {
    entries_[entry].first_block = block;
    next_same_[block] = prev_same_[block] = block;
    return;
  }
  const BlockId last = prev_same_[first];
  next_same_[last] = block, prev_same_[block] = last;
  next_same_[block] = first, prev_same_[first] = block;
}

void HashIndex::remove_block(BlockId block) {
  const EntryId entry = block_entry_[block];
  block_entry_[block] = kNone;
  if (next_same_[block] == block) {
    entries_[entry].first_block = -1;
    release(entry);
    return;
  }
  next_same_[prev_same_[block]] = next_same_[block];
  prev_same_[next_same_[block]] = prev_same_[block];
  if (entries_[entry].first_block == block) entries_[entry].first_block = next_same_[block];
}

void HashIndex::release(EntryId entry) {
  while (entry >= 0 && entries_[entry].first_block < 0 && entries_[entry].num_children == 0) {
    erase_slot(entry);
    if (!extra_.empty()) extra_.erase(entry);
    unused_.push_back(entry);
    const EntryId parent = entries_[entry].parent;
    entries_[entry].parent = kNone;
    if (parent >= 0) --entries_[parent].num_children;
    entry = parent;
  }
}

void HashIndex::check() const {
  const auto fail = [](EntryId entry, const char* what) {
    throw CacheError("entry " + std::to_string(entry) + " " + what);
  };
  std::vector<int32_t> children(entries_.size(), 0);
  std::vector<bool> live(entries_.size(), true);
  for (const EntryId entry : unused_) live[entry] = false;
  size_t used_slots = 0;
  for (const Slot& slot : slots_) {
    if (slot.entry == kNone) continue;
    ++used_slots;
    if (!live[slot.entry]) fail(slot.entry, "is in the table but unused");
  }
  if (used_slots != entries_.size() - unused_.size()) {
    throw CacheError("the table holds " + std::to_string(used_slots) + " entries, " +
                     std::to_string(entries_.size() - unused_.size()) + " are in use");
  }
  size_t listed = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!live[i]) continue;
    const EntryId entry = static_cast<EntryId>(i);
    const Entry& it = entries_[i];
    size_t slot = home(it.tag);
    while (slots_[slot].entry != entry) {
      if (slots_[slot].entry == kNone) fail(entry, "cannot be reached in the table");
      slot = (slot + 1) & slot_mask_;
    }
    if (it.parent >= 0) {
      if (!live[it.parent]) fail(entry, "has a parent that is unused");
      ++children[it.parent];
    }
    BlockId block = it.first_block;
    if (block < 0) continue;
    do {
      if (block_entry_[block] != entry) fail(entry, "lists a block of another entry");
      if (prev_same_[next_same_[block]] != block) fail(entry, "has a broken block ring");
      ++listed;
      block = next_same_[block];
    } while (block != it.first_block);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!live[i]) continue;
    if (children[i] != entries_[i].num_children) fail(static_cast<EntryId>(i), "miscounts its children");
    if (entries_[i].first_block < 0 && children[i] == 0) {
      fail(static_cast<EntryId>(i), "has neither block nor child");
    }
  }
  size_t cached = 0;
  for (const EntryId entry : block_entry_) cached += entry != kNone;
  if (cached != listed) throw CacheError("a cached block is not listed by its entry");
}

}  // namespace prefixkv
