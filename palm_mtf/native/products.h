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
#include "tiles.h"

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

// Adds the products of kRows rows with an int8 panel, from element k on, to
// `totals`, and converts these sums to the float32 results `sums`.
template <int kRows, class Ahead>
inline void finish_bytes(const Rows& x, int first, const uint8_t* panel,
                         int length, int k, Ahead ahead,
                         Ints totals[][kVectors], Floats sums[][kVectors]) {
  const uint8_t* ends = panel + size_t(length) * kColumns;
  panel += size_t(k) * kColumns;
  for (; k < length; k += 4, panel += 4 * kColumns) {
    ahead.prefetch();
    for (int r = 0; r < kRows; ++r) {
      Words value = splat_word(x.bytes + size_t(first + r) * length + k);
      for (int v = 0; v < kVectors; ++v)
        totals[r][v] = add_signed_bytes(
          totals[r][v], value, load<Words>(panel + v * sizeof(Words)));
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      const Floats scale = load<Floats>(ends + v * sizeof(Floats));
      const Ints column = load<Ints>(ends + (kVectors + v) * sizeof(Ints));
      sums[r][v] = to_floats(totals[r][v] - kByteOffset * column) *
                   x.scales[first + r] * scale;
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
    Ints totals[kRows][kVectors] = {};
    finish_bytes<kRows>(x, first, panel, length, 0, ahead, totals, sums);
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

// A product by tiles (tiles.h) computes this many steps for all rows before the
// next steps: they read 32 kB of a panel, which fit into the L1 cache.
constexpr int kTileSteps = 8;

// Does what `multiply_panels` does, by tiles; `inner` is above kGroup.
template <Format kFormat, class Use>
void multiply_by_tiles(const Rows& x, int num_rows, const uint8_t* panels,
                       int inner, int begin, int end, const uint8_t* next,
                       Use use) {
  constexpr bool kIsBytes = kFormat == kInt8;
  const int length = padded(inner);
  const int words = length / (kIsBytes ? 4 : 2), steps = words / kTileSize;
  const void* rows = x.halves;
  if constexpr (kIsBytes) rows = x.bytes;
  const size_t bytes = panel_bytes(kFormat, inner), stride = 4 * words;
  const int num_tiles = (num_rows + kTileSize - 1) / kTileSize;
  thread_local std::vector<TileSums> sums;
  if (sums.size() < size_t(num_tiles)) sums.resize(num_tiles);
  const Tiles tiles(num_rows);
  for (int p = begin; p < end; ++p) {
    const uint8_t* panel = panels + p * bytes;
    const uint8_t* following = p + 1 < end ? panel + bytes : next;
    const uint8_t* at = panel;
    for (int step = 0; step < steps; step += kTileSteps) {
      const int count = std::min(kTileSteps, steps - step);
      const size_t size = size_t(count) * kTileSize * kPanelStride;
      const bool is_last = step + count == steps;
      for_tiles(num_rows, [&](int first, int row, int) {
        const int i = row / kTileSize;
        tiles.multiply<kIsBytes>(
          static_cast<const uint8_t*>(rows) + first * stride +
            step * kTileBytes,
          stride, at, count, step == 0,
          make_part(is_last ? following : at + size, size, i, 1, num_tiles,
                    count),
          sums[i].rows);
      });
      at += size;
    }
    for_tiles(num_rows, [&](int first, int row, int last) {
      float(*found)[kColumns] = sums[row / kTileSize].rows + (row - first);
      if constexpr (kIsBytes)
        for (int r = row; r < last; ++r) {
          Ints totals[1][kVectors];
          Floats numbers[1][kVectors];
          std::memcpy(totals, found[r - row], sizeof(totals));
          finish_bytes<1>(x, r, panel, length, steps * kTileBytes, Part{},
                          totals, numbers);
          std::memcpy(found[r - row], numbers, sizeof(numbers));
        }
      use(row, last - row, p * kColumns, found);
    });
  }
}

// Multiplies all rows by the panels `begin` to `end` - 1. For each tile, calls
// use(first row, number of rows, first column, the tile's results). `next` is
// the panel that the thread probably reads next, to prefetch it.
template <Format kFormat, class Use>
void multiply_panels(const Rows& x, int num_rows, const uint8_t* panels,
                     int inner, int begin, int end, const uint8_t* next,
                     Use use) {
  if constexpr (kHasTiles && (kFormat == kBfloat16 || kFormat == kInt8))
    if (num_rows >= x.tile_rows && padded(inner) > kGroup)
      return multiply_by_tiles<kFormat>(x, num_rows, panels, inner, begin, end,
                                        next, use);
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
