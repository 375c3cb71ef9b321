// What became findable and what stopped being so, for those who follow a cache from outside.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "hash.h"

namespace prefixkv {

struct Event {
  enum class Kind { kStored, kEvicted, kCleared };
  Kind kind;
  std::vector<Digest> hashes;
  std::optional<Digest> parent;  // stored: hash of the block before the first; none at the start
  std::vector<Token> tokens;     // stored: of all these blocks
  int group = 0;
  std::optional<std::string> lora;
  std::optional<std::string> cache_salt;
};

// Collects events until they are drained. It knows the content of each cached block, so that an
// eviction can name it.
class EventLog {
 public:
  explicit EventLog(int32_t num_blocks) : digest_(num_blocks), group_(num_blocks, 0) {}

  // The block has the content of block `index` of the sequence.
  void note(BlockId block, Sequence& seq, int64_t index, int group);
  const Digest& digest(BlockId block) const { return digest_[block]; }

  // Blocks [first, stop) of the sequence, if any, became findable.
  void stored(Sequence& seq, int64_t first, int64_t stop, int group);
  // The content of the block stopped being findable.
  void evicted(BlockId block) { evicted(digest_[block], group_[block]); }
  void evicted(const Digest& digest, int group);
  void cleared() { events_.push_back({Event::Kind::kCleared, {}, {}, {}, 0, {}, {}}); }

  std::vector<Event> drain() { return std::exchange(events_, {}); }

 private:
  std::vector<Event> events_;
  std::vector<Digest> digest_;  // of each cached block
  std::vector<int32_t> group_;
};

}  // namespace prefixkv
