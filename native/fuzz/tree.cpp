// The radix tree under an arbitrary stream of operations, right and wrong ones, in step with the plain
// tree of tree_model.h: hit lengths, slots, evicted slots in order, both sizes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "model.h"
#include "radix_tree.h"
#include "tree_model.h"

namespace prefixkv::fuzz {
namespace {

constexpr uint64_t kSeed = 1;
constexpr size_t kMostMatches = 8, kMostPrompts = 12, kMostTokens = 48;

struct TreeCounts {
  int64_t operations = 0, misuses = 0, stale = 0, hits = 0, evictions = 0;
};

struct MatchModel {
  Match native;
  uint64_t end;  // creation of the node where it ends
  int64_t held = 0;
  bool foreign = false;
};

std::optional<std::string> name_of(size_t space) {
  return space == 0 ? std::nullopt : std::optional<std::string>("space " + std::to_string(space));
}

class TreeFuzz {
 public:
  TreeFuzz(int page_size, TreeCounts& counts)
      : page_size_(page_size), counts_(counts), tree_(page_size, kSeed), other_(page_size, kSeed), plain_(page_size) {}

  void run(const Record& r) {
    struct Entry {
      const char* name;
      void (TreeFuzz::*operation)(const Record&);
    };
    constexpr Entry entries[] = {
        {"prompt", &TreeFuzz::prompt}, {"insert", &TreeFuzz::insert}, {"insert", &TreeFuzz::insert},
        {"insert", &TreeFuzz::insert}, {"match", &TreeFuzz::match},   {"match", &TreeFuzz::match},
        {"match", &TreeFuzz::match},   {"lock", &TreeFuzz::lock},     {"lock", &TreeFuzz::lock},
        {"unlock", &TreeFuzz::unlock}, {"unlock", &TreeFuzz::unlock}, {"unlock", &TreeFuzz::unlock},
        {"evict", &TreeFuzz::evict},   {"evict", &TreeFuzz::evict},   {"foreign", &TreeFuzz::foreign},
    };
    const Entry& entry = entries[r.op % std::size(entries)];
    if (std::getenv("FUZZ_TRACE") != nullptr) {
      std::fprintf(stderr, "%s %d %d %d\n", entry.name, r.a, r.b, r.c);
    }
    ++counts_.operations;
    (this->*entry.operation)(r);
    check();
  }

  // Nothing is locked: everything can be evicted.
  void finish() {
    for (MatchModel& it : matches_) {
      for (; it.held > 0; --it.held) {
        tree_.unlock(it.native);
        plain_.lock(plain_.find(it.end), -1);
      }
    }
    require(plain_.protected_size() == 0, "the model holds a lock");
    compare_evicted(tree_.evict(tree_.evictable_size()), plain_.evict(plain_.evictable_size()));
    check();
    require(tree_.evictable_size() == 0, "something cannot be evicted");
  }

 private:
  // The beginning of an earlier one, and more.
  void prompt(const Record& r) {
    std::vector<Token> tokens;
    if (!prompts_.empty()) {
      const std::vector<Token>& base = prompts_[r.a % prompts_.size()];
      tokens.assign(base.begin(), base.begin() + static_cast<ptrdiff_t>(r.b % (base.size() + 1)));
    }
    uint64_t state = r.c;
    for (int more = 1 + r.c % 12; more > 0 && tokens.size() < kMostTokens; --more) {
      state = mix(state, static_cast<uint64_t>(more));
      tokens.push_back(static_cast<Token>((state >> 20) % 3));
    }
    if (prompts_.size() < kMostPrompts) {
      prompts_.push_back(std::move(tokens));
    } else {
      prompts_[r.a % kMostPrompts] = std::move(tokens);
    }
  }

  const std::vector<Token>* chosen(uint8_t byte) const {
    return prompts_.empty() ? nullptr : &prompts_[byte % prompts_.size()];
  }

  void insert(const Record& r) {
    const std::vector<Token>* tokens = chosen(r.a);
    if (tokens == nullptr) return prompt(r);
    std::vector<int32_t> slots(tokens->size());
    for (int32_t& slot : slots) slot = next_slot_++;
    bool wrong = false;
    if (r.c >= 0xf8) slots.push_back(next_slot_++), wrong = true;
    if (r.c >= 0xf0 && r.c < 0xf8 && !slots.empty()) slots.pop_back(), wrong = true;
    if (r.c >= 0xe8 && r.c < 0xf0 && !slots.empty()) slots[r.c % slots.size()] = -1, wrong = true;
    const size_t space = r.b % 2;
    int64_t there = 0;
    if (!attempt(wrong, "insert", [&] { there = tree_.insert(*tokens, slots, name_of(space)); })) return;
    require(there == static_cast<int64_t>(plain_.insert(space, *tokens, slots)), "insert tells another length");
  }

