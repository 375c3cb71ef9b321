// Binding of the cache manager: hits, grants, tables, pins, blocks, events, and the seam itself.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "bind.h"
#include "bind_types.h"
#include "checks.h"
#include "errors.h"
#include "read_tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace prefixkv {
namespace {

struct PyPin {
  std::shared_ptr<BlockManager> manager;
  Pin pin;
};

struct PyBlock {
  BlockInfo info;
  int digest_size;
};

struct PyEvent {
  Event event;
  int digest_size;
};

using IntList = nb::typed<nb::list, int>;

// A copy of the ids is read: to make a list may collect garbage, and that may free a table.
IntList to_list(std::vector<BlockId> blocks) {
  IntList list = nb::steal<IntList>(PyList_New(static_cast<Py_ssize_t>(blocks.size())));
  if (!list.is_valid()) throw nb::python_error();
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

nb::bytes to_bytes(const Digest& digest, int size) {
  return nb::bytes(reinterpret_cast<const char*>(digest.word), static_cast<size_t>(size));
}

std::optional<nb::bytes> to_bytes(const std::optional<Digest>& digest, int size) {
  return digest ? std::optional<nb::bytes>(to_bytes(*digest, size)) : std::nullopt;
}

const char* name_of(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::kStored: return "stored";
    case Event::Kind::kEvicted: return "evicted";
    case Event::Kind::kCleared: break;
  }
  return "cleared";
}

System system_of(const std::string& name) {
  if (name == "hash") return System::kHash;
  if (name == "radix") return System::kRadix;
  if (name == "paged") return System::kPaged;
  if (name == "off") return System::kOff;
  throw ConfigError("system is '" + name + "'; it must be one of hash, radix, paged, off");
}

struct PyManager {
  std::shared_ptr<BlockManager> manager;

  PyManager(const std::string& system, int64_t num_blocks, int64_t block_size,
            const std::string& hash_algorithm, int64_t num_groups, bool events, int hash_bits) {
    // The seed is unpredictable, so that nobody can choose prompts whose hashes collide.
    auto hasher = std::make_shared<Hasher>(algorithm_of(hash_algorithm),
                                           checked_block_size("block_size", block_size), random_seed(),
                                           hash_bits, pickle_hash);
    manager = make_manager(system_of(system), num_blocks, num_groups, std::move(hasher), events);
  }

