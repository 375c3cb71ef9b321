// PagedAttention as its paper does it: explicit block tables; only what was reserved is found.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "block_manager.h"

namespace prefixkv {

// Nothing is cached by itself. A reserved prefix is found to the token: its last block may be partial,
// and who goes on from it gets a copy of that block.
class PagedManager : public BlockManager {
 public:
  // A cache that shares nothing (`off`) refuses reservations.
  PagedManager(int64_t num_blocks, int64_t num_groups, std::shared_ptr<const Hasher> hasher, bool events,
               bool reserves)
      : BlockManager(num_blocks, num_groups, std::move(hasher), events),
        reserves_(reserves),
        num_pins_(pool_.num_blocks(), 0) {}

 private:
  void find(Hit& hit) const override;
  std::optional<int64_t> num_free_in(const Hit& hit) const override;
  void publish(BlockTable&, int64_t, int64_t) override {}
  int64_t reservable(int64_t num_tokens) const override;
  void reserved(const BlockTable& pin) override;
  void released(const BlockTable& pin) override;
  bool is_cached(BlockId block) const override { return num_pins_[block] > 0; }
  void check_system() const override;

  struct Content {
    int group;
    Digest digest;
    bool operator==(const Content&) const = default;
  };
  struct HashContent {
    size_t operator()(const Content& it) const { return it.digest.word[0] + static_cast<size_t>(it.group); }
  };

  bool reserves_;
  std::vector<int32_t> num_pins_;  // that hold the block
  std::unordered_map<Content, int64_t, HashContent> num_stored_;  // with events: pins with that full block
};

}  // namespace prefixkv
