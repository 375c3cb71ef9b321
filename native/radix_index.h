// The compressed radix tree of RadixAttention (SGLang): from prefixes of tokens to the slots or blocks
// that hold their K/V, with the least recently used leaf in reach.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "hash.h"
#include "names.h"
#include "slot_table.h"

namespace prefixkv {

using NodeId = int32_t;

// Consecutive pages of tokens; with a sequence, its extra content is part of them.
struct Pages {
  const Token* tokens;
  int64_t count;
  const Sequence* seq = nullptr;
  int64_t first = 0;  // page in the sequence
};

// A node is a run of whole pages (its edge) with their values, below a node or below the root of a
// namespace. Children of one node differ in their first page, by which a hash table finds them. A node
// has the time of the last walk through it, so none is older than its children. It is never evicted
// while it is locked or has children. The other nodes are in a heap: the oldest time first, of equal
// times the one made first.
class RadixIndex {
 public:
  static constexpr NodeId kNoRoot = -1;  // of a namespace that has no nodes

  RadixIndex(int page_size, int values_per_page, uint64_t seed);

  int page_size() const { return page_size_; }
  int64_t num_evictable_pages() const { return num_evictable_; }
  int64_t num_locked_pages() const { return num_locked_; }
  int64_t num_visited() const { return num_visited_; }

  static bool is_root(NodeId node) { return node < 0; }
  NodeId root(const std::string& space) const { return kNoRoot - 1 - spaces_.find(space); }
  NodeId parent(NodeId node) const { return nodes_[node].parent; }
  int32_t num_pages(NodeId node) const { return nodes_[node].num_pages; }
  int32_t num_children(NodeId node) const { return nodes_[node].num_children; }
  int32_t locks(NodeId node) const { return nodes_[node].locks; }
  // Number of the node's making, never used twice; 0 once it is evicted.
  uint64_t created(NodeId node) const { return nodes_[node].created; }
  // [num_pages * values_per_page]
  const int32_t* values(NodeId node) const { return values_at(nodes_[node], 0); }

  // Where a walk ended: `into` pages into the edge of the node.
  struct End {
    NodeId node;
    int32_t into = 0;
    int64_t num_pages = 0;  // walked
  };
  // The longest run of the pages below `from`; changes nothing. Appends the values of that run, if asked.
  End walk(NodeId from, const Pages& pages, std::vector<int32_t>* values) const;
  // Makes what a walk went through, and all above, as recent as nothing else.
  void touch(NodeId node);
  bool ends_inside(const End& end) const {
    return !is_root(end.node) && end.into < nodes_[end.node].num_pages;
  }
  // A new node takes the first `at` pages of another, which stays itself to all that know it.
  NodeId split(NodeId lower, int32_t at);

  // Counts on the whole path to the root; neither changes recency.
  void lock(NodeId node);
  void unlock(NodeId node);

  // The pages, of which the walk from the root of `space` found none beyond `above`, as a new child.
  NodeId add(NodeId above, const std::string& space, const Pages& pages, const int32_t* values);
  // Appends the pages to the edge of a locked node without children.
  void extend(NodeId node, const Pages& pages, const int32_t* values);

  // Evicts whole nodes until that many pages are free or no node is left to evict; a parent that is
  // left without children is next in line at its own time. Tells each node before it goes.
  void evict(int64_t num_pages, const std::function<void(NodeId)>& tell);
  // The order in which all that is not locked would go.
  std::vector<NodeId> eviction_order() const;

  void for_each(const std::function<void(NodeId)>& visit) const;
  void check() const;

 private:
  struct Node {
    std::unique_ptr<int32_t[]> data;  // tokens [capacity * page_size], values [capacity * values_per_page]
    uint64_t time = 0;
    uint64_t created = 0;
    NodeId parent = kNoRoot;
    int32_t num_pages = 0;
    int32_t capacity = 0;  // pages
    int32_t num_children = 0;
    int32_t locks = 0;
    uint32_t tag = 0;  // of its first page, in the table of children
  };
  struct Leaf {
    uint64_t time;
    uint64_t created;
    NodeId node;
    bool operator<(const Leaf& other) const {
      return time != other.time ? time < other.time : created < other.created;
    }
    bool operator>(const Leaf& other) const { return other < *this; }
  };

  const Token* tokens_at(const Node& node, int64_t page) const {
    return node.data.get() + page * page_size_;
  }
  const int32_t* values_at(const Node& node, int64_t page) const {
    return node.data.get() + int64_t{node.capacity} * page_size_ + page * values_per_page_;
  }
  std::string content(const Pages& pages, int64_t page) const {
    return pages.seq == nullptr ? std::string() : pages.seq->content_cbor(pages.first + page);
  }
  const std::string& content(NodeId node, int32_t page) const;
  uint32_t tag(NodeId parent, const Token* page, const std::string& content) const;
  NodeId find_child(NodeId parent, const Pages& pages, int64_t page) const;
  int32_t num_common(NodeId node, const Pages& pages, int64_t page) const;
  NodeId new_node();
  void set_data(NodeId node, int32_t capacity);
  void append(NodeId node, const Pages& pages, const int32_t* values);
  void move_contents(NodeId lower, NodeId upper, int32_t at);
  void list_child(NodeId node);
  void remove(NodeId node);

  bool is_leaf(const Node& node) const { return node.num_children == 0 && node.locks == 0; }
  void place(size_t at, const Leaf& leaf);
  void sift_up(size_t at, const Leaf& leaf);
  void sift_down(size_t at, const Leaf& leaf);
  void push(NodeId node);
  void pull(NodeId node);

  int page_size_;
  int values_per_page_;
  uint64_t seed_;
  uint64_t clock_ = 0;
  uint64_t num_created_ = 0;
  int64_t num_evictable_ = 0;
  int64_t num_locked_ = 0;
  int64_t num_visited_ = 0;  // nodes that evictions looked at
  std::vector<Node> nodes_;
  std::vector<NodeId> unused_;
  SlotTable children_;
  std::vector<Leaf> heap_;          // each node's two children are at 2 i + 1 and 2 i + 2
  std::vector<int32_t> heap_index_;  // of each node in heap_, or -1
  Names spaces_;                    // namespaces; each node below a root refers to its name
  std::unordered_map<NodeId, std::map<int32_t, std::string>> contents_;  // of the few pages that have any
};

}  // namespace prefixkv
