#include "radix_index.h"

#include <algorithm>
#include <cstring>
#include <queue>

#include "checks.h"
#include "errors.h"

namespace prefixkv {

RadixIndex::RadixIndex(int page_size, int values_per_page, uint64_t seed)
    : page_size_(page_size), values_per_page_(values_per_page), seed_(seed), children_(0) {}

namespace {

// Leading tokens that are equal: whole stretches are compared by memcmp, which is several times as fast.
int64_t num_equal(const Token* a, const Token* b, int64_t count) {
  constexpr int64_t kStretch = 256;
  int64_t done = 0;
  while (done + kStretch <= count && std::memcmp(a + done, b + done, kStretch * sizeof(Token)) == 0) {
    done += kStretch;
  }
  return std::mismatch(a + done, a + count, b + done).first - a;
}

}  // namespace

// ---- walks ----

const std::string& RadixIndex::content(NodeId node, int32_t page) const {
  static const std::string none;
  if (contents_.empty()) return none;
  const auto of_node = contents_.find(node);
  if (of_node == contents_.end()) return none;
  const auto found = of_node->second.find(page);
  return found == of_node->second.end() ? none : found->second;
}

uint32_t RadixIndex::tag(NodeId parent, const Token* page, const std::string& content) const {
  uint64_t hash = seed_ + static_cast<uint64_t>(parent) * 0x9e3779b97f4a7c15u;
  hash = hash_bytes(page, sizeof(Token) * static_cast<size_t>(page_size_), hash);
  if (!content.empty()) hash = hash_bytes(content.data(), content.size(), hash);
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

NodeId RadixIndex::find_child(NodeId parent, const Pages& pages, int64_t page) const {
  const Token* tokens = pages.tokens + page * page_size_;
  const std::string extra = content(pages, page);
  return children_.find(tag(parent, tokens, extra), [&](NodeId child) {
    const Node& node = nodes_[child];
    return node.parent == parent && std::equal(tokens, tokens + page_size_, tokens_at(node, 0)) &&
           content(child, 0) == extra;
  });
}

// Leading pages of the node's edge that are equal to those of `pages` from `page` on.
int32_t RadixIndex::num_common(NodeId id, const Pages& pages, int64_t page) const {
  const Node& node = nodes_[id];
  const int64_t most = std::min<int64_t>(node.num_pages, pages.count - page);
  const Token *mine = tokens_at(node, 0), *theirs = pages.tokens + page * page_size_;
  const int64_t tokens = num_equal(mine, theirs, most * page_size_);
  const int32_t common = static_cast<int32_t>(tokens / page_size_);
  if (contents_.empty() && (pages.seq == nullptr || !pages.seq->has_content())) return common;
  for (int32_t i = 0; i < common; ++i) {
    if (content(id, i) != content(pages, page + i)) return i;
  }
  return common;
}

RadixIndex::End RadixIndex::walk(NodeId from, const Pages& pages, std::vector<int32_t>* values) const {
  End end{from, is_root(from) ? 0 : nodes_[from].num_pages};
  while (end.num_pages < pages.count) {
    const NodeId child = find_child(end.node, pages, end.num_pages);
    if (child == SlotTable::kNone) break;
    end.node = child;
    end.into = num_common(child, pages, end.num_pages);
    end.num_pages += end.into;
    if (values != nullptr) {
      const int32_t* found = this->values(child);
      values->insert(values->end(), found, found + int64_t{end.into} * values_per_page_);
    }
    if (ends_inside(end)) break;
  }
  return end;
}

void RadixIndex::touch(NodeId node) {
  ++clock_;
  for (; !is_root(node); node = nodes_[node].parent) {
    nodes_[node].time = clock_;
    if (heap_index_[node] >= 0) {
      sift_down(heap_index_[node], {clock_, nodes_[node].created, node});
    }
  }
}

// ---- nodes ----

NodeId RadixIndex::new_node() {
  NodeId id;
  if (!unused_.empty()) {
    id = unused_.back();
    unused_.pop_back();
  } else {
    id = static_cast<NodeId>(nodes_.size());
    // Doubling would leave up to half of the largest array unused.
    if (nodes_.size() == nodes_.capacity()) {
      const size_t more = nodes_.size() + nodes_.size() / 4 + 16;
      nodes_.reserve(more), heap_index_.reserve(more), heap_.reserve(more);
    }
    nodes_.emplace_back();
    heap_index_.push_back(-1);
  }
  nodes_[id].created = ++num_created_;
  nodes_[id].time = clock_;
  return id;
}

// Moves the node's pages to an array of another capacity.
void RadixIndex::set_data(NodeId id, int32_t capacity) {
  Node& node = nodes_[id];
  const int64_t stride = int64_t{page_size_} + values_per_page_;
  std::unique_ptr<int32_t[]> data(new int32_t[static_cast<size_t>(capacity * stride)]);
  if (node.num_pages > 0) {
    const int64_t num_tokens = int64_t{node.num_pages} * page_size_;
    std::copy_n(tokens_at(node, 0), num_tokens, data.get());
    std::copy_n(values_at(node, 0), int64_t{node.num_pages} * values_per_page_,
                data.get() + int64_t{capacity} * page_size_);
  }
  node.data = std::move(data);
  node.capacity = capacity;
}

void RadixIndex::append(NodeId id, const Pages& pages, const int32_t* values) {
  Node& node = nodes_[id];
  const int64_t stop = node.num_pages + pages.count;
  if (stop > INT32_MAX) throw CacheError("a prefix of " + text(stop) + " pages is too long");
  if (stop > node.capacity) {
    const int64_t spare = node.num_pages == 0 ? 0 : node.num_pages / 4 + 1;
    set_data(id, static_cast<int32_t>(std::min<int64_t>(std::max(stop, node.num_pages + spare), INT32_MAX)));
  }
  std::copy_n(pages.tokens, pages.count * page_size_, node.data.get() + int64_t{node.num_pages} * page_size_);
  std::copy_n(values, pages.count * values_per_page_,
              node.data.get() + int64_t{node.capacity} * page_size_ +
                  int64_t{node.num_pages} * values_per_page_);
  for (int64_t i = 0; pages.seq != nullptr && pages.seq->has_content() && i < pages.count; ++i) {
    std::string extra = content(pages, i);
    const int32_t page = node.num_pages + static_cast<int32_t>(i);
    if (!extra.empty()) contents_[id].emplace(page, std::move(extra));
  }
  node.num_pages = static_cast<int32_t>(stop);
}

void RadixIndex::list_child(NodeId id) {
  Node& node = nodes_[id];
  node.tag = tag(node.parent, tokens_at(node, 0), content(id, 0));
  children_.insert(node.tag, id);
}

NodeId RadixIndex::add(NodeId above, const std::string& space, const Pages& pages,
                       const int32_t* values) {
  const NodeId id = new_node();
  append(id, pages, values);
  if (is_root(above)) {
    above = kNoRoot - 1 - spaces_.add(space);
  } else {
    if (heap_index_[above] >= 0) pull(above);
    ++nodes_[above].num_children;
  }
  nodes_[id].parent = above;
  list_child(id);
  num_evictable_ += pages.count;
  push(id);
  return id;
}

void RadixIndex::extend(NodeId node, const Pages& pages, const int32_t* values) {
  append(node, pages, values);
  num_locked_ += pages.count;
}

void RadixIndex::move_contents(NodeId lower, NodeId upper, int32_t at) {
  const auto found = contents_.find(lower);
  if (found == contents_.end()) return;
  const std::map<int32_t, std::string> all = std::move(found->second);
  contents_.erase(found);
  for (const auto& [page, extra] : all) {
    contents_[page < at ? upper : lower].emplace(page < at ? page : page - at, extra);
  }
}

NodeId RadixIndex::split(NodeId lower_id, int32_t at) {
  const NodeId upper_id = new_node();
  Node &lower = nodes_[lower_id], &upper = nodes_[upper_id];
  const int64_t rest = lower.num_pages - at;
  const std::unique_ptr<int32_t[]> data = std::move(lower.data);
  const int32_t* values = data.get() + int64_t{lower.capacity} * page_size_;
  lower.num_pages = lower.capacity = 0;
  append(upper_id, {data.get(), at}, values);
  append(lower_id, {data.get() + int64_t{at} * page_size_, rest}, values + int64_t{at} * values_per_page_);
  move_contents(lower_id, upper_id, at);

  upper.time = lower.time;
  upper.locks = lower.locks;
  upper.num_children = 1;
  upper.parent = lower.parent;
  upper.tag = lower.tag;
  children_.erase(lower.tag, lower_id);
  children_.insert(upper.tag, upper_id);
  lower.parent = upper_id;
  list_child(lower_id);
  return upper_id;
}

void RadixIndex::lock(NodeId id) {
  for (; !is_root(id); id = nodes_[id].parent) {
    Node& node = nodes_[id];
    if (heap_index_[id] >= 0) pull(id);
    if (node.locks++ > 0) continue;
    num_evictable_ -= node.num_pages;
    num_locked_ += node.num_pages;
  }
}

void RadixIndex::unlock(NodeId id) {
  for (; !is_root(id); id = nodes_[id].parent) {
    Node& node = nodes_[id];
    if (--node.locks > 0) continue;
    num_evictable_ += node.num_pages;
    num_locked_ -= node.num_pages;
    if (is_leaf(node)) push(id);
  }
}

// ---- eviction ----

void RadixIndex::remove(NodeId id) {
  Node& node = nodes_[id];
  children_.erase(node.tag, id);
  if (!contents_.empty()) contents_.erase(id);
  num_evictable_ -= node.num_pages;
  const NodeId parent = node.parent;
  node = Node{};
  unused_.push_back(id);
  if (is_root(parent)) {
    spaces_.drop(kNoRoot - 1 - parent);
  } else {
    --nodes_[parent].num_children;
    if (is_leaf(nodes_[parent])) push(parent);
  }
}

void RadixIndex::evict(int64_t num_pages, const std::function<void(NodeId)>& tell) {
  while (num_pages > 0 && !heap_.empty()) {
    const NodeId leaf = heap_.front().node;
    num_pages -= nodes_[leaf].num_pages;
    tell(leaf);
    pull(leaf);
    remove(leaf);
  }
}

std::vector<NodeId> RadixIndex::eviction_order() const {
  std::priority_queue<Leaf, std::vector<Leaf>, std::greater<>> leaves(std::greater<>(), heap_);
  std::unordered_map<NodeId, int32_t> evicted_children;
  std::vector<NodeId> order;
  while (!leaves.empty()) {
    const NodeId id = leaves.top().node;
    leaves.pop();
    order.push_back(id);
    const NodeId parent = nodes_[id].parent;
    if (is_root(parent) || nodes_[parent].locks > 0) continue;
    if (++evicted_children[parent] < nodes_[parent].num_children) continue;
    leaves.push({nodes_[parent].time, nodes_[parent].created, parent});
  }
  return order;
}

void RadixIndex::place(size_t at, const Leaf& leaf) {
  heap_[at] = leaf;
  heap_index_[leaf.node] = static_cast<int32_t>(at);
  ++num_visited_;
}

void RadixIndex::sift_up(size_t at, const Leaf& leaf) {
  while (at > 0) {
    const size_t above = (at - 1) / 2;
    if (!(leaf < heap_[above])) break;
    place(at, heap_[above]);
    at = above;
  }
  place(at, leaf);
}

void RadixIndex::sift_down(size_t at, const Leaf& leaf) {
  while (2 * at + 1 < heap_.size()) {
    size_t below = 2 * at + 1;
    if (below + 1 < heap_.size() && heap_[below + 1] < heap_[below]) ++below;
    if (!(heap_[below] < leaf)) break;
    place(at, heap_[below]);
    at = below;
  }
  place(at, leaf);
}

void RadixIndex::push(NodeId node) {
  const Leaf leaf{nodes_[node].time, nodes_[node].created, node};
  heap_.push_back(leaf);
  sift_up(heap_.size() - 1, leaf);
}

void RadixIndex::pull(NodeId node) {
  const size_t at = static_cast<size_t>(heap_index_[node]);
  heap_index_[node] = -1;
  const Leaf last = heap_.back();
  heap_.pop_back();
  if (at == heap_.size()) return;
  if (at > 0 && last < heap_[(at - 1) / 2]) {
    sift_up(at, last);
  } else {
    sift_down(at, last);
  }
}

// ---- invariants ----

void RadixIndex::for_each(const std::function<void(NodeId)>& visit) const {
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].num_pages > 0) visit(static_cast<NodeId>(i));
  }
}

