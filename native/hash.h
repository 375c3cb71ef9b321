// Chained hashes of token blocks: H_i = hash(H_{i-1}, tokens of block i, extra keys of block i).
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace prefixkv {

using Token = int32_t;

// Content that is not in the tokens, such as an image, over tokens [start, stop).
struct Extra {
  int64_t start;
  int64_t stop;
  std::string content_hash;  // SHA-256 of the content, hex
  auto operator<=>(const Extra&) const = default;
};

// One pair of a block's extra keys: ("lora", name), ("cache_salt", salt), or (content hash, offset):
// where the content begins, relative to the block's first token.
struct ExtraKey {
  std::string name;
  std::string value;
  int64_t offset = 0;
  bool has_offset = false;
};

// 32 bytes; xxh3 fills the first 16 and leaves the rest zero.
struct Digest {
  uint64_t word[4] = {};
  bool operator==(const Digest&) const = default;
};

enum class HashAlgorithm { kXxh3, kSha256Cbor, kSha256 };

// How blocks are hashed: the same object in a cache and in all its sequences.
class Hasher {
 public:
  // Hash over a pickle of (parent, tokens, extra keys), which only Python can make.
  using PickleHash = std::function<Digest(const Digest* parent, const Token* tokens, int count,
                                          const std::vector<ExtraKey>& extra)>;

  // hash_bits < 128 makes xxh3 collide, for tests of what then happens.
  Hasher(HashAlgorithm algorithm, int block_size, uint64_t seed, int hash_bits, PickleHash pickle);

  HashAlgorithm algorithm() const { return algorithm_; }
  int block_size() const { return block_size_; }
  // 16 for xxh3, 32 for the SHA-256 forms.
  int digest_size() const { return algorithm_ == HashAlgorithm::kXxh3 ? 16 : 32; }
  // Whether equal digests are proof enough that contents are equal.
  bool collision_resistant() const { return algorithm_ != HashAlgorithm::kXxh3; }

  // parent is null for the first block; extra is the CBOR form of keys, empty when there are none.
  Digest hash(const Digest* parent, const Token* tokens, const std::vector<ExtraKey>& keys,
              const std::string& extra) const;
  // xxh3 of blocks [first, stop) that have no extra keys; the digests of those before them are there.
  void hash_xxh3(const Token* tokens, Digest* digests, int64_t first, int64_t stop) const;
  // Unpredictable, for tables within one process.
  uint64_t seed() const { return seed_; }

 private:
  struct Chain;
  Digest hash_xxh3(const Digest* parent, const Token* tokens, const std::string& extra) const;
  Digest hash_cbor(const Digest* parent, const Token* tokens, const std::string& extra) const;

  HashAlgorithm algorithm_;
  int block_size_;
  uint64_t seed_;
  uint64_t mask_[2];
  Digest root_;  // sha256_cbor: the parent of first blocks
  PickleHash pickle_;
};

// Of any bytes, for tables within one process.
uint64_t hash_bytes(const void* bytes, size_t size, uint64_t seed);

// Tokens of one request and the hashes of its full blocks, both of which only grow.
class Sequence {
 public:
  Sequence(std::shared_ptr<const Hasher> hasher, std::optional<std::string> cache_salt,
           std::optional<std::string> lora, std::vector<Extra> extra);

  const std::shared_ptr<const Hasher>& hasher() const { return hasher_; }
  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }
  const Token* tokens() const { return tokens_.data(); }
  // For the reader of Python objects: it appends here, and truncates again if one is refused.
  std::vector<Token>& mutable_tokens() { return tokens_; }

  // Digests of the first `count` blocks, hashed now where they are not yet; all must be full. With
  // kSha256 this runs Python code, and with it perhaps other calls: no state may be half changed.
  const Digest* digests(int64_t count);
  int64_t num_digests() const { return static_cast<int64_t>(digests_.size()); }
  // The digest of the next block that has none, known from elsewhere.
  void add_digest(const Digest& digest) { digests_.push_back(digest); }
  void expect_digests(int64_t count) { digests_.reserve(count); }
  // Extra keys of block i as CBOR, empty when there are none: equal iff the keys are equal.
  std::string extra_cbor(int64_t block) const;
  // The same without adapter and salt.
  std::string content_cbor(int64_t block) const;
  bool has_extra(int64_t block) const {
    return lora_.has_value() || !extra_.empty() || (block == 0 && cache_salt_.has_value());
  }
  bool has_content() const { return !extra_.empty(); }
  const std::optional<std::string>& cache_salt() const { return cache_salt_; }
  const std::optional<std::string>& lora() const { return lora_; }

  // Leading tokens with equal content and namespace in both.
  int64_t shared_prefix(const Sequence& other) const;

  uint64_t mark = 0;  // the manager's: the last call over many sequences that listed this one

 private:
  std::vector<ExtraKey> content_keys(int64_t block) const;
  std::vector<ExtraKey> extra_keys(int64_t block) const;
  void hash_in_python(int64_t count);

  std::shared_ptr<const Hasher> hasher_;
  std::optional<std::string> cache_salt_;
  std::optional<std::string> lora_;
  std::vector<Extra> extra_;    // by start
  std::vector<int64_t> reach_;  // of each and all before it, the furthest stop
  std::vector<Token> tokens_;
  std::vector<Digest> digests_;
};

}  // namespace prefixkv
