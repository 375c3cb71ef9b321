#include "thread_pool.h"

#include <string>

#include "errors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace prefixkv {
namespace {

// About 50 µs: longer than the gap between two kernels of one forward pass, far shorter than a step.
constexpr int kSpins = 2000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {  // the system gives no more; a thread that is not joined would end the process
    stop();
    throw ConfigError("threads is " + std::to_string(threads) + "; the system gives " +
                      std::to_string(workers_.size() + 1) + " at most, so ask for fewer");
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stop_.store(true, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool ThreadPool::run_one(uint32_t epoch) {
  uint64_t claim = claim_.load(std::memory_order_acquire);
  do {
    const uint32_t left = static_cast<uint32_t>(claim);
    if (static_cast<uint32_t>(claim >> 32) != epoch || left == 0) return false;
  } while (!claim_.compare_exchange_weak(claim, claim - 1, std::memory_order_acq_rel,
                                         std::memory_order_acquire));
  const int64_t left = static_cast<uint32_t>(claim);
  const int64_t tasks = tasks_.load(std::memory_order_relaxed);
  fn_.load(std::memory_order_relaxed)(ctx_.load(std::memory_order_relaxed), tasks - left);
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) done_.notify_one();
  return true;
}

void ThreadPool::run_erased(int64_t tasks, Fn fn, const void* ctx) {
  if (tasks <= 1 || workers_.empty()) {
    for (int64_t task = 0; task < tasks; ++task) fn(ctx, task);
    return;
  }
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  fn_.store(fn, std::memory_order_relaxed);
  ctx_.store(ctx, std::memory_order_relaxed);
  tasks_.store(tasks, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  claim_.store(uint64_t{epoch} << 32 | static_cast<uint64_t>(tasks), std::memory_order_release);
  // Sequentially consistent: the notification must not look for sleepers before the store is seen.
  epoch_.store(epoch, std::memory_order_seq_cst);
  epoch_.notify_all();
  while (run_one(epoch)) {
  }
  for (int spin = 0;; ++spin) {
    const int64_t done = done_.load(std::memory_order_acquire);
    if (done == tasks) return;
    if (spin < kSpins) {
      pause();
    } else {
      done_.wait(done, std::memory_order_acquire);
    }
  }
}

void ThreadPool::work() {
  uint32_t seen = 0;
  while (!stop_.load(std::memory_order_acquire)) {
    uint32_t epoch = epoch_.load(std::memory_order_acquire);
    for (int spin = 0; epoch == seen && spin < kSpins; ++spin) {
      pause();
      epoch = epoch_.load(std::memory_order_acquire);
    }
    if (epoch == seen) {
      epoch_.wait(seen, std::memory_order_acquire);
      continue;
    }
    seen = epoch;
    while (run_one(epoch)) {
    }
  }
}

}  // namespace prefixkv
