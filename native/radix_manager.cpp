#include "radix_manager.h"

#include <algorithm>

#include "checks.h"
#include "errors.h"

namespace prefixkv {
namespace {

// Equal iff nothing keeps the two from sharing; lengths make it so whatever the names contain.
std::string space_of(const Sequence& seq, int group) {
  std::string space = text(group);
  const auto put = [&space](char kind, const std::optional<std::string>& name) {
    if (name) space += kind + std::to_string(name->size()) + ":" + *name;
  };
  put('l', seq.lora());
  put('s', seq.cache_salt());
  return space;
}

}  // namespace

RadixIndex::End RadixManager::walk(const Hit& hit, int64_t num_blocks,
                                   std::vector<BlockId>& blocks) const {
  return tree_.walk(tree_.root(space_of(*hit.seq, hit.group)), pages(*hit.seq, 0, num_blocks), &blocks);
}

void RadixManager::find(Hit& hit) const {
  hit.num_tokens = walk(hit, most_blocks(*hit.seq), hit.blocks).num_pages * block_size();
}

std::optional<int64_t> RadixManager::num_free_in(const Hit& hit) const {
  std::vector<BlockId> blocks;
  const RadixIndex::End end = walk(hit, static_cast<int64_t>(hit.blocks.size()), blocks);
  if (blocks != hit.blocks) return std::nullopt;
  int64_t num_free = 0;
  NodeId node = end.node;
  for (int32_t covered = end.into; !RadixIndex::is_root(node);) {
    if (tree_.locks(node) > 0) break;  // and so is all above
    num_free += covered;
    node = tree_.parent(node);
    if (!RadixIndex::is_root(node)) covered = tree_.num_pages(node);
  }
  return num_free;
}

void RadixManager::take_hit(BlockTable& table, const Hit& hit) {
  table.node = arrive(walk(hit, static_cast<int64_t>(hit.blocks.size()), table.blocks));
  tree_.lock(table.node);
}

// The node that ends where the walk did. It and all above are now the most recent.
NodeId RadixManager::arrive(const RadixIndex::End& end) {
  tree_.touch(end.node);
  return tree_.ends_inside(end) ? split(end.node, end.into) : end.node;
}

NodeId RadixManager::split(NodeId lower, int32_t at) {
  const NodeId upper = tree_.split(lower, at);
  for (int32_t i = 0; i < at; ++i) node_of_[tree_.values(upper)[i]] = upper;
  return upper;
}

void RadixManager::let_go(NodeId leaf) {
  for (int32_t i = tree_.num_pages(leaf) - 1; i >= 0; --i) {
    const BlockId block = tree_.values(leaf)[i];
    node_of_[block] = kNone;
    pool_.drop(block);
    pool_.push_back(block);
  }
}

void RadixManager::evict(int64_t count) {
  if (count <= pool_.num_free()) return;
  tree_.evict(count - pool_.num_free(), [this](NodeId leaf) {
    for (int32_t i = tree_.num_pages(leaf) - 1; events_ && i >= 0; --i) {
      events_->evicted(tree_.values(leaf)[i]);
    }
    let_go(leaf);
  });
}

// A running request grows its own leaf while nobody else holds it or goes on from it.
bool RadixManager::may_extend(const BlockTable& table) const {
  return table.owns_leaf && tree_.locks(table.node) == 1 && tree_.num_children(table.node) == 0;
}

// What the tree has already is given up for the tree's blocks; the rest becomes the tree's.
void RadixManager::publish(BlockTable& table, int64_t first, int64_t stop) {
  const Sequence& seq = *table.seq;
  const std::string space = space_of(seq, table.group);
  const NodeId before = table.node == kNone ? tree_.root(space) : table.node;
  std::vector<BlockId> known;
  const RadixIndex::End found = tree_.walk(before, pages(seq, first, stop), &known);
  NodeId end = arrive(found);
  const int64_t first_new = first + found.num_pages;
  const std::vector<BlockId> own(table.blocks.begin() + first, table.blocks.begin() + first_new);
  std::copy(known.begin(), known.end(), table.blocks.begin() + first);

  if (first_new < stop) {
    const BlockId* added = table.blocks.data() + first_new;
    if (end == table.node && may_extend(table)) {
      tree_.extend(end, pages(seq, first_new, stop), added);
    } else {
      end = tree_.add(end, space, pages(seq, first_new, stop), added);
    }
    for (int64_t i = first_new; i < stop; ++i) node_of_[table.blocks[i]] = end;
    if (events_) note_stored(table, first_new, stop);
  }
  if (end != table.node) {
    tree_.lock(end);
    tree_.unlock(table.node);
    table.node = end;
  }
  table.owns_leaf = first_new < stop;
  drop_blank(own, 0);
}

void RadixManager::note_stored(const BlockTable& table, int64_t first, int64_t stop) {
  for (int64_t i = first; i < stop; ++i) events_->note(table.blocks[i], *table.seq, i, table.group);
  events_->stored(*table.seq, first, stop, table.group);
}

// The node where the first blocks of the table end, all of them the tree's. To split it off is no use of
// it, so that makes nothing more recent.
NodeId RadixManager::node_at(const BlockTable& table, int64_t num_blocks) {
  NodeId node = table.node;
  int64_t stop = table.num_computed_tokens / block_size();
  while (!RadixIndex::is_root(node) && stop - tree_.num_pages(node) >= num_blocks) {
    stop -= tree_.num_pages(node);
    node = tree_.parent(node);
  }
  if (RadixIndex::is_root(node)) return kNone;
  const int64_t at = num_blocks - stop + tree_.num_pages(node);
  return stop > num_blocks ? split(node, static_cast<int32_t>(at)) : node;
}

void RadixManager::hold(BlockTable& copy, const BlockTable& of) {
  const int64_t full = copy.num_computed_tokens / block_size();
  copy.node = node_at(of, full);
  tree_.lock(copy.node);
  for (size_t i = static_cast<size_t>(full); i < copy.blocks.size(); ++i) pool_.touch(copy.blocks[i]);
}

void RadixManager::drop(BlockTable& table) {
  drop_blank(table.blocks, table.num_computed_tokens / block_size());
  tree_.unlock(table.node);
}

void RadixManager::forget() {
  tree_.evict(tree_.num_evictable_pages(), [this](NodeId leaf) { let_go(leaf); });
}

std::vector<BlockId> RadixManager::free_blocks() const {
  std::vector<BlockId> blocks = pool_.free_blocks();
  for (const NodeId node : tree_.eviction_order()) {
    const int32_t *first = tree_.values(node), *stop = first + tree_.num_pages(node);
    blocks.insert(blocks.end(), std::make_reverse_iterator(stop), std::make_reverse_iterator(first));
  }
  return blocks;
}

std::optional<Digest> RadixManager::digest_of(BlockId block) const {
  if (!events_ || !is_cached(block)) return std::nullopt;
  return events_->digest(block);
}

void RadixManager::check_system() const {
  check_cached();
  tree_.check();
  int64_t in_tree = 0;
  tree_.for_each([&](NodeId node) {
    for (int32_t i = 0; i < tree_.num_pages(node); ++i, ++in_tree) {
      const BlockId block = tree_.values(node)[i];
      if (node_of_[block] != node) throw CacheError("block " + text(block) + " is of another node");
      if (pool_.ref_cnt(block) != 1) throw CacheError("block " + text(block) + " is not the tree's alone");
    }
  });
  if (in_tree != num_blocks() - std::count(node_of_.begin(), node_of_.end(), kNone)) {
    throw CacheError("a block is of a node that does not list it");
  }
}

}  // namespace prefixkv
