#include "hash.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "sha256.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace prefixkv {
namespace {

// Canonical CBOR (RFC 8949, section 4.2), as much of it as block hashes need.
constexpr uint8_t kBytes = 0x40, kText = 0x60, kArray = 0x80, kNegative = 0x20, kNull = 0xf6;

// Writes at most 9 bytes; returns where they end.
uint8_t* write_head(uint8_t* out, uint8_t major, uint64_t value) {
  if (value < 24) {
    *out = static_cast<uint8_t>(major | value);
    return out + 1;
  }
  const int log = value <= 0xff ? 0 : value <= 0xffff ? 1 : value <= 0xffffffff ? 2 : 3;
  *out++ = static_cast<uint8_t>(major | (24 + log));
  for (int i = (1 << log) - 1; i >= 0; --i) *out++ = static_cast<uint8_t>(value >> (8 * i));
  return out;
}

void put_head(std::string& out, uint8_t major, uint64_t value) {
  uint8_t head[9];
  out.append(reinterpret_cast<const char*>(head), write_head(head, major, value) - head);
}

void put_int(std::string& out, int64_t value) {
  if (value >= 0) {
    put_head(out, 0, static_cast<uint64_t>(value));
  } else {
    put_head(out, kNegative, static_cast<uint64_t>(-1 - value));
  }
}

void put_text(std::string& out, const std::string& text) {
  put_head(out, kText, text.size());
  out += text;
}

std::string encode(const std::vector<ExtraKey>& keys) {
  std::string out;
  if (keys.empty()) return out;
  put_head(out, kArray, keys.size());
  for (const ExtraKey& key : keys) {
    put_head(out, kArray, 2);
    put_text(out, key.name);
    if (key.has_offset) {
      put_int(out, key.offset);
    } else {
      put_text(out, key.value);
    }
  }
  return out;
}

Digest digest_of(const Sha256Digest& bytes) {
  Digest digest;
  std::memcpy(digest.word, bytes.data(), bytes.size());
  return digest;
}

// The fractional parts of the square roots of 2, 3, 5 and 7.
constexpr uint64_t kMix[4] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                              0xa54ff53a5f1d36f1};

uint64_t low_bits(int bits) {
  if (bits <= 0) return 0;
  return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
}

}  // namespace

Hasher::Hasher(HashAlgorithm algorithm, int block_size, uint64_t seed, int hash_bits,
               PickleHash pickle)
    : algorithm_(algorithm),
      block_size_(block_size),
      seed_(seed),
      mask_{low_bits(hash_bits), low_bits(hash_bits - 64)},
      pickle_(std::move(pickle)) {
  std::string name;
  put_text(name, "vllm-none-hash");
  root_ = digest_of(sha256(reinterpret_cast<const uint8_t*>(name.data()), name.size()));
}

Digest Hasher::hash(const Digest* parent, const Token* tokens, const std::vector<ExtraKey>& keys,
                    const std::string& extra) const {
  switch (algorithm_) {
    case HashAlgorithm::kXxh3: return hash_xxh3(parent, tokens, extra);
    case HashAlgorithm::kSha256Cbor: return hash_cbor(parent, tokens, extra);
    case HashAlgorithm::kSha256: return pickle_(parent, tokens, block_size_, keys);
  }
  return {};
}

// In registers: reading back as a whole what was written in halves would cost as much as the hash.
struct Hasher::Chain {
  uint64_t low = 0, high = 0;

  // The parent enters last, by two multiplications: blocks are hashed side by side, and only those
  // run one after another.
  void add(const Hasher& hasher, const void* own, size_t size) {
    const XXH128_hash_t hash = XXH3_128bits_withSeed(own, size, hasher.seed_);
    const uint64_t a = hash.low64 ^ low, b = hash.high64 ^ high;
    low = XXH3_mul128_fold64(a ^ kMix[0], b ^ kMix[1]) & hasher.mask_[0];
    high = XXH3_mul128_fold64(a ^ kMix[2], XXH_rotl64(b, 32) ^ kMix[3]) & hasher.mask_[1];
  }
};

Digest Hasher::hash_xxh3(const Digest* parent, const Token* tokens, const std::string& extra) const {
  std::string own(reinterpret_cast<const char*>(tokens), sizeof(Token) * block_size_);
  own += extra;
  Chain chain;
  if (parent != nullptr) chain.low = parent->word[0], chain.high = parent->word[1];
  chain.add(*this, own.data(), own.size());
  return Digest{{chain.low, chain.high, 0, 0}};
}

void Hasher::hash_xxh3(const Token* tokens, Digest* digests, int64_t first, int64_t stop) const {
  Chain chain;
  if (first > 0) chain.low = digests[first - 1].word[0], chain.high = digests[first - 1].word[1];
  for (int64_t i = first; i < stop; ++i) {
    chain.add(*this, tokens + i * block_size_, sizeof(Token) * block_size_);
    digests[i].word[0] = chain.low, digests[i].word[1] = chain.high;
  }
}

uint64_t hash_bytes(const void* bytes, size_t size, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes, size, seed);
}

