// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic on one row, in float32. V is Floats (a register) or one float.

#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace palm {

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return from_bfloat16(x); }

template <class T>
inline T from_float(float x) {
  if constexpr (sizeof(T) == 2) return to_bfloat16(x);
  else return x;
}

// Reads a V (float or Floats) from T (float, or uint16_t for bfloat16).
template <class V, class T>
inline V get(const T* at) {
  if constexpr (sizeof(V) == sizeof(float)) return to_float(*at);
  else if constexpr (sizeof(T) == 2) return from_bfloat16(at);
  else return load<V>(at);
}

template <class T, class V>
inline void put(T* at, V x) {
  if constexpr (sizeof(T) == 2) store(at, to_bfloat16(x));
  else store(at, x);
}

// For indices below `size`, calls use(i, Floats()) for each whole register
// (indices i to i + kLanes - 1), then use(i, float()) for each other index.
template <class Use>
inline void for_vectors(int size, Use use) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) use(i, Floats());
  for (; i < size; ++i) use(i, float());
}

// Returns the sum over the indices below `size`. term(i, V()) returns the terms
// of a whole register if V is Floats, and one term if V is float.
template <class Term>
inline float sum_of(int size, Term term) {
  Floats total = {};
  float rest = 0;
  for_vectors(size, [&](int i, auto kind) {
    if constexpr (sizeof(kind) == sizeof(float)) rest += term(i, kind);
    else total += term(i, kind);
  });
  return sum(total) + rest;
}

// Returns e^x, with an error of a few units in the last place; clamps x to
// [-87, 87].
template <class V>
inline V exponential(V x) {
  x = x < -87.0f ? V{} - 87.0f : x;
  x = x > 87.0f ? V{} + 87.0f : x;
  // x = n log(2) + rest, with |rest| below 0.35
  auto n = to_ints(x * 1.44269504f + (x < 0.0f ? V{} - 0.5f : V{} + 0.5f));
  V rest = x - to_floats(n) * 0.693145752f - to_floats(n) * 1.42860677e-6f;
  V y = V{} + 1.98412698e-4f;  // 1/7!, the last term of Taylor's series
  for (float term : {1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f,
                     0.166666667f, 0.5f, 1.0f, 1.0f})
    y = y * rest + term;
  auto power = (n + 127) << 23;
  return y * load<V>(&power);
}

template <class V>
inline V sigmoid(V x) {
  return 1 / (1 + exponential(-x));
}

inline float swish(float x) { return x * sigmoid(x); }

// Combines `start` and all numbers of x, one register at a time.
template <class Combine>
inline float reduce(const float* x, int size, float start, Combine combine) {
  Floats all = splat(start);
  int i = 0;
  for (; i + kLanes <= size; i += kLanes)
    all = combine(all, load<Floats>(x + i));
  for (int j = 0; j < kLanes; ++j) start = combine(start, float(all[j]));
  for (; i < size; ++i) start = combine(start, x[i]);
  return start;
}

inline float total(const float* x, int size) {
  return reduce(x, size, 0, [](auto a, auto b) { return a + b; });
}

inline float largest(const float* x, int size) {
  return reduce(x, size, x[0], [](auto a, auto b) { return a > b ? a : b; });
}

// Returns the first index of the largest number; 0 if no number is larger than
// -infinity.
inline int find_largest_place(const float* x, int size) {
  // For each lane, `most` is the largest number, and `begin` is the index in x
  // at which the register with this number begins.
  Floats most = splat(-INFINITY);
  Ints begin = {};
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats numbers = load<Floats>(x + i);
    const Ints is_more = numbers > most;
    most = is_more ? numbers : most;
    begin = is_more ? splat(i) : begin;
  }
  float largest = -INFINITY;
  int place = 0;
  auto offer = [&](float number, int at) {
    if (number > largest || (number == largest && at < place))
      largest = number, place = at;
  };
  for (int lane = 0; lane < kLanes; ++lane)
    offer(most[lane], begin[lane] + lane);
  for (; i < size; ++i) offer(x[i], i);
  return place;
}

// Replaces x by softmax(scale * x); `scale` is above 0.
inline void softmax(float* x, int size, float scale) {
  const float most = largest(x, size);
  for (int i = 0; i < size; ++i) x[i] = exponential(scale * (x[i] - most));
  const float sum = total(x, size);
  for (int i = 0; i < size; ++i) x[i] /= sum;
}

// Writes round(x / scale) + offset to `bytes`, and the sum of round(x / scale)
// of each 16 numbers to `half_sums`. Returns scale = max |x| / 127.
inline float quantize(const float* x, int size, int offset, uint8_t* bytes,
                      int32_t* half_sums) {
  const float most = reduce(x, size, 0, [](auto a, auto b) {
    auto size = b < 0.0f ? -b : b;
    return a > size ? a : size;
  });
  const float scale = (most > 0 ? most : 1) / 127;
  for (int half = 0; half < size / 16; ++half) {
    int32_t sum = 0;
    for (int i = 16 * half; i < 16 * half + 16; ++i) {
      int32_t number = int32_t(std::nearbyint(x[i] / scale));
      bytes[i] = uint8_t(number + offset);
      sum += number;
    }
    half_sums[half] = sum;
  }
  return scale;
}

}  // namespace palm
