// Binding of sequences, and the block hash that only Python can make.
#include <cstring>

#include "bind_types.h"
#include "errors.h"
#include "read_tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace prefixkv {

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
  throw ConfigError("hash_algorithm is '" + name + "'; it must be one of xxh3, sha256_cbor, sha256");
}

uint64_t random_seed() {
  const nb::object bytes = nb::module_::import_("os").attr("urandom")(sizeof(uint64_t));
  uint64_t seed;
  std::memcpy(&seed, nb::cast<nb::bytes>(bytes).c_str(), sizeof seed);
  return seed;
}

void bind_sequence(nb::module_& m) {
  nb::class_<PySequence>(m, "Sequence",
                         "Tokens of one request and the hashes of its full blocks, which grow with it.")
      .def("append", [](PySequence& self, nb::handle token_ids) {
             read_tokens(token_ids, self.seq->mutable_tokens());
           }, "token_ids"_a,
           "Append token ids: a list, array, bytes (a token a byte), or an int32 or int64 NumPy array "
           "or torch tensor. A CacheError names the first that is no token id; none is appended then.")
      .def("fork", [](const PySequence& self) {
             return PySequence{std::make_shared<Sequence>(*self.seq)};
           }, "A sequence with the same tokens and namespace, that grows by itself from here on.")
      .def("shared_prefix", [](const PySequence& self, const PySequence& other) {
             return self.seq->shared_prefix(*other.seq);
           }, "other"_a, "Leading tokens that both would share, namespace included.")
      .def("__repr__", [](const PySequence& self) {
             return "Sequence(num_tokens=" + std::to_string(self.seq->num_tokens()) + ")";
           })
      .def_prop_ro("num_tokens", [](const PySequence& self) { return self.seq->num_tokens(); },
                   "Tokens appended so far.");
}

}  // namespace prefixkv
