// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Products of palm_mtf/native as functions that tiles_test.py calls.

#include <algorithm>
#include <vector>

#include "packing.h"
#include "products.h"
#include "word_products.h"

using namespace palm;

// Writes the product of x, [rows, inner], and w, [inner, outer], to y. Products
// of `tile_rows` rows or more are by tiles.
template <Format kFormat>
void multiply(const float* x, const float* w, int rows, int inner, int outer,
              int tile_rows, float* y) {
  const size_t bytes = panel_bytes(kFormat, inner), length = padded(inner);
  const int count = (outer + kColumns - 1) / kColumns;
  std::vector<uint8_t> panels(count * bytes), numbers(rows * length);
  Columns32 columns;
  for (int i = 0; i < count; ++i) {
    read_columns({{w, inner, outer, 0, 0, size_t(outer), 1}}, i * kColumns, inner,
                 false, columns);
    if (kFormat == kInt8) pack_int8(columns, &panels[i * bytes]);
    else pack_bfloat16(columns, &panels[i * bytes]);
  }
  std::vector<uint16_t> halves(rows * length);
  std::vector<float> floats(length), scales(rows);
  std::vector<int32_t> sums(length / 16);
  for (int row = 0; row < rows; ++row) {
    std::copy_n(x + size_t(row) * inner, inner, floats.data());
    scales[row] = quantize(floats.data(), length, kByteOffset,
                           &numbers[row * length], sums.data());
    for (size_t i = 0; i < length; ++i)
      halves[row * length + i] = to_bfloat16(floats[i]);
  }
  const Rows prepared = {floats.data(), halves.data(), numbers.data(),
                         scales.data(), sums.data(), nullptr, tile_rows};
  multiply_panels<kFormat>(
    prepared, rows, panels.data(), inner, 0, count, panels.data(),
    [&](int first, int num_rows, int column, float found[][kColumns]) {
      for (int r = 0; r < num_rows; ++r)
        std::copy_n(found[r], std::min(kColumns, outer - column),
                    y + size_t(first + r) * outer + column);
    });
}

extern "C" void multiply_bfloat16(const float* x, const float* w, int rows,
                                  int inner, int outer, int tile_rows,
                                  float* y) {
  multiply<kBfloat16>(x, w, rows, inner, outer, tile_rows, y);
}
extern "C" void multiply_int8(const float* x, const float* w, int rows,
                              int inner, int outer, int tile_rows, float* y) {
  multiply<kInt8>(x, w, rows, inner, outer, tile_rows, y);
}

#if defined(__AVX512BF16__)  // other CPUs multiply these numbers as float32
// The same of bfloat16 numbers, as attention multiplies them. x is [rows, inner]
// words of two numbers, or (is_transposed) [inner, rows].
extern "C" void multiply_pairs(const uint32_t* x, const uint16_t* w, int rows,
                               int inner, int outer, bool is_transposed,
                               float* y) {
  const int count = parts_of(outer, kColumns);
  std::vector<uint32_t> words(size_t(inner) * count * kColumns);
  const Panels<uint32_t> panels = {words.data(), count, size_t(inner) * kColumns};
  pack_rows(w, outer, 2 * inner, outer, panels);
  const Left<uint32_t> left =
    is_transposed ? Left<uint32_t>{x, 1, size_t(rows)}
                  : Left<uint32_t>{x, size_t(inner), 1};
  multiply_words(left, rows, panels, inner,
                 [&](int, int, int) { return Steps{0, inner}; },
                 [&](int row, int column, const Floats* sums) {
                   const int size = std::min(kColumns, outer - column);
                   for (int i = 0; i < size; ++i)
                     y[size_t(row) * outer + column + i] =
                       sums[i / kLanes][i % kLanes];
                 });
}
#endif
