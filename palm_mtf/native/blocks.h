// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Quantizes to the types of GGUF files that have a scale per group of weights.
//
// A weight is scale * number, or scale * number + least with least <= 0. In a
// block of 256 weights, each scale (and least) is itself a whole number times a
// float16 number of the block. Each lane of a register has another row's block.

#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace palm {

constexpr int kMostInBlock = 256;

// A byte has the lower 4 bits of numbers i and i + low_step. The bits above are
// in other bytes, `high_width` per number, of numbers that are high_step apart.
struct BlockType {
  int size, group, bytes;  // weights per block and per group; bytes per block
  float low, high;         // smallest and largest number
  float scale_target;      // number of the largest scale; 0: scales are float16
  bool has_least;
  int low_step, high_step, high_width;
};

// In the order of BLOCK_TYPES (blocks.py).
constexpr BlockType kBlockTypes[] = {
  {256, 32, 144, 0, 15, 63, true, 32, 0, 0},       // Q4_K
  {256, 32, 176, 0, 31, 63, true, 32, 32, 1},      // Q5_K
  {256, 16, 210, -32, 31, -128, false, 64, 32, 2},  // Q6_K
  {32, 32, 22, -16, 15, 0, false, 16, 1, 1},       // Q5_0
  {32, 32, 24, 0, 31, 0, true, 16, 1, 1},          // Q5_1
};

// Rounds to the nearest integer, and ties to even; |x| is below 2^22.
inline Floats nearest(Floats x) {
  constexpr float kMagic = 3 << 22;  // near kMagic, floats are integers
  return (x + kMagic) - kMagic;
}

inline Floats greater(Floats x, Floats y) { return x > y ? x : y; }

struct QuantizedBlock {
  Floats numbers[kMostInBlock];
  Floats scales[16], leasts[16];  // per group, whole numbers
  Floats scale, least;            // of the block, float16 numbers
};

inline Floats clamp(Floats x, float low, float high) {
  x = x < low ? splat(low) : x;
  return x > high ? splat(high) : x;
}

inline Floats absolute(Floats x) { return greater(x, -x); }

// Returns x, or 1 where x is 0.
inline Floats divisor_of(Floats x) { return x == 0.0f ? splat(1.0f) : x; }

inline Floats root(Floats x) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

