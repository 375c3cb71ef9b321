// A block manager under an arbitrary stream of operations, right and wrong ones, beside a model that
// knows which are wrong and what each slot must hold.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "block_manager.h"
#include "errors.h"
#include "model.h"

namespace prefixkv::fuzz {

struct Counts {
  int64_t operations = 0, misuses = 0, hits = 0, copies = 0, refusals = 0, stale = 0;
};

struct Setting {
  System system;
  HashAlgorithm algorithm;
  int hash_bits;
  int block_size, num_groups, num_blocks;
  bool events;

  static Setting of(const Record& one, const Record& two);
};

struct TableModel {
  std::unique_ptr<BlockTable> native;
  std::shared_ptr<Text> text;  // filled it; null while nothing is computed
  std::optional<std::string> owner;
  int group = 0;
  int64_t num_tokens = 0;
  int64_t num_computed_tokens = 0;
  bool wrong = false;  // freed, or of another manager
};

struct HitModel {
  Hit native;
  std::shared_ptr<Text> text;
  bool foreign = false;
};

struct PinModel {
  Pin native;
  std::shared_ptr<Text> text;
  bool released = false;
};

// What an allocate must do.
struct Plan {
  std::vector<size_t> replaced;  // indices in the table
  std::optional<size_t> copied;  // of those, the one whose content goes along
  int64_t appended = 0;
  int64_t taken() const { return static_cast<int64_t>(replaced.size()) + appended; }
};

class Seam {
 public:
  Seam(const Setting& setting, Counts& counts);
  void run(const Record& record);
  // Frees all that is held: everything must be free then.
  void finish();

 private:
  // ---- operations ----
  void make_text(const Record& r);
  void append(const Record& r);
  void fork_text(const Record& r);
  void lookup(const Record& r);
  void make_table(const Record& r);
  void allocate(const Record& r);
  void commit(const Record& r);
  void admit(const Record& r);
  void fork_table(const Record& r);
  void free_table(const Record& r);
  void reserve(const Record& r);
  void release(const Record& r);
  void allocate_many(const Record& r);
  void commit_many(const Record& r);
  void reset(const Record& r);
  void drain(const Record& r);
  void block(const Record& r);
  void misuse(const Record& r);

  // ---- choice of what an operation is done to; now and then something wrong ----
  std::shared_ptr<Text> text(uint8_t byte);
  TableModel* table(uint8_t byte);
  HitModel* hit(uint8_t byte);
  void keep(std::shared_ptr<Text> text, uint8_t at);
  BlockManager& other();

  // ---- the model's view ----
  bool is_foreign(const Text& text) const { return text.native->hasher() != manager_->hasher(); }
  int64_t blocks_for(int64_t num_tokens) const {
    return num_tokens / setting_.block_size + (num_tokens % setting_.block_size != 0);
  }
  int64_t whole(int64_t num_tokens) const { return num_tokens - num_tokens % setting_.block_size; }
  bool finds_blocks() const {
    return setting_.system == System::kHash || setting_.system == System::kRadix;
  }
  std::vector<int32_t> holders() const;
  Plan plan(const std::vector<BlockId>& blocks, int64_t num_computed_tokens, int64_t num_tokens,
            const std::vector<int32_t>& holders) const;
  bool is_stale(const HitModel& hit) const;
  bool is_wrong_allocate(const TableModel& table, int64_t num_tokens, const HitModel* hit) const;
  bool is_wrong_commit(const TableModel& table, const Text& text, int64_t num_computed_tokens,
                       int64_t num_known) const;
  int64_t least_hit(const Text& text, int group) const;

  // ---- carrying out ----
  // Whether it was done; what is wrong must be refused without a trace, and nothing else.
  bool attempt(bool wrong, const char* what, const std::function<void()>& call);
  void do_allocate(TableModel& table, int64_t num_tokens, HitModel* hit);
  void granted(TableModel& table, const Plan& plan, const std::vector<BlockId>& before,
               const Grant& grant, int64_t num_tokens);
  void do_commit(TableModel& table, const std::shared_ptr<Text>& text, int64_t num_computed_tokens);
  void write(const TableModel& table, const Text& text, int64_t stop);
  void committed(TableModel& table, const std::shared_ptr<Text>& text, int64_t num_computed_tokens,
                 const std::vector<BlockId>& before);

  // ---- checks ----
  bool holds(const std::vector<BlockId>& blocks, const Text& text, int64_t num_tokens, int group) const;
  void check_found(const Hit& hit, const Text& text, int group) const;
  void check_everything() const;
  void check_events();
  uint64_t visible() const;

  Setting setting_;
  Counts& counts_;
  std::unique_ptr<BlockManager> manager_;
  std::unique_ptr<BlockManager> other_;  // made when first needed
  std::vector<uint64_t> shadow_;         // [num_blocks * block_size], what each slot holds
  std::vector<std::shared_ptr<Text>> texts_;
  std::vector<std::unique_ptr<TableModel>> tables_;  // live
  std::vector<std::unique_ptr<TableModel>> wrong_tables_;
  std::vector<HitModel> hits_;
  std::vector<PinModel> pins_;           // oldest first, released ones too
  std::set<std::pair<int, std::string>> findable_;  // by the events
  int next_owner_ = 0;
};

}  // namespace prefixkv::fuzz
