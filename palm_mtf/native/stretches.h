// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Products of many rows with panels, for CPUs with few registers.
//
// AVX2 has registers for the sums of only three input rows, so a product of
// many input rows would read a panel and unpack its bfloat16 many times.
// Instead, a stretch (kStretch rows of the panel) is unpacked to float32 once,
// and multiplied by all input rows while it is in the L1 cache. Sums have the
// same bits as without stretches, because they add the same terms in the same
// order.

#pragma once

#include <algorithm>
#include <vector>

#include "panels.h"

namespace palm {

constexpr int kStretch = 128;  // rows; 16 kB in float32 fit into the L1 cache

// Only AVX2 multiplies a panel in stretches of rows. Stretches are slower with
// AVX-512, which has more registers, and without AVX2, where unpacking is slow.
template <Format kFormat>
constexpr bool kHasStretches =
  kLanes == 8 && (kFormat == kFloat32 || kFormat == kBfloat16);

// Adds to `sums` the product of at most kRows rows with a stretch of weights.
template <int kRows = kTileRows>
void stretch_tile(int rows, const float* x, int length, const float* weights,
                  int count, Part ahead, float sums[][kColumns]) {
  if constexpr (kRows > 1)
    if (rows < kRows)
      return stretch_tile<kRows - 1>(rows, x, length, weights, count, ahead,
                                     sums);
  Floats own[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      own[r][v] = load<Floats>(&sums[r][v * kLanes]);
  for (int k = 0; k < count; ++k, weights += kColumns) {
    ahead.prefetch();
    for (int r = 0; r < kRows; ++r) {
      const Floats value = splat(x[size_t(r) * length + k]);
      for (int v = 0; v < kVectors; ++v)
        own[r][v] += value * load<Floats>(weights + v * kLanes);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      store(&sums[r][v * kLanes], own[r][v]);
}

// Returns the first `count` rows of a panel as float32, [count, kColumns].
template <Format kFormat>
const float* unpack(const uint8_t* panel, int count) {
  if constexpr (kFormat == kFloat32)
    return reinterpret_cast<const float*>(panel);
  alignas(64) static thread_local float floats[kStretch * kColumns];
  for (float* to = floats; to < floats + count * kColumns;
       to += 2 * kColumns, panel += 4 * kColumns)
    for (int v = 0; v < kVectors; ++v) {
      // A word holds two adjacent weights of a column, the first in the lower
      // half.
      const Words w = load<Words>(panel + v * sizeof(Words));
      store(to + v * kLanes, w << 16);
      store(to + kColumns + v * kLanes, w & 0xffff0000);
    }
  return floats;
}

// Multiplies rows by a panel, and prefetches the panel `following`. Calls
// use(row, sums) for each row.
template <Format kFormat, class Use>
void multiply_stretches(const Rows& x, int num_rows, const uint8_t* panel,
                        int inner, const uint8_t* following, Use use) {
  const int length = padded(inner);
  const int num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  thread_local std::vector<float> memory;
  memory.assign(size_t(num_rows) * kColumns, 0);
  auto sums = reinterpret_cast<float(*)[kColumns]>(memory.data());
  for (int k = 0; k < length; k += kStretch) {
    const int count = std::min(kStretch, length - k);
    const size_t size = panel_bytes(kFormat, count);
    const float* weights = unpack<kFormat>(panel, count);
    for (int i = 0; i < num_tiles; ++i) {
      const int first = i * kTileRows, rows = std::min(kTileRows, num_rows - first);
      const Part ahead = make_part(following, size, first, rows, num_rows, count);
      stretch_tile(rows, x.floats + size_t(first) * length + k, length, weights,
                   count, ahead, sums + first);
    }
    panel += size, following += size;
  }
  for (int row = 0; row < num_rows; ++row) use(row, sums + row);
}

}  // namespace palm
