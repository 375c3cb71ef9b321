#include "seam.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

namespace prefixkv::fuzz {
namespace {

constexpr size_t kMostTables = 8, kMostTexts = 10, kMostHits = 6, kMostPins = 4, kMostFreed = 3;
constexpr int64_t kMostTokens = 64;

std::vector<Token> bits(uint64_t seed, int64_t count) {
  std::vector<Token> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<Token>(mix(seed, i + 1) >> 20 & 1));
  return tokens;
}

// In place of Python's pickle.
Digest toy_hash(const Digest* parent, const Token* tokens, int count, const std::vector<ExtraKey>& extra) {
  uint64_t state = 7;
  for (int i = 0; i < 4 && parent != nullptr; ++i) state = mix(state, parent->word[i]);
  for (int i = 0; i < count; ++i) state = mix(state, static_cast<uint64_t>(tokens[i]));
  for (const ExtraKey& key : extra) {
    for (const char c : key.name + "\n" + key.value) state = mix(state, static_cast<uint8_t>(c));
    state = mix(state, static_cast<uint64_t>(key.offset));
  }
  return Digest{{state, mix(state, 1), mix(state, 2), mix(state, 3)}};
}

std::unique_ptr<BlockManager> make(const Setting& it, int64_t num_blocks) {
  auto hasher = std::make_shared<Hasher>(it.algorithm, it.block_size, 5, it.hash_bits, toy_hash);
  return make_manager(it.system, num_blocks, it.num_groups, std::move(hasher), it.events);
}

}  // namespace

Setting Setting::of(const Record& one, const Record& two) {
  struct Kind {
    System system;
    HashAlgorithm algorithm;
    int hash_bits;
  };
  constexpr Kind kinds[] = {
      {System::kHash, HashAlgorithm::kXxh3, 128},   {System::kHash, HashAlgorithm::kSha256Cbor, 128},
      {System::kHash, HashAlgorithm::kSha256, 128}, {System::kHash, HashAlgorithm::kXxh3, 0},
      {System::kHash, HashAlgorithm::kXxh3, 3},     {System::kRadix, HashAlgorithm::kXxh3, 128},
      {System::kRadix, HashAlgorithm::kXxh3, 128},  {System::kRadix, HashAlgorithm::kSha256, 128},
      {System::kPaged, HashAlgorithm::kXxh3, 128},  {System::kPaged, HashAlgorithm::kSha256Cbor, 128},
      {System::kOff, HashAlgorithm::kXxh3, 128},
  };
  const Kind& kind = kinds[one.op % std::size(kinds)];
  return {kind.system,     kind.algorithm,   kind.hash_bits,   1 << one.a % 3,
          1 + one.b % 2,   1 + one.c % 32,   two.op % 2 == 1};
}

Seam::Seam(const Setting& setting, Counts& counts)
    : setting_(setting),
      counts_(counts),
      manager_(make(setting, setting.num_blocks)),
      shadow_(static_cast<size_t>(setting.num_blocks * setting.block_size)) {}

BlockManager& Seam::other() {
  if (!other_) other_ = make(setting_, 4);
  return *other_;
}

std::shared_ptr<Text> Seam::text(uint8_t byte) {
  if (byte >= 0xf8) {
    auto foreign = std::make_shared<Text>(other().hasher(), 0);
    foreign->append(bits(1, 9));
    return foreign;
  }
  return texts_.empty() ? nullptr : texts_[byte % texts_.size()];
}

TableModel* Seam::table(uint8_t byte) {
  if (byte >= 0xf8) {
    const bool is_new = std::none_of(wrong_tables_.begin(), wrong_tables_.end(),
                                     [](const auto& table) { return !table->native->freed; });
    if (is_new) {
      wrong_tables_.insert(wrong_tables_.begin(), std::make_unique<TableModel>());
      TableModel& foreign = *wrong_tables_.front();
      foreign.native = other().table(std::nullopt, 0);
      foreign.wrong = true;
    }
    return wrong_tables_.front().get();
  }
  if (byte >= 0xf0 && !wrong_tables_.empty()) return wrong_tables_.back().get();
  return tables_.empty() ? nullptr : tables_[byte % tables_.size()].get();
}

HitModel* Seam::hit(uint8_t byte) {
  if (byte < 0x50 || hits_.empty()) return nullptr;
  return &hits_[byte % hits_.size()];
}

void Seam::keep(std::shared_ptr<Text> text, uint8_t at) {
  if (texts_.size() < kMostTexts) {
    texts_.push_back(std::move(text));
  } else {
    texts_[at % kMostTexts] = std::move(text);
  }
}

// -------------------------------------------------------------------------------------- sequences

void Seam::make_text(const Record& r) {
  auto made = std::make_shared<Text>(manager_->hasher(), r.a < 0x80 ? 0 : r.a);
  if (const auto base = text(r.b % 0xf8)) {
    const auto& tokens = base->tokens();
    made->append({tokens.begin(), tokens.begin() + r.c % (base->size() + 1)});
  }
  made->append(bits(r.b, std::min<int64_t>(1 + r.a % 12, kMostTokens - made->size())));
  keep(std::move(made), r.a);
}

void Seam::append(const Record& r) {
  const auto to = text(r.a % 0xf8);
  if (to && to->size() + 3 <= kMostTokens) to->append(bits(r.c, 1 + r.b % 3));
}

