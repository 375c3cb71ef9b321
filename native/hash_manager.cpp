#include "hash_manager.h"

#include <algorithm>

namespace prefixkv {

EntryId HashManager::find_entry(const Sequence& seq, const Digest& digest, int64_t i,
                                EntryId parent) const {
  const std::string extra = seq.extra_cbor(i);
  return index_.find({parent, digest, seq.tokens() + i * block_size(), extra});
}

void HashManager::find(Hit& hit) const {
  const int64_t most = most_blocks(*hit.seq);
  // Hashes are made a stretch ahead of the walk, so that a miss early in a long prompt is cheap. Those
  // that Python makes come all before it, because other calls may run meanwhile.
  const int64_t ahead = hasher_->algorithm() == HashAlgorithm::kSha256 ? most : 32;
  EntryId parent = HashIndex::root(hit.group);
  for (int64_t start = 0; start < most; start += ahead) {
    const int64_t stop = std::min(start + ahead, most);
    const Digest* digests = hit.seq->digests(stop);
    for (int64_t i = start; i < stop; ++i) index_.prefetch(digests[i]);
    for (int64_t i = start; i < stop; ++i) {
      parent = find_entry(*hit.seq, digests[i], i, parent);
      const BlockId block = parent == HashIndex::kNone ? -1 : index_.block_of(parent);
      if (block < 0) return;
      hit.blocks.push_back(block);
      hit.num_tokens += block_size();
    }
  }
}

bool HashManager::is_stale(const Hit& hit) const {
  if (hit.epoch == epoch_) return false;
  const int64_t count = static_cast<int64_t>(hit.blocks.size());
  const Digest* digests = hit.seq->digests(count);
  EntryId parent = HashIndex::root(hit.group);
  for (int64_t i = 0; i < count; ++i) {
    parent = find_entry(*hit.seq, digests[i], i, parent);
    if (parent == HashIndex::kNone || index_.entry_of(hit.blocks[i]) != parent) return true;
  }
  return false;
}

std::optional<int64_t> HashManager::num_free_in(const Hit& hit) const {
  if (is_stale(hit)) return std::nullopt;
  return std::count_if(hit.blocks.begin(), hit.blocks.end(),
                       [this](BlockId block) { return pool_.ref_cnt(block) == 0; });
}

void HashManager::evict(int64_t count) {
  for (BlockId block = pool_.front(); count > 0; --count, block = pool_.after(block)) {
    if (!index_.is_cached(block)) continue;
    if (events_ && index_.is_only(block)) events_->evicted(block);
    index_.remove_block(block);
    ++epoch_;
  }
}

void HashManager::publish(BlockTable& table, int64_t first, int64_t stop) {
  Sequence& seq = *table.seq;
  const Digest* digests = seq.digests(stop);
  EntryId parent = first == 0 ? HashIndex::root(table.group) : index_.entry_of(table.blocks[first - 1]);
  int64_t first_new = first;  // of the run of contents that no block had before
  for (int64_t i = first; i < stop; ++i) {
    const std::string extra = seq.extra_cbor(i);
    parent = index_.find_or_add({parent, digests[i], seq.tokens() + i * block_size(), extra});
    const bool is_new = index_.block_of(parent) < 0;
    index_.add_block(parent, table.blocks[i]);
    if (!events_) continue;
    events_->note(table.blocks[i], seq, i, table.group);
    if (is_new) continue;
    events_->stored(seq, first_new, i, table.group);
    first_new = i + 1;
  }
  if (events_) events_->stored(seq, first_new, stop, table.group);
}

// Cached blocks go to the back, the table's last block first, so that of a prefix the deepest is evicted
// first; blank ones go to the front as one run.
void HashManager::drop(BlockTable& table) {
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
}

void HashManager::forget() {
  for (BlockId block = 0; block < pool_.num_blocks(); ++block) {
    if (index_.is_cached(block)) index_.remove_block(block);
  }
}

std::optional<Digest> HashManager::digest_of(BlockId block) const {
  if (!index_.is_cached(block)) return std::nullopt;
  return index_.digest(index_.entry_of(block));
}

}  // namespace prefixkv
