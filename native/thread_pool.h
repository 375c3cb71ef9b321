// A small pool for data-parallel loops that are often only microseconds long.
//
// Tasks are claimed one by one from a counter, so which thread runs a task varies from run to run:
// a task's result must not depend on the thread. The caller takes part, and never waits for a worker
// that has claimed nothing: on a busy machine a descheduled worker costs parallelism, not time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace prefixkv {

class ThreadPool {
 public:
  // threads >= 1, the caller's included. Throws ConfigError when the system refuses them.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls f(task) once for each task in [0, tasks) and returns when all are done. f must not throw
  // and must not call run. One caller at a time.
  template <typename F>
  void run(int64_t tasks, const F& f) {
    run_erased(tasks, [](const void* ctx, int64_t task) { (*static_cast<const F*>(ctx))(task); }, &f);
  }

 private:
  using Fn = void (*)(const void*, int64_t);

  void run_erased(int64_t tasks, Fn fn, const void* ctx);
  bool run_one(uint32_t epoch);
  void work();
  void stop();

  // The job. Whether a task is left is decided by `claim_` alone; the rest is read only after a
  // claim, when it cannot change: the next job is written once every claimed task is done.
  std::atomic<Fn> fn_{nullptr};
  std::atomic<const void*> ctx_{nullptr};
  std::atomic<int64_t> tasks_{0};
  std::atomic<uint64_t> claim_{0};  // epoch << 32 | tasks left
  std::atomic<int64_t> done_{0};
  std::atomic<uint32_t> epoch_{0};  // of the newest job; workers sleep on it
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace prefixkv
