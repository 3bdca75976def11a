// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Sums over a row of logits, for the cross-entropy of model/loss.py.

#pragma once

#include "arithmetic.h"

namespace palm {

// Writes three numbers to `sums`: the largest logit, the sum of exp(logit -
// largest), and the logit of `target`, or 0 if `target` is below 0. Reads the
// row twice; the second time, the row is in the CPU's cache.
template <class T>
void sum_row(const T* logits, int size, int target, float* sums) {
  Floats most = splat(to_float(logits[0]));
  float largest = most[0];
  for_vectors(size, [&](int i, auto kind) {
    using V = decltype(kind);
    if constexpr (sizeof(V) == sizeof(float)) {
      largest = std::max(largest, get<V>(logits + i));
    } else {
      V x = get<V>(logits + i);
      most = most > x ? most : x;
    }
  });
  for (int i = 0; i < kLanes; ++i) largest = std::max(largest, float(most[i]));
  Floats parts = {};
  float total = 0;
  for_vectors(size, [&](int i, auto kind) {
    using V = decltype(kind);
    V power = exponential(get<V>(logits + i) - largest);
    if constexpr (sizeof(V) == sizeof(float)) total += power;
    else parts += power;
  });
  sums[0] = largest;
  sums[1] = total + sum(parts);
  sums[2] = target < 0 ? 0 : to_float(logits[target]);
}

}  // namespace palm
