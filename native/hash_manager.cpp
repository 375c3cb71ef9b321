#include "hash_manager.h"

#include <algorithm>

namespace prefixkv {
namespace {

// Blocks whose memory is waited for together.
constexpr int64_t kStretch = 32;

}  // namespace

// Where blocks are compared by their tokens, a walk hashes nothing while it goes where the last one
// added below each entry went: whose tokens are those of the sequence is the entry that the hash would
// find, and has that hash.
void HashManager::find(Hit& hit) const {
  Sequence& seq = *hit.seq;
  const int64_t most = most_blocks(seq);
  // Hashes that Python makes come all before the walk, because other calls may run meanwhile.
  if (hasher_->algorithm() == HashAlgorithm::kSha256) seq.digests(most);
  EntryId parent = HashIndex::root(hit.group);
  for (int64_t i = 0; i < most; ++i) {
    if (!index_.compares_tokens() && i % kStretch == 0) {
      // A stretch ahead: so it waits for memory once, and a miss early in a long prompt is cheap.
      const int64_t stop = std::min(i + kStretch, most);
      const Digest* digests = seq.digests(stop);
      for (int64_t j = i; j < stop; ++j) index_.prefetch(digests[j]);
    }
    parent = find_entry(seq, i, parent, index_.last_child(parent));
    const BlockId block = parent == HashIndex::kNone ? -1 : index_.block_of(parent);
    if (block < 0) break;
    if (i == 0) hit.blocks.reserve(most), seq.expect_digests(most);
    hit.blocks.push_back(block);
    if (i == seq.num_digests()) seq.add_digest(index_.digest(parent));
  }
  hit.num_tokens = static_cast<int64_t>(hit.blocks.size()) * block_size();
}

EntryId HashManager::find_entry(Sequence& seq, int64_t i, EntryId parent, EntryId guessed) const {
  const Token* tokens = seq.tokens() + i * block_size();
  const std::string extra = seq.has_extra(i) ? seq.extra_cbor(i) : std::string();
  if (guessed != HashIndex::kNone && index_.has_content(guessed, parent, tokens, extra)) return guessed;
  return index_.find({parent, seq.digests(i + 1)[i], tokens, extra});
}

bool HashManager::is_stale(const Hit& hit) const {
  if (hit.epoch == epoch_) return false;
  EntryId parent = HashIndex::root(hit.group);
  for (size_t i = 0; i < hit.blocks.size(); ++i) {
    const EntryId entry = index_.entry_of(hit.blocks[i]);
    parent = find_entry(*hit.seq, static_cast<int64_t>(i), parent, entry);
    if (parent == HashIndex::kNone || parent != entry) return true;
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
  bool added = false;  // the parent, which then is nobody else's either
  int64_t first_new = first;  // of the run of contents that no block had before
  for (int64_t i = first; i < std::min(stop, first + kStretch); ++i) index_.prefetch(digests[i]);
  for (int64_t i = first; i < stop; ++i) {
    if (i + kStretch < stop) index_.prefetch(digests[i + kStretch]);
    const std::string extra = seq.has_extra(i) ? seq.extra_cbor(i) : std::string();
    const HashIndex::Content content{parent, digests[i], seq.tokens() + i * block_size(), extra};
    parent = added ? HashIndex::kNone : index_.find(content);
    added = parent == HashIndex::kNone;
    if (added) parent = index_.add(content);
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
