#include "model.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>

namespace prefixkv::fuzz {
namespace {

// One content has one length, as an image has: block hashes tell where it begins, not where it ends.
struct Space {
  std::optional<std::string> cache_salt, lora;
  std::vector<Extra> extra;  // sorted
};

const Space& space_at(size_t index) {
  static const std::array<Space, kNumSpaces> spaces = {{
      {},
      {"a", {}, {}},
      {{}, "a", {}},
      {{}, {}, {{1, 3, "one"}}},
      {{}, {}, {{1, 3, "two"}}},
      {{}, {}, {{2, 4, "one"}, {6, 13, "long"}}},
      {"a", "b", {{1, 3, "one"}, {3, 10, "long"}}},
  }};
  return spaces[index % kNumSpaces];
}

uint64_t of(const std::optional<std::string>& name) {
  return name ? std::hash<std::string>()(*name) | 1 : 0;
}

}  // namespace

void fail(const std::string& what) {
  std::fprintf(stderr, "violated: %s\n", what.c_str());
  std::abort();
}

int64_t number(uint8_t byte, int64_t usual) {
  using Limits = std::numeric_limits<int64_t>;
  constexpr int64_t kFar = int64_t{1} << 31;
  const std::array<int64_t, 12> numbers = {-1, 0, 1, usual - 1, Limits::min(), Limits::max(), Limits::max() - 1,
                                           kFar, kFar - 1, -kFar, 2 * kFar, usual + 1000};
  return byte < 232 ? usual : numbers[(byte - 232) % numbers.size()];
}

Text::Text(std::shared_ptr<const Hasher> hasher, size_t space) : space_(space % kNumSpaces) {
  const Space& it = space_at(space_);
  // Given in the other order: it must not matter.
  std::vector<Extra> extra(it.extra.rbegin(), it.extra.rend());
  native = std::make_shared<Sequence>(std::move(hasher), it.cache_salt, it.lora, std::move(extra));
}

std::shared_ptr<Text> Text::fork() const {
  auto copy = std::make_shared<Text>(*this);
  copy->native = std::make_shared<Sequence>(*native);
  return copy;
}

void Text::append(const std::vector<Token>& tokens) {
  std::vector<Token>& to = native->mutable_tokens();
  to.insert(to.end(), tokens.begin(), tokens.end());
  for (const Token token : tokens) note(token);
}

void Text::note(Token token) {
  const Space& space = space_at(space_);
  const int64_t position = size();
  uint64_t content = position > 0 ? content_.back() : mix(mix(1, of(space.cache_salt)), of(space.lora));
  content = mix(content, static_cast<uint64_t>(token));
  for (const Extra& extra : space.extra) {
    if (extra.start > position || extra.stop <= position) continue;
    content = mix(mix(content, std::hash<std::string>()(extra.content_hash)),
                  static_cast<uint64_t>(extra.start));
  }
  tokens_.push_back(token);
  content_.push_back(content);
}

int64_t Text::shared_prefix(const Text& other) const {
  const Space &one = space_at(space_), &two = space_at(other.space_);
  if (one.cache_salt != two.cache_salt || one.lora != two.lora) return 0;
  int64_t shared = 0;
  while (shared < size() && shared < other.size() && tokens_[shared] == other.tokens_[shared]) ++shared;
  std::vector<Extra> different;
  std::set_symmetric_difference(one.extra.begin(), one.extra.end(), two.extra.begin(), two.extra.end(),
                                std::back_inserter(different));
  return different.empty() ? shared : std::min(shared, different.front().start);
}

}  // namespace prefixkv::fuzz
