// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// PalmPack packs weights in panels, PalmUnpack returns them to a matrix, and
// PalmProduct multiplies rows by panels.

#pragma once

#include <mutex>
#include <vector>

#include "call.h"
#include "huge_pages.h"
#include "packing.h"
#include "shared.h"

namespace palm {

struct PackKernel {
  Format format;
  bool joins_rows, is_transposed, is_rounded;
  int stack, threads;

  explicit PackKernel(const Attributes& attrs)
      : format(Format(attrs.number("format"))),
        joins_rows(attrs.flag("joins_rows")),
        is_transposed(attrs.flag("is_transposed")),
        is_rounded(attrs.flag("is_rounded")),
        stack(attrs.number("stack")),
        threads(attrs.number("threads")) {}

  template <class T>
  void compute(Call& call) const {
    int inner = 0, outer = 0;  // sizes of a matrix so far
    std::vector<std::vector<Block>> blocks(stack);  // of each matrix
    while (call.has_next()) {
      const Matrix<const T> w = call.next_matrix<const T>();
      const int w_rows = w.rows / stack;
      if (call.last_rank() != 2) return call.fail("a matrix has two dimensions");
      const int rows = is_transposed ? w.columns : w_rows;
      const int columns = is_transposed ? w_rows : w.columns;
      const size_t step = w.columns;
      for (int i = 0; i < stack; ++i)
        blocks[i].push_back({w.row(i * w_rows), rows, columns,
                             joins_rows ? inner : 0, joins_rows ? 0 : outer,
                             is_transposed ? 1 : step,
                             is_transposed ? step : 1});
      inner = joins_rows ? inner + rows : rows;
      outer = joins_rows ? columns : outer + columns;
    }
    const int num_panels = (outer + kColumns - 1) / kColumns;
    const Matrix<uint8_t> panels = call.allocate<uint8_t>(
      0, stack * num_panels, panel_bytes(format, inner));
    use_huge_pages(panels.data, size_t(panels.rows) * panels.columns, true);
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    WorkQueue queue;
    with.team_of(threads, kNoPatience).run([&](int) {
      Columns32 columns;
      queue.each(stack * num_panels, [&](int i) {
        const int first = i % num_panels * kColumns;
        read_columns(blocks[i / num_panels], first, inner, is_rounded, columns);
        pack(columns, format, panels.row(i));
      });
    });
  }
};

struct UnpackKernel {
  int inner, outer, threads;

  explicit UnpackKernel(const Attributes& attrs)
      : inner(attrs.number("inner")),
        outer(attrs.number("outer")),
        threads(attrs.number("threads")) {}

  template <class T>
  void compute(Call& call) const {
    const uint8_t* kernel = call.next_data<uint8_t>();
    const Matrix<T> w = call.allocate<T>(0, inner, outer);
    const size_t bytes = panel_bytes(kBfloat16, inner);
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    WorkQueue queue;
    with.team_of(threads, kNoPatience).run([&](int) {
      queue.each((outer + kColumns - 1) / kColumns, [&](int i) {
        unpack_bfloat16(kernel + i * bytes, inner, outer - i * kColumns,
                        w.data + i * kColumns, outer);
      });
    });
  }
};

// Writes a row of a product's input, whose columns are in several parts.
template <class T>
void read_parts(const std::vector<Matrix<const T>>& parts, int row, float* to) {
  for (const Matrix<const T>& x : parts) {
    const T* from = x.row(row);
    for (int j = 0; j < x.columns; ++j) *to++ = to_float(from[j]);
  }
}

template <class Out>
struct ProductKernel {
  int outer, threads, tile_rows;
  Format format;

  explicit ProductKernel(const Attributes& attrs)
      : outer(attrs.number("outer")),
        threads(attrs.number("threads")),
        tile_rows(attrs.number("tile_rows")),
        format(Format(attrs.number("format"))) {}

  // A prompt may have many rows. Therefore the product is computed for kRows
  // rows at a time, so that the prepared rows fit into the CPU's cache.
  template <class T>
  void compute(Call& call) const {
    constexpr int kRows = 192;
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    Team& team = with.team_of(threads);
    std::vector<Matrix<const T>> parts;
    int num_rows = 0, inner = 0;
    for (int i = 0; i < call.num_inputs() - 1; ++i) {
      parts.push_back(call.next_matrix<const T>());
      num_rows = parts.back().rows, inner += parts.back().columns;
    }
    const uint8_t* kernel = call.next_data<uint8_t>();
    const Matrix<Out> y = call.allocate<Out>(0, num_rows, outer);
    PreparedRows& inputs = with.inputs;
    inputs.tile_rows = tile_rows;
    WorkQueue queue;
    for (int first = 0; first < num_rows; first += kRows) {
      const int count = std::min(kRows, num_rows - first);
      inputs.resize(count, inner);
      queue.begin_again();
      team.run([&](int thread) {
        for (int row = thread; row < count; row += team.size()) {
          read_parts(parts, first + row, inputs.row(row, inner));
          inputs.prepare(row, inner, format);
        }
        team.meet();
        const Group whole = {0, count, kernel};
        inputs.multiply(
          queue, team.size(), {&whole, 1}, format, inner, outer,
          [&](int row, int column, int size, const float* numbers) {
            Out* to = y.row(first + row) + column;
            for (int i = 0; i < size; ++i) put(to + i, numbers[i]);
          });
      });
    }
  }
};

}  // namespace palm
