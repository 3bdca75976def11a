// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// PalmMatmul multiplies bfloat16 matrices, for training.

#pragma once

#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "call.h"
#include "matmul.h"
#include "shared.h"

namespace palm {

// Memory that begins with a cache line, and grows when more is needed.
class Lines {
 public:
  template <class T>
  T* get(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      at_.reset(std::aligned_alloc(64, bytes));
      size_ = bytes;
    }
    return static_cast<T*>(at_.get());
  }

 private:
  struct Free {
    void operator()(void* at) const { std::free(at); }
  };
  std::unique_ptr<void, Free> at_;
  size_t size_ = 0;
};

// The buffers of a thread, and the number of the strip in `packed`, or -1.
struct MatmulThread {
  Lines packed;
  std::vector<float> sums;
  int number = -1;
};

// Columns of the right operand, at most kColumns, and where results go.
struct Strip {
  int part, column, output, output_column, columns;
};

// A product of one call. `left` is [rows, inner], or [inner, rows] if it is
// transposed. `right` has matrices whose columns are joined to one matrix,
// [inner, columns], or its transpose [columns, inner].
template <class Out>
struct Matmul {
  using In = Matrix<const uint16_t>;

  In left;
  std::vector<In> right;
  std::vector<Matrix<Out>> outputs;  // the product's columns, split
  bool is_left_transposed, is_right_transposed;
  std::vector<Strip> strips;

  int rows() const { return is_left_transposed ? left.columns : left.rows; }
  int inner() const { return is_left_transposed ? left.rows : left.columns; }
  int pairs() const { return (inner() + 1) / 2; }
  size_t strip_size() const { return size_t(pairs()) * 2 * kColumns; }
  size_t left_size(int count) const {
    return (count + kTileRows - 1) / kTileRows * packed_tile_size(pairs());
  }

  void make_strips() {
    Strip strip = {};
    for (; strip.output < int(outputs.size()); ++strip.output)
      for (strip.output_column = 0;
           strip.output_column < outputs[strip.output].columns;) {
        if (!is_right_transposed && strip.column == right[strip.part].columns)
          ++strip.part, strip.column = 0;
        strip.columns = std::min(
          kColumns, outputs[strip.output].columns - strip.output_column);
        if (!is_right_transposed)
          strip.columns =
            std::min(strip.columns, right[strip.part].columns - strip.column);
        strips.push_back(strip);
        strip.column += strip.columns, strip.output_column += strip.columns;
      }
  }

  void pack_strip(const Strip& strip, uint16_t* to) const {
    if (strip.columns < kColumns || inner() % 2)
      std::fill_n(to, strip_size(), 0);
    if (!is_right_transposed) {
      const In& w = right[strip.part];
      pack_rows(w.data + strip.column, w.columns, w.rows, strip.columns, 0, to);
      return;
    }
    int first = 0;
    for (const In& w : right) {
      pack_transposed(w.row(strip.column), w.columns, w.columns, strip.columns,
                      first, to);
      first += w.columns;
    }
  }

  void pack_left_rows(int first, int count, uint32_t* to) const {
    pack_left(left.data + first, left.columns, left.rows, count, to);
  }

  // Multiplies `count` rows from `first` on. `packed` has them if the left
  // operand is transposed.
  void multiply(int first, int count, const uint32_t* packed,
                const Strip& strip, const uint16_t* numbers,
                std::vector<float>& sums) const {
    const Matrix<Out>& y = outputs[strip.output];
    auto go = [&](auto tile) {
      multiply_rows(count, tile, numbers, pairs(), sums, strip.columns,
                    y.row(first) + strip.output_column, y.columns);
    };
    if (is_left_transposed)
      go([&](int i) {
        return LeftTile<true>{
          packed + i / kTileRows * packed_tile_size(pairs()), 0};
      });
    else
      go([&](int i) {
        const uint16_t* row = left.row(first + i);
        return LeftTile<false>{reinterpret_cast<const uint32_t*>(row),
                               size_t(left.columns) / 2};
      });
  }
};

// Computes products with a team, whose threads take blocks of rows and strips.
// A block's rows, and a strip, are read from the L2 cache many times.
class MatmulRunner {
 public:
  explicit MatmulRunner(Team& team) : team_(team), threads_(threads()) {
    while (int(threads_.size()) < team.size()) threads_.emplace_back();
  }