// Rounds to float16, but keeps the float32 type; |x| is at most 65504.
inline Floats to_float16(Floats x) {
  const Words bits = (Words)x;
  const Floats normal =
    (Floats)((bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000);
  constexpr float kLeast = 1.0f / (1 << 24);  // of subnormal numbers
  return absolute(x) < 0x1p-14f ? nearest(x * (1 << 24)) * kLeast : normal;
}

// Returns the scale for which numbers from `low` to `high`, times the scale,
// have the least error, weighted by w. Scales to try map the x of the largest
// magnitude to numbers near `target`.
inline Floats fit_scale(const Floats* x, const Floats* w, int size, float low,
                        float high, float target) {
  constexpr int kTries = 9;
  Floats extreme = {}, best = {}, scale = {};
  for (int i = 0; i < size; ++i)
    extreme = absolute(x[i]) > absolute(extreme) ? x[i] : extreme;
  extreme = divisor_of(extreme);
  for (int i = -kTries; i <= kTries; ++i) {
    const Floats inverse = (target + 0.1f * i) / extreme;
    Floats products = {}, squares = {};
    for (int k = 0; k < size; ++k) {
      const Floats number = clamp(nearest(x[k] * inverse), low, high);
      products += w[k] * number * x[k], squares += w[k] * number * number;
    }
    const Floats found = products / divisor_of(squares);
    const Floats gain = found * products;  // how much it lowers the error
    scale = gain > best ? found : scale;
    best = greater(gain, best);
  }
  return scale;
}

// As `fit_scale`, for scale * number + least, with numbers from 0 to `high`.
inline void fit_line(const Floats* x, const Floats* w, int size, float high,
                     Floats& scale, Floats& least) {
  constexpr int kTries = 36;
  Floats low = {}, most = {}, sum_w = {}, sum_x = {}, sum_xx = {};
  for (int k = 0; k < size; ++k) {
    low = x[k] < low ? x[k] : low, most = greater(most, x[k]);
    sum_w += w[k], sum_x += w[k] * x[k], sum_xx += w[k] * x[k] * x[k];
  }
  // Numbers that are all 0 need only `least`.
  scale = Floats{}, least = sum_x / divisor_of(sum_w);
  least = least < 0.0f ? least : Floats{};
  Floats best = sum_x * least;
  const Floats range = divisor_of(most - low);
  for (int i = 0; i <= kTries; ++i) {
    const Floats inverse = (high - 0.9f + 0.05f * i) / range;
    Floats sum_n = {}, sum_nn = {}, sum_nx = {};
    for (int k = 0; k < size; ++k) {
      const Floats number = clamp(nearest((x[k] - low) * inverse), 0, high);
      const Floats weighted = w[k] * number;
      sum_n += weighted, sum_nn += weighted * number;
      sum_nx += weighted * x[k];
    }
    const Floats determinant = sum_w * sum_nn - sum_n * sum_n;
    const auto is_line = determinant > 1e-5f * sum_w * sum_nn;
    const Floats divisor = is_line ? determinant : splat(1.0f);
    Floats line = (sum_w * sum_nx - sum_x * sum_n) / divisor;
    Floats start = (sum_nn * sum_x - sum_n * sum_nx) / divisor;
    const auto is_used = is_line & (start <= 0.0f);
    line = is_used ? line : sum_nx / divisor_of(sum_nn);
    start = is_used ? start : Floats{};
    const Floats gain = line * sum_nx + start * sum_x;
    scale = gain > best ? line : scale, least = gain > best ? start : least;
    best = greater(gain, best);
  }
}

// Rounds a block's scales, or the magnitudes of its `least` numbers, to whole
// numbers times the result, a float16 number.
inline Floats round_scales(const Floats* x, const Floats* w, int size,
                           float target, Floats* numbers) {
  const float low = target < 0 ? target : 0;
  const float high = target < 0 ? -target - 1 : target;
  const Floats scale =
    to_float16(fit_scale(x, w, size, low, high, target));
  for (int j = 0; j < size; ++j)
    numbers[j] = clamp(nearest(x[j] / divisor_of(scale)), low, high);
  return scale;
}

// Quantizes a block x of kLanes rows. `importance` has a factor of the squared
// error per weight of a row; null for equal factors.
inline void quantize_block(const BlockType& type, const Floats* x,
                           const float* importance, QuantizedBlock& to) {
  const int size = type.size, group = type.group, count = size / group;
  Floats w[kMostInBlock], scales[16], leasts[16], sums[16], squares = {};
  for (int k = 0; k < size; ++k) squares += x[k] * x[k];
  for (int k = 0; k < size; ++k)
    w[k] = importance ? splat(importance[k])
                      : root(squares / float(size) + x[k] * x[k]);
  for (int j = 0; j < count; ++j) {
    const Floats *from = x + j * group, *by = w + j * group;
    if (type.has_least)
      fit_line(from, by, group, type.high, scales[j], leasts[j]);
    else
      scales[j] = fit_scale(from, by, group, type.low, type.high, type.low);
    sums[j] = Floats{};
    for (int k = 0; k < group; ++k) sums[j] += by[k];
    leasts[j] = type.has_least ? -leasts[j] : Floats{};
  }
  if (type.scale_target) {
    to.scale = round_scales(scales, sums, count, type.scale_target, to.scales);
    to.least = round_scales(leasts, sums, count, type.scale_target, to.leasts);
  } else {
    to.scale = to_float16(scales[0]);
    to.least = to_float16(clamp(leasts[0], 0, 65504));
    to.scales[0] = to.leasts[0] = splat(1.0f);
  }
  for (int j = 0; j < count; ++j) {
    const Floats least = type.has_least ? to.least * to.leasts[j] : Floats{};
    const Floats inverse = 1.0f / divisor_of(to.scale * to.scales[j]);
    for (int k = j * group; k < (j + 1) * group; ++k)
      to.numbers[k] =
        clamp(nearest((x[k] + least) * inverse), type.low, type.high);
  }
}

// Writes the bits of x, which float16 can represent.
inline uint8_t* write_float16(float x, uint8_t* to) {
  const uint32_t bits = load<uint32_t>(&x), size = bits & 0x7fffffff;
  const uint32_t normal = (size - (112 << 23)) >> 13;
  const bool is_small = std::abs(x) < 0x1p-14f;
  const uint32_t half = is_small ? uint32_t(std::abs(x) * 0x1p24f) : normal;
  store(to, uint16_t((bits >> 16 & 0x8000) | half));
  return to + 2;
}

// Writes the block of one lane in the order of llama.cpp's ggml-common.h.
inline void write_block(const BlockType& type, const QuantizedBlock& block,
                        int lane, uint8_t* to) {
  auto number = [&](int k) {
    return uint8_t(block.numbers[k][lane] - type.low);
  };
  auto write_low = [&] {
    for (int k = 0; k < type.size; k += 2 * type.low_step)
      for (int i = k; i < k + type.low_step; ++i)
        *to++ = (number(i) & 15) | number(i + type.low_step) << 4;
  };
  auto write_high = [&] {
    const int step = type.high_step, width = type.high_width;
    for (int k = 0; step && k < type.size; k += step * 8 / width)
      for (int i = k; i < k + step; ++i, ++to)
        for (int j = *to = 0; j < 8; j += width)
          *to |= number(i + j / width * step) >> 4 << j;
  };
  if (!type.has_least && type.scale_target) {
    write_low(), write_high();
    for (int j = 0; j < type.size / type.group; ++j)
      *to++ = uint8_t(int(block.scales[j][lane]));
    write_float16(block.scale[lane], to);
    return;
  }
  to = write_float16(block.scale[lane], to);
  // A block without whole numbers adds its `least`; others subtract it.
  const float sign = type.scale_target ? 1 : -1;
  if (type.has_least) to = write_float16(sign * block.least[lane], to);
  if (type.scale_target) {  // 6 bits per number
    for (int j = 0; j < 4; ++j) {
      const int a = block.scales[j][lane], b = block.scales[j + 4][lane];
      const int c = block.leasts[j][lane], d = block.leasts[j + 4][lane];
      to[j] = a | b >> 4 << 6, to[j + 4] = c | d >> 4 << 6;
      to[j + 8] = (b & 15) | (d & 15) << 4;
    }
    to += 12;
  }
  write_high(), write_low();
}

// Quantizes kLanes rows of w, [rows, columns], from row `first` on. A row has
// whole blocks.
inline void quantize_rows(const BlockType& type, const float* w, int64_t first,
                          int64_t rows, int64_t columns,
                          const float* importance, uint8_t* to) {
  QuantizedBlock block;
  Floats x[kMostInBlock];
  const int lanes = std::min<int64_t>(kLanes, rows - first);
  for (int64_t at = 0; at < columns; at += type.size) {
    for (int k = 0; k < type.size; ++k) x[k] = Floats{};
    for (int r = 0; r < lanes; ++r)
      for (int k = 0; k < type.size; ++k)
        x[k][r] = w[(first + r) * columns + at + k];
    quantize_block(type, x, importance ? importance + at : nullptr, block);
    for (int r = 0; r < lanes; ++r)
      write_block(type, block, r,
                  to + ((first + r) * columns + at) / type.size * type.bytes);
  }
}

}  // namespace palm
