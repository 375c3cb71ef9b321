// A small coverage-guided fuzzer for g++, which has no libFuzzer. With clang, leave this file out and
// link the same targets with -fsanitize=fuzzer.
//
// As AFL does it: the program is compiled with -fsanitize-coverage=trace-pc; a map counts how often
// each edge between two blocks of code was taken; an input that takes a new edge, or one a new order
// of magnitude of times, joins the corpus; inputs are mutations of inputs from the corpus.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// What a target may tell when a run ends.
extern "C" __attribute__((weak)) void fuzz_report();

extern "C" const char* __asan_default_options() { return "abort_on_error=1:malloc_context_size=8"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

namespace {

using Input = std::vector<uint8_t>;

constexpr size_t kMapSize = 1 << 16;
constexpr unsigned kSecondsAnInput = 20;
constexpr int64_t kFirst = 64;  // inputs that are no mutations

// One process, one run: what follows is written by the hook that the compiler plants everywhere, and
// read by a signal handler.
std::array<uint8_t, kMapSize> edges;
uintptr_t previous_block = 0;
const Input* running = nullptr;
std::string artifacts = ".";

struct Options {
  int64_t runs = INT64_MAX;
  double seconds = 1e18;
  uint64_t seed = 1;
  size_t most_bytes = 1024;
  bool blind = false;  // no feedback from coverage, for comparison
  std::string corpus;
  std::string minimize;
  std::vector<std::string> replay;
};

// 1, 2, 3, 4-7, 8-15, 16-31, 32-127, 128 and more: one bit each.
uint8_t magnitude(uint8_t count) {
  if (count <= 2) return count;
  if (count == 3) return 4;
  if (count < 8) return 8;
  if (count < 16) return 16;
  if (count < 32) return 32;
  return count < 128 ? 64 : 128;
}

Input read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  return Input(std::istreambuf_iterator<char>(file), {});
}

void write_file(const std::string& path, const Input& input) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
}

std::string name_of(const Input& input) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const uint8_t byte : input) hash = (hash ^ byte) * 0x100000001b3;
  char name[17];
  std::snprintf(name, sizeof name, "%016" PRIx64, hash);
  return name;
}

void on_failure(int fault) {
  if (running != nullptr) {
    const std::string path = artifacts + "/failure-" + name_of(*running);
    write_file(path, *running);
    std::fprintf(stderr, "%s; the input is in %s\n",
                 fault == SIGALRM ? "an input takes too long" : "an input fails", path.c_str());
  }
  std::_Exit(1);
}

void execute(const Input& input) {
  running = &input;
  alarm(kSecondsAnInput);
  previous_block = 0;
  LLVMFuzzerTestOneInput(input.data(), input.size());
  alarm(0);
  running = nullptr;
}

class Mutator {
 public:
  Mutator(uint64_t seed, size_t most_bytes) : random_(seed), most_bytes_(most_bytes) {}

  size_t below(size_t limit) { return limit == 0 ? 0 : static_cast<size_t>(random_() % limit); }

