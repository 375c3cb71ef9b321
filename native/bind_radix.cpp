// Binding of the radix tree.
#include "bind_types.h"
#include "radix_tree.h"
#include "read_tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace prefixkv {
namespace {

struct PyMatch {
  std::shared_ptr<RadixTree> tree;  // it is told from others by its address
  Match match;
};

struct PyTree {
  std::shared_ptr<RadixTree> tree;
  explicit PyTree(int64_t page_size) : tree(std::make_shared<RadixTree>(page_size, random_seed())) {}
};

}  // namespace

void bind_radix(nb::module_& m) {
  nb::class_<PyMatch>(m, "Match", "Where a walk down a RadixTree ended; it holds nothing unless locked.")
      .def("__repr__", [](const PyMatch& self) {
             return "Match(num_tokens=" + std::to_string(self.match.slots.size()) + ")";
           })
      .def_prop_ro("num_tokens", [](const PyMatch& self) { return self.match.slots.size(); },
                   "Tokens found; a multiple of the page size.")
      .def_prop_ro("slots", [](const PyMatch& self) {
             return to_array(std::vector<int32_t>(self.match.slots));
           }, nb::rv_policy::move, "Their slots in order, int32 [num_tokens].");

  nb::class_<PyTree>(m, "RadixTree",
                     "Slots of tokens by the tokens before them, for engines that keep their own slots: the "
                     "compressed radix tree of RadixAttention. Only whole pages are stored and found.")
      .def(nb::init<int64_t>(), "page_size"_a,
           "page_size: tokens a page, 1 to 1024 (else ConfigError).")
      .def("insert", [](PyTree& self, nb::handle tokens, nb::handle slots,
                        const std::optional<std::string>& space) {
             const TokenView ids(tokens, "token id");
             const TokenView own(slots, "slot");
             return self.tree->insert(*ids, *own, space);
           }, "tokens"_a, "slots"_a, "namespace"_a = nb::none(),
           "Store the slots of tokens, one of 0 to 2^31 - 1 for each (else CacheError). Returns how many "
           "leading tokens were there already: those keep the slots that the tree has. Tokens short of a "
           "page at the end are ignored.")
      .def("match", [](PyTree& self, nb::handle tokens, const std::optional<std::string>& space) {
             const TokenView ids(tokens, "token id");
             return PyMatch{self.tree, self.tree->match(*ids, space)};
           }, "tokens"_a, "namespace"_a = nb::none(),
           "The longest stored prefix of the tokens; what is on the way becomes the most recently used.")
      .def("lock", [](PyTree& self, PyMatch& match) { self.tree->lock(match.match); }, "match"_a,
           "Keep what the match found from eviction until it is unlocked as often as locked. Raises "
           "StaleHitError when it was evicted meanwhile.")
      .def("unlock", [](PyTree& self, PyMatch& match) { self.tree->unlock(match.match); }, "match"_a,
           "Take one lock of the match back; CacheError when it has none.")
      .def("evict", [](PyTree& self, int64_t num_tokens) { return to_array(self.tree->evict(num_tokens)); },
           nb::rv_policy::move, "num_tokens"_a,
           "Evict whole leaves that are not locked, the least recently used first, until at least "
           "num_tokens tokens are gone or no leaf is left. Returns their slots, int32 [tokens].")
      .def("check", [](const PyTree& self) { self.tree->check(); },
           "Recount every invariant; a CacheError names the first that fails.")
      .def_prop_ro("page_size", [](const PyTree& self) { return self.tree->page_size(); }, "Tokens a page.")
      .def_prop_ro("evictable_size", [](const PyTree& self) { return self.tree->evictable_size(); },
                   "Tokens that no lock holds.")
      .def_prop_ro("protected_size", [](const PyTree& self) { return self.tree->protected_size(); },
                   "Tokens that a lock holds.")
      .def_prop_ro("_num_visited", [](const PyTree& self) { return self.tree->num_visited(); });
}

}  // namespace prefixkv