  void match(const Record& r) {
    const std::vector<Token>* tokens = chosen(r.a);
    if (tokens == nullptr) return;
    const size_t space = r.b % 2;
    const PlainTree::Found found = plain_.match(space, *tokens);
    MatchModel made{tree_.match(*tokens, name_of(space)), found.node->created};
    require(made.native.slots == found.slots, "a match gives other slots");
    counts_.hits += !found.slots.empty();
    if (matches_.size() < kMostMatches) {
      matches_.push_back(std::move(made));
      return;
    }
    MatchModel& old = matches_[r.c % kMostMatches];
    if (old.held == 0) old = std::move(made);
  }

  void lock(const Record& r) {
    if (matches_.empty()) return;
    MatchModel& it = matches_[r.a % matches_.size()];
    PlainNode* end = plain_.find(it.end);
    counts_.stale += end == nullptr;
    if (attempt(end == nullptr, "lock", [&] { tree_.lock(it.native); })) {
      plain_.lock(end, 1);
      ++it.held;
    }
  }

  void unlock(const Record& r) {
    if (matches_.empty()) return;
    MatchModel& it = matches_[r.a % matches_.size()];
    if (attempt(it.held == 0, "unlock", [&] { tree_.unlock(it.native); })) {
      plain_.lock(plain_.find(it.end), -1);
      --it.held;
    }
  }

  void evict(const Record& r) {
    const int64_t num_tokens = number(r.a, r.a % 24);
    std::vector<int32_t> freed;
    if (!attempt(num_tokens < 0, "evict", [&] { freed = tree_.evict(num_tokens); })) return;
    counts_.evictions += !freed.empty();
    compare_evicted(freed, plain_.evict(num_tokens));
  }

  // A match of another tree.
  void foreign(const Record& r) {
    const std::vector<Token> tokens(static_cast<size_t>(page_size_), 1);
    other_.insert(tokens, std::vector<int32_t>(tokens.size(), 1), std::nullopt);
    Match match = other_.match(tokens, std::nullopt);
    if (r.a % 2 == 0) {
      attempt(true, "lock of another's match", [&] { tree_.lock(match); });
    } else {
      other_.lock(match);
      attempt(true, "unlock of another's match", [&] { tree_.unlock(match); });
      other_.unlock(match);
    }
  }

  template <typename Call>
  bool attempt(bool wrong, const char* what, Call&& call) {
    counts_.misuses += wrong;
    try {
      call();
    } catch (const CacheError& error) {
      if (!wrong) fail(std::string(what) + " is refused: " + error.what());
      return false;  // that it left no trace is told by all that follows
    }
    if (wrong) fail(std::string(what) + " goes unnoticed");
    return true;
  }

  static void compare_evicted(const std::vector<int32_t>& native, const std::vector<int32_t>& plain) {
    require(native == plain, "evict frees other slots, or in another order");
  }

  void check() const {
    tree_.check();
    require(tree_.evictable_size() == plain_.evictable_size(), "evictable_size is wrong");
    require(tree_.protected_size() == plain_.protected_size(), "protected_size is wrong");
  }

  int page_size_;
  TreeCounts& counts_;
  RadixTree tree_, other_;
  PlainTree plain_;
  std::vector<std::vector<Token>> prompts_;
  std::vector<MatchModel> matches_;
  int32_t next_slot_ = 0;
};

// Of the whole run.
TreeCounts counts;

}  // namespace
}  // namespace prefixkv::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace prefixkv::fuzz;
  Script script(data, size);
  Record first, record;
  if (!script.next(first)) return 0;
  TreeFuzz fuzz(1 << first.a % 3, counts);
  while (script.next(record)) fuzz.run(record);
  fuzz.finish();
  return 0;
}

extern "C" void fuzz_report() {
  using prefixkv::fuzz::counts;
  std::printf("%lld operations, of which %lld misuses (%lld stale matches); %lld hits, %lld evictions\n",
              static_cast<long long>(counts.operations), static_cast<long long>(counts.misuses),
              static_cast<long long>(counts.stale), static_cast<long long>(counts.hits),
              static_cast<long long>(counts.evictions));
}
