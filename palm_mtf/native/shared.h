// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Threads and buffers that all operations of a process share.

#pragma once

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "rows.h"
#include "team.h"

namespace palm {

// How many times an idle thread polls for a job before it sleeps. Decoding
// threads poll, because the next step follows as soon as a token is chosen.
// Training threads do not poll, because TensorFlow's operations need the cores.
constexpr int kPatience = 20000, kNoPatience = 0;

// Threads and buffers of decoding steps; a call that uses them holds `mutex`.
struct Shared {
  std::mutex mutex;
  std::map<std::pair<int, int>, Team> teams;  // by size and patience
  PreparedRows inputs, copies;
  std::vector<float> x, wide;

  Team& team_of(int size, int patience = kPatience) {
    return teams.try_emplace({size, patience}, size, patience).first->second;
  }
};

inline Shared& shared() {
  // `it` is never freed, because threads may still run when the process ends.
  static Shared& it = *new Shared;
  return it;
}

}  // namespace palm
