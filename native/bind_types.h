// What the bindings of sequences, caches and the radix tree have in common.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "block_manager.h"
#include "read_tokens.h"
#include "sha256.h"

namespace prefixkv {

struct PySequence {
  std::shared_ptr<Sequence> seq;
};

struct PyTable {
  std::shared_ptr<BlockManager> manager;
  std::unique_ptr<BlockTable> table;
  std::optional<std::string> owner;

  PyTable(std::shared_ptr<BlockManager> m, std::unique_ptr<BlockTable> t, std::optional<std::string> o)
      : manager(std::move(m)), table(std::move(t)), owner(std::move(o)) {}
  PyTable(PyTable&&) = default;
  // A table that is dropped without a free gives its blocks back all the same.
  ~PyTable() {
    if (table && !table->freed) manager->free(*table);
  }
};

template <typename T>
using Array = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

template <typename T>
Array<T> to_array(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Array<T>(owned->data(), {owned->size()}, owner);
}

// Items of any iterable, kept alive while they are in use, even if Python code that runs meanwhile
// changes the iterable. Throws TypeError for an item of another type.
template <typename T>
class Items {
 public:
  explicit Items(nanobind::handle iterable) : items_(nanobind::tuple(nanobind::borrow(iterable))) {
    for (nanobind::handle item : items_) {
      T* pointer = nullptr;
      if (nanobind::try_cast(item, pointer, false) && pointer != nullptr) {
        pointers_.push_back(pointer);
        continue;
      }
      const std::string needed = nanobind::type_name(nanobind::type<T>()).c_str();
      throw nanobind::type_error(("an item is of type " + type_of(item) + "; " + needed + " is needed").c_str());
    }
  }
  const std::vector<T*>& operator*() const { return pointers_; }

 private:
  nanobind::tuple items_;
  std::vector<T*> pointers_;
};

Digest pickle_hash(const Digest* parent, const Token* tokens, int count, const std::vector<ExtraKey>& extra);
// Throws ConfigError for another name.
HashAlgorithm algorithm_of(const std::string& name);
// From the operating system.
uint64_t random_seed();

void bind_sequence(nanobind::module_& m);
void bind_step(nanobind::module_& m);
void bind_radix(nanobind::module_& m);

}  // namespace prefixkv
