// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Weights that are packed in panels, and how products read them.
//
// A panel holds kColumns columns of a weight matrix, all of the inner
// dimension, in the order in which a product reads it: one stream of bytes.

#pragma once

#include <cstddef>
#include <cstdint>

#include "vectors.h"

namespace palm {

// In the order of FORMATS (decoding.py).
enum Format { kFloat32, kBfloat16, kInt8, kInt4 };

constexpr int kGroup = 32;  // inner indices that share a scale of 4-bit weights

// The inner dimension is padded with zeros to a multiple of kGroup.
inline int padded(int inner) { return (inner + kGroup - 1) / kGroup * kGroup; }

// Bytes of a panel: numbers, and the scales of integers. Int8 has a scale and
// the sum of the numbers for each column, int4 a bfloat16 scale for each group.
inline size_t panel_bytes(Format format, int inner) {
  size_t count = size_t(padded(inner)) * kColumns;
  if (format == kFloat32) return 4 * count;
  if (format == kBfloat16) return 2 * count;
  if (format == kInt8) return count + 8 * kColumns;
  return count / 2 + count / kGroup * 2;
}

// Rows as a product reads them: [count, padded(inner)] of one kind.
struct Rows {
  const float* floats;
  const uint16_t* halves;     // bfloat16, where the CPU multiplies it
  const uint8_t* bytes;       // int8; for int8 weights plus kByteOffset
  const float* scales;        // [count], of bytes
  const int32_t* group_sums;  // [count, padded(inner) / kGroup], of bytes
};

// What a tile prefetches while it computes, at each step along its panel.

// The panel itself, a little ahead.
struct Stream {
  const uint8_t* at;

  void prefetch() {
    palm::prefetch(at);
    at += 4 * kColumns;
  }
};

// A part of the panel that comes next, evenly over the steps of a tile: where
// several tiles read one panel, memory has the time of all these tiles to load
// the next panel.
struct Part {
  const uint8_t* at;
  int bytes;  // of a step

  void prefetch() {
    constexpr int kLine = 64;
    // A line may be asked for twice, which costs less than a branch would.
    for (int i = 0; i < bytes; i += kLine) __builtin_prefetch(at + i, 0, 2);
    at += bytes;
  }
};

// Returns the part of the panel at `panel` that a tile of `rows` of `num_rows`
// prefetches: as much as its share of the rows.
inline Part part_of(const uint8_t* panel, size_t bytes, int first, int rows,
                    int num_rows, int steps) {
  const size_t begin = bytes * first / num_rows;
  const size_t end = bytes * (first + rows) / num_rows;
  return {panel + begin, int(end - begin + steps - 1) / steps};
}

}  // namespace palm
