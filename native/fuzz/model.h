// What the fuzzers know of right and wrong: the tokens of each sequence, and what the K/V of each
// token depends on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hash.h"

namespace prefixkv::fuzz {

// Ends the process, which the driver takes for a find.
[[noreturn]] void fail(const std::string& what);
inline void require(bool holds, const char* what) {
  if (!holds) fail(what);
}

// Order matters, as in everything that a prefix decides.
inline uint64_t mix(uint64_t state, uint64_t value) {
  state = (state ^ value) * 0x9e3779b97f4a7c15;
  return state ^ (state >> 29);
}

// An operation and its arguments. An input is a list of these.
struct Record {
  uint8_t op = 0, a = 0, b = 0, c = 0;
};

class Script {
 public:
  Script(const uint8_t* data, size_t size) : data_(data), left_(size / 4) {}
  bool next(Record& record) {
    if (left_ == 0) return false;
    record = {data_[0], data_[1], data_[2], data_[3]};
    data_ += 4;
    --left_;
    return true;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

// Numbers that no caller should give, for bytes of 232 and above; else `usual`.
int64_t number(uint8_t byte, int64_t usual);

// Namespaces and extra content that differ in all the ways that matter.
inline constexpr size_t kNumSpaces = 7;

// A sequence beside what it must be equal to.
class Text {
 public:
  Text(std::shared_ptr<const Hasher> hasher, size_t space);
  std::shared_ptr<Text> fork() const;

  void append(const std::vector<Token>& tokens);
  // The native sequence has it already.
  void note(Token token);

  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
  const std::vector<Token>& tokens() const { return tokens_; }
  // What a slot with the K/V of the token at `position` holds.
  uint64_t content(int64_t position, int group) const {
    return mix(content_[static_cast<size_t>(position)], static_cast<uint64_t>(group));
  }
  // The rule of Sequence::shared_prefix, written anew.
  int64_t shared_prefix(const Text& other) const;

  std::shared_ptr<Sequence> native;

 private:
  size_t space_;
  std::vector<Token> tokens_;
  std::vector<uint64_t> content_;
};

}  // namespace prefixkv::fuzz
