#include "names.h"

namespace prefixkv {

int32_t Names::add(const std::string& name) {
  int32_t id = unused_.empty() ? static_cast<int32_t>(entries_.size()) : unused_.back();
  const auto [it, added] = ids_.try_emplace(name, id);
  if (!added) {
    id = it->second;
  } else if (unused_.empty()) {
    entries_.push_back({&it->first, 0});
  } else {
    unused_.pop_back();
    entries_[id].name = &it->first;
  }
  count(id, 1);
  return id;
}

void Names::drop(int32_t id) {
  count(id, -1);
  if (id < 0 || entries_[id].references > 0) return;
  ids_.erase(ids_.find(*entries_[id].name));
  entries_[id].name = nullptr;
  unused_.push_back(id);
}

}  // namespace prefixkv
