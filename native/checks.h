// Checks that the core's classes have in common.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "errors.h"

namespace prefixkv {

inline std::string text(int64_t value) { return std::to_string(value); }

inline int64_t checked(const char* name, int64_t value, int64_t most) {
  if (value < 1 || value > most) {
    throw ConfigError(std::string(name) + " is " + text(value) + "; it must be from 1 to " + text(most));
  }
  return value;
}

// Of a block or a page, in tokens.
inline int checked_block_size(const char* name, int64_t size) {
  return static_cast<int>(checked(name, size, 1024));
}

inline void check_as_many(const char* name, size_t count, const char* other, size_t others) {
  if (count == others) return;
  throw CacheError("there are " + std::to_string(count) + " " + name + " and " + std::to_string(others) +
                   " " + other + "; one of each is needed");
}

inline void check_not_negative(const char* noun, std::span<const int32_t> values) {
  int32_t all = 0;
  for (const int32_t value : values) all |= value;
  if (all < 0) throw CacheError(std::string("a ") + noun + " is negative");
}

}  // namespace prefixkv
