// A radix tree by its rules and nothing else: lists that are searched from end to end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hash.h"

namespace prefixkv::fuzz {

struct PlainNode {
  PlainNode* parent = nullptr;
  std::vector<std::unique_ptr<PlainNode>> children;
  std::vector<Token> tokens;  // whole pages
  std::vector<int32_t> slots;
  uint64_t time = 0;
  uint64_t created = 0;
  int64_t locks = 0;
};

class PlainTree {
 public:
  explicit PlainTree(size_t page_size) : page_size_(page_size) {}

  struct Found {
    PlainNode* node;  // where the walk ended: its end is the match's
    std::vector<int32_t> slots;
  };

  // One root for each namespace, numbered by the caller.
  Found match(size_t space, const std::vector<Token>& tokens);
  size_t insert(size_t space, const std::vector<Token>& tokens, const std::vector<int32_t>& slots);
  void lock(PlainNode* node, int64_t more);
  std::vector<int32_t> evict(int64_t num_tokens);
  // By the number of its creation; null if it was evicted. Roots count down from the largest.
  PlainNode* find(uint64_t created) const;

  int64_t evictable_size() const { return size(false); }
  int64_t protected_size() const { return size(true); }

 private:
  size_t whole(size_t num_tokens) const { return num_tokens - num_tokens % page_size_; }
  PlainNode* root(size_t space);
  PlainNode* split(PlainNode* node, size_t at);
  std::vector<PlainNode*> nodes() const;
  int64_t size(bool locked) const;

  size_t page_size_;
  uint64_t clock_ = 0, next_created_ = 0;
  std::vector<std::unique_ptr<PlainNode>> roots_;
};

}  // namespace prefixkv::fuzz
