// What the core throws; bind.cpp turns it into prefixkv.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace prefixkv {

// The caller broke the interface; nothing changed.
struct CacheError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A block of the hit was evicted since the lookup.
struct StaleHitError : CacheError {
  using CacheError::CacheError;
};

// An option is out of its limits.
struct ConfigError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace prefixkv
