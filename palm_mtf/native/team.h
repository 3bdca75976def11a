// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Threads that compute an operation together.

#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "other_cores.h"

namespace palm {

// Threads that run a job together. A decoding step has some thirty parts, after
// each of which the threads wait for one another (`meet`). Some parts take only
// microseconds, so a thread waits by polling a number, not by sleeping.
class Team {
 public:
  // An idle thread polls `patience` times for a job before it sleeps.
  Team(int size, int patience) : size_(size), patience_(patience) {
    for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { work(i); });
  }

  ~Team() {
    job_ = nullptr;
    begin();
    for (std::thread& each : threads_) each.join();
  }

  int size() const { return size_; }

  // Calls job(i) for each i in [0, size), each in a different thread; job(0)
  // runs in the caller's thread.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    cores_.hold(threads_);
    begin();
    job(0);
    meet();
  }

  // Waits at a barrier until all threads of the job have called meet().
  void meet() {
    unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; round_.load(std::memory_order_acquire) == round; ++i)
      pause(i);
  }

 private:
  static void pause(int i) {
    // Let other threads run, because the awaited thread may need this core.
    if (i % 4096 == 4095) std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void begin() {
    jobs_.fetch_add(1, std::memory_order_release);
    jobs_.notify_all();
  }

  void work(int i) {
    for (unsigned seen = 0;; ++seen) {
      for (int j = 0;
           j < patience_ && jobs_.load(std::memory_order_acquire) == seen; ++j)
        pause(j);
      jobs_.wait(seen, std::memory_order_acquire);
      if (!job_) return;
      (*job_)(i);
      meet();
    }
  }

  const int size_, patience_;
  OtherCores cores_;
  const std::function<void(int)>* job_ = nullptr;
  std::vector<std::thread> threads_;
  std::atomic<unsigned> jobs_ = 0, round_ = 0;
  std::atomic<int> arrived_ = 0;
};

}  // namespace palm
