#include "tree_model.h"

#include <algorithm>

namespace prefixkv::fuzz {

PlainNode* PlainTree::root(size_t space) {
  while (roots_.size() <= space) {
    roots_.push_back(std::make_unique<PlainNode>());
    roots_.back()->created = ~uint64_t{0} - roots_.size();
  }
  return roots_[space].get();
}

PlainTree::Found PlainTree::match(size_t space, const std::vector<Token>& tokens) {
  ++clock_;
  Found found{root(space), {}};
  const size_t most = whole(tokens.size());
  for (size_t at = 0; at < most;) {
    PlainNode* next = nullptr;
    for (const auto& child : found.node->children) {
      if (std::equal(child->tokens.begin(), child->tokens.begin() + page_size_, tokens.begin() + at)) {
        next = child.get();
      }
    }
    if (next == nullptr) break;
    size_t same = 0;
    while (same < next->tokens.size() && at + same < most && next->tokens[same] == tokens[at + same]) ++same;
    same = whole(same);
    next->time = clock_;
    found.node = same < next->tokens.size() ? split(next, same) : next;
    found.slots.insert(found.slots.end(), found.node->slots.begin(), found.node->slots.end());
    at += same;
    if (found.node != next) break;
  }
  return found;
}

// The upper part, which is new.
PlainNode* PlainTree::split(PlainNode* node, size_t at) {
  auto upper = std::make_unique<PlainNode>();
  upper->parent = node->parent;
  upper->time = clock_;
  upper->created = next_created_++;
  upper->locks = node->locks;
  upper->tokens.assign(node->tokens.begin(), node->tokens.begin() + at);
  upper->slots.assign(node->slots.begin(), node->slots.begin() + at);
  node->tokens.erase(node->tokens.begin(), node->tokens.begin() + at);
  node->slots.erase(node->slots.begin(), node->slots.begin() + at);
  node->parent = upper.get();
  auto& place = *std::find_if(upper->parent->children.begin(), upper->parent->children.end(),
                              [node](const auto& child) { return child.get() == node; });
  upper->children.push_back(std::move(place));
  place = std::move(upper);
  return place.get();
}

size_t PlainTree::insert(size_t space, const std::vector<Token>& tokens, const std::vector<int32_t>& slots) {
  const Found found = match(space, tokens);
  const size_t before = found.slots.size(), most = whole(tokens.size());
  if (before == most) return before;
  auto added = std::make_unique<PlainNode>();
  added->parent = found.node;
  added->time = clock_;
  added->created = next_created_++;
  added->tokens.assign(tokens.begin() + before, tokens.begin() + most);
  added->slots.assign(slots.begin() + before, slots.begin() + most);
  found.node->children.push_back(std::move(added));
  return before;
}

void PlainTree::lock(PlainNode* node, int64_t more) {
  for (; node != nullptr; node = node->parent) node->locks += more;
}

std::vector<PlainNode*> PlainTree::nodes() const {
  std::vector<PlainNode*> all;
  for (const auto& root : roots_) all.push_back(root.get());
  for (size_t i = 0; i < all.size(); ++i) {
    for (const auto& child : all[i]->children) all.push_back(child.get());
  }
  std::erase_if(all, [](const PlainNode* node) { return node->parent == nullptr; });
  return all;
}

PlainNode* PlainTree::find(uint64_t created) const {
  for (const auto& root : roots_) {
    if (root->created == created) return root.get();
  }
  for (PlainNode* node : nodes()) {
    if (node->created == created) return node;
  }
  return nullptr;
}

std::vector<int32_t> PlainTree::evict(int64_t num_tokens) {
  std::vector<int32_t> freed;
  while (static_cast<int64_t>(freed.size()) < num_tokens) {
    PlainNode* first = nullptr;
    for (PlainNode* node : nodes()) {
      if (!node->children.empty() || node->locks > 0) continue;
      if (first == nullptr || std::pair(node->time, node->created) < std::pair(first->time, first->created)) {
        first = node;
      }
    }
    if (first == nullptr) break;
    freed.insert(freed.end(), first->slots.begin(), first->slots.end());
    std::erase_if(first->parent->children, [first](const auto& child) { return child.get() == first; });
  }
  return freed;
}

int64_t PlainTree::size(bool locked) const {
  int64_t total = 0;
  for (const PlainNode* node : nodes()) {
    if ((node->locks > 0) == locked) total += static_cast<int64_t>(node->tokens.size());
  }
  return total;
}

}  // namespace prefixkv::fuzz
