// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Chooses the next token of a row, as generation/decode/sampling.py does.

#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace palm {

struct Sampling {
  bool is_greedy;
  float temperature, top_p, repetition_penalty;
  int top_k;       // 0 keeps all tokens
  int num_tokens;  // pieces in the vocabulary
};

// Threefry-2x32 with 20 rounds (ops/threefry.py): hashes the counter (count, 0)
// under the key (first, second), and returns the first word.
inline uint32_t threefry(uint32_t first, uint32_t second, uint32_t count) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {first, second, 0x1BD11BDA ^ first ^ second};
  uint32_t a = count + keys[0], b = keys[1];
  for (int i = 1; i < 6; ++i) {
    for (int bits : kRotations[(i - 1) % 2]) {
      a += b;
      b = (b << bits | b >> (32 - bits)) ^ a;
    }
    a += keys[i % 3];
    b += keys[(i + 1) % 3] + i;
  }
  return a;
}

// Returns a uniform number in [0, 1): 23 bits of threefry(key, place).
inline float uniform(const int32_t* key, int place) {
  const uint32_t bits =
    threefry(key[0], key[1], place) >> 9 | 0x3f800000;  // in [1, 2)
  return load<float>(&bits) - 1;
}

// A share is a token's probability times a constant. Returns the sum of the
// shares that are at least `least`; if `counts`, the number of these shares.
inline float sum_from(const float* shares, int size, float least,
                      bool counts) {
  return sum_of(size, [&](int i, auto kind) {
    using V = decltype(kind);
    const V x = get<V>(shares + i);
    const V term = counts ? V{} + 1.0f : x;
    return V(x >= least ? term : V{});
  });
}

// Sets all but the largest shares to 0. Keeps the fewest shares whose sum (if
// `counts`, whose number) is at least `wanted`, and all shares equal to the
// smallest kept share. Finds the smallest kept share by bisection over its
// bits, because floats that are not negative have the order of their bits.
inline void keep_largest(float* shares, int size, float wanted, bool counts) {
  int32_t low = 0, high = 0x3f800001;  // just above 1, the largest share
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const bool is_enough =
      sum_from(shares, size, load<float>(&middle), counts) >= wanted;
    (is_enough ? low : high) = middle;
  }
  const float least = load<float>(&low);
  for (int i = 0; i < size; ++i) shares[i] = shares[i] >= least ? shares[i] : 0;
}

// Returns the first token at which the cumulative sum of shares exceeds `at`.
// If rounding prevents that, returns the last token whose share is not 0.
inline int find_token(const float* shares, int size, float at) {
  float upto = 0;
  int last = 0;
  for (int i = 0; i < size; ++i) {
    if (shares[i] == 0) continue;
    upto += shares[i], last = i;
    if (upto > at) break;
  }
  return last;
}

// Chooses a token by `logits`, [num_tokens], and overwrites them. `seen` says
// which tokens are in the row's text; null means no repetition penalty. `mask`
// has a bit per token, which says whether it is allowed; null allows all.
inline int choose_token(const Sampling& how, float* logits, const bool* seen,
                      const int32_t* mask, const int32_t* key, int place) {
  const int size = how.num_tokens;
  auto forbid = [&](float* numbers, float number) {
    for (int i = 0; mask && i < size; ++i)
      if (!(uint32_t(mask[i / 32]) >> i % 32 & 1)) numbers[i] = number;
  };
  forbid(logits, -INFINITY);
  if (seen)
    for (int i = 0; i < size; ++i)
      if (seen[i])
        logits[i] = logits[i] > 0 ? logits[i] / how.repetition_penalty
                                  : logits[i] * how.repetition_penalty;
  if (how.is_greedy) return find_largest_place(logits, size);
  const float most = logits[find_largest_place(logits, size)];
  float* shares = logits;
  for_vectors(size, [&](int i, auto kind) {
    using V = decltype(kind);
    const V x = (get<V>(logits + i) - most) / how.temperature;
    put(shares + i, exponential(x));
  });
  forbid(shares, 0);  // because `exponential` is never 0
  if (how.top_k > 0 && how.top_k < size)
    keep_largest(shares, size, how.top_k, true);
  if (how.top_p < 1)
    keep_largest(shares, size, how.top_p * total(shares, size), false);
  return find_token(shares, size, uniform(key, place) * total(shares, size));
}

}  // namespace palm