void RadixIndex::check() const {
  const auto fail = [](NodeId id, const char* what) {
    throw CacheError("node " + text(id) + " of the tree " + what);
  };
  std::vector<int32_t> children(nodes_.size(), 0);
  int64_t nodes = 0, leaves = 0, evictable = 0, locked = 0;
  for_each([&](NodeId id) {
    const Node& node = nodes_[id];
    ++nodes;
    (node.locks > 0 ? locked : evictable) += node.num_pages;
    const auto is_it = [id](NodeId found) { return found == id; };
    if (children_.find(node.tag, is_it) != id) fail(id, "cannot be found");
    if (node.locks < 0) fail(id, "has a negative count of locks");
    if (is_leaf(node) != (heap_index_[id] >= 0)) fail(id, "is wrong about being next to evict");
    if (is_leaf(node)) {
      const Leaf& leaf = heap_[heap_index_[id]];
      ++leaves;
      if (leaf.node != id || leaf.time != node.time) fail(id, "has another time among the leaves");
      if (heap_index_[id] > 0 && leaf < heap_[(heap_index_[id] - 1) / 2]) fail(id, "is out of order");
    }
    if (is_root(node.parent)) return;
    ++children[node.parent];
    if (nodes_[node.parent].num_pages == 0) fail(id, "has a parent that was evicted");
    if (nodes_[node.parent].locks < node.locks) fail(id, "has more locks than its parent");
    if (nodes_[node.parent].time < node.time) fail(id, "is more recent than its parent");
  });
  for_each([&](NodeId id) {
    if (children[id] != nodes_[id].num_children) fail(id, "miscounts its children");
  });
  if (nodes + static_cast<int64_t>(unused_.size()) != static_cast<int64_t>(nodes_.size()) ||
      nodes != static_cast<int64_t>(children_.size()) || leaves != static_cast<int64_t>(heap_.size())) {
    throw CacheError("the tree miscounts its nodes");
  }
  if (evictable != num_evictable_ || locked != num_locked_) {
    throw CacheError("the tree has " + text(evictable) + " evictable and " + text(locked) +
                     " locked pages, but counts " + text(num_evictable_) + " and " + text(num_locked_));
  }
}

}  // namespace prefixkv
