// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Products of two matrices, neither of which is constant, as in attention.
//
// A word is a float, or two bfloat16 numbers that are adjacent in the inner
// dimension. The left operand has strides, so that its transpose needs no copy.
// The right operand is packed in panels of kColumns columns. Sums are float32.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "arithmetic.h"
#include "tiles.h"

namespace palm {

// Numbers per word: two if T is bfloat16 and the CPU multiplies bfloat16.
template <class T>
constexpr int kTogether = sizeof(T) == 2 && kMultipliesBfloat16 ? 2 : 1;
template <class T>
using Word = std::conditional_t<kTogether<T> == 2, uint32_t, float>;
template <class T>
using Number = std::conditional_t<kTogether<T> == 2, uint16_t, float>;

inline int parts_of(int size, int part) { return (size + part - 1) / part; }
inline int padded_columns(int size) {
  return parts_of(size, kColumns) * kColumns;
}
template <class T>
int words_of(int size) {
  return parts_of(size, kTogether<T>);
}

// Returns how many positions a product over `size` positions sums: with tiles,
// `size` rounded up to whole tiles. The left operand is 0 at added positions.
template <class T>
int summed(int size) {
  constexpr int kWhole = kHasTiles && kTogether<T> == 2 ? 2 * kTileSize : 1;
  return parts_of(size, kWhole) * kWhole;
}

template <class W>
struct Left {
  const W* at;
  size_t row, step;  // strides in words: from row to row, and within a row
};

template <class W>
struct Panels {
  W* at;
  int count;
  size_t size;  // words from the start of a panel to that of the next panel
};

inline Floats add_product(Floats sum, const float* x, Words w) {
  return sum + *x * (Floats)w;
}
// Rounds as the function above: once, if the CPU has the instruction for it.
inline float add_product(float sum, float x, float y) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(x, y, sum);
#else
  return sum + x * y;
#endif
}
inline Floats add_product(Floats sum, const uint32_t* x, Words w) {
  return add_pairs(sum, reinterpret_cast<const uint16_t*>(x), w);
}

// Steps of a product's inner dimension, in words: from `begin` to before `end`.
struct Steps {
  int begin, end;
};

// Multiplies the first `rows` (at most kRows) rows of x by a panel; calls
// use(row, sums) for each row.
template <int kRows, class W, class Use>
inline void word_tile(int rows, Left<W> x, const W* panel, Steps steps,
                      Use use) {
  if constexpr (kRows > 1)
    if (rows < kRows) return word_tile<kRows - 1>(rows, x, panel, steps, use);
  Floats sums[kRows][kVectors] = {};
  for (int k = steps.begin; k < steps.end; ++k)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] =
          add_product(sums[r][v], x.at + r * x.row + k * x.step,
                      load<Words>(panel + (k * kVectors + v) * kLanes));
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    Floats row[kVectors];  // a copy, because `sums` must stay in registers
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = sums[r][v];
    use(r, row);
  }
}

// Does what `multiply_words` does, by tiles; kTileSize divides `steps`.
template <class Use>
inline void multiply_words_by_tiles(Left<uint32_t> x, int rows,
                                    Panels<uint32_t> panels, int steps,
                                    Use use) {
  thread_local std::vector<uint32_t> copy;
  if (x.step != 1) {  // tiles read rows whose words are adjacent
    copy.resize(size_t(rows) * steps);
    for (int first = 0; first < rows; first += kTileSize)
      for (int k = 0; k < steps; ++k)
        for (int r = first; r < std::min(first + kTileSize, rows); ++r)
          copy[size_t(r) * steps + k] = x.at[r * x.row + k * x.step];
    x = {copy.data(), size_t(steps), 1};
  }
  const Tiles tiles(rows);
  TileSums sums;
  for (int p = 0; p < panels.count; ++p)
    for_tiles(rows, [&](int first, int row, int last) {
      tiles.multiply<false>(x.at + first * x.row, 4 * x.row,
                            panels.at + p * panels.size, steps / kTileSize, true,
                            Part{}, sums.rows);
      for (; row < last; ++row)
        use(row, p * kColumns,
            reinterpret_cast<const Floats*>(sums.rows[row - first]));
    });
}

// Multiplies `rows` rows of x by each panel. Calls use(row, column, sums) with
// the kVectors registers of sums from `column` on. For rows from `first` to
// before `last`, some(first, last, column) returns the steps that count: terms
// of other steps are 0. If none counts, `use` may not be called.
template <class W, class Some, class Use>
inline void multiply_words(Left<W> x, int rows, Panels<W> panels, int steps,
                           Some some, Use use) {
  if constexpr (kHasTiles && std::is_same_v<W, uint32_t>)
    if (steps % kTileSize == 0)
      return multiply_words_by_tiles(x, rows, panels, steps, use);
  for (int p = 0; p < panels.count; ++p)
    for (int first = 0; first < rows; first += kTileRows) {
      const int last = std::min(first + kTileRows, rows);
      const Steps own = some(first, last, p * kColumns);
      if (own.begin >= own.end) continue;
      word_tile<kTileRows>(
        last - first, Left<W>{x.at + first * x.row, x.row, x.step},
        panels.at + p * panels.size, own,
        [&](int r, const Floats* sums) { use(first + r, p * kColumns, sums); });
    }
}

// Returns word k of a row of `size` numbers. An odd size ends with half a word.
template <class T>
inline Word<T> word_at(const T* row, int k, int size) {
  if constexpr (kTogether<T> == 2)
    return 2 * k + 1 < size ? load<uint32_t>(row + 2 * k) : row[2 * k];
  else
    return to_float(row[k]);
}

// Packs x, [count, size], as a right operand whose columns are the rows of x, so
// that products sum over `size`. `stride` is the row stride.
template <class T>
void pack_columns(const T* x, size_t stride, int count, int size,
                  Panels<Word<T>> to) {
  for (int c = 0; c < to.count * kColumns; ++c) {
    Word<T>* column = to.at + c / kColumns * to.size + c % kColumns;
    const T* row = x + size_t(c) * stride;
    for (int k = 0; k < words_of<T>(size); ++k)
      column[k * kColumns] = c < count ? word_at(row, k, size) : Word<T>{};
  }
}

// Packs x, [count, size], as a right operand whose rows are the rows of x, then
// rows of 0, so that products sum over `count`. `stride` is the row stride.
template <class T>
void pack_rows(const T* x, size_t stride, int count, int size,
               Panels<Word<T>> to) {
  for (int p = 0; p < to.count; ++p)
    for (int k = 0; k < int(to.size / kColumns); ++k) {
      Word<T>* words = to.at + p * to.size + k * kColumns;
      const int columns =
        kTogether<T> * k < count ? std::min(kColumns, size - p * kColumns) : 0;
      const T* row = x + size_t(kTogether<T> * k) * stride + p * kColumns;
      if constexpr (kTogether<T> == 2) {
        const bool is_pair = 2 * k + 1 < count;
        for (int c = 0; c < columns; ++c)
          words[c] = row[c] | (is_pair ? uint32_t(row[stride + c]) << 16 : 0);
      } else {
        for (int c = 0; c < columns; ++c) words[c] = to_float(row[c]);
      }
      std::fill(words + columns, words + kColumns, Word<T>{});
    }
}

inline Words join_pairs(Halves low, Halves high) {
  return __builtin_convertvector(low, Words) |
         __builtin_convertvector(high, Words) << 16;
}

}  // namespace palm