  Input random_input() {
    Input input(1 + below(most_bytes_));
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random_());
    return input;
  }

  Input mutated(Input input, const Input& other) {
    // Targets read records of four bytes: most changes keep to whole records.
    for (size_t changes = size_t{1} << below(4); changes > 0; --changes) {
      unit_ = below(4) == 0 ? 1 : 4;
      change(input, other);
    }
    if (input.size() > most_bytes_) input.resize(most_bytes_);
    return input;
  }

 private:
  struct Range {
    size_t at, size;
  };

  Range range(const Input& input) {
    const size_t units = input.size() / unit_;
    const size_t at = below(units);
    return {at * unit_, std::min(units - at, 1 + below(below(4) == 0 ? 32 : 4)) * unit_};
  }

  void change(Input& input, const Input& other) {
    if (input.size() < 4) input.resize(4);
    const size_t at = below(input.size());
    switch (below(9)) {
      case 0: input[at] ^= static_cast<uint8_t>(1 << below(8)); break;
      case 1: input[at] = static_cast<uint8_t>(random_()); break;
      case 2: input[at] += static_cast<uint8_t>(below(9)) - 4; break;
      case 3: insert_random(input); break;
      case 4: remove(input); break;
      case 5: insert(input, input); break;
      case 6: insert(input, other); break;
      case 7: overwrite(input, other); break;
      case 8: splice(input, other); break;
    }
  }

  void insert_random(Input& input) {
    Input more(unit_ * (1 + below(8)));
    for (uint8_t& byte : more) byte = static_cast<uint8_t>(random_());
    input.insert(input.begin() + static_cast<ptrdiff_t>(range(input).at), more.begin(), more.end());
  }

  void remove(Input& input) {
    const Range gone = range(input);
    const auto from = input.begin() + static_cast<ptrdiff_t>(gone.at);
    input.erase(from, from + static_cast<ptrdiff_t>(gone.size));
  }

  void insert(Input& input, const Input& source) {
    const Range from = range(source);
    const Input copy(source.begin() + static_cast<ptrdiff_t>(from.at),
                     source.begin() + static_cast<ptrdiff_t>(from.at + from.size));
    input.insert(input.begin() + static_cast<ptrdiff_t>(range(input).at), copy.begin(), copy.end());
  }

  void overwrite(Input& input, const Input& source) {
    const Range from = range(source), to = range(input);
    std::memmove(input.data() + to.at, source.data() + from.at, std::min(from.size, to.size));
  }

  void splice(Input& input, const Input& other) {
    const size_t keep = range(input).at, from = range(other).at;
    input.resize(keep);
    input.insert(input.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
  }

  std::mt19937_64 random_;
  size_t most_bytes_;
  size_t unit_ = 1;
};

class Fuzzer {
 public:
  explicit Fuzzer(const Options& options)
      : options_(options), mutator_(options.seed, options.most_bytes) {}

  void run() {
    load_corpus();
    if (corpus_.empty()) add(mutator_.random_input());
    const auto start = std::chrono::steady_clock::now();
    const auto elapsed = [start] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    double next_line = 1;
    while (executions_ < options_.runs && elapsed() < options_.seconds) {
      const bool fresh = options_.blind || executions_ < kFirst || mutator_.below(16) == 0;
      const Input input = fresh ? mutator_.random_input() : mutated();
      ++executions_;
      if (finds_something(input) && !options_.blind) add(input);
      if (elapsed() > next_line) {
        print(elapsed());
        next_line *= 2;
      }
    }
    print(elapsed());
    if (fuzz_report != nullptr) fuzz_report();
  }

 private:
  void load_corpus() {
    if (options_.corpus.empty()) return;
    std::vector<std::string> paths;
    for (const auto& file : std::filesystem::directory_iterator(options_.corpus)) {
      paths.push_back(file.path().string());
    }
    std::sort(paths.begin(), paths.end());
    for (const std::string& path : paths) {
      const Input input = read_file(path);
      if (finds_something(input)) corpus_.push_back(input);
    }
  }

  Input mutated() {
    // The newest have been tried least.
    const size_t recent = std::max<size_t>(corpus_.size() / 4, 1);
    const size_t pick = mutator_.below(2) == 0 ? corpus_.size() - 1 - mutator_.below(recent)
                                               : mutator_.below(corpus_.size());
    return mutator_.mutated(corpus_[pick], corpus_[mutator_.below(corpus_.size())]);
  }

  bool finds_something(const Input& input) {
    edges.fill(0);
    execute(input);
    bool found = false;
    for (size_t i = 0; i < kMapSize; i += 8) {
      uint64_t eight;
      std::memcpy(&eight, &edges[i], 8);
      if (eight == 0) continue;
      for (size_t j = i; j < i + 8; ++j) {
        const uint8_t bit = magnitude(edges[j]);
        if ((seen_[j] | bit) == seen_[j]) continue;
        num_edges_ += seen_[j] == 0;
        num_features_ += static_cast<size_t>(std::popcount(static_cast<uint8_t>(bit & ~seen_[j])));
        seen_[j] |= bit;
        found = true;
      }
    }
    return found;
  }

