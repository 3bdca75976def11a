// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Blocks of products of two bfloat16 matrices, for CPUs with AVX512-BF16.
//
// Sums are float32. Each sum adds its terms in the order of the inner dimension,
// so its bits do not depend on blocks, threads or other rows.

#pragma once

#include <algorithm>
#include <vector>

#include "arithmetic.h"

namespace palm {

constexpr int kLine = 64;  // bytes of a cache line
// Packing prefetches this many rows ahead, because the CPU's own prefetching
// stops at the end of a page of memory.
constexpr int kRowsAhead = 16;

// --- The right operand -------------------------------------------------------

// A strip is kColumns columns of the right operand, packed: for each pair of
// rows k and k + 1, one word per column, with row k in the word's lower half.
// Both functions write `count` rows into a strip, from the strip's row `first`
// on; the strip has zeros elsewhere. `pack_rows` reads the rows from a matrix,
// and `pack_transposed` reads them from the columns of a matrix. The rows of
// the matrix are `step` numbers apart.

typedef uint16_t Pairs __attribute__((vector_size(4 * kLanes)));

// Indices that interleave kLanes numbers, from `first` on, of two vectors.
constexpr Pairs interleaved(int first) {
  Pairs found{};
  for (int i = 0; i < 2 * kLanes; ++i)
    found[i] = first + i / 2 + (i % 2) * 2 * kLanes;
  return found;
}

inline void pack_number(uint16_t number, int row, int column, uint16_t* strip) {
  strip[(size_t(row / 2) * kColumns + column) * 2 + row % 2] = number;
}

inline void pack_rows(const uint16_t* from, size_t step, int count, int columns,
                      int first, uint16_t* strip) {
  int k = 0;
  if (first % 2 == 0 && columns == kColumns)
    for (; k + 2 <= count; k += 2) {
      const uint16_t *low = from + k * step, *high = low + step;
      uint16_t* to = strip + size_t(first + k) * kColumns;
      for (int j = 0; j < kColumns; j += 2 * kLanes) {
        __builtin_prefetch(low + kRowsAhead * step + j, 0, 2);
        __builtin_prefetch(high + kRowsAhead * step + j, 0, 2);
        const Pairs a = load<Pairs>(low + j), b = load<Pairs>(high + j);
        store(to + 2 * j, __builtin_shuffle(a, b, interleaved(0)));
        store(to + 2 * j + 2 * kLanes,
              __builtin_shuffle(a, b, interleaved(kLanes)));
      }
    }
  for (; k < count; ++k)
    for (int j = 0; j < columns; ++j)
      pack_number(from[k * step + j], first + k, j, strip);
}

// Transposes 16 vectors of 16 words.
inline void transpose(__m512i* x) {
  for (__m512i* y = x; y < x + 16; y += 4) {  // 4 by 4 words in each 128 bits
    const __m512i a = _mm512_unpacklo_epi32(y[0], y[1]);
    const __m512i b = _mm512_unpackhi_epi32(y[0], y[1]);
    const __m512i c = _mm512_unpacklo_epi32(y[2], y[3]);
    const __m512i d = _mm512_unpackhi_epi32(y[2], y[3]);
    y[0] = _mm512_unpacklo_epi64(a, c), y[1] = _mm512_unpackhi_epi64(a, c);
    y[2] = _mm512_unpacklo_epi64(b, d), y[3] = _mm512_unpackhi_epi64(b, d);
  }
  for (__m512i* y = x; y < x + 4; ++y) {  // 4 by 4 of these 128 bits
    const __m512i a = _mm512_shuffle_i32x4(y[0], y[4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(y[0], y[4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(y[8], y[12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(y[8], y[12], 0xdd);
    y[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    y[4] = _mm512_shuffle_i32x4(b, d, 0x88);
    y[8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    y[12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

inline void pack_transposed(const uint16_t* from, size_t step, int count,
                            int columns, int first, uint16_t* strip) {
  int k = 0;
  if (first % 2 == 0 && columns == kColumns)
    for (; k + 2 * kLanes <= count; k += 2 * kLanes)
      for (int j = 0; j < kColumns; j += kLanes) {
        __m512i words[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          words[i] = load<__m512i>(from + (j + i) * step + k);
        transpose(words);
        uint16_t* to = strip + size_t(first + k) * kColumns + 2 * j;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(to + 2 * i * kColumns, words[i]);
      }
  for (int j = 0; j < columns; ++j)
    for (int i = k; i < count; ++i)
      pack_number(from[j * step + i], first + i, j, strip);
}

// --- The left operand --------------------------------------------------------

// The left operand of a tile. Word k of a row has the row's numbers 2k (lower
// half) and 2k + 1. Rows are those of a matrix, `row_step` words apart; or, if
// packed, word 0 of all kTileRows rows comes first, then word 1, and so on.
template <bool kIsPacked>
struct LeftTile {
  const uint32_t* at;
  size_t row_step;

  static constexpr size_t kPairStep = kIsPacked ? kTileRows : 1;

  const uint32_t* word(int row) const {
    return at + row * (kIsPacked ? 1 : row_step);
  }
  // Returns cache line i of the kTileRows lines that have the next 16 words.
  const uint32_t* line(int i) const {
    return at + i * (kIsPacked ? kLine / sizeof(uint32_t) : row_step);
  }
};

// Returns the number of words from a packed tile, [pairs, kTileRows], to the
// next one. Without a gap, lines of different tiles would share sets of the
// cache.
inline size_t packed_tile_size(int pairs) {
  return size_t(pairs + 8) * kTileRows;
}

// Packs `columns` columns of a matrix, [count, ...], as the rows of tiles.
inline void pack_left(const uint16_t* from, size_t step, int count, int columns,
                      uint32_t* to) {
  constexpr int kSome = 16 * kTileRows;  // columns at a time
  const int pairs = (count + 1) / 2;
  const size_t size = packed_tile_size(pairs);
  constexpr __mmask16 kOfTile = (1 << kTileRows) - 1;
  alignas(64) uint32_t words[kSome + kLanes] = {};
  for (int begin = 0; begin < columns; begin += kSome) {
    const int some = std::min(kSome, columns - begin);
    for (int k = 0; k < pairs; ++k) {
      const uint16_t* low = from + 2 * k * step + begin;
      const uint16_t* high = low + step;
      for (int i = 0; i < some; i += kLine / sizeof(*low)) {
        __builtin_prefetch(low + kRowsAhead * step + i);
        __builtin_prefetch(high + kRowsAhead * step + i);
      }
      const bool has_high = 2 * k + 1 < count;
      if (some == kSome && has_high)
        for (int i = 0; i < kSome; ++i)
          words[i] = low[i] | uint32_t(high[i]) << 16;
      else
        for (int i = 0; i < some; ++i)
          words[i] = low[i] | uint32_t(has_high ? high[i] : 0) << 16;
      uint32_t* at = to + begin / kTileRows * size + size_t(k) * kTileRows;
      for (int i = 0; i < some; i += kTileRows, at += size)
        _mm512_mask_storeu_epi32(at, kOfTile, _mm512_loadu_si512(words + i));
    }
  }
}

// --- The product -------------------------------------------------------------

inline void put_row(float* to, const Floats* row) {
  for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, row[v]);
}

inline void put_row(uint16_t* to, const Floats* row) {
  for (int v = 0; v < kVectors; v += 2)
    store(to + v * kLanes,
          _mm512_cvtne2ps_pbh((__m512)row[v + 1], (__m512)row[v]));
}

// Multiplies a tile by `pairs` pairs of rows of a strip. Adds the products to
// `sums`, [kRows, kColumns], unless `is_first`. Writes them to `to`, whose rows
// are `step` numbers apart, or to `sums` if `to` is null. Prefetches the tile
// `next`, because the CPU's own prefetching does not foresee its rows.
template <int kRows, class Left, class Out>
inline void multiply_tile(Left x, Left next, const uint16_t* strip, int pairs,
                          bool is_first, float* sums, Out* to, size_t step) {
  constexpr int kWords = kLine / sizeof(uint32_t);
  Floats own[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      own[r][v] =
        is_first ? Floats{} : load<Floats>(&sums[r * kColumns + v * kLanes]);
  for (int k = 0; k < pairs; k += kWords) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(next.line(r));
    next.at += kWords * Left::kPairStep;
    for (int i = std::min(kWords, pairs - k); i > 0; --i) {
      Words words[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        words[v] = load<Words>(strip + 2 * v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          own[r][v] = add_pairs(
            own[r][v], reinterpret_cast<const uint16_t*>(x.word(r)), words[v]);
      strip += 2 * kColumns, x.at += Left::kPairStep;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    if (to) put_row(to + r * step, own[r]);
    else put_row(sums + r * kColumns, own[r]);
}

template <int kRows = kTileRows, class... Given>
inline void multiply_tile_of(int rows, Given... given) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply_tile_of<kRows - 1>(rows, given...);
  multiply_tile<kRows>(given...);
}

// Pairs of rows of a strip by which a block is multiplied at a time: 256 kB,
// which stay in the L2 cache.
constexpr int kPairs = 1024;

// Multiplies `count` rows by a strip of `pairs` pairs. left(i) returns the tile
// that begins with row i. Writes `columns` columns of results to `to`, whose
// rows are `step` numbers apart.
template <class Left, class Out>
void multiply_rows(int count, Left left, const uint16_t* strip, int pairs,
                   std::vector<float>& sums, int columns, Out* to,
                   size_t step) {
  // With several runs of kPairs pairs, each tile needs memory for its sums;
  // otherwise all tiles use the same memory.
  const int kept = pairs > kPairs ? kColumns : 0;
  sums.resize(size_t(count + kTileRows) * kColumns);
  for (int k = 0; k < pairs; k += kPairs) {
    const int some = std::min(kPairs, pairs - k);
    const bool is_last = k + some == pairs;
    const bool is_whole = is_last && columns == kColumns;
    for (int i = 0; i < count; i += kTileRows) {
      auto x = left(i), next = left(i + kTileRows);
      x.at += k * x.kPairStep, next.at += k * x.kPairStep;
      const int rows = std::min(kTileRows, count - i);
      float* own = &sums[size_t(i) * kept];
      Out* y = to + i * step;
      // Prefetch the lines of the results: otherwise writes would wait for
      // these lines, and reads of other lines would wait for the writes.
      if (is_last)
        for (int r = 0; r < rows; ++r)
          for (int j = 0; j <= kColumns; j += kLine / sizeof(Out))
            __builtin_prefetch(y + r * step + std::min(j, columns - 1), 1);
      multiply_tile_of(rows, x, next, strip + size_t(k) * 2 * kColumns, some,
                       k == 0, own, is_whole ? y : nullptr, step);
      if (is_last && !is_whole)
        for (int r = 0; r < rows; ++r)
          for (int j = 0; j < columns; ++j)
            put(y + r * step + j, own[r * kColumns + j]);
    }
  }
}

}  // namespace palm
