// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Packs a float32 matrix in panels (panels.h): as it is, cast, or quantized.

#pragma once

#include <algorithm>
#include <vector>

#include "blocks.h"
#include "products.h"

namespace palm {

// A part of a matrix. The part's element (i, j) is at[i * row_step + j *
// column_step], and is element (first_row + i, first_column + j) of the matrix.
struct Block {
  const float* at;
  int rows, columns, first_row, first_column;
  size_t row_step, column_step;
};

// A panel's columns in float32, [padded(inner), kColumns], padded with zeros.
using Columns32 = std::vector<float>;

inline void read_columns(const std::vector<Block>& blocks, int first, int inner,
                         bool is_rounded, Columns32& to) {
  to.assign(size_t(padded(inner)) * kColumns, 0);
  for (const Block& block : blocks) {
    const int begin = std::max(first, block.first_column);
    const int end =
      std::min(first + kColumns, block.first_column + block.columns);
    for (int i = 0; i < block.rows; ++i) {
      const float* from = block.at + i * block.row_step;
      float* row = &to[size_t(block.first_row + i) * kColumns];
      for (int j = begin; j < end; ++j)
        row[j - first] = from[(j - block.first_column) * block.column_step];
    }
  }
  if (!is_rounded) return;
  for (float& x : to) x = from_bfloat16(to_bfloat16(x));
}

// Returns row k of x, in the kLanes columns of register `vector`.
inline Floats row_of(const Columns32& x, int k, int vector) {
  return load<Floats>(&x[size_t(k) * kColumns + vector * kLanes]);
}

inline void pack_bfloat16(const Columns32& x, uint8_t* panel) {
  uint16_t* to = reinterpret_cast<uint16_t*>(panel);
  for (size_t i = 0; i < x.size(); i += 2 * kColumns)
    for (int j = 0; j < kColumns; ++j) {
      *to++ = to_bfloat16(x[i + j]);
      *to++ = to_bfloat16(x[i + kColumns + j]);
    }
}

// Writes the first `columns` columns of a panel, or the whole panel if it has
// fewer, to the rows of a matrix; the rows are `step` numbers apart.
inline void unpack_bfloat16(const uint8_t* panel, int inner, int columns,
                            uint16_t* to, size_t step) {
  const uint16_t* from = reinterpret_cast<const uint16_t*>(panel);
  columns = std::min(columns, kColumns);
  for (int k = 0; k < inner; ++k, to += step) {
    const uint16_t* row = from + size_t(k / 2) * 2 * kColumns + k % 2;
    for (int j = 0; j < columns; ++j) to[j] = row[2 * j];
  }
}

// Quantizes with one scale per column, which maps the largest |x| to 127.
inline void pack_int8(const Columns32& x, uint8_t* panel) {
  const int length = x.size() / kColumns;
  uint8_t* ends = panel + x.size();
  for (int v = 0; v < kVectors; ++v) {
    Floats largest = {};
    for (int k = 0; k < length; ++k) {
      const Floats row = row_of(x, k, v);
      largest = greater(greater(largest, row), -row);
    }
    largest = largest > 0.0f ? largest : largest + 1.0f;
    const Floats inverse = 127.0f / largest;
    Ints total = {};
    for (int k = 0; k < length; ++k) {
      const Ints numbers = to_ints(nearest(row_of(x, k, v) * inverse));
      total += numbers;
      // Four consecutive weights of a column are adjacent bytes.
      uint8_t* to = panel + (size_t(k / 4) * kColumns + v * kLanes) * 4 + k % 4;
      for (int j = 0; j < kLanes; ++j) to[4 * j] = numbers[j];
    }
    store(ends + v * sizeof(Floats), largest / 127.0f);
    store(ends + (kVectors + v) * sizeof(Ints), total);
  }
}

// Scales to try for a group of int4 numbers, relative to the scale that clips
// no number. Smaller scales clip large numbers, but round others more finely.
constexpr float kInt4Factors[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};

inline Floats int4_divisor(Halves scale) {
  const Floats divisor = from_bfloat16(&scale);
  return divisor == 0.0f ? splat(1.0f) : divisor;
}

inline Floats to_int4(Floats x, Floats divisor) {
  x = nearest(x * (1.0f / divisor));
  x = x < -8.0f ? splat(-8.0f) : x;
  return x > 7.0f ? splat(7.0f) : x;
}

// Returns the scales with the least squared error in a group of rows, one for
// each of the kLanes columns of register v.
inline Halves int4_scales(const Columns32& x, int group, int v) {
  Floats low = {}, high = {}, best = {}, least = {};
  for (int k = 0; k < kGroup; ++k) {
    const Floats row = row_of(x, group * kGroup + k, v);
    low = row < low ? row : low, high = greater(high, row);
  }
  // The number with the largest magnitude becomes -8, because int4 has no 8.
  const Floats extreme = high > -low ? high : low;
  for (float factor : kInt4Factors) {
    const Halves scale = to_bfloat16(extreme * (factor / -8));
    const Floats divisor = int4_divisor(scale);
    Floats error = {};
    for (int k = 0; k < kGroup; ++k) {
      const Floats row = row_of(x, group * kGroup + k, v);
      const Floats lost = to_int4(row, divisor) * divisor - row;
      error += lost * lost;
    }
    const auto is_better = factor == 1 ? error == error : error < least;
    least = is_better ? error : least;
    best = is_better ? from_bfloat16(&scale) : best;
  }
  return to_bfloat16(best);
}

// Quantizes to numbers from -8 to 7, with one scale per column and row group.
inline void pack_int4(const Columns32& x, uint8_t* panel) {
  constexpr int kHalf = kGroup / 2;
  const int groups = x.size() / kColumns / kGroup;
  for (int group = 0; group < groups; ++group) {
    uint8_t* scales = panel + kHalf * kColumns;
    for (int v = 0; v < kVectors; ++v) {
      const Halves scale = int4_scales(x, group, v);
      store(scales + v * sizeof(Halves), scale);
      const Floats divisor = int4_divisor(scale);
      for (int k = 0; k < kHalf; ++k) {
        // The lower 4 bits of a byte hold weight k of the group, plus 8. The
        // upper 4 bits hold weight k + 16, plus 8.
        const int at = group * kGroup + k;
        const Ints low = to_ints(to_int4(row_of(x, at, v), divisor)) + 8;
        const Ints high =
          to_ints(to_int4(row_of(x, at + kHalf, v), divisor)) + 8;
        uint8_t* to = panel + ((k / 4) * kColumns + v * kLanes) * 4 + k % 4;
        for (int j = 0; j < kLanes; ++j) to[4 * j] = low[j] | high[j] << 4;
      }
    }
    panel = scales + 2 * kColumns;
  }
}

// Quantizes to numbers of llama.cpp's Q4_K, Q5_K or Q6_K.
inline void pack_blocks(const Columns32& x, Format format, uint8_t* panel) {
  const BlockType& type = kBlockTypes[format - kQ4K];
  const int length = x.size() / kColumns, per_block = kBlock / kGroup;
  const int per_group = kGroup / type.group;  // 2 scales in a group of kQ6K
  static thread_local QuantizedBlock blocks[kVectors];
  for (int begin = 0; begin < length; begin += kBlock) {
    for (int v = 0; v < kVectors; ++v) {
      Floats rows[kBlock] = {};
      for (int k = 0; k < std::min(kBlock, length - begin); ++k)
        rows[k] = row_of(x, begin + k, v);
      quantize_block(type, rows, nullptr, blocks[v]);
      store(panel + v * sizeof(Floats), blocks[v].scale);
      store(panel + (kVectors + v) * sizeof(Floats), blocks[v].least);
    }
    panel += 8 * kColumns;
    const int groups = std::min(per_block, (length - begin) / kGroup);
    for (int g = 0; g < groups; ++g) {
      const size_t bytes = block_group_bytes(format) * kColumns;
      std::fill_n(panel, bytes, 0);
      uint8_t* high = panel + kGroup / 2 * kColumns;
      uint8_t* ends = panel + bytes - 2 * kColumns;
      for (int c = 0; c < kColumns; ++c) {
        const QuantizedBlock& block = blocks[c / kLanes];
        const int lane = c % kLanes;
        for (int i = 0; i < kGroup; ++i) {
          const int number = block.numbers[g * kGroup + i][lane] - type.low;
          const int half = i / 16, k = i % 16;
          const int at = (k / 4 * kColumns + c) * 4 + k % 4;
          panel[at] |= (number & 15) << 4 * half;
          const int top = number >> 4 << k / 4 * 2;
          if (format == kQ5K) high[4 * c + k % 4] |= top << half;
          if (format == kQ6K) high[4 * (half * kColumns + c) + k % 4] |= top;
        }
        auto whole = [&](const Floats* from, int j) {
          return uint8_t(int(from[j][lane]));
        };
        ends[c] = whole(block.scales, g * per_group);
        ends[kColumns + c] = per_group == 2
                               ? whole(block.scales, g * per_group + 1)
                               : whole(block.leasts, g);
      }
      panel += bytes;
    }
  }
}

inline void pack(const Columns32& x, Format format, uint8_t* panel) {
  if (format == kFloat32) std::memcpy(panel, x.data(), sizeof(float) * x.size());
  if (format == kBfloat16) pack_bfloat16(x, panel);
  if (format == kInt8) pack_int8(x, panel);
  if (format == kInt4) pack_int4(x, panel);
  if (has_blocks(format)) pack_blocks(x, format, panel);
}

}  // namespace palm