  template <class Out>
  void run(const Matmul<Out>& product) {
    const int columns = int(product.strips.size()) * kColumns;
    for (MatmulThread& each : threads_) each.number = -1;
    if (product.is_left_transposed && product.rows() > columns)
      run_by_rows(product);
    else
      run_by_strips(product);
  }

 private:
  // These buffers outlive calls; a call that uses them holds Shared's mutex.
  static std::deque<MatmulThread>& threads() {
    static auto& it = *new std::deque<MatmulThread>;
    return it;
  }
  static Lines& packed_by_all() {
    static Lines& it = *new Lines;
    return it;
  }

  // Each thread packs a strip, and multiplies all rows by it. Threads share the
  // last strips, of which each packs a copy, so that none waits for long. All
  // threads pack the left operand first, if it is transposed.
  template <class Out>
  void run_by_strips(const Matmul<Out>& product) {
    constexpr int kBlock = 32 * kTileRows;
    const int rows = product.rows(), blocks = (rows + kBlock - 1) / kBlock;
    const int strips = int(product.strips.size());
    const size_t size = product.left_size(kBlock);
    uint32_t* left = packed_by_all().get<uint32_t>(
      product.is_left_transposed ? blocks * size : 0);
    const int shared = std::min(strips, team_.size());
    WorkQueue packing, own, units;
    team_.run([&](int i) {
      MatmulThread& thread = threads_[i];
      if (product.is_left_transposed) {
        packing.each(blocks, [&](int b) {
          const int count = std::min(kBlock, rows - b * kBlock);
          product.pack_left_rows(b * kBlock, count, left + b * size);
        });
        team_.meet();
      }
      uint16_t* strip = thread.packed.get<uint16_t>(product.strip_size());
      auto multiply = [&](int number, int b) {
        if (thread.number != number)
          product.pack_strip(product.strips[number], strip);
        thread.number = number;
        product.multiply(b * kBlock, std::min(kBlock, rows - b * kBlock),
                         left + b * size, product.strips[number], strip,
                         thread.sums);
      };
      own.each(strips - shared, [&](int number) {
        for (int b = 0; b < blocks; ++b) multiply(number, b);
      });
      units.each(shared * blocks, [&](int u) {
        multiply(strips - shared + u / blocks, u % blocks);
      });
    });
  }

  // For a transposed left operand that is larger than the right one. First all
  // threads pack all strips; then each thread packs blocks of rows, and
  // multiplies each block by all strips.
  template <class Out>
  void run_by_rows(const Matmul<Out>& product) {
    constexpr int kBlock = 16 * kTileRows;
    const int rows = product.rows(), blocks = (rows + kBlock - 1) / kBlock;
    const int strips = int(product.strips.size());
    const size_t size = product.strip_size();
    uint16_t* right = packed_by_all().get<uint16_t>(strips * size);
    WorkQueue packing, units;
    team_.run([&](int i) {
      MatmulThread& thread = threads_[i];
      packing.each(strips, [&](int s) {
        product.pack_strip(product.strips[s], right + s * size);
      });
      team_.meet();
      uint32_t* left =
        thread.packed.get<uint32_t>(product.left_size(kBlock));
      units.each(blocks, [&](int b) {
        const int first = b * kBlock, count = std::min(kBlock, rows - first);
        product.pack_left_rows(first, count, left);
        for (int s = 0; s < strips; ++s)
          product.multiply(first, count, left, product.strips[s],
                           right + s * size, thread.sums);
      });
    });
  }

  Team& team_;
  std::deque<MatmulThread>& threads_;
};

template <class Out>
struct MatmulKernel {
  bool is_left_transposed, is_right_transposed;
  std::vector<int> sizes;
  int threads;

  explicit MatmulKernel(const Attributes& attrs)
      : is_left_transposed(attrs.flag("transpose_a")),
        is_right_transposed(attrs.flag("transpose_b")),
        sizes(attrs.numbers("sizes")),
        threads(attrs.number("threads")) {}

  template <class T>
  void compute(Call& call) const {
    Matmul<Out> product = {call.next_matrix<const T>(), {}, {},
                           is_left_transposed, is_right_transposed, {}};
    while (call.has_next())
      product.right.push_back(call.next_matrix<const T>());
    for (int i = 0; i < int(sizes.size()); ++i)
      product.outputs.push_back(
        call.allocate<Out>(i, product.rows(), sizes[i]));
    product.make_strips();
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    MatmulRunner(with.team_of(threads, kNoPatience)).run(product);
  }
};

}  // namespace palm
