#include "names.h"

namespace prefixkv {

int32_t Names::add(const std::string& name) {
  if (unused_.empty()) {
    // Room for all to be unused, so that to drop a name needs no memory.
    if (entries_.size() == entries_.capacity()) entries_.reserve(2 * entries_.size() + 1);
    unused_.reserve(entries_.capacity());
    unused_.push_back(static_cast<int32_t>(entries_.size()));
    entries_.emplace_back();
  }
  const auto [it, added] = ids_.try_emplace(name, unused_.back());
  if (added) {
    unused_.pop_back();
    entries_[it->second].name = &it->first;
  }
  count(it->second, 1);
  return it->second;
}

void Names::drop(int32_t id) {
  count(id, -1);
  if (id < 0 || entries_[id].references > 0) return;
  ids_.erase(ids_.find(*entries_[id].name));
  entries_[id].name = nullptr;
  unused_.push_back(id);
}

}  // namespace prefixkv
