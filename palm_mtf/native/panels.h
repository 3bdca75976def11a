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

// In the order of FORMATS (packing.py).
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

// A part of the panel that comes next. Where several tiles read one panel, each
// prefetches a part of the next: memory has the time of all of them for it.
struct Part {
  const uint8_t *at, *end;

  void prefetch() {
    constexpr int kBytes = 2 * kColumns, kLine = 64;
    if (at >= end) return;
    for (int i = 0; i < kBytes; i += kLine) __builtin_prefetch(at + i, 0, 2);
    at += kBytes;
  }
};

}  // namespace palm
