// Names as small numbers.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace prefixkv {

// A name keeps its number while something refers to it; then the number is used again. -1 is no name.
class Names {
 public:
  // The name's number, or -1.
  int32_t find(const std::string& name) const {
    const auto found = ids_.find(name);
    return found == ids_.end() ? -1 : found->second;
  }
  int32_t add(const std::string& name);  // one more reference
  void add(int32_t id) { count(id, 1); }
  void drop(int32_t id);
  const std::string& name(int32_t id) const { return *entries_[id].name; }
  size_t size() const { return ids_.size(); }

 private:
  struct Entry {
    const std::string* name = nullptr;  // the key in ids_
    int64_t references = 0;
  };
  void count(int32_t id, int64_t more) {
    if (id >= 0) entries_[id].references += more;
  }

  std::vector<Entry> entries_;
  std::vector<int32_t> unused_;
  std::unordered_map<std::string, int32_t> ids_;
};

}  // namespace prefixkv
