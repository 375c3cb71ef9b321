// The radix tree by itself, for engines that keep their own slots.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "radix_index.h"

namespace prefixkv {

class RadixTree;

// Where a walk ended. It holds what it found only while it is locked.
struct Match {
  const RadixTree* tree;
  NodeId node;       // a root when nothing was found
  uint64_t created;  // of that node
  std::vector<int32_t> slots;  // of its tokens
  int64_t locks = 0;
};

// Slots of single tokens by the tokens before them, in whole pages. Not thread-safe.
class RadixTree {
 public:
  // Throws ConfigError unless the page size is from 1 to 1024 tokens.
  RadixTree(int64_t page_size, uint64_t seed);

  int page_size() const { return index_.page_size(); }
  // Tokens in nodes without locks, and with.
  int64_t evictable_size() const { return index_.num_evictable_pages() * page_size(); }
  int64_t protected_size() const { return index_.num_locked_pages() * page_size(); }
  int64_t num_visited() const { return index_.num_visited(); }

  // Tokens that were there already; they keep the slots that they have.
  int64_t insert(std::span<const Token> tokens, std::span<const int32_t> slots,
                 const std::optional<std::string>& space);
  Match match(std::span<const Token> tokens, const std::optional<std::string>& space);
  void lock(Match& match);
  void unlock(Match& match);
  // Slots that are free now: at least so many, if that much can be evicted.
  std::vector<int32_t> evict(int64_t num_tokens);
  void check() const { index_.check(); }

 private:
  Pages pages(std::span<const Token> tokens) const {
    return {tokens.data(), static_cast<int64_t>(tokens.size()) / page_size()};
  }
  NodeId arrive(const RadixIndex::End& end);
  void check_own(const Match& match) const;

  RadixIndex index_;
};

}  // namespace prefixkv
