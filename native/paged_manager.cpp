#include "paged_manager.h"

#include <algorithm>

#include "checks.h"
#include "errors.h"

namespace prefixkv {

// Pins are few, so each is compared; of equally long prefixes the oldest pin's wins.
void PagedManager::find(Hit& hit) const {
  for (const auto& [id, pin] : pins_) {
    if (pin->group != hit.group) continue;
    const int64_t shared = std::min({pin->seq->shared_prefix(*hit.seq), pin->num_tokens,
                                     hit.seq->num_tokens() - 1});
    if (shared <= hit.num_tokens) continue;
    hit.num_tokens = shared;
    hit.pin = id;
  }
  if (hit.num_tokens == 0) return;
  const std::vector<BlockId>& blocks = pins_.at(hit.pin)->blocks;
  hit.blocks.assign(blocks.begin(), blocks.begin() + blocks_for(hit.num_tokens));
}

std::optional<int64_t> PagedManager::num_free_in(const Hit& hit) const {
  return pins_.contains(hit.pin) ? std::optional<int64_t>(0) : std::nullopt;
}

int64_t PagedManager::reservable(int64_t num_tokens) const {
  if (!reserves_) throw CacheError("this cache is off: it finds nothing, so there is nothing to reserve");
  return num_tokens;
}

void PagedManager::reserved(const BlockTable& pin) {
  for (const BlockId block : pin.blocks) ++num_pins_[block];
  if (!events_) return;
  const int64_t full = pin.num_tokens / block_size();
  const Digest* digests = pin.seq->digests(full);
  int64_t first_new = 0;  // of the run of contents that no other pin has
  for (int64_t i = 0; i < full; ++i) {
    if (++num_stored_[{pin.group, digests[i]}] == 1) continue;
    events_->stored(*pin.seq, first_new, i, pin.group);
    first_new = i + 1;
  }
  events_->stored(*pin.seq, first_new, full, pin.group);
}

void PagedManager::released(const BlockTable& pin) {
  for (const BlockId block : pin.blocks) --num_pins_[block];
  if (!events_) return;
  const int64_t full = pin.num_tokens / block_size();
  const Digest* digests = pin.seq->digests(full);
  for (int64_t i = full - 1; i >= 0; --i) {
    const auto found = num_stored_.find({pin.group, digests[i]});
    if (--found->second > 0) continue;
    num_stored_.erase(found);
    events_->evicted(digests[i], pin.group);
  }
}

void PagedManager::check_system() const {
  std::vector<int32_t> counted(num_blocks(), 0);
  for (const auto& [id, pin] : pins_) {
    for (const BlockId block : pin->blocks) ++counted[block];
  }
  for (BlockId block = 0; block < num_blocks(); ++block) {
    if (counted[block] == num_pins_[block]) continue;
    throw CacheError("block " + text(block) + " counts " + text(num_pins_[block]) + " pins, but " +
                     text(counted[block]) + " hold it");
  }
}

}  // namespace prefixkv
