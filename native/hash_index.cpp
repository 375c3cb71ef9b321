#include "hash_index.h"

#include <cstring>

#include "errors.h"

namespace prefixkv {

HashIndex::HashIndex(int32_t num_blocks, std::shared_ptr<const Hasher> hasher)
    : hasher_(std::move(hasher)),
      block_size_(hasher_->block_size()),
      slots_(num_blocks),
      digest_words_(hasher_->digest_size() / 8),
      block_entry_(num_blocks, kNone),
      next_same_(num_blocks, -1),
      prev_same_(num_blocks, -1) {
  entries_.reserve(num_blocks);
  digests_.reserve(static_cast<size_t>(num_blocks) * digest_words_);
  if (!hasher_->collision_resistant()) {
    tokens_.reserve(static_cast<size_t>(num_blocks) * hasher_->block_size());
  }
}

EntryId HashIndex::find(const Content& content) const {
  return slots_.find(tag_of(content.digest), [&](EntryId entry) { return equals(entry, content); });
}

Digest HashIndex::digest(EntryId entry) const {
  Digest digest;
  const uint64_t* words = &digests_[static_cast<size_t>(entry) * digest_words_];
  for (int i = 0; i < digest_words_; ++i) digest.word[i] = words[i];
  return digest;
}

void HashIndex::guess(const Digest* digests, int64_t count, EntryId* guesses) const {
  for (int64_t i = 0; i < count; ++i) {
    guesses[i] = slots_.find(tag_of(digests[i]), [](EntryId) { return true; });
    if (guesses[i] == kNone) continue;
    __builtin_prefetch(&entries_[guesses[i]]);
    if (!tokens_.empty()) __builtin_prefetch(&tokens_[guesses[i] * block_size_]);
  }
}

EntryId HashIndex::add(const Content& content) {
  EntryId entry;
  if (unused_.empty()) {
    entry = static_cast<EntryId>(entries_.size());
    entries_.emplace_back();
    digests_.resize(digests_.size() + digest_words_);
  } else {
    entry = unused_.back();
    unused_.pop_back();
  }
  entries_[entry] = Entry{content.parent, 0, -1, tag_of(content.digest)};
  uint64_t* words = &digests_[static_cast<size_t>(entry) * digest_words_];
  for (int i = 0; i < digest_words_; ++i) words[i] = content.digest.word[i];
  if (content.parent >= 0) ++entries_[content.parent].num_children;
  if (!hasher_->collision_resistant()) {
    const size_t at = entry * block_size_;
    if (at == tokens_.size()) {
      tokens_.insert(tokens_.end(), content.tokens, content.tokens + block_size_);
    } else {
      std::memcpy(&tokens_[at], content.tokens, block_size_ * sizeof(Token));
    }
  }
  if (!content.extra.empty()) extra_.emplace(entry, content.extra);
  slots_.insert(entries_[entry].tag, entry);
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
    slots_.erase(entries_[entry].tag, entry);
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
  if (slots_.size() != entries_.size() - unused_.size()) {
    throw CacheError("the table holds " + std::to_string(slots_.size()) + " entries, " +
                     std::to_string(entries_.size() - unused_.size()) + " are in use");
  }
  size_t listed = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!live[i]) continue;
    const EntryId entry = static_cast<EntryId>(i);
    const Entry& it = entries_[i];
    if (slots_.find(it.tag, [&](EntryId found) { return found == entry; }) != entry) {
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
