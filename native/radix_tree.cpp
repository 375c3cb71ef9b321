#include "radix_tree.h"

#include "checks.h"
#include "errors.h"

namespace prefixkv {
namespace {

std::string name_of(const std::optional<std::string>& space) { return space ? "=" + *space : ""; }

}  // namespace

RadixTree::RadixTree(int64_t page_size, uint64_t seed)
    : index_(checked_block_size("page_size", page_size), checked_block_size("page_size", page_size), seed) {}

NodeId RadixTree::arrive(const RadixIndex::End& end) {
  index_.touch(end.node);
  return index_.ends_inside(end) ? index_.split(end.node, end.into) : end.node;
}

int64_t RadixTree::insert(std::span<const Token> tokens, std::span<const int32_t> slots,
                          const std::optional<std::string>& space) {
  check_as_many("tokens", tokens.size(), "slots", slots.size());
  check_not_negative("slot", slots);
  const Pages all = pages(tokens);
  const RadixIndex::End end = index_.walk(index_.root(name_of(space)), all, nullptr);
  const NodeId node = arrive(end);
  const int64_t at = end.num_pages * page_size();
  if (end.num_pages < all.count) {
    index_.add(node, name_of(space), {tokens.data() + at, all.count - end.num_pages}, slots.data() + at);
  }
  return at;
}

Match RadixTree::match(std::span<const Token> tokens, const std::optional<std::string>& space) {
  std::vector<int32_t> slots;
  const NodeId node = arrive(index_.walk(index_.root(name_of(space)), pages(tokens), &slots));
  return {this, node, RadixIndex::is_root(node) ? 0 : index_.created(node), std::move(slots)};
}

void RadixTree::check_own(const Match& match) const {
  if (match.tree != this) throw CacheError("the match belongs to another tree");
}

void RadixTree::lock(Match& match) {
  check_own(match);
  if (!RadixIndex::is_root(match.node)) {
    if (index_.created(match.node) != match.created) {
      throw StaleHitError("what the match found was evicted since; match again");
    }
    index_.lock(match.node);
  }
  ++match.locks;
}

void RadixTree::unlock(Match& match) {
  check_own(match);
  if (match.locks == 0) throw CacheError("the match is not locked; it may have been unlocked twice");
  --match.locks;
  index_.unlock(match.node);
}

std::vector<int32_t> RadixTree::evict(int64_t num_tokens) {
  if (num_tokens < 0) throw CacheError("num_tokens is " + text(num_tokens) + "; it must be 0 or more");
  std::vector<int32_t> slots;
  const int64_t pages = num_tokens / page_size() + (num_tokens % page_size() != 0);
  index_.evict(pages, [&](NodeId leaf) {
    const int32_t* values = index_.values(leaf);
    slots.insert(slots.end(), values, values + int64_t{index_.num_pages(leaf)} * page_size());
  });
  return slots;
}

}  // namespace prefixkv
