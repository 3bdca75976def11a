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
  // Add up parts of the row separately: in one sum over a large vocabulary, the
  // largest powers would round off the many small ones.
  constexpr int kPart = 1024;
  double total = 0;
  for (int first = 0; first < size; first += kPart) {
    const T* part = logits + first;
    total += sum_of(std::min(kPart, size - first), [&](int i, auto kind) {
      return exponential(get<decltype(kind)>(part + i) - largest);
    });
  }
  sums[0] = largest;
  sums[1] = total;
  sums[2] = target < 0 ? 0 : to_float(logits[target]);
}

}  // namespace palm
