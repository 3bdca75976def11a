// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Weights packed in panels. A panel holds kColumns columns of a weight matrix,
// as one stream of bytes in the order in which a product reads the numbers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace palm {

// Formats of packed weights, in the order of FORMATS (decoding.py).
enum Format { kFloat32, kBfloat16, kInt8, kInt4, kQ4K, kQ5K, kQ6K };

// Formats with blocks of kBlock weights in a column (blocks.h). A block begins
// with float32 scales, of each column; then, if it has them, `least` numbers.
constexpr bool has_blocks(Format format) { return format >= kQ4K; }
constexpr int kBlock = 256;

constexpr int kGroup = 32;  // rows per scale in a column of int4 weights

// Returns the inner dimension of weights [inner, outer], padded with zeros.
inline int padded(int inner) { return (inner + kGroup - 1) / kGroup * kGroup; }

// Returns the bytes per column in a group of a format with blocks. A group has
// the lower 4 bits of its numbers, as int4 has them; the bits above; and a
// number for the scale, and one for `least`, or for the scale of 16 weights.
constexpr int block_group_bytes(Format format) {
  return kGroup / 2 + kGroup / 8 * (format - kQ4K) + 2;
}

// Returns a panel's size. An int8 panel ends with a scale and a sum of weights
// per column. Products subtract kByteOffset times the sum, because input rows
// have kByteOffset added. An int4 group ends with a bfloat16 scale per column.
inline size_t panel_bytes(Format format, int inner) {
  size_t count = size_t(padded(inner)) * kColumns;
  if (format == kFloat32) return 4 * count;
  if (format == kBfloat16) return 2 * count;
  if (format == kInt8) return count + 8 * kColumns;
  if (has_blocks(format))
    return count / kGroup * block_group_bytes(format) +
           (padded(inner) + kBlock - 1) / kBlock * 8 * size_t(kColumns);
  return count / 2 + count / kGroup * 2;
}

// Input rows of a product, [count, padded(inner)]. Only the members that
// the weights' format requires are set.
struct Rows {
  const float* floats;
  const uint16_t* halves;     // bfloat16, if the CPU multiplies bfloat16
  const uint8_t* bytes;       // int8; plus kByteOffset for int8 weights
  const float* scales;        // of `bytes`, [count]
  const int32_t* half_sums;   // of `bytes`, [count, padded(inner) / 16]
  const float* group_scales;  // for k-quants, [count, padded(inner) / kGroup]
  int tile_rows;  // tiles (tiles.h) compute products of at least so many rows
};

// Prefetches the panel that a tile (products.h) reads, a little ahead of the
// tile.
struct Stream {
  const uint8_t* at;

  void prefetch() {
    palm::prefetch(at);
    at += 4 * kColumns;
  }
};

// Leaves prefetching to the hardware.
struct Hardware {
  explicit Hardware(const uint8_t*) {}
  void prefetch() {}
};

// What prefetches in a product of few rows. On Zen 4, the hardware's own
// prefetching reads memory at the full rate, except for k-quants, which are
// twice as fast with `Stream`. With `Stream`, int4 weights take 1.3 to 1.6
// times as long, and four rows in the other formats 1.2 to 1.4 times. In pages
// of 4 KiB, `Stream` makes float32 and int8 1.05 to 1.08 times as fast.
template <Format kFormat>
using AheadOf = std::conditional_t<has_blocks(kFormat), Stream, Hardware>;

// The part of the next panel that a tile (products.h) prefetches, some bytes in
// each step of its loop. For products of many rows: several tiles per panel.
struct Part {
  const uint8_t* at;
  int bytes;  // prefetched per step

  void prefetch() {
    constexpr int kLine = 64;
    // A cache line may be prefetched twice, which costs less than a branch.
    for (int i = 0; i < bytes; i += kLine) __builtin_prefetch(at + i, 0, 2);
    at += bytes;
  }
};

// Returns the part of `panel` that a tile prefetches: rows / num_rows of its
// bytes, if the tile has `rows` of the product's `num_rows` rows.
inline Part make_part(const uint8_t* panel, size_t bytes, int first, int rows,
                    int num_rows, int steps) {
  const size_t begin = bytes * first / num_rows;
  const size_t end = bytes * (first + rows) / num_rows;
  return {panel + begin, int(end - begin + steps - 1) / steps};
}

}  // namespace palm
