// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// The input rows of products, and products that several threads compute.

#pragma once

#include <algorithm>
#include <atomic>
#include <span>
#include <type_traits>
#include <vector>

#include "arithmetic.h"
#include "products.h"

namespace palm {

// Hands out indices, such as panels of a product, to threads, so that a thread
// on a slower core takes fewer indices.
class WorkQueue {
 public:
  int take(int size) { return next_.fetch_add(size, std::memory_order_relaxed); }
  void begin_again() { next_.store(0, std::memory_order_relaxed); }

  template <class Use>
  void each(int count, Use use) {
    for (int i = take(1); i < count; i = take(1)) use(i);
  }

 private:
  std::atomic<int> next_ = 0;
};

// The `count` rows from `first` on, and the kernel that multiplies them.
struct Group {
  int first, count;
  const uint8_t* kernel;
};

class PreparedRows {
 public:
  int tile_rows = 1;  // that of Rows (panels.h)

  // Makes room for rows of at most `inner` numbers; earlier rows are lost.
  void resize(int num_rows, int inner) {
    const size_t size = size_t(num_rows) * padded(inner);
    if (floats_.size() < size) {
      floats_.resize(size);
      halves_.resize(size);
      bytes_.resize(size);
      half_sums_.resize(size / 16), group_scales_.resize(size / kGroup);
    }
    if (scales_.size() < size_t(num_rows)) scales_.resize(num_rows);
  }

  // Returns where to write the `inner` numbers of a row.
  float* row(int row, int inner) {
    return &floats_[size_t(row) * padded(inner)];
  }

  // Pads a row, and converts the row for products with weights in `format`.
  void prepare(int row, int inner, Format format) {
    const int length = padded(inner);
    const size_t at = size_t(row) * length;
    float* from = &floats_[at];
    std::fill(from + inner, from + length, 0.0f);
    if (format == kBfloat16 && kMultipliesBfloat16) {
      for (int i = 0; i < length; ++i) halves_[at + i] = to_bfloat16(from[i]);
    } else if (has_blocks(format)) {
      for (size_t i = at; i < at + length; i += kGroup)
        group_scales_[i / kGroup] =
          quantize(&floats_[i], kGroup, 0, &bytes_[i], &half_sums_[i / 16]);
    } else if (format >= kInt8) {
      scales_[row] = quantize(from, length, format == kInt8 ? kByteOffset : 0,
                              &bytes_[at], &half_sums_[at / 16]);
    }
  }

  // Multiplies the rows of each group by its kernel, [inner, outer]. Each of
  // `num_threads` threads calls this function to compute some columns of the
  // products. Calls use(row, column, count, numbers) with `count` numbers from
  // `column` on.
  template <class Use>
  void multiply(WorkQueue& queue, int num_threads,
                std::span<const Group> groups, Format format, int inner,
                int outer, Use use) const {
    const int panels = (outer + kColumns - 1) / kColumns;
    const int all = panels * int(groups.size());
    const int size = std::max(1, all / (8 * num_threads));
    const size_t bytes = panel_bytes(format, inner);
    auto panel = [&](int i) {
      return groups[i / panels].kernel + i % panels * bytes;
    };
    auto go = [&](auto constant) {
      for (int at = queue.take(size); at < all; at = queue.take(size)) {
        const int last = std::min(at + size, all);
        while (at < last) {  // the run of panels may be of several groups
          const Group& group = groups[at / panels];
          const int begin = at % panels;
          const int end = std::min(panels, begin + last - at);
          at += end - begin;
          // If all threads are equally fast, they take runs of `size` panels
          // in turn, so this thread's next run begins as far after this one.
          const int next =
            at < last ? at : std::min(at + (num_threads - 1) * size, all - 1);
          multiply_panels<constant()>(
            rows_from(group.first, inner), group.count, group.kernel, inner,
            begin, end, panel(next),
            [&](int first, int count, int column, float y[][kColumns]) {
              const int columns = std::min(kColumns, outer - column);
              for (int r = 0; r < count; ++r)
                use(group.first + first + r, column, columns, y[r]);
            });
        }
      }
    };
    switch (format) {
      case kFloat32: return go(std::integral_constant<Format, kFloat32>());
      case kBfloat16: return go(std::integral_constant<Format, kBfloat16>());
      case kInt8: return go(std::integral_constant<Format, kInt8>());
      case kInt4: return go(std::integral_constant<Format, kInt4>());
      case kQ4K: return go(std::integral_constant<Format, kQ4K>());
      case kQ5K: return go(std::integral_constant<Format, kQ5K>());
      case kQ6K: return go(std::integral_constant<Format, kQ6K>());
    }
  }

 private:
  Rows rows_from(int first, int inner) const {
    const size_t at = size_t(first) * padded(inner);
    return {floats_.data() + at, halves_.data() + at, bytes_.data() + at,
            scales_.data() + first, half_sums_.data() + at / 16,
            group_scales_.data() + at / kGroup, tile_rows};
  }

  std::vector<float> floats_, scales_, group_scales_;
  std::vector<uint16_t> halves_;
  std::vector<uint8_t> bytes_;
  std::vector<int32_t> half_sums_;
};

}  // namespace palm