  PySequence sequence(nb::handle token_ids, std::optional<std::string> cache_salt,
                      std::optional<std::string> lora, nb::handle extra) const {
    std::vector<Extra> extras;
    for (nb::handle item : extra) {
      std::tuple<int64_t, int64_t, nb::bytes> entry;
      if (!nb::try_cast(item, entry)) {
        throw CacheError("extra holds " + repr_of(item) + "; each entry is (start, stop, bytes)");
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

  void release(const PyPin& pin) const {
    if (pin.manager != manager) throw CacheError("the pin belongs to another cache");
    manager->release(pin.pin);
  }

  std::vector<PyEvent> drain_events() const {
    std::vector<PyEvent> events;
    for (Event& event : manager->drain_events()) {
      events.push_back({std::move(event), manager->hasher()->digest_size()});
    }
    return events;
  }
};

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

// What calls of the seam return.
void bind_results(nb::module_& m) {
  nb::class_<Hit>(m, "Hit", "What a lookup found: leading tokens of the sequence whose K/V is there.")
      .def_ro("num_tokens", &Hit::num_tokens,
              "Tokens covered: whole blocks in `hash` and `radix`, any number in `paged`.")
      .def("__repr__", [](const Hit& self) {
             return "Hit(num_tokens=" + std::to_string(self.num_tokens) + ")";
           })
      .def_prop_ro("blocks", [](const Hit& self) { return to_list(self.blocks); },
                   "Ids of the blocks that hold them, in order.");

  nb::class_<Grant>(m, "Grant", "What an allocation gave.")
      .def("__repr__", [](const Grant& self) {
             return "Grant(new_blocks=" + shown(self.new_blocks) +
                    (self.copies.empty() ? ")" : ", copies=" + std::to_string(self.copies.size()) + ")");
           })
      .def_prop_ro("new_blocks", [](const Grant& self) { return to_list(self.new_blocks); },
                   "Ids new to the table that are neither of the hit nor targets of a copy.")
      .def_prop_ro("copies", [](const Grant& self) { return self.copies; },
                   "(source, target) block copies to run, in order, before the next write.");

  nb::class_<PyTable>(m, "BlockTable",
                      "One sequence's logical to physical map; only the manager writes it. A table that is "
                      "dropped without `free` gives its blocks back.")
      .def("__repr__", [](const PyTable& self) {
             const BlockTable& table = *self.table;
             return "BlockTable(blocks=" + shown(table.blocks) +
                    ", num_tokens=" + std::to_string(table.num_tokens) +
                    ", num_computed_tokens=" + std::to_string(table.num_computed_tokens) + ")";
           })
      .def_prop_ro("blocks", [](const PyTable& self) { return to_list(self.table->blocks); },
                   "Block ids in logical order; empty once freed.")
      .def_prop_ro("num_tokens", [](const PyTable& self) { return self.table->num_tokens; },
                   "Tokens that the table has room for.")
      .def_prop_ro("num_computed_tokens",
                   [](const PyTable& self) { return self.table->num_computed_tokens; },
                   "Tokens whose K/V exists: from the hit, then as committed.")
      .def_prop_ro("group", [](const PyTable& self) { return self.table->group; },
                   "Kind of layers that its blocks are for.")
      .def_ro("owner", &PyTable::owner, "Who it is for, as given to `table`, or None.");

  nb::class_<PyPin>(m, "Pin",
                    "Computed tokens that are held without a table, until `release`; also when this object "
                    "is gone.")
      .def("__repr__", [](const PyPin& self) {
             return "Pin(num_tokens=" + std::to_string(self.pin.num_tokens) +
                    ", blocks=" + shown(self.pin.blocks) + ")";
           })
      .def_prop_ro("num_tokens", [](const PyPin& self) { return self.pin.num_tokens; },
                   "Tokens held: those asked for in `paged`, of those the full blocks in `hash` and `radix`.")
      .def_prop_ro("blocks", [](const PyPin& self) { return to_list(self.pin.blocks); },
                   "Ids of the blocks held, in order.")
      .def_prop_ro("group", [](const PyPin& self) { return self.pin.group; },
                   "Kind of layers that its blocks are for.");

  nb::class_<PyBlock>(m, "Block", "State of one block at the time of the call.")
      .def("__repr__", [](const PyBlock& self) {
             return "Block(ref_cnt=" + std::to_string(self.info.ref_cnt) +
                    ", is_cached=" + (self.info.is_cached ? "True" : "False") + ")";
           })
      .def_prop_ro("ref_cnt", [](const PyBlock& self) { return self.info.ref_cnt; },
                   "Tables and pins that hold it.")
      .def_prop_ro("block_hash", [](const PyBlock& self) {
             return to_bytes(self.info.block_hash, self.digest_size);
           },
           "Hash of its content: 16 bytes for xxh3, 32 for SHA-256. None when it is blank, in `radix` "
           "without events, and in `paged`.")
      .def_prop_ro("is_cached", [](const PyBlock& self) { return self.info.is_cached; },
                   "Whether a lookup can find it.")
      .def_prop_ro("owner", [](const PyBlock& self) { return self.info.owner; },
                   "Owner of the table that took it last, or None.");

  nb::class_<PyEvent>(m, "Event", "Something became findable, or stopped being so.")
      .def("__repr__", [](const PyEvent& self) {
             return std::string("Event(kind='") + name_of(self.event.kind) + "', " +
                    std::to_string(self.event.hashes.size()) + " blocks)";
           })
      .def_prop_ro("kind", [](const PyEvent& self) { return name_of(self.event.kind); },
                   "'stored': contents are findable that were not; 'evicted': contents are not any more; "
                   "'cleared': nothing is.")
      .def_prop_ro("block_hashes", [](const PyEvent& self) {
             std::vector<nb::bytes> hashes;
             for (const Digest& digest : self.event.hashes) hashes.push_back(to_bytes(digest, self.digest_size));
             return hashes;
           }, "Hashes of the blocks' contents: stored, in order of the prefix; evicted, the deepest first.")
      .def_prop_ro("parent_block_hash", [](const PyEvent& self) {
             return to_bytes(self.event.parent, self.digest_size);
           }, "Stored: hash of the block before the first one; None when that starts the prefix.")
      .def_prop_ro("token_ids", [](const PyEvent& self) { return to_list(self.event.tokens); },
                   "Stored: tokens of all these blocks, len(block_hashes) * block_size.")
      .def_prop_ro("group", [](const PyEvent& self) { return self.event.group; },
                   "Kind of layers that the blocks are for.")
      .def_prop_ro("lora", [](const PyEvent& self) { return self.event.lora; }, "Stored: the adapter, or None.")
      .def_prop_ro("cache_salt", [](const PyEvent& self) { return self.event.cache_salt; },
                   "Stored: the salt, or None.");
}

void bind_manager(nb::module_& m) {
  nb::class_<PyManager>(m, "BlockManager", "One pool of blocks under one of the systems; see make_cache.")
      .def(nb::init<const std::string&, int64_t, int64_t, const std::string&, int64_t, bool, int>(),
           nb::kw_only(), "system"_a = "hash", "num_blocks"_a, "block_size"_a = 16,
           "hash_algorithm"_a = "xxh3", "num_groups"_a = 1, "events"_a = false, "hash_bits"_a = 128)
      .def("sequence", &PyManager::sequence, "token_ids"_a, "cache_salt"_a = nb::none(),
           "lora"_a = nb::none(), "extra"_a = nb::make_tuple(),
           "A sequence for this cache. `extra` lists (start, stop, content) for content that is not in "
           "the tokens, such as an image over tokens [start, stop).")
      .def("lookup", [](const PyManager& self, const PySequence& seq, int group) {
             return self.manager->lookup(seq.seq, group);
           }, "seq"_a, "group"_a = 0,
           "The longest prefix that is there; never covers the last token. Changes nothing.")
      .def("table", [](const PyManager& self, std::optional<std::string> owner, int group) {
             auto table = self.manager->table(owner, group);
             return PyTable(self.manager, std::move(table), std::move(owner));
           }, "owner"_a = nb::none(), "group"_a = 0, "An empty block table.")
      .def("fork", [](PyManager& self, const PyTable& table) {
             return PyTable(self.manager, self.manager->fork(*table.table), table.owner);
           }, "table"_a,
           "A table with the same blocks, all shared. Allocates nothing and cannot be refused; whoever "
           "writes next calls `allocate` first, which copies what is shared.")
      .def("allocate", [](PyManager& self, PyTable& table, int64_t num_tokens, const Hit* hit) {
             return self.manager->allocate(*table.table, num_tokens, hit);
           }, "table"_a, "num_tokens"_a, "hit"_a = nb::none(),
           "Room for num_tokens in all, the hit's blocks first; None, and no trace, when the pool "
           "cannot give it. Raises StaleHitError when a block of the hit was evicted meanwhile.")
      .def("allocate_many", [](PyManager& self, nb::handle tables, nb::handle num_tokens) {
             const Items<PyTable> items(tables);
             const std::vector<int64_t> rooms = read_numbers(num_tokens, "num_tokens");
             std::vector<BlockTable*> each;
             for (PyTable* table : *items) each.push_back(table->table.get());
             return self.manager->allocate_many(each, rooms);
           }, "tables"_a, "num_tokens"_a,
           "`allocate` for each table in order, in one call. From the first that is refused on, all are None "
           "and untouched. An error leaves every table as it was.",
           nb::sig("def allocate_many(self, tables: collections.abc.Iterable[BlockTable], "
                   "num_tokens: collections.abc.Iterable[int]) -> list[Grant | None]"))
      .def("commit", [](PyManager& self, PyTable& table, PySequence& seq, int64_t num_computed_tokens) {
             self.manager->commit(*table.table, seq.seq, num_computed_tokens);
           }, "table"_a, "seq"_a, "num_computed_tokens"_a,
           "K/V of the first num_computed_tokens is written: their full blocks become findable.")
      .def("commit_many", [](PyManager& self, nb::handle tables, nb::handle seqs, nb::handle token_ids) {
             const Items<PyTable> table_items(tables);
             const Items<PySequence> seq_items(seqs);
             std::vector<Token> tokens;
             read_tokens(token_ids, tokens);
             std::vector<BlockTable*> each_table;
             std::vector<std::shared_ptr<Sequence>> each_seq;
             for (PyTable* table : *table_items) each_table.push_back(table->table.get());
             for (PySequence* seq : *seq_items) each_seq.push_back(seq->seq);
             self.manager->commit_many(each_table, each_seq, tokens);
           }, "tables"_a, "seqs"_a, "token_ids"_a,
           "After a decode step, for each table: append its token to its sequence and commit one token more, "
           "in one call. An error leaves every table and sequence as it was.",
           nb::sig("def commit_many(self, tables: collections.abc.Iterable[BlockTable], "
                   "seqs: collections.abc.Iterable[Sequence], token_ids: object) -> None"))
      .def("free", [](PyManager& self, PyTable& table) { self.manager->free(*table.table); }, "table"_a,
           "Drop the table's blocks, last first; cached ones stay findable until they are reused.")
      .def("reserve", [](PyManager& self, const PyTable& table, int64_t num_tokens) {
             return PyPin{self.manager, self.manager->reserve(*table.table, num_tokens)};
           }, "table"_a, "num_tokens"_a,
           "Hold the first num_tokens computed tokens beyond the life of the table, so that they are found "
           "and not evicted until `release`. Refused by `off`.")
      .def("release", &PyManager::release, "pin"_a, "End a reservation; CacheError when it has ended.")
      .def("reset", [](PyManager& self) { return self.manager->reset(); },
           "Forget every cached block; False, and nothing done, while any block is held.")
      .def("block", [](const PyManager& self, int64_t index) {
             return PyBlock{self.manager->block(index), self.manager->hasher()->digest_size()};
           }, "block_id"_a, "State of one block.")
      .def("free_blocks", [](const PyManager& self) { return to_list(self.manager->free_blocks()); },
           "Ids of the free blocks (blank and evictable), in the order of reuse.")
      .def("drain_events", &PyManager::drain_events,
           "What became findable or stopped being so since the last call, in order; always empty unless "
           "make_cache was given events=True.")
      .def("check", [](const PyManager& self) { self.manager->check(); },
           "Recount every invariant; a CacheError names the first that fails. Costs time with the pool.")
      .def_prop_ro("num_blocks", [](const PyManager& self) { return self.manager->num_blocks(); },
                   "Blocks in the pool.")
      .def_prop_ro("num_free_blocks",
                   [](const PyManager& self) { return self.manager->num_free_blocks(); },
                   "Blocks that no table and no pin holds: blank and evictable.")
      .def_prop_ro("block_size", [](const PyManager& self) { return self.manager->block_size(); },
                   "Tokens a block.");
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::register_exception_translator(translate);
  bind_sequence(m);
  bind_results(m);
  bind_manager(m);
  bind_step(m);
  bind_radix(m);
}

}  // namespace prefixkv
