// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Products of rows with weights packed in panels.
//
// A tile is the product of a few rows with a panel; its sums stay in registers.
// The terms of a sum, and their order, do not depend on other rows, so a row's
// result has the same bits whichever rows are computed with it.

#pragma once

#include <algorithm>
#include <cmath>

#include "panels.h"
#include "stretches.h"

namespace palm {

// Rows of a tile with int4 weights: fewer than kTileRows, because int4 weights
// need more registers.
constexpr int kTileRowsInt4 = kLanes == 16 ? 3 : 1;

inline Floats byte_floats(const void* at, bool is_signed) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));
  return to_floats(is_signed ? __builtin_convertvector(load<SignedBytes>(at), Ints)
                             : __builtin_convertvector(load<Bytes>(at), Ints));
}

// Adds the products with a group of a format with blocks to `sums`. `block` has
// the scales of the group's block.
template <Format kFormat, int kRows, class Ahead>
inline void add_block_group(const Rows& x, int first, int length, int group,
                            const uint8_t* panel, const uint8_t* block,
                            Ahead& ahead, Floats sums[][kVectors]) {
  constexpr int kHalf = kGroup / 2, kMore = kFormat - kQ4K;
  constexpr bool kHasLeast = kFormat != kQ6K;
  const uint8_t* high = panel + kHalf * kColumns;
  const uint8_t* ends = high + kMore * 4 * kColumns;
  auto half_sum = [&](int r, int half) {
    return x.half_sums[size_t(first + r) * (length / 16) + 2 * group + half];
  };
  for (int i = 0; i < block_group_bytes(kFormat); i += 4) ahead.prefetch();
  // A group of kQ6K has two scales.
  for (int begin = 0; begin < 2; begin += kHasLeast ? 2 : 1) {
    const int end = kHasLeast ? 2 : begin + 1;
    Ints totals[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        totals[r][v] = splat(kHasLeast ? 0 : -32 * half_sum(r, begin));
    for (int k = 0; k < kHalf; k += 4)
      for (int v = 0; v < kVectors; ++v) {
        const size_t at = v * sizeof(Words);
        const Words both = load<Words>(panel + k * kColumns + at);
        for (int half = begin; half < end; ++half) {
          Words w = (both >> 4 * half) & 0x0f0f0f0f;
          if constexpr (kFormat == kQ5K)
            w |= (load<Words>(high + at) >> (k / 2 + half) & 0x01010101) << 4;
          if constexpr (kFormat == kQ6K)
            w |= (load<Words>(high + half * 4 * kColumns + at) >> k / 2 &
                  0x03030303)
                 << 4;
          for (int r = 0; r < kRows; ++r)
            totals[r][v] =
              add_bytes(totals[r][v], w,
                        splat_word(x.bytes + size_t(first + r) * length +
                                   group * kGroup + half * kHalf + k));
        }
      }
    for (int v = 0; v < kVectors; ++v) {
      const uint8_t* bytes = ends + begin * kColumns + v * kLanes;
      const Floats scale = byte_floats(bytes, !kHasLeast) *
                           load<Floats>(block + v * sizeof(Floats));
      Floats least = {};
      if constexpr (kHasLeast)
        least = byte_floats(bytes + kColumns, false) *
                load<Floats>(block + (kVectors + v) * sizeof(Floats));
      for (int r = 0; r < kRows; ++r) {
        Floats sum = to_floats(totals[r][v]) * scale;
        if constexpr (kHasLeast)
          sum -= splat(float(half_sum(r, 0) + half_sum(r, 1))) * least;
        sums[r][v] +=
          sum * x.group_scales[(first + r) * (length / kGroup) + group];
      }
    }
  }
}

template <Format kFormat, int kRows, class Ahead>
void tile(const Rows& x, int first, const uint8_t* panel, int inner,
          Ahead ahead, float out[][kColumns]) {
  const int length = padded(inner);
  Floats sums[kRows][kVectors] = {};
  if constexpr (kFormat == kFloat32) {
    for (int k = 0; k < length; ++k, panel += 4 * kColumns) {
      ahead.prefetch();
      for (int r = 0; r < kRows; ++r) {
        Floats value = splat(x.floats[size_t(first + r) * length + k]);
        for (int v = 0; v < kVectors; ++v)
          sums[r][v] += value * load<Floats>(panel + v * sizeof(Floats));
      }
    }
  } else if constexpr (kFormat == kBfloat16) {
    // A word holds weights k (lower half) and k + 1 (upper half) of a column.
    for (int k = 0; k < length; k += 2, panel += 4 * kColumns) {
      ahead.prefetch();
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) {
          Words w = load<Words>(panel + v * sizeof(Words));
          size_t at = size_t(first + r) * length + k;
          sums[r][v] = kMultipliesBfloat16
                         ? add_pairs(sums[r][v], x.halves + at, w)
                         : add_pairs(sums[r][v], x.floats + at, w);
        }
    }
  } else if constexpr (kFormat == kInt8) {
    const uint8_t* ends = panel + size_t(length) * kColumns;
    Ints totals[kRows][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      Ints column = load<Ints>(ends + (kVectors + v) * sizeof(Ints));
      for (int r = 0; r < kRows; ++r) totals[r][v] = -kByteOffset * column;
    }
    for (int k = 0; k < length; k += 4, panel += 4 * kColumns) {
      ahead.prefetch();
      for (int r = 0; r < kRows; ++r) {
        Words value = splat_word(x.bytes + size_t(first + r) * length + k);
        for (int v = 0; v < kVectors; ++v)
          totals[r][v] = add_signed_bytes(
            totals[r][v], value, load<Words>(panel + v * sizeof(Words)));
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = to_floats(totals[r][v]) * x.scales[first + r] *
                     load<Floats>(ends + v * sizeof(Floats));
  } else if constexpr (has_blocks(kFormat)) {
    const uint8_t* block = panel;
    for (int g = 0; g < length / kGroup; ++g) {
      if (g % (kBlock / kGroup) == 0) block = panel, panel += 8 * kColumns;
      add_block_group<kFormat, kRows>(x, first, length, g, panel, block, ahead,
                                      sums);
      panel += block_group_bytes(kFormat) * kColumns;
    }
  } else {
    // The lower 4 bits of a byte hold weight k, the upper 4 bits weight k + 16.
    const int groups = length / kGroup;
    for (int g = 0; g < groups; ++g) {
      Ints totals[kRows][kVectors];
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
          totals[r][v] = splat(
            -8 * (x.half_sums[2 * (size_t(first + r) * groups + g)] +
                  x.half_sums[2 * (size_t(first + r) * groups + g) + 1]));
      for (int k = 0; k < kGroup / 2; k += 4, panel += 4 * kColumns) {
        ahead.prefetch();
        for (int v = 0; v < kVectors; ++v) {
          Words w = load<Words>(panel + v * sizeof(Words));
          Words low = w & 0x0f0f0f0f, high = (w >> 4) & 0x0f0f0f0f;
          for (int r = 0; r < kRows; ++r) {
            const uint8_t* at =
              x.bytes + size_t(first + r) * length + g * kGroup + k;
            totals[r][v] = add_bytes(totals[r][v], low, splat_word(at));
            totals[r][v] =
              add_bytes(totals[r][v], high, splat_word(at + kGroup / 2));
          }
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        Floats scale = from_bfloat16(panel + v * sizeof(Halves));
        for (int r = 0; r < kRows; ++r)
          sums[r][v] += to_floats(totals[r][v]) * scale;
      }
      panel += 2 * kColumns;
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] *= x.scales[first + r];
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      store(&out[r][v * kLanes], sums[r][v]);
}

template <Format kFormat, int kRows, class Ahead>
void tile_of(int rows, const Rows& x, int first, const uint8_t* panel,
             int inner, Ahead ahead, float out[][kColumns]) {
  if (rows == kRows)
    return tile<kFormat, kRows>(x, first, panel, inner, ahead, out);
  if constexpr (kRows > 1)
    tile_of<kFormat, kRows - 1>(rows, x, first, panel, inner, ahead, out);
}

// Multiplies all rows by the panels `begin` to `end` - 1. For each tile, calls
// use(first row, number of rows, first column, the tile's results). `next` is
// the panel that the thread probably reads next, to prefetch it.
template <Format kFormat, class Use>
void multiply_panels(const Rows& x, int num_rows, const uint8_t* panels,
                     int inner, int begin, int end, const uint8_t* next,
                     Use use) {
  constexpr int kMost = kFormat >= kInt4 ? kTileRowsInt4 : kTileRows;
  alignas(64) float out[kMost][kColumns];
  const size_t bytes = panel_bytes(kFormat, inner);
  const int num_tiles = (num_rows + kMost - 1) / kMost;
  // Steps read 1, 2, 4 or 8 rows of weights each.
  const int steps = padded(inner) >> std::min<int>(kFormat, kInt4);
  for (int p = begin; p < end; ++p) {
    const uint8_t* panel = panels + p * bytes;
    const uint8_t* following = p + 1 < end ? panel + bytes : next;
    if constexpr (kHasStretches<kFormat>)
      if (num_tiles > 1) {
        multiply_stretches<kFormat>(
          x, num_rows, panel, inner, following,
          [&](int row, float numbers[][kColumns]) {
            use(row, 1, p * kColumns, numbers);
          });
        continue;
      }
    for (int i = 0; i < num_tiles; ++i) {
      const int first = i * kMost, rows = std::min(kMost, num_rows - first);
      if (num_tiles == 1) {
        tile_of<kFormat, kMost>(rows, x, first, panel, inner,
                                AheadOf<kFormat>(panel), out);
      } else {
        const Part part = make_part(following, bytes, first, rows, num_rows,
                                  steps);
        tile_of<kFormat, kMost>(rows, x, first, panel, inner, part, out);
      }
      use(first, rows, p * kColumns, out);
    }
  }
}

}  // namespace palm
