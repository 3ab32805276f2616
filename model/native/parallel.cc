// Tasks over all cores: threads of XLA's pool, which look for more for a moment and meanwhile read ahead.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "shared.h"

namespace {

constexpr int64_t kNear = 4 << 20;  // bytes of the next call that idle threads read ahead

// What Parallel gives to the threads.
//
// Tasks are claimed one by one, by this thread too, and it waits only for tasks that a running thread has claimed: so
// it cannot wait for a pool whose threads all wait. It takes the first ones, the others take the last ones.
struct Work {
  std::function<void(int64_t)> run;
  int64_t count;
  Range next_read;  // of the call that came after this one the last time
  std::atomic<int64_t> claimed{0}, front{0}, back{0}, done{0};

  void Drain(bool from_front) {
    while (claimed.fetch_add(1) < count) {
      run(from_front ? front.fetch_add(1) : count - 1 - back.fetch_add(1));
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Threads of the pool that have drained their work and look for more for a moment: to wake one that sleeps takes as long
// as to read a megabyte. Meanwhile they bring what the next call reads into the caches: a decode step has the same
// calls as the one before it. Then they yield all the time, so whatever else can run goes first.
class Crew {
 public:
  // Gives work, which reads `own`, to threads that look for some, at most so many; returns how many they are.
  int64_t Offer(const std::shared_ptr<Work>& work, Range own, int64_t most) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (after_.size() > kKnown) after_.clear();
    after_[last_] = own;
    last_ = own.end;
    if (const auto found = after_.find(last_); found != after_.end()) work->next_read = found->second;
    const int64_t there = std::min(most, looking_.load() - int64_t(offers_.size()));
    for (int64_t i = 0; i < there; ++i) offers_.push_back(work);
    offered_.store(offers_.size(), std::memory_order_release);
    return std::max<int64_t>(0, there);
  }

  // Drains work, and then what is offered, until nothing was for kLook.
  void Serve(std::shared_ptr<Work> work) {
    for (work->Drain(false); (work = Look(work->next_read)); work->Drain(false)) {
    }
  }

 private:
  static constexpr auto kLook = std::chrono::microseconds(200);
  static constexpr int64_t kAtOnce = 4096;  // bytes that are asked for before a look for work
  static constexpr size_t kKnown = 1 << 14;  // calls whose successor is known: those of dozens of artifacts

  std::shared_ptr<Work> Look(Range ahead) {
    const auto end = std::chrono::steady_clock::now() + kLook;
    std::shared_ptr<Work> found;
    int64_t read = 0;
    // One core is the caller's: more threads than there are others would look instead of it.
    if (looking_.load() + 1 >= int64_t(std::thread::hardware_concurrency())) return nullptr;
    looking_.fetch_add(1);
    while (!found && std::chrono::steady_clock::now() < end) {
      if (!offered_.load(std::memory_order_acquire)) {
        if (read >= kNear || read >= ahead.bytes * ahead.groups) {
          std::this_thread::yield();
          continue;
        }
        const char* at = ahead.end - read / ahead.bytes * ahead.step - read % ahead.bytes;
        for (int64_t i = 64; i <= kAtOnce; i += 64) __builtin_prefetch(at - i, 0, 2);
        read += kAtOnce;
        continue;
      }
      const std::lock_guard<std::mutex> held(mutex_);
      if (offers_.empty()) continue;
      found = offers_.back().lock();  // none of a call that is over
      offers_.pop_back();
      offered_.store(offers_.size(), std::memory_order_release);
    }
    looking_.fetch_sub(1);
    return found;
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<Work>> offers_;
  std::unordered_map<const char*, Range> after_;
  const char* last_ = nullptr;
  std::atomic<int64_t> offered_{0}, looking_{0};
};

}  // namespace

void Parallel(ffi::ThreadPool pool, int32_t devices, int64_t count, Range own, std::function<void(int64_t)> run) {
  static Crew* const crew = new Crew;  // threads of the pool may outlive everything that is static
  const int64_t helpers = std::min({Cores(devices), pool.num_threads(), count}) - 1;
  auto work = std::make_shared<Work>();
  work->run = std::move(run);
  work->count = count;
  if (helpers > 0) {
    for (int64_t i = crew->Offer(work, own, helpers); i < helpers; ++i) pool.Schedule([work] { crew->Serve(work); });
  }
  work->Drain(true);
  while (work->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}
