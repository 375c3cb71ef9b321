// Operations on one table.
#include <algorithm>

#include "seam.h"

namespace prefixkv::fuzz {
namespace {

constexpr size_t kMostTables = 8, kMostFreed = 3;

}  // namespace

void Seam::make_table(const Record& r) {
  const int group = static_cast<int>(number(r.a, r.a % setting_.num_groups));
  const bool wrong = group < 0 || group >= setting_.num_groups;
  if (!wrong && tables_.size() == kMostTables) return;
  auto made = std::make_unique<TableModel>();
  if (r.b % 2 == 1) made->owner = "owner " + std::to_string(next_owner_++ % 5);
  made->group = group;
  if (attempt(wrong, "table", [&] { made->native = manager_->table(made->owner, group); })) {
    tables_.push_back(std::move(made));
  }
}

void Seam::allocate(const Record& r) {
  TableModel* to = table(r.a);
  if (to == nullptr) return;
  HitModel foreign;
  HitModel* with = hit(r.c);
  if (r.c >= 0xf8) {
    foreign = {other().lookup(text(0xff)->native, 0), text(0xff), true};
    with = &foreign;
  }
  const int64_t least = std::max(to->num_tokens, with != nullptr ? with->native.num_tokens : 0);
  do_allocate(*to, number(r.b, least + r.b % (2 * setting_.block_size + 3)), with);
}

void Seam::do_allocate(TableModel& table, int64_t num_tokens, HitModel* hit) {
  const Hit* native_hit = hit != nullptr ? &hit->native : nullptr;
  std::optional<Grant> grant;
  const auto call = [&] { grant = manager_->allocate(*table.native, num_tokens, native_hit); };
  if (is_wrong_allocate(table, num_tokens, hit)) {
    counts_.stale += hit != nullptr && !hit->foreign && is_stale(*hit);
    attempt(true, "allocate", call);
    return;
  }
  const bool takes_hit = hit != nullptr && !hit->native.blocks.empty();
  const std::vector<BlockId> before = takes_hit ? hit->native.blocks : table.native->blocks;
  std::vector<BlockId> free = manager_->free_blocks();
  std::vector<int32_t> held = holders();
  if (takes_hit) {
    for (const BlockId block : before) ++held[static_cast<size_t>(block)];
    std::erase_if(free, [&](BlockId block) { return std::count(before.begin(), before.end(), block) > 0; });
  }
  const int64_t computed = takes_hit ? hit->native.num_tokens : table.num_computed_tokens;
  const Plan plan = this->plan(before, computed, num_tokens, held);
  const bool refused = plan.taken() > static_cast<int64_t>(free.size());
  const uint64_t state = refused ? visible() : 0;
  attempt(false, "allocate", call);
  require(grant.has_value() != refused, "allocate gives or refuses against its rule");
  if (refused) {
    ++counts_.refusals;
    require(visible() == state, "a refusal leaves a trace");
    return;
  }
  if (takes_hit) {
    table.text = hit->text;
    table.num_computed_tokens = computed;
  }
  std::vector<BlockId> taken;
  for (const size_t i : plan.replaced) taken.push_back(table.native->blocks[i]);
  taken.insert(taken.end(), table.native->blocks.end() - plan.appended, table.native->blocks.end());
  for (const BlockId block : taken) {
    require(std::count(free.begin(), free.end(), block) == 1, "allocate takes a block that is not free");
  }
  // In radix the hit's walk makes a leaf that it splits more recent, so the order may change.
  if (!takes_hit || setting_.system != System::kRadix) {
    require(std::equal(taken.begin(), taken.end(), free.begin()), "allocate takes blocks out of order");
  }
  granted(table, plan, before, *grant, num_tokens);
}

void Seam::granted(TableModel& table, const Plan& plan, const std::vector<BlockId>& before,
                   const Grant& grant, int64_t num_tokens) {
  const std::vector<BlockId>& blocks = table.native->blocks;
  std::vector<BlockId> expected = before, fresh;
  std::vector<std::pair<BlockId, BlockId>> copies;
  for (const size_t i : plan.replaced) {
    expected[i] = blocks[i];
    if (plan.copied == i) {
      copies.emplace_back(before[i], blocks[i]);
    } else {
      fresh.push_back(blocks[i]);
    }
  }
  for (size_t i = before.size(); i < blocks.size(); ++i) {
    fresh.push_back(blocks[i]);
    expected.push_back(blocks[i]);
  }
  require(blocks == expected, "allocate changes blocks that it must not");
  require(grant.new_blocks == fresh, "a grant's new blocks are wrong");
  require(grant.copies == copies, "a grant's copies are wrong");
  const auto slots = [&](BlockId block) { return shadow_.begin() + block * setting_.block_size; };
  for (const BlockId block : fresh) {
    std::fill_n(slots(block), setting_.block_size, 0);
    require(manager_->block(block).owner == table.owner, "a new block has another owner than its table");
  }
  for (const auto& [source, target] : copies) {
    std::copy_n(slots(source), setting_.block_size, slots(target));
    ++counts_.copies;
  }
  table.num_tokens = num_tokens;
}

void Seam::commit(const Record& r) {
  TableModel* to = table(r.a);
  if (to == nullptr) return;
  const auto of = r.b < 0xc0 && to->text ? to->text : text(r.b);
  if (!of) return;
  int64_t stop = std::min(to->num_tokens, of->size());
  if (r.c % 4 == 0) stop = to->num_computed_tokens + r.c / 4 % (setting_.block_size + 1);
  do_commit(*to, of, number(r.c, stop));
}

void Seam::do_commit(TableModel& table, const std::shared_ptr<Text>& text, int64_t num_computed_tokens) {
  const bool wrong = is_wrong_commit(table, *text, num_computed_tokens, text->size());
  if (!wrong) write(table, *text, num_computed_tokens);
  const std::vector<BlockId> before = table.native->blocks;
  if (attempt(wrong, "commit", [&] { manager_->commit(*table.native, text->native, num_computed_tokens); })) {
    committed(table, text, num_computed_tokens, before);
  }
}

// As a model would, before the commit.
void Seam::write(const TableModel& table, const Text& text, int64_t stop) {
  const int64_t size = setting_.block_size;
  for (int64_t i = table.num_computed_tokens; i < stop; ++i) {
    const BlockId block = table.native->blocks[static_cast<size_t>(i / size)];
    const BlockInfo info = manager_->block(block);
    require(info.ref_cnt == 1 && !info.is_cached, "a block to write to is shared or findable");
    shadow_[static_cast<size_t>(block * size + i % size)] = text.content(i, table.group);
  }
}

void Seam::committed(TableModel& table, const std::shared_ptr<Text>& text, int64_t num_computed_tokens,
                     const std::vector<BlockId>& before) {
  std::vector<BlockId> expected = before;
  if (setting_.system == System::kRadix) {  // which may give the table the tree's blocks for its own
    for (int64_t i = table.num_computed_tokens / setting_.block_size;
         i < num_computed_tokens / setting_.block_size; ++i) {
      expected[static_cast<size_t>(i)] = table.native->blocks[static_cast<size_t>(i)];
    }
  }
  require(table.native->blocks == expected, "commit changes blocks that it must not");
  table.text = text;
  table.num_computed_tokens = num_computed_tokens;
}

// A request in one operation, so that more inputs get beyond the first steps.
void Seam::admit(const Record& r) {
  if (tables_.size() == kMostTables) return;
  const auto of = text(r.a % 0xf8);
  if (!of) return;
  make_table({0, static_cast<uint8_t>(r.b % 0xe0), r.c, 0});
  TableModel& made = *tables_.back();
  HitModel found{manager_->lookup(of->native, made.group), of, false};
  check_found(found.native, *of, made.group);
  do_allocate(made, of->size(), &found);
  if (made.num_tokens == of->size()) do_commit(made, of, of->size());
}

void Seam::fork_table(const Record& r) {
  TableModel* from = table(r.a);
  if (from == nullptr || (!from->wrong && tables_.size() == kMostTables)) return;
  auto child = std::make_unique<TableModel>();
  if (!attempt(from->wrong, "fork", [&] { child->native = manager_->fork(*from->native); })) return;
  require(child->native->blocks == from->native->blocks, "a fork has other blocks");
  child->text = from->text;
  child->owner = from->owner;
  child->group = from->group;
  child->num_tokens = from->num_tokens;
  child->num_computed_tokens = from->num_computed_tokens;
  tables_.push_back(std::move(child));
}

void Seam::free_table(const Record& r) {
  TableModel* gone = table(r.a);
  if (gone == nullptr) return;
  if (!attempt(gone->wrong, "free", [&] { manager_->free(*gone->native); })) return;
  gone->wrong = true;
  const auto at = std::find_if(tables_.begin(), tables_.end(), [&](const auto& it) { return it.get() == gone; });
  wrong_tables_.push_back(std::move(*at));
  tables_.erase(at);
  if (wrong_tables_.size() > kMostFreed) wrong_tables_.erase(wrong_tables_.end() - 2);
}

}  // namespace prefixkv::fuzz
