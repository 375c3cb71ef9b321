#include "seam.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

namespace prefixkv::fuzz {
namespace {

constexpr size_t kMostTexts = 10, kMostHits = 6, kMostPins = 4;
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

// ----------------------------------------------------------------------------------- reservations

void Seam::reserve(const Record& r) {
  TableModel* from = table(r.a);
  if (from == nullptr) return;
  const int64_t computed = from->num_computed_tokens;
  const int64_t num_tokens = number(r.b, computed > 0 ? 1 + r.b % computed : 1);
  const bool wrong = from->wrong || setting_.system == System::kOff || num_tokens < 1 || num_tokens > computed;
  if (!wrong && pins_.size() == kMostPins) {
    const auto old = std::find_if(pins_.begin(), pins_.end(), [](const auto& pin) { return pin.released; });
    if (old == pins_.end()) return;
    pins_.erase(old);
  }
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
  if (attempt(pin.released, "release", [&] { manager_->release(pin.native); })) pin.released = true;
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

// Many calls of which most are wrong.
void Seam::misuse(const Record& r) {
  using Operation = void (Seam::*)(const Record&);
  constexpr Operation operations[] = {&Seam::lookup, &Seam::make_table, &Seam::allocate, &Seam::commit,
                                      &Seam::fork_table, &Seam::free_table, &Seam::reserve, &Seam::release,
                                      &Seam::allocate_many, &Seam::commit_many, &Seam::block};
  uint64_t state = mix(mix(r.a, r.b), r.c);
  for (int i = 0; i < 8; ++i) {
    state = mix(state, i);
    Record sub{0, static_cast<uint8_t>(state), static_cast<uint8_t>(state >> 8), static_cast<uint8_t>(state >> 16)};
    (i % 2 == 0 ? sub.a : state >> 24 & 1 ? sub.b : sub.c) |= 0xf0;
    ++counts_.operations;
    (this->*operations[(state >> 32) % std::size(operations)])(sub);
  }
}

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
      {"misuse", 3, &Seam::misuse},
  };
  constexpr int kTotal = 38;
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
