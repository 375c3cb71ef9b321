// Operations over many tables, and the fuzzer's entry.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "seam.h"

namespace prefixkv::fuzz {

void Seam::allocate_many(const Record& r) {
  std::vector<TableModel*> tables;
  std::vector<int64_t> num_tokens;
  for (size_t i = 0; i < tables_.size(); ++i) {
    if ((r.a >> i & 1) == 0) continue;
    tables.push_back(tables_[i].get());
    num_tokens.push_back(tables_[i]->num_tokens + (r.b >> i) % (setting_.block_size + 2));
  }
  bool wrong = false;
  if (r.c >= 0xf0 && !tables.empty()) tables.push_back(tables.front()), num_tokens.push_back(1), wrong = true;
  if (r.c >= 0xe0 && r.c < 0xf0) tables.push_back(table(r.c | 0xf0)), num_tokens.push_back(1);
  if (r.c >= 0xd8 && r.c < 0xe0) num_tokens.push_back(1), wrong = true;
  if (r.c >= 0xc0 && r.c < 0xd8 && !tables.empty()) num_tokens[0] = number(r.c + 0x20, num_tokens[0]);
  if (std::count(tables.begin(), tables.end(), nullptr) > 0) return;

  std::vector<BlockTable*> natives;
  for (const TableModel* one : tables) natives.push_back(one->native.get());
  for (size_t i = 0; i < std::min(tables.size(), num_tokens.size()); ++i) {
    wrong |= is_wrong_allocate(*tables[i], num_tokens[i], nullptr);
    wrong |= std::count(tables.begin(), tables.end(), tables[i]) > 1;
  }
  std::vector<std::optional<Grant>> grants;
  const auto call = [&] { grants = manager_->allocate_many(natives, num_tokens); };
  if (wrong) {
    attempt(true, "allocate_many", call);
    return;
  }
  std::vector<int32_t> held = holders();
  const std::vector<BlockId> free = manager_->free_blocks();
  int64_t available = static_cast<int64_t>(free.size());
  std::vector<std::optional<Plan>> plans;
  std::vector<std::vector<BlockId>> before;
  for (size_t i = 0; i < tables.size(); ++i) {
    before.push_back(natives[i]->blocks);
    plans.push_back(plan(before[i], tables[i]->num_computed_tokens, num_tokens[i], held));
    if ((i > 0 && !plans[i - 1]) || plans[i]->taken() > available) {
      plans[i] = std::nullopt;
      continue;
    }
    available -= plans[i]->taken();
    for (const size_t at : plans[i]->replaced) --held[static_cast<size_t>(before[i][at])];
  }
  attempt(false, "allocate_many", call);
  require(grants.size() == tables.size(), "allocate_many gives another number of grants");
  std::vector<BlockId> taken;
  for (size_t i = 0; i < tables.size(); ++i) {
    require(grants[i].has_value() == plans[i].has_value(), "allocate_many gives or refuses against its rule");
    if (!grants[i]) {
      require(natives[i]->blocks == before[i], "a refused table changes");
      ++counts_.refusals;
      continue;
    }
    for (const size_t at : plans[i]->replaced) taken.push_back(natives[i]->blocks[at]);
    taken.insert(taken.end(), natives[i]->blocks.end() - plans[i]->appended, natives[i]->blocks.end());
    granted(*tables[i], *plans[i], before[i], *grants[i], num_tokens[i]);
  }
  require(std::equal(taken.begin(), taken.end(), free.begin()), "allocate_many takes blocks out of order");
}

void Seam::commit_many(const Record& r) {
  std::vector<TableModel*> tables;
  std::vector<std::shared_ptr<Text>> texts;
  std::vector<Token> tokens;
  for (size_t i = 0; i < tables_.size(); ++i) {
    if ((r.a >> i & 1) == 0) continue;
    tables.push_back(tables_[i].get());
    texts.push_back(tables_[i]->text ? tables_[i]->text : text(r.c % 0xf8));
    tokens.push_back(r.b >> i & 1);
  }
  if (r.c >= 0xe8 && !tables.empty()) {
    if (r.c % 2 == 0) tables.push_back(table(r.c)), texts.push_back(text(r.c)), tokens.push_back(0);
    if (r.c % 4 == 1) texts.back() = text(r.c);
    if (r.c % 4 == 3) tokens.back() = static_cast<Token>(number(r.c, 0));
  }
  bool wrong = false;
  if (r.c >= 0xe0 && r.c < 0xe8) tokens.push_back(0), wrong = true;
  const auto is_full = [](const auto& text) { return !text || text->size() >= 64; };
  if (std::count(tables.begin(), tables.end(), nullptr) > 0) return;
  if (std::any_of(texts.begin(), texts.end(), is_full)) return;

  std::vector<BlockTable*> natives;
  std::vector<std::shared_ptr<Sequence>> seqs;
  for (const TableModel* one : tables) natives.push_back(one->native.get());
  for (const auto& one : texts) seqs.push_back(one->native);
  for (size_t i = 0; i < tables.size(); ++i) {
    wrong |= std::count(tables.begin(), tables.end(), tables[i]) > 1;
    wrong |= std::count(texts.begin(), texts.end(), texts[i]) > 1;
    wrong |= tokens[i] < 0;
    wrong |= is_wrong_commit(*tables[i], *texts[i], tables[i]->num_computed_tokens + 1, texts[i]->size() + 1);
  }
  std::vector<std::vector<BlockId>> before;
  for (size_t i = 0; i < tables.size() && !wrong; ++i) {
    before.push_back(natives[i]->blocks);
    texts[i]->note(tokens[i]);
    write(*tables[i], *texts[i], tables[i]->num_computed_tokens + 1);
  }
  const auto call = [&] { manager_->commit_many(natives, seqs, tokens); };
  if (!attempt(wrong, "commit_many", call)) return;
  for (size_t i = 0; i < tables.size(); ++i) {
    require(seqs[i]->num_tokens() == texts[i]->size(), "commit_many appends other than one token");
    committed(*tables[i], texts[i], tables[i]->num_computed_tokens + 1, before[i]);
  }
}

namespace {

// Of the whole run.
Counts counts;

}  // namespace
}  // namespace prefixkv::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace prefixkv::fuzz;
  Script script(data, size);
  Record one, two, record;
  if (!script.next(one) || !script.next(two)) return 0;
  Seam seam(Setting::of(one, two), counts);
  while (script.next(record)) seam.run(record);
  seam.finish();
  return 0;
}

extern "C" void fuzz_report() {
  using prefixkv::fuzz::counts;
  std::printf("%lld operations, of which %lld misuses (%lld stale hits); %lld hits, %lld copies, %lld refusals\n",
              static_cast<long long>(counts.operations), static_cast<long long>(counts.misuses),
              static_cast<long long>(counts.stale), static_cast<long long>(counts.hits),
              static_cast<long long>(counts.copies), static_cast<long long>(counts.refusals));
}
