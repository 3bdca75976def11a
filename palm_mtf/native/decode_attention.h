// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Attention for one head and one position.

#pragma once

#include "arithmetic.h"

namespace palm {

inline Floats load_floats(const float* at) { return load<Floats>(at); }
inline Floats load_floats(const uint16_t* at) { return from_bfloat16(at); }

// Writes softmax(scale * q keys) values to y, [d_kv]. `keys` and `values` are
// [count, d_kv]. kSize is d_kv if d_kv is known at compile time, else 0.
// `weights` is a buffer for `count` numbers.
template <int kSize, class T>
void attend_row(const float* q, const T* keys, const T* values, int count,
                int d_kv, float scale, float* weights, float* y) {
  constexpr int kParts = kSize / kLanes;
  if constexpr (kSize == 0) {
    for (int p = 0; p < count; ++p) {
      float total = 0;
      for (int i = 0; i < d_kv; ++i)
        total += q[i] * to_float(keys[size_t(p) * d_kv + i]);
      weights[p] = total;
    }
    softmax(weights, count, scale);
    std::fill_n(y, d_kv, 0.0f);
    for (int p = 0; p < count; ++p)
      for (int i = 0; i < d_kv; ++i)
        y[i] += weights[p] * to_float(values[size_t(p) * d_kv + i]);
  } else {
    Floats parts[kParts], totals[kParts] = {};
    for (int i = 0; i < kParts; ++i) parts[i] = load_floats(q + i * kLanes);
    for (int p = 0; p < count; ++p, keys += kSize) {
      Floats total = {};
      for (int i = 0; i < kParts; ++i)
        total += parts[i] * load_floats(keys + i * kLanes);
      weights[p] = sum(total);
    }
    softmax(weights, count, scale);
    for (int p = 0; p < count; ++p, values += kSize)
      for (int i = 0; i < kParts; ++i)
        totals[i] += weights[p] * load_floats(values + i * kLanes);
    for (int i = 0; i < kParts; ++i) store(y + i * kLanes, totals[i]);
  }
}

}  // namespace palm
