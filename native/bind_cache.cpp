// Binding of the cache manager: sequences, tables, hits, grants.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bind.h"
#include "block_manager.h"
#include "errors.h"
#include "hash.h"
#include "read_tokens.h"
#include "sha256.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace prefixkv {
namespace {

struct PySequence {
  std::shared_ptr<Sequence> seq;
};

struct PyTable {
  std::shared_ptr<BlockManager> manager;
  std::unique_ptr<BlockTable> table;
  std::optional<std::string> owner;

  PyTable(std::shared_ptr<BlockManager> m, std::unique_ptr<BlockTable> t,
          std::optional<std::string> o)
      : manager(std::move(m)), table(std::move(t)), owner(std::move(o)) {}
  PyTable(PyTable&&) = default;
  // A table that is dropped without a free gives its blocks back all the same.
  ~PyTable() {
    if (table && !table->freed) manager->free(*table);
  }
};

struct PyBlock {
  int32_t ref_cnt;
  std::optional<std::string> hash;
  std::optional<std::string> owner;
};

using IntList = nb::typed<nb::list, int>;

IntList to_list(const std::vector<BlockId>& blocks) {
  IntList list = nb::steal<IntList>(PyList_New(static_cast<Py_ssize_t>(blocks.size())));
  for (size_t i = 0; i < blocks.size(); ++i) {
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLong(blocks[i]));
  }
  return list;
}

// Ids for a person: the first few.
std::string shown(const std::vector<BlockId>& blocks) {
  constexpr size_t kMost = 8;
  std::string text = "[";
  for (size_t i = 0; i < std::min(blocks.size(), kMost); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(blocks[i]);
  }
  return text + (blocks.size() > kMost ? ", ...]" : "]");
}

template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
Array<T> to_array(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Array<T>(owned->data(), {owned->size()}, owner);
}

// vLLM's `sha256`: over a pickle of (parent, tokens, extra keys), as this Python pickles it. The hash
// itself is taken here, because hashlib lets other threads in while it works.
Digest pickle_hash(const Digest* parent, const Token* tokens, int count,
                   const std::vector<ExtraKey>& extra) {
  nb::module_ pickle = nb::module_::import_("pickle");
  nb::object protocol = pickle.attr("HIGHEST_PROTOCOL");
  const auto digest_of = [&](nb::object value) {
    nb::bytes bytes = nb::cast<nb::bytes>(pickle.attr("dumps")(value, "protocol"_a = protocol));
    const Sha256Digest hash = sha256(reinterpret_cast<const uint8_t*>(bytes.c_str()), bytes.size());
    Digest digest;
    std::memcpy(digest.word, hash.data(), sizeof digest.word);
    return digest;
  };
  const Digest before = parent != nullptr ? *parent : digest_of(nb::str("vllm-none-hash"));
  nb::list ids, pairs;
  for (int i = 0; i < count; ++i) ids.append(tokens[i]);
  for (const ExtraKey& key : extra) {
    nb::object second = key.has_offset ? nb::object(nb::int_(key.offset))
                                       : nb::object(nb::str(key.value.c_str(), key.value.size()));
    pairs.append(nb::make_tuple(nb::str(key.name.c_str(), key.name.size()), second));
  }
  nb::object keys = extra.empty() ? nb::object(nb::none()) : nb::object(nb::tuple(pairs));
  const nb::bytes before_bytes(reinterpret_cast<const char*>(before.word), sizeof before.word);
  return digest_of(nb::make_tuple(before_bytes, nb::tuple(ids), keys));
}

HashAlgorithm algorithm_of(const std::string& name) {
  if (name == "xxh3") return HashAlgorithm::kXxh3;
  if (name == "sha256_cbor") return HashAlgorithm::kSha256Cbor;
  if (name == "sha256") return HashAlgorithm::kSha256;
  if (name == "none") return HashAlgorithm::kNone;
  throw ConfigError("hash_algorithm is '" + name + "'; it must be one of xxh3, sha256_cbor, sha256");
}

struct PyManager {
  std::shared_ptr<BlockManager> manager;

