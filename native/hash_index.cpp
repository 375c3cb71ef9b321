#include "hash_index.h"

#include <algorithm>

#include "errors.h"

namespace prefixkv {

HashIndex::HashIndex(int32_t num_blocks, std::shared_ptr<const Hasher> hasher)
    : hasher_(std::move(hasher)),
      block_size_(hasher_->block_size()),
      slots_(num_blocks),
      block_entry_(num_blocks, kNone),
      next_same_(num_blocks, -1),
      prev_same_(num_blocks, -1) {
  make_room(num_blocks);
}

void HashIndex::make_room(size_t num_entries) {
  if (compares_tokens()) {
    tokens_.resize(num_entries * block_size_);
  } else {
    tails_.resize(num_entries * 2);
  }
  entries_.resize(num_entries);
}

bool HashIndex::equals(EntryId entry, const Content& content) const {
  if (compares_tokens()) return has_content(entry, content.parent, content.tokens, content.extra);
  return entries_[entry].parent == content.parent && digest(entry) == content.digest;
}

EntryId HashIndex::find(const Content& content) const {
  return slots_.find(tag_of(content.digest), [&](EntryId entry) { return equals(entry, content); });
}

Digest HashIndex::digest(EntryId entry) const {
  const uint64_t* head = entries_[entry].digest;
  if (compares_tokens()) return Digest{{head[0], head[1], 0, 0}};
  const uint64_t* tail = &tails_[2 * static_cast<size_t>(entry)];
  return Digest{{head[0], head[1], tail[0], tail[1]}};
}

EntryId HashIndex::add(const Content& content) {
  EntryId entry;
  if (unused_.empty()) {
    if (num_entries_ == entries_.size()) make_room(2 * num_entries_);
    entry = static_cast<EntryId>(num_entries_++);
  } else {
    entry = unused_.back();
    unused_.pop_back();
  }
  const uint64_t* words = content.digest.word;
  entries_[entry] = Entry{content.parent, 0, -1, kNone, {words[0], words[1]}};
  if (content.parent >= 0) {
    ++entries_[content.parent].num_children;
    entries_[content.parent].last_child = entry;
  }
  if (compares_tokens()) {
    std::copy_n(content.tokens, block_size_, &tokens_[entry * block_size_]);
  } else {
    std::copy_n(words + 2, 2, &tails_[2 * static_cast<size_t>(entry)]);
  }
  if (!content.extra.empty()) extra_.emplace(entry, content.extra);
  slots_.insert(tag_of(content.digest), entry);
  return entry;
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
  if (is_only(block)) {
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
    slots_.erase(tag_of(entries_[entry].digest[0]), entry);
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
  std::vector<int32_t> children(num_entries_, 0);
  std::vector<bool> live(num_entries_, true);
  for (const EntryId entry : unused_) live[entry] = false;
  if (slots_.size() != num_entries_ - unused_.size()) {
    throw CacheError("the table holds " + std::to_string(slots_.size()) + " entries, " +
                     std::to_string(num_entries_ - unused_.size()) + " are in use");
  }
  size_t listed = 0;
  for (size_t i = 0; i < num_entries_; ++i) {
    if (!live[i]) continue;
    const EntryId entry = static_cast<EntryId>(i);
    const Entry& it = entries_[i];
    if (slots_.find(tag_of(it.digest[0]), [&](EntryId found) { return found == entry; }) != entry) {
      fail(entry, "cannot be reached in the table");
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
  for (size_t i = 0; i < num_entries_; ++i) {
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