  void add(const Input& input) {
    corpus_.push_back(input);
    if (!options_.corpus.empty()) write_file(options_.corpus + "/" + name_of(input), input);
  }

  void print(double seconds) const {
    std::printf("%8.1f s  %9" PRId64 " executions  %5zu edges  %6zu features  %5zu in the corpus\n",
                seconds, executions_, num_edges_, num_features_, corpus_.size());
    std::fflush(stdout);
  }

  const Options& options_;
  Mutator mutator_;
  std::vector<Input> corpus_;
  std::array<uint8_t, kMapSize> seen_{};
  size_t num_edges_ = 0;
  size_t num_features_ = 0;  // edges, told apart by how often they were taken
  int64_t executions_ = 0;
};

// In a process of its own, without its report.
bool fails(const Input& input) {
  const pid_t child = fork();
  if (child == 0) {
    if (std::freopen("/dev/null", "w", stderr) == nullptr) std::_Exit(2);
    for (const int fault : {SIGABRT, SIGSEGV, SIGALRM}) signal(fault, SIG_DFL);
    execute(input);
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}

// Takes out ever smaller pieces as long as it still fails.
Input minimized(Input input) {
  for (size_t piece = std::bit_floor(input.size()); piece > 0; piece /= 2) {
    for (size_t at = 0; at + piece <= input.size();) {
      Input less = input;
      less.erase(less.begin() + static_cast<ptrdiff_t>(at),
                 less.begin() + static_cast<ptrdiff_t>(at + piece));
      if (fails(less)) {
        input = std::move(less);
      } else {
        at += piece;
      }
    }
  }
  return input;
}

[[noreturn]] void usage(const char* program) {
  std::printf(
      "%s [--runs N] [--seconds S] [--seed N] [--max-bytes N] [--blind] [--corpus DIR] [--artifacts DIR]\n"
      "   fuzzes; new inputs are kept in the corpus, a failing one is written to the artifacts\n"
      "%s FILE...              runs these inputs once\n"
      "%s --minimize FILE      writes the shortest failing part of it to FILE.min\n",
      program, program, program);
  std::exit(2);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string {
      if (++i == argc) usage(argv[0]);
      return argv[i];
    };
    if (name == "--runs") options.runs = std::stoll(value());
    else if (name == "--seconds") options.seconds = std::stod(value());
    else if (name == "--seed") options.seed = std::stoull(value());
    else if (name == "--max-bytes") options.most_bytes = std::max(std::stoull(value()), 4ull);
    else if (name == "--blind") options.blind = true;
    else if (name == "--corpus") options.corpus = value();
    else if (name == "--artifacts") artifacts = value();
    else if (name == "--minimize") options.minimize = value();
    else if (name.starts_with("-")) usage(argv[0]);
    else options.replay.push_back(name);
  }
  return options;
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  uintptr_t block = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  block = (block * 0x9e3779b97f4a7c15) >> 48;
  uint8_t& count = edges[(block ^ previous_block) % kMapSize];
  if (count < 255) ++count;
  previous_block = block >> 1;
}

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  for (const int fault : {SIGABRT, SIGSEGV, SIGALRM}) signal(fault, on_failure);
  if (!options.minimize.empty()) {
    const Input input = minimized(read_file(options.minimize));
    write_file(options.minimize + ".min", input);
    std::printf("%zu bytes in %s.min\n", input.size(), options.minimize.c_str());
  } else if (!options.replay.empty()) {
    for (const std::string& path : options.replay) {
      execute(read_file(path));
      std::printf("%s: fine\n", path.c_str());
    }
  } else {
    Fuzzer(options).run();
  }
}