Digest Hasher::hash_cbor(const Digest* parent, const Token* tokens, const std::string& extra) const {
  uint8_t small[512];
  const size_t most = 64 + 5 * static_cast<size_t>(block_size_) + extra.size() + kSha256Padding;
  std::vector<uint8_t> large(most <= sizeof small ? 0 : most);
  uint8_t* const message = large.empty() ? small : large.data();
  uint8_t* end = write_head(message, kArray, 3);
  end = write_head(end, kBytes, 32);
  std::memcpy(end, (parent != nullptr ? *parent : root_).word, 32);
  end = write_head(end + 32, kArray, static_cast<uint64_t>(block_size_));
  for (int i = 0; i < block_size_; ++i) {
    const uint32_t token = static_cast<uint32_t>(tokens[i]);
    if (token > 0xff && token <= 0xffff) {  // most of them
      end[0] = 25, end[1] = static_cast<uint8_t>(token >> 8), end[2] = static_cast<uint8_t>(token);
      end += 3;
    } else {
      end = write_head(end, 0, token);
    }
  }
  if (extra.empty()) {
    *end++ = kNull;
  } else {
    end = std::copy(extra.begin(), extra.end(), end);
  }
  return digest_of(sha256_in_place(message, end - message));
}

Sequence::Sequence(std::shared_ptr<const Hasher> hasher, std::optional<std::string> cache_salt,
                   std::optional<std::string> lora, std::vector<Extra> extra)
    : hasher_(std::move(hasher)),
      cache_salt_(std::move(cache_salt)),
      lora_(std::move(lora)),
      extra_(std::move(extra)) {
  // Their order says nothing about the K/V, so it must not enter the hashes.
  std::sort(extra_.begin(), extra_.end());
  int64_t reach = 0;
  for (const Extra& extra : extra_) reach_.push_back(reach = std::max(reach, extra.stop));
}

const Digest* Sequence::digests(int64_t count) {
  if (hasher_->algorithm() == HashAlgorithm::kSha256) {
    hash_in_python(count);
    return digests_.data();
  }
  int64_t first = static_cast<int64_t>(digests_.size());
  if (first >= count) return digests_.data();
  if (static_cast<size_t>(count) > digests_.capacity()) {
    digests_.reserve(std::max(static_cast<size_t>(count), 2 * digests_.capacity()));
  }
  const bool is_plain = hasher_->algorithm() == HashAlgorithm::kXxh3 && !lora_ && extra_.empty();
  for (; first < count && (!is_plain || has_extra(first)); ++first) {
    const std::vector<ExtraKey> keys = extra_keys(first);
    const Digest* parent = first > 0 ? &digests_[first - 1] : nullptr;
    const Token* block = tokens_.data() + first * hasher_->block_size();
    digests_.push_back(hasher_->hash(parent, block, keys, encode(keys)));
  }
  digests_.resize(count);
  hasher_->hash_xxh3(tokens_.data(), digests_.data(), first, count);
  return digests_.data();
}

// Another thread, or code that a pickle runs, may append to the sequence or hash it meanwhile. Its
// first tokens stay what they are, so both find the same digests; they are stored at the end.
void Sequence::hash_in_python(int64_t count) {
  const int64_t first = static_cast<int64_t>(digests_.size()), block_size = hasher_->block_size();
  if (first >= count) return;
  const std::vector<Token> tokens(tokens_.begin() + first * block_size,
                                  tokens_.begin() + count * block_size);
  Digest parent = first > 0 ? digests_.back() : Digest{};
  std::vector<Digest> made;
  for (int64_t i = first; i < count; ++i) {
    const std::vector<ExtraKey> keys = extra_keys(i);
    const Token* block = tokens.data() + (i - first) * block_size;
    parent = hasher_->hash(i > 0 ? &parent : nullptr, block, keys, encode(keys));
    made.push_back(parent);
  }
  const int64_t known = static_cast<int64_t>(digests_.size());
  if (known < count) digests_.insert(digests_.end(), made.begin() + (known - first), made.end());
}

std::vector<ExtraKey> Sequence::content_keys(int64_t block) const {
  const int64_t start = block * hasher_->block_size(), stop = start + hasher_->block_size();
  std::vector<ExtraKey> keys;
  // Those before the first that reaches the block, and from the first that begins after it, are skipped.
  auto extra = extra_.begin() + (std::upper_bound(reach_.begin(), reach_.end(), start) - reach_.begin());
  for (; extra != extra_.end() && extra->start < stop; ++extra) {
    if (extra->stop > start) keys.push_back({extra->content_hash, "", extra->start - start, true});
  }
  return keys;
}

std::vector<ExtraKey> Sequence::extra_keys(int64_t block) const {
  std::vector<ExtraKey> keys = content_keys(block);
  if (lora_) keys.insert(keys.begin(), {"lora", *lora_});
  if (block == 0 && cache_salt_) keys.push_back({"cache_salt", *cache_salt_});
  return keys;
}

std::string Sequence::extra_cbor(int64_t block) const {
  return has_extra(block) ? encode(extra_keys(block)) : std::string();
}

std::string Sequence::content_cbor(int64_t block) const {
  return has_content() ? encode(content_keys(block)) : std::string();
}

int64_t Sequence::shared_prefix(const Sequence& other) const {
  if (lora_ != other.lora_ || cache_salt_ != other.cache_salt_) return 0;
  const int64_t most = std::min(num_tokens(), other.num_tokens());
  int64_t shared = std::mismatch(tokens_.begin(), tokens_.begin() + most, other.tokens_.begin()).first -
                   tokens_.begin();
  // An extra that only one of them has parts them where it begins.
  std::vector<Extra> different;
  std::set_symmetric_difference(extra_.begin(), extra_.end(), other.extra_.begin(),
                                other.extra_.end(), std::back_inserter(different));
  if (!different.empty()) shared = std::min(shared, different.front().start);
  return shared;
}

}  // namespace prefixkv
