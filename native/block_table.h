// What a block manager hands out.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "hash.h"

namespace prefixkv {

// What a lookup found; it holds nothing, so its blocks may be evicted before it is used.
struct Hit {
  std::shared_ptr<Sequence> seq;
  int group = 0;
  uint64_t epoch = 0;  // the manager's at the lookup
  std::vector<BlockId> blocks = {};
  int64_t num_tokens = 0;
  uint64_t pin = 0;  // paged: whose blocks these are
};

// One sequence's logical to physical map. Only the manager writes it.
struct BlockTable {
  std::vector<BlockId> blocks;
  std::shared_ptr<Sequence> seq;    // filled it; null while nothing is computed
  int64_t num_tokens = 0;           // room was asked for
  int64_t num_computed_tokens = 0;  // K/V exists
  int32_t node = -1;                // radix: where its full computed blocks end in the tree
  bool owns_leaf = false;           // radix: a commit of this table made that node
  int group = 0;
  int32_t owner = -1;  // number of its name in the manager
  bool freed = false;
  size_t index = 0;   // in the manager's list of live tables
  uint64_t mark = 0;  // the last call over many tables that listed it
};

struct Grant {
  std::vector<BlockId> new_blocks;
  std::vector<std::pair<BlockId, BlockId>> copies;
};

// Computed tokens that are held without a table of the caller's.
struct Pin {
  uint64_t id;
  int64_t num_tokens;
  std::vector<BlockId> blocks;
  int group;
};

struct BlockInfo {
  int32_t ref_cnt;
  bool is_cached;
  std::optional<Digest> block_hash;
  std::optional<std::string> owner;
};

}  // namespace prefixkv