  PyManager(int64_t num_blocks, int64_t block_size, const std::string& hash_algorithm,
            int64_t num_groups, int hash_bits) {
    // Unpredictable, so that nobody can choose prompts whose hashes collide.
    nb::object bytes = nb::module_::import_("os").attr("urandom")(8);
    uint64_t seed;
    std::memcpy(&seed, nb::cast<nb::bytes>(bytes).c_str(), sizeof seed);
    manager = std::make_shared<BlockManager>(
        num_blocks, num_groups,
        std::make_shared<Hasher>(algorithm_of(hash_algorithm), checked_block_size(block_size), seed,
                                 hash_bits, pickle_hash));
  }

  PySequence sequence(nb::handle token_ids, std::optional<std::string> cache_salt,
                      std::optional<std::string> lora, nb::handle extra) const {
    std::vector<Extra> extras;
    for (nb::handle item : extra) {
      std::tuple<int64_t, int64_t, nb::bytes> entry;
      if (!nb::try_cast(item, entry)) {
        throw CacheError(std::string("extra holds ") + nb::repr(item).c_str() +
                         "; each entry is (start, stop, bytes)");
      }
      const auto& [start, stop, content] = entry;
      if (start < 0 || stop <= start) {
        throw CacheError("extra covers tokens " + std::to_string(start) + " to " +
                         std::to_string(stop) + "; it must start at 0 or more and stop after that");
      }
      const Sha256Digest digest =
          sha256(reinterpret_cast<const uint8_t*>(content.c_str()), content.size());
      std::string hex;
      for (const uint8_t byte : digest) {
        hex += "0123456789abcdef"[byte >> 4];
        hex += "0123456789abcdef"[byte & 15];
      }
      extras.push_back({start, stop, std::move(hex)});
    }
    auto seq = std::make_shared<Sequence>(manager->hasher(), std::move(cache_salt), std::move(lora),
                                          std::move(extras));
    read_tokens(token_ids, seq->mutable_tokens());
    return {std::move(seq)};
  }
};

using StepArrays = nb::typed<nb::tuple, Array<int64_t>, Array<int64_t>, Array<int32_t>, Array<int32_t>,
                             Array<int32_t>, Array<int32_t>>;

// What a forward pass with paged attention needs, from the sequences and tables of one step.
StepArrays step_arrays(const std::vector<PySequence*>& seqs, const std::vector<PyTable*>& tables,
                       const std::vector<int64_t>& starts, const std::vector<int64_t>& stops) {
  const size_t count = tables.size();
  if (seqs.size() != count || starts.size() != count || stops.size() != count) {
    throw CacheError("step_arrays needs as many sequences, starts and stops as tables");
  }
  std::vector<int32_t> query_start(count + 1), num_computed(count), table_start(count + 1), blocks;
  std::vector<int64_t> token_ids, positions;
  for (size_t i = 0; i < count; ++i) {
    const BlockTable& table = *tables[i]->table;
    const Sequence& seq = *seqs[i]->seq;
    if (starts[i] < 0 || stops[i] <= starts[i] || stops[i] > table.num_tokens ||
        stops[i] > seq.num_tokens()) {
      throw CacheError("a step computes tokens " + std::to_string(starts[i]) + " to " +
                       std::to_string(stops[i]) + " of a sequence of " +
                       std::to_string(seq.num_tokens()) + " in a table with room for " +
                       std::to_string(table.num_tokens));
    }
    const int64_t block_size = tables[i]->manager->hasher()->block_size();
    const int64_t needed = (stops[i] + block_size - 1) / block_size;
    query_start[i + 1] = query_start[i] + static_cast<int32_t>(stops[i] - starts[i]);
    num_computed[i] = static_cast<int32_t>(starts[i]);
    blocks.insert(blocks.end(), table.blocks.begin(), table.blocks.begin() + needed);
    table_start[i + 1] = static_cast<int32_t>(blocks.size());
    token_ids.insert(token_ids.end(), seq.tokens() + starts[i], seq.tokens() + stops[i]);
    for (int64_t position = starts[i]; position < stops[i]; ++position) positions.push_back(position);
  }
  return StepArrays(nb::make_tuple(to_array(std::move(token_ids)), to_array(std::move(positions)),
                                   to_array(std::move(query_start)), to_array(std::move(num_computed)),
                                   to_array(std::move(table_start)), to_array(std::move(blocks))));
}

