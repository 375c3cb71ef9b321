// The model's view of a manager: what is wrong to ask, what must come out, what must always hold.
#include <algorithm>
#include <functional>

#include "seam.h"

namespace prefixkv::fuzz {
namespace {

uint64_t mixed(uint64_t state, const std::vector<BlockId>& blocks) {
  for (const BlockId block : blocks) state = mix(state, static_cast<uint64_t>(block));
  return mix(state, blocks.size());
}

std::string bytes_of(const Digest& digest) {
  return std::string(reinterpret_cast<const char*>(digest.word), sizeof digest.word);
}

}  // namespace

bool Seam::attempt(bool wrong, const char* what, const std::function<void()>& call) {
  const uint64_t before = wrong ? visible() : 0;
  counts_.misuses += wrong;
  try {
    call();
  } catch (const CacheError& error) {
    if (!wrong) fail(std::string(what) + " is refused: " + error.what());
    require(visible() == before, "a refused call leaves a trace");
    return false;
  }
  if (wrong) fail(std::string(what) + " goes unnoticed");
  return true;
}

std::vector<int32_t> Seam::holders() const {
  std::vector<int32_t> holders(static_cast<size_t>(setting_.num_blocks));
  for (const auto& table : tables_) {
    for (const BlockId block : table->native->blocks) ++holders[static_cast<size_t>(block)];
  }
  for (const PinModel& pin : pins_) {
    if (pin.released) continue;
    for (const BlockId block : pin.native.blocks) ++holders[static_cast<size_t>(block)];
  }
  return holders;
}

Plan Seam::plan(const std::vector<BlockId>& blocks, int64_t num_computed_tokens, int64_t num_tokens,
                const std::vector<int32_t>& holders) const {
  Plan plan;
  const int64_t needed = blocks_for(num_tokens), have = static_cast<int64_t>(blocks.size());
  plan.appended = std::max<int64_t>(needed - have, 0);
  if (num_tokens == num_computed_tokens) return plan;
  for (int64_t i = num_computed_tokens / setting_.block_size; i < std::min(needed, have); ++i) {
    if (holders[static_cast<size_t>(blocks[static_cast<size_t>(i)])] == 1) continue;
    plan.replaced.push_back(static_cast<size_t>(i));
    const bool has_ours = num_computed_tokens % setting_.block_size != 0;
    if (has_ours && i == num_computed_tokens / setting_.block_size) plan.copied = static_cast<size_t>(i);
  }
  return plan;
}

bool Seam::is_stale(const HitModel& hit) const {
  if (hit.native.blocks.empty()) return false;
  if (!finds_blocks()) {
    return std::none_of(pins_.begin(), pins_.end(), [&](const PinModel& pin) {
      return !pin.released && pin.native.id == hit.native.pin;
    });
  }
  const bool all_cached = std::all_of(hit.native.blocks.begin(), hit.native.blocks.end(), [&](BlockId block) {
    return manager_->block(block).is_cached;
  });
  return !all_cached || !holds(hit.native.blocks, *hit.text, hit.native.num_tokens, hit.native.group);
}

bool Seam::is_wrong_allocate(const TableModel& table, int64_t num_tokens, const HitModel* hit) const {
  if (table.wrong || num_tokens < table.num_tokens) return true;
  if (hit == nullptr) return false;
  if (hit->foreign || hit->native.group != table.group) return true;
  if (hit->native.blocks.empty()) return false;
  return !table.native->blocks.empty() || num_tokens < hit->native.num_tokens || is_stale(*hit);
}

bool Seam::is_wrong_commit(const TableModel& table, const Text& text, int64_t num_computed_tokens,
                           int64_t num_known) const {
  if (table.wrong || is_foreign(text)) return true;
  const int64_t before = table.num_computed_tokens;
  if (num_computed_tokens < before || num_computed_tokens > table.num_tokens) return true;
  if (num_computed_tokens > num_known) return true;
  if (before > 0 && text.shared_prefix(*table.text) < before) return true;
  if (num_computed_tokens == before) return false;
  const std::vector<int32_t> held = holders();
  for (int64_t i = before / setting_.block_size; i < blocks_for(num_computed_tokens); ++i) {
    if (held[static_cast<size_t>(table.native->blocks[static_cast<size_t>(i)])] != 1) return true;
  }
  return false;
}

// Tokens that a lookup must find at the least: what is held is never evicted.
int64_t Seam::least_hit(const Text& text, int group) const {
  const int64_t most = std::max<int64_t>(text.size() - 1, 0);
  int64_t least = 0;
  const auto offer = [&](const Text& held, int64_t num_tokens) {
    int64_t shared = std::min(text.shared_prefix(held), num_tokens);
    shared = std::min(finds_blocks() ? whole(shared) : shared, finds_blocks() ? whole(most) : most);
    least = std::max(least, shared);
  };
  if (setting_.system == System::kOff) return 0;
  for (const auto& table : tables_) {
    if (finds_blocks() && table->group == group && table->text) {
      offer(*table->text, table->num_computed_tokens);
    }
  }
  for (const PinModel& pin : pins_) {
    if (!pin.released && pin.native.group == group && pin.text) offer(*pin.text, pin.native.num_tokens);
  }
  return least;
}

bool Seam::holds(const std::vector<BlockId>& blocks, const Text& text, int64_t num_tokens,
                 int group) const {
  const int64_t size = setting_.block_size;
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t slot = blocks[static_cast<size_t>(i / size)] * size + i % size;
    if (shadow_[static_cast<size_t>(slot)] != text.content(i, group)) return false;
  }
  return true;
}