void Seam::fork_text(const Record& r) {
  if (const auto from = text(r.a % 0xf8)) keep(from->fork(), r.b);
}

void Seam::lookup(const Record& r) {
  const auto of = text(r.a);
  if (!of) return;
  const int group = static_cast<int>(number(r.b, r.b % setting_.num_groups));
  const bool wrong = is_foreign(*of) || group < 0 || group >= setting_.num_groups;
  HitModel found{{}, of, false};
  if (!attempt(wrong, "lookup", [&] { found.native = manager_->lookup(of->native, group); })) return;
  check_found(found.native, *of, group);
  counts_.hits += !found.native.blocks.empty();
  if (hits_.size() < kMostHits) {
    hits_.push_back(std::move(found));
  } else {
    hits_[r.c % kMostHits] = std::move(found);
  }
}

// ----------------------------------------------------------------------------------------- tables

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

// ----------------------------------------------------------------------------------- reservations

void Seam::reserve(const Record& r) {
  TableModel* from = table(r.a);
  if (from == nullptr) return;
  const int64_t computed = from->num_computed_tokens;
  const int64_t num_tokens = number(r.b, computed > 0 ? 1 + r.b % computed : 1);
  const bool wrong = from->wrong || setting_.system == System::kOff || num_tokens < 1 || num_tokens > computed;
  if (!wrong && pins_.size() == kMostPins) return;
  std::optional<Pin> pin;
  if (!attempt(wrong, "reserve", [&] { pin = manager_->reserve(*from->native, num_tokens); })) return;
  require(pin->num_tokens == (finds_blocks() ? whole(num_tokens) : num_tokens),
          "a reservation holds other than what was asked for");
  const auto& blocks = from->native->blocks;
  require(pin->blocks == std::vector<BlockId>(blocks.begin(), blocks.begin() + blocks_for(pin->num_tokens)),
          "a reservation holds other blocks than the table's first");
  require(pin->group == from->group, "a reservation is of another group");
  pins_.push_back({std::move(*pin), from->text, false});
}

void Seam::release(const Record& r) {
  if (pins_.empty()) return;
  PinModel& pin = pins_[r.a % pins_.size()];
  if (attempt(pin.released, "release", [&] { manager_->release(pin.native); })) {
    pin.released = true;
  } else {
    pins_.erase(pins_.begin() + r.a % static_cast<ptrdiff_t>(pins_.size()));
  }
}

// ------------------------------------------------------------------------------------- the others

void Seam::reset(const Record&) {
  const std::vector<int32_t> held = holders();
  const bool possible = std::all_of(held.begin(), held.end(), [](int32_t count) { return count == 0; });
  const uint64_t state = visible();
  const std::vector<BlockId> free = manager_->free_blocks();
  require(manager_->reset() == possible, "reset against its rule");
  if (!possible) return require(visible() == state, "a refused reset leaves a trace");
  require(manager_->free_blocks() == free, "reset changes the order of reuse");
  for (const BlockId block : free) require(!manager_->block(block).is_cached, "a block is cached after a reset");
  std::fill(shadow_.begin(), shadow_.end(), 0);
}

void Seam::block(const Record& r) {
  const int64_t index = number(r.a, r.a % setting_.num_blocks);
  const bool wrong = index < 0 || index >= setting_.num_blocks;
  attempt(wrong, "block", [&] { manager_->block(index); });
}

void Seam::drain(const Record&) { check_events(); }

void Seam::run(const Record& record) {
  using Operation = void (Seam::*)(const Record&);
  struct Entry {
    const char* name;
    int weight;
    Operation operation;
  };
  constexpr Entry entries[] = {
      {"sequence", 2, &Seam::make_text},     {"append", 2, &Seam::append},
      {"seq.fork", 1, &Seam::fork_text},     {"lookup", 3, &Seam::lookup},
      {"table", 2, &Seam::make_table},       {"allocate", 5, &Seam::allocate},
      {"commit", 3, &Seam::commit},          {"admit", 3, &Seam::admit},
      {"fork", 2, &Seam::fork_table},        {"free", 3, &Seam::free_table},
      {"reserve", 2, &Seam::reserve},        {"release", 1, &Seam::release},
      {"allocate_many", 1, &Seam::allocate_many}, {"commit_many", 2, &Seam::commit_many},
      {"reset", 1, &Seam::reset},            {"drain_events", 1, &Seam::drain},
      {"block", 1, &Seam::block},
  };
  constexpr int kTotal = 35;
  static_assert(std::accumulate(std::begin(entries), std::end(entries), 0,
                                [](int sum, const Entry& it) { return sum + it.weight; }) == kTotal);
  const Entry* entry = entries;
  for (int at = record.op % kTotal; at >= entry->weight; ++entry) at -= entry->weight;
  if (std::getenv("FUZZ_TRACE") != nullptr) {
    std::fprintf(stderr, "%s %d %d %d\n", entry->name, record.a, record.b, record.c);
  }
  ++counts_.operations;
  (this->*entry->operation)(record);
  check_everything();
}

void Seam::finish() {
  while (!tables_.empty()) free_table({});
  for (PinModel& pin : pins_) {
    if (!pin.released) manager_->release(pin.native);
    pin.released = true;
  }
  check_everything();
  check_events();
  require(manager_->num_free_blocks() == setting_.num_blocks, "blocks are lost");
  if (other_) other_->check();
  reset({});
  check_everything();
}

}  // namespace prefixkv::fuzz