void translate(const std::exception_ptr& thrown, void*) {
  const auto raise = [](const char* name, const char* what) {
    PyErr_SetString(nb::module_::import_("prefixkv.errors").attr(name).ptr(), what);
  };
  try {
    std::rethrow_exception(thrown);
  } catch (const StaleHitError& error) {
    raise("StaleHitError", error.what());
  } catch (const CacheError& error) {
    raise("CacheError", error.what());
  } catch (const ConfigError& error) {
    raise("ConfigError", error.what());
  }
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::register_exception_translator(translate);

  nb::class_<PySequence>(m, "Sequence",
                         "Tokens of one request and the hashes of its full blocks, which grow with it.")
      .def("append", [](PySequence& self, nb::handle token_ids) {
             read_tokens(token_ids, self.seq->mutable_tokens());
           }, "token_ids"_a,
           "Append token ids: a list, array, bytes (a token a byte), or an int32 or int64 NumPy array "
           "or torch tensor. A CacheError names the first that is no token id; none is appended then.")
      .def("shared_prefix", [](const PySequence& self, const PySequence& other) {
             return self.seq->shared_prefix(*other.seq);
           }, "other"_a, "Leading tokens that both would share, namespace included.")
      .def("__repr__", [](const PySequence& self) {
             return "Sequence(num_tokens=" + std::to_string(self.seq->num_tokens()) + ")";
           })
      .def_prop_ro("num_tokens", [](const PySequence& self) { return self.seq->num_tokens(); });

  nb::class_<Hit>(m, "Hit", "What a lookup found: leading tokens of the sequence whose K/V is cached.")
      .def_ro("num_tokens", &Hit::num_tokens, "Tokens covered; a multiple of the block size.")
      .def("__repr__", [](const Hit& self) {
             return "Hit(num_tokens=" + std::to_string(self.num_tokens) + ")";
           })
      .def_prop_ro("blocks", [](const Hit& self) { return to_list(self.blocks); },
                   "Ids of the blocks that hold them, in order.");

  nb::class_<Grant>(m, "Grant", "What an allocation gave.")
      .def("__repr__", [](const Grant& self) {
             return "Grant(new_blocks=" + shown(self.new_blocks) + ")";
           })
      .def_prop_ro("new_blocks", [](const Grant& self) { return to_list(self.new_blocks); },
                   "Ids appended to the table that are not of the hit.")
      .def_prop_ro("copies", [](const Grant&) { return std::vector<std::pair<int, int>>(); },
                   "(source, target) block copies to run before the next write.");

  nb::class_<PyTable>(m, "BlockTable",
                      "One sequence's logical to physical map; only the manager writes it.")
      .def("__repr__", [](const PyTable& self) {
             const BlockTable& table = *self.table;
             return "BlockTable(blocks=" + shown(table.blocks) +
                    ", num_tokens=" + std::to_string(table.num_tokens) +
                    ", num_computed_tokens=" + std::to_string(table.num_computed_tokens) + ")";
           })
      .def_prop_ro("blocks", [](const PyTable& self) { return to_list(self.table->blocks); },
                   "Block ids in logical order.")
      .def_prop_ro("num_tokens", [](const PyTable& self) { return self.table->num_tokens; },
                   "Tokens that the table has room for.")
      .def_prop_ro("num_computed_tokens",
                   [](const PyTable& self) { return self.table->num_computed_tokens; },
                   "Tokens whose K/V exists: from the hit, then as committed.")
      .def_prop_ro("group", [](const PyTable& self) { return self.table->group; })
      .def_ro("owner", &PyTable::owner);

  nb::class_<PyBlock>(m, "Block", "State of one block at the time of the call.")
      .def("__repr__", [](const PyBlock& self) {
             return "Block(ref_cnt=" + std::to_string(self.ref_cnt) +
                    ", is_cached=" + (self.hash ? "True" : "False") + ")";
           })
      .def_ro("ref_cnt", &PyBlock::ref_cnt, "Tables that hold it.")
      .def_prop_ro("block_hash", [](const PyBlock& self) -> std::optional<nb::bytes> {
             if (!self.hash) return std::nullopt;
             return nb::bytes(self.hash->data(), self.hash->size());
           }, "Hash of its content (16 bytes for xxh3, 32 for SHA-256), or None when it is blank.")
      .def_prop_ro("is_cached", [](const PyBlock& self) { return self.hash.has_value(); },
                   "Whether a lookup can find it.")
      .def_ro("owner", &PyBlock::owner, "Owner of the table that took it last, or None.");

  nb::class_<PyManager>(m, "BlockManager",
                        "Block tables, reference counts, block hashes and eviction over one pool.")
      .def(nb::init<int64_t, int64_t, const std::string&, int64_t, int>(), nb::kw_only(), "num_blocks"_a,
           "block_size"_a = 16, "hash_algorithm"_a = "xxh3", "num_groups"_a = 1, "hash_bits"_a = 128)
      .def("sequence", &PyManager::sequence, "token_ids"_a, "cache_salt"_a = nb::none(),
           "lora"_a = nb::none(), "extra"_a = nb::make_tuple(),
           "A sequence for this cache. `extra` lists (start, stop, content) for content that is not in "
           "the tokens, such as an image over tokens [start, stop).")
      .def("lookup", [](const PyManager& self, const PySequence& seq, int group) {
             return self.manager->lookup(seq.seq, group);
           }, "seq"_a, "group"_a = 0,
           "The longest cached prefix of full blocks; never covers the last token. Changes nothing.")
      .def("table", [](const PyManager& self, std::optional<std::string> owner, int group) {
             auto table = self.manager->table(owner, group);
             return PyTable(self.manager, std::move(table), std::move(owner));
           }, "owner"_a = nb::none(), "group"_a = 0, "An empty block table.")
      .def("allocate", [](PyManager& self, PyTable& table, int64_t num_tokens, const Hit* hit) {
             return self.manager->allocate(*table.table, num_tokens, hit);
           }, "table"_a, "num_tokens"_a, "hit"_a = nb::none(),
           "Room for num_tokens in all, the hit's blocks first; None, and no trace, when the pool "
           "cannot give it. Raises StaleHitError when a block of the hit was evicted meanwhile.")
      .def("commit", [](PyManager& self, PyTable& table, PySequence& seq, int64_t num_computed_tokens) {
             self.manager->commit(*table.table, *seq.seq, num_computed_tokens);
           }, "table"_a, "seq"_a, "num_computed_tokens"_a,
           "K/V of the first num_computed_tokens is written: their full blocks become findable.")
      .def("free", [](PyManager& self, PyTable& table) { self.manager->free(*table.table); }, "table"_a,
           "Drop the table's blocks, last first; cached ones stay findable until they are reused.")
      .def("reset", [](PyManager& self) { return self.manager->reset(); },
           "Forget every cached block; False, and nothing done, while any block is held.")
      .def("block", [](const PyManager& self, int64_t index) {
             const BlockInfo info = self.manager->block(index);
             PyBlock block{info.ref_cnt, std::nullopt, info.owner};
             if (info.block_hash != nullptr) {
               block.hash.emplace(reinterpret_cast<const char*>(info.block_hash->word),
                                  self.manager->hasher()->digest_size());
             }
             return block;
           }, "block_id"_a, "State of one block.")
      .def("free_blocks", [](const PyManager& self) { return to_list(self.manager->free_blocks()); },
           "Ids of the free blocks (blank and evictable), in the order of reuse.")
      .def("check", [](const PyManager& self) { self.manager->check(); },
           "Recount every invariant; a CacheError names the first that fails. Costs time with the pool.")
      .def_prop_ro("num_blocks", [](const PyManager& self) { return self.manager->num_blocks(); })
      .def_prop_ro("num_free_blocks",
                   [](const PyManager& self) { return self.manager->num_free_blocks(); },
                   "Blocks that no table holds: blank and evictable.")
      .def_prop_ro("block_size", [](const PyManager& self) { return self.manager->hasher()->block_size(); });

  m.def("step_arrays", &step_arrays, "seqs"_a, "tables"_a, "starts"_a, "stops"_a,
        "Arrays of one step that computes tokens [start, stop) of each of S sequences, T in all: "
        "token_ids [T] and positions [T] (int64); query_start [S+1], num_computed [S], "
        "table_start [S+1] and block_ids (int32).");
}

}  // namespace prefixkv
