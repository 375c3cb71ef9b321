// Token ids out of whatever Python holds them in.
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <string>
#include <vector>

#include "hash.h"

namespace prefixkv {

// Appends the token ids of a list, tuple, array, bytes (a token a byte), or an integer NumPy array or
// torch tensor of one dimension. Throws CacheError naming the first that is not a whole number from
// 0 to 2^31 - 1, and `out` is as before then. `noun` is what an error calls one of them.
void read_tokens(nanobind::handle source, std::vector<Token>& out, const char* noun = "token id");

// Whole numbers of any iterable. Throws CacheError for one beyond 64 bits.
std::vector<int64_t> read_numbers(nanobind::handle iterable, const char* name);

// How an error calls an object and its type, whatever code of the object's makes of that: its repr, cut
// short, or its type where that fails.
std::string repr_of(nanobind::handle object);
std::string type_of(nanobind::handle object);

// The memory of a Python object in one piece, held while this lives.
class ObjectBuffer {
 public:
  // It has none if the object's memory is not in one piece, or not aligned to its items.
  explicit ObjectBuffer(PyObject* object);
  ~ObjectBuffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  ObjectBuffer(const ObjectBuffer&) = delete;
  ObjectBuffer& operator=(const ObjectBuffer&) = delete;

  explicit operator bool() const { return view_.obj != nullptr; }
  const Py_buffer& operator*() const { return view_; }
  // As the struct module writes it, without the mark of the byte order.
  const char* format() const;

 private:
  Py_buffer view_ = {};
};

// The same to look at, copied only if they are not int32 in one piece already.
class TokenView {
 public:
  TokenView(nanobind::handle source, const char* noun);
  std::span<const Token> operator*() const { return tokens_; }

 private:
  ObjectBuffer buffer_;
  std::vector<Token> copied_;
  std::span<const Token> tokens_;
};

}  // namespace prefixkv
