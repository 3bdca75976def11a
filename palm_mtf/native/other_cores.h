// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Keeps a team's threads off the core of the calling thread.

#pragma once

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <thread>
#include <vector>

namespace palm {

// Forbids threads to run on the caller's core. Otherwise, if no core has been
// idle for long, Linux wakes the threads on the caller's core. It moves them
// milliseconds later, when one core has already ended a short operation.
class OtherCores {
#if defined(__linux__)
 public:
  OtherCores() { pthread_getaffinity_np(pthread_self(), sizeof(all_), &all_); }

  void hold(std::vector<std::thread>& threads) {
    const int core = sched_getcpu();
    if (core < 0 || core == left_) return;
    cpu_set_t others = all_;
    CPU_CLR(core, &others);
    if (!CPU_COUNT(&others)) return;
    for (std::thread& each : threads)
      pthread_setaffinity_np(each.native_handle(), sizeof(others), &others);
    left_ = core;
  }

 private:
  cpu_set_t all_;  // the cores that this process may use
  int left_ = -1;  // the core that the threads avoid
#else
 public:
  void hold(std::vector<std::thread>&) {}
#endif
};

}  // namespace palm
