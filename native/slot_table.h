// From a 32-bit tag to small numbers: the hash table under the indexes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include "huge_pages.h"

namespace prefixkv {

// Open addressing with linear probing; deletion shifts back, so there are no tombstones. It is at
// most half full. What is stored is a number of the caller's, whose content the caller compares.
class SlotTable {
 public:
  static constexpr int32_t kNone = INT32_MIN;

  explicit SlotTable(size_t expected)
      : slots_(std::bit_ceil(2 * expected + 2)), mask_(slots_.size() - 1) {}

  size_t size() const { return size_; }
  void prefetch(uint32_t tag) const { __builtin_prefetch(&slots_[home(tag)]); }

  // The first number under the tag for which `equals` is true, or kNone.
  template <typename Equals>
  int32_t find(uint32_t tag, Equals&& equals) const {
    for (size_t slot = home(tag); slots_[slot].id != kNone; slot = next(slot)) {
      if (slots_[slot].tag == tag && equals(slots_[slot].id)) return slots_[slot].id;
    }
    return kNone;
  }

  void insert(uint32_t tag, int32_t id) {
    if (2 * ++size_ > slots_.size()) grow();
    place(tag, id);
  }

  // The number must be there.
  void erase(uint32_t tag, int32_t id) {
    size_t hole = home(tag);
    while (slots_[hole].id != id) hole = next(hole);
    // Shift back each later slot of the run that a probe from its home would no longer reach.
    for (size_t slot = next(hole); slots_[slot].id != kNone; slot = next(slot)) {
      if (distance(home(slots_[slot].tag), slot) >= distance(hole, slot)) {
        slots_[hole] = slots_[slot];
        hole = slot;
      }
    }
    slots_[hole].id = kNone;
    --size_;
  }

 private:
  struct Slot {
    uint32_t tag = 0;
    int32_t id = kNone;
  };

  size_t home(uint32_t tag) const { return tag & mask_; }
  size_t next(size_t slot) const { return (slot + 1) & mask_; }
  size_t distance(size_t from, size_t to) const { return (to - from) & mask_; }
  void place(uint32_t tag, int32_t id) {
    size_t slot = home(tag);
    while (slots_[slot].id != kNone) slot = next(slot);
    slots_[slot] = Slot{tag, id};
  }
  void grow() {
    HugeVector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old) {
      if (slot.id != kNone) place(slot.tag, slot.id);
    }
  }

  HugeVector<Slot> slots_;  // a power of two of them
  size_t mask_;
  size_t size_ = 0;
};

}  // namespace prefixkv