void Seam::check_found(const Hit& hit, const Text& text, int group) const {
  require(hit.num_tokens <= std::max<int64_t>(text.size() - 1, 0), "a hit covers the last token");
  require(static_cast<int64_t>(hit.blocks.size()) == blocks_for(hit.num_tokens),
          "a hit has other than the blocks that its tokens need");
  require(holds(hit.blocks, text, hit.num_tokens, group), "a hit brings K/V of something else");
  const int64_t least = least_hit(text, group);
  require(hit.num_tokens >= least, "a lookup misses what is held");
  if (finds_blocks()) {
    require(hit.num_tokens % setting_.block_size == 0, "a hit ends inside a block");
  } else {
    require(hit.num_tokens == least, "a lookup finds what is not reserved");
  }
}

// Of the manager and all handles: equal before and after a refused call.
uint64_t Seam::visible() const {
  uint64_t state = mix(1, static_cast<uint64_t>(manager_->num_free_blocks()));
  state = mixed(state, manager_->free_blocks());
  for (BlockId i = 0; i < setting_.num_blocks; ++i) {
    const BlockInfo info = manager_->block(i);
    state = mix(state, static_cast<uint64_t>(info.ref_cnt) << 1 | info.is_cached);
    if (info.block_hash) state = mix(state, info.block_hash->word[0]);
    if (info.owner) state = mix(state, std::hash<std::string>()(*info.owner));
  }
  for (const auto& table : tables_) {
    state = mixed(state, table->native->blocks);
    state = mix(state, static_cast<uint64_t>(table->native->num_tokens));
    state = mix(state, static_cast<uint64_t>(table->native->num_computed_tokens));
  }
  for (const auto& text : texts_) state = mix(state, static_cast<uint64_t>(text->native->num_tokens()));
  return state;
}

void Seam::check_everything() const {
  manager_->check();
  const std::vector<int32_t> held = holders();
  std::vector<bool> is_free(held.size());
  const std::vector<BlockId> free = manager_->free_blocks();
  for (const BlockId block : free) {
    require(!is_free[static_cast<size_t>(block)], "a block is listed free twice");
    is_free[static_cast<size_t>(block)] = true;
  }
  require(static_cast<int64_t>(free.size()) == manager_->num_free_blocks(), "num_free_blocks is wrong");
  for (size_t i = 0; i < held.size(); ++i) {
    require(manager_->block(static_cast<BlockId>(i)).ref_cnt == held[i], "a ref_cnt is wrong");
    require(is_free[i] == (held[i] == 0), "a held block is free, or an unheld one is not");
  }
  for (const auto& table : tables_) {
    const BlockTable& native = *table->native;
    require(native.num_tokens == table->num_tokens, "num_tokens of a table is wrong");
    require(native.num_computed_tokens == table->num_computed_tokens, "num_computed_tokens is wrong");
    require(native.group == table->group, "the group of a table changed");
    require(static_cast<int64_t>(native.blocks.size()) == blocks_for(table->num_tokens),
            "a table has other than the blocks that its tokens need");
    if (table->text) {
      require(holds(native.blocks, *table->text, table->num_computed_tokens, table->group),
              "a table's K/V was overwritten");
    }
  }
  for (const PinModel& pin : pins_) {
    if (pin.released) continue;
    require(!pin.text || holds(pin.native.blocks, *pin.text, pin.native.num_tokens, pin.native.group),
            "a reservation's K/V was overwritten");
  }
}

void Seam::check_events() {
  const auto events = manager_->drain_events();
  require(setting_.events || events.empty(), "there are events though none were asked for");
  if (!setting_.events || setting_.hash_bits < 128) return;
  for (const Event& event : events) {
    if (event.kind == Event::Kind::kCleared) findable_.clear();
    for (const Digest& digest : event.hashes) {
      const std::pair key(event.group, bytes_of(digest));
      if (event.kind == Event::Kind::kStored) {
        require(findable_.insert(key).second, "content is stored twice");
      } else {
        require(findable_.erase(key) == 1, "content is evicted that was not stored");
      }
    }
    if (event.kind == Event::Kind::kStored) {
      require(event.tokens.size() == event.hashes.size() * static_cast<size_t>(setting_.block_size),
              "a stored event has other tokens than its blocks");
    }
  }
  std::set<std::string> told, seen;
  for (const auto& [group, digest] : findable_) told.insert(digest);
  for (BlockId i = 0; finds_blocks() && i < setting_.num_blocks; ++i) {
    const BlockInfo info = manager_->block(i);
    require(info.is_cached == info.block_hash.has_value(), "a cached block has no hash");
    if (info.block_hash) seen.insert(bytes_of(*info.block_hash));
  }
  for (const PinModel& pin : pins_) {
    if (finds_blocks() || pin.released || !pin.text) continue;
    const int64_t full = pin.native.num_tokens / setting_.block_size;
    const Digest* digests = pin.text->native->digests(full);
    for (int64_t i = 0; i < full; ++i) seen.insert(bytes_of(digests[i]));
  }
  require(told == seen, "the events tell of other content than there is");
}

}  // namespace prefixkv::fuzz
