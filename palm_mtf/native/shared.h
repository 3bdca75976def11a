// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Threads and memory that all operations of a process share.

#pragma once

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "rows.h"
#include "team.h"

namespace palm {

// The next decoding step is near: between two of them a token is chosen. What
// follows an operation of a training step needs the cores.
constexpr int kPatience = 20000, kNoPatience = 0;

// Calls of all sessions in a process take turns with its threads and memory.
struct Shared {
  std::mutex mutex;
  std::map<std::pair<int, int>, Team> teams;  // one without a job sleeps
  PreparedRows inputs;
  std::vector<float> x, wide;

  Team& team_of(int size, int patience = kPatience) {
    return teams.try_emplace({size, patience}, size, patience).first->second;
  }
};

inline Shared& shared() {
  // Never freed: other threads may run when the process ends.
  static Shared& it = *new Shared;
  return it;
}

}  // namespace palm
