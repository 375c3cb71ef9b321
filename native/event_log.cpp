#include "event_log.h"

namespace prefixkv {

void EventLog::note(BlockId block, Sequence& seq, int64_t index, int group) {
  digest_[block] = seq.digests(index + 1)[index];
  group_[block] = group;
}

void EventLog::stored(Sequence& seq, int64_t first, int64_t stop, int group) {
  if (first >= stop) return;
  const Digest* digests = seq.digests(stop);
  const int64_t block_size = seq.hasher()->block_size();
  Event event{Event::Kind::kStored,
              {digests + first, digests + stop},
              {},
              {seq.tokens() + first * block_size, seq.tokens() + stop * block_size},
              group,
              seq.lora(),
              seq.cache_salt()};
  if (first > 0) event.parent = digests[first - 1];
  events_.push_back(std::move(event));
}

void EventLog::evicted(const Digest& digest, int group) {
  if (!events_.empty()) {
    Event& last = events_.back();
    if (last.kind == Event::Kind::kEvicted && last.group == group) {
      last.hashes.push_back(digest);
      return;
    }
  }
  events_.push_back({Event::Kind::kEvicted, {digest}, {}, {}, group, {}, {}});
}

}  // namespace prefixkv
