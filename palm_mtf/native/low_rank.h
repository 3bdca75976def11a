// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Adapters (architecture/adapter.py) of rows: each row adds x A B, with the
// factors of the adapter of the row, to its product with a kernel of the base.
//
// The terms of a sum, and their order, do not depend on other rows, so a row's
// result has the same bits whichever rows and adapters are computed with it.

#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "arithmetic.h"
#include "call.h"
#include "huge_pages.h"
#include "rows.h"
#include "word_products.h"

namespace palm {

constexpr char kNoAdapter[] = "an adapter is not kept";
constexpr int kRanks = 4;  // columns of A that a tile multiplies
constexpr int kLowRows = kLanes == 16 ? 4 : 2;  // most rows of a tile
// A thread takes this many ranks and rows at a time.
constexpr int kRanksTaken = 16, kRowsTaken = 48;

// The factors of a kernel, which multiplies some columns of a product's input,
// and gives some columns of its result.
struct Factors {
  int first_in, inner, rank, first_out, outer;
  int first_low;  // column of x A among those of all kernels in the product
  size_t a, b;    // where the factors begin in `numbers`
};

// The factors of an adapter, in T: A transposed, [rank, inner], with the rank
// padded to kRanks; and B in panels, [panels, rank, kColumns]. Those of a product
// are adjacent, first all A, because a step reads them in this order.
template <class T>
struct Adapter {
  std::vector<std::vector<Factors>> products;
  std::vector<T> numbers;
  int width = 0;  // most columns of x A of a product

  // A row of `parts` has a product, in ascending order, and the first five
  // members of `Factors`. `from` has their factors: A transposed, then B.
  Adapter(Matrix<const int32_t> parts, const float* from) {
    size_t size = 0;
    for (int i = 0; i < parts.rows;) {
      const int product = *parts.row(i);
      products.resize(product + 1);
      std::vector<Factors>& all = products.back();
      int low = 0;
      for (; i < parts.rows && *parts.row(i) == product; ++i) {
        const int32_t* part = parts.row(i);
        all.push_back({part[1], part[2], part[3], part[4], part[5], low, size});
        const int ranks = parts_of(part[3], kRanks) * kRanks;
        low += ranks, size += size_t(ranks) * part[2];
      }
      for (Factors& f : all)
        f.b = size, size += size_t(padded_columns(f.outer)) * f.rank;
      width = std::max(width, low);
    }
    numbers.resize(size);
    use_huge_pages(numbers.data(), size * sizeof(T));
    for (const std::vector<Factors>& all : products)
      for (const Factors& f : all) {
        for (size_t j = 0; j < size_t(f.rank) * f.inner; ++j)
          numbers[f.a + j] = from_float<T>(*from++);
        for (int k = 0; k < f.rank; ++k)
          for (int j = 0; j < f.outer; ++j) {
            const size_t row = size_t(j / kColumns) * f.rank + k;
            numbers[f.b + row * kColumns + j % kColumns] =
              from_float<T>(*from++);
          }
      }
  }
};

// Adapters that calls name by their numbers; guarded by the mutex of `shared`.
// A number always names the same adapter.
template <class T>
std::map<int, std::shared_ptr<const Adapter<T>>>& adapters() {
  static auto& it = *new std::map<int, std::shared_ptr<const Adapter<T>>>;
  return it;
}

// Prefetches kCount numbers a little ahead, because the hardware's prefetches do
// not cross the end of a page.
template <int kCount, class T>
inline void prefetch_numbers(const T* at) {
  constexpr int kAhead = 8192, kLine = 64;
  const auto bytes = reinterpret_cast<const uint8_t*>(at);
  for (int i = 0; i < int(kCount * sizeof(T)); i += kLine)
    __builtin_prefetch(bytes + kAhead + i, 0, 2);
}

// Writes x A for kRanks columns of A.
template <int kRows, class T>
void multiply_down(int rows, const float* const* x, const T* a, int inner,
                   float* const* low) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply_down<kRows - 1>(rows, x, a, inner, low);
  Floats sums[kRows][kRanks] = {};
  float rests[kRows][kRanks] = {};
  for_vectors(inner, [&](int i, auto kind) {
    using V = decltype(kind);
    prefetch_numbers<kRanks * kLanes>(a + kRanks * i);
    for (int k = 0; k < kRanks; ++k) {
      const V w = get<V>(a + size_t(k) * inner + i);
      for (int r = 0; r < kRows; ++r) {
        if constexpr (sizeof(V) == sizeof(float)) rests[r][k] += x[r][i] * w;
        else sums[r][k] += load<Floats>(x[r] + i) * w;
      }
    }
  });
  for (int r = 0; r < kRows; ++r)
    for (int k = 0; k < kRanks; ++k) low[r][k] = sum(sums[r][k]) + rests[r][k];
}

// Adds the product of x A and a panel of B to `columns` numbers of each row y.
template <int kRows, class T, class Out>
void multiply_up(int rows, const float* const* low, const T* b, int rank,
                 int columns, Out* const* y) {
  if constexpr (kRows > 1)
    if (rows < kRows)
      return multiply_up<kRows - 1>(rows, low, b, rank, columns, y);
  Floats sums[kRows][kVectors] = {};
  for (int k = 0; k < rank; ++k, b += kColumns) {
    prefetch_numbers<kColumns>(b);
    for (int v = 0; v < kVectors; ++v) {
      const Floats w = get<Floats>(b + v * kLanes);
      for (int r = 0; r < kRows; ++r) sums[r][v] += low[r][k] * w;
    }
  }
  alignas(64) float numbers[kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(numbers + v * kLanes, sums[r][v]);
    for_vectors(columns, [&](int i, auto kind) {
      using V = decltype(kind);
      put(y[r] + i, V(get<V>(y[r] + i) + get<V>(numbers + i)));
    });
  }
}

// The rows of a step or a prompt that have an adapter.
template <class T>
class LowRankRows {
  struct Group {
    std::shared_ptr<const Adapter<T>> adapter;
    std::vector<int> rows;
  };

 public:
  // Takes the number of each row's adapter, 0 for none. Returns whether all
  // these adapters are kept. The caller holds the mutex of `shared`.
  bool begin(const std::vector<int>& numbers, int num_products) {
    groups_.clear();
    int width = 0;
    std::map<int, Group> found;
    for (int row = 0; row < int(numbers.size()); ++row)
      if (numbers[row]) found[numbers[row]].rows.push_back(row);
    for (auto& [number, group] : found) {
      const auto at = adapters<T>().find(number);
      if (at == adapters<T>().end()) return false;
      group.adapter = at->second;
      width = std::max(width, group.adapter->width);
      groups_.push_back(group);
    }
    width_ = width;
    low_.resize(std::max(low_.size(), numbers.size() * width));
    if (width) queues_ = std::vector<WorkQueue>(num_products);
    return true;
  }

  // Whether a row adds anything to a product.
  bool has(int product) const {
    return std::ranges::any_of(groups_, [&](const Group& group) {
      return !factors_of(group, product).empty();
    });
  }

  // Computes x A of a product; x(row) is a row of its input. Each thread calls
  // this function to compute a part. Then threads wait for one another.
  template <class X>
  void multiply_in(int product, X x) {
    for_tiles(
      product, [](const Factors& f) { return parts_of(f.rank, kRanksTaken); },
      [&](const Group& group, const Factors& f, int part, const int* rows,
          int count) {
        const float* from[kLowRows];
        float* to[kLowRows];
        const int first = part * kRanksTaken;
        for (int k = first; k < std::min(first + kRanksTaken, f.rank);
             k += kRanks) {
          for (int r = 0; r < count; ++r) {
            from[r] = x(rows[r]) + f.first_in;
            to[r] = low(rows[r], f) + k;
          }
          const T* a = &group.adapter->numbers[f.a + size_t(k) * f.inner];
          multiply_down<kLowRows>(count, from, a, f.inner, to);
        }
      });
  }

  // Adds (x A) B to those rows y(row) of a product that are a thread's own, one
  // in `size` rows, as elsewhere in a step. So no thread waits for another one.
  template <class Y>
  void add_out(int product, int thread, int size, Y y) {
    const float* from[kLowRows];
    std::remove_reference_t<decltype(*y(0))>* to[kLowRows];
    for (const Group& group : groups_)
      for (const Factors& f : factors_of(group, product)) {
        int count = 0;
        auto add = [&] {
          for (int column = 0; count && column < f.outer; column += kColumns) {
            const T* b = &group.adapter->numbers[f.b + size_t(column) * f.rank];
            multiply_up<kLowRows>(count, from, b, f.rank,
                                  std::min(kColumns, f.outer - column), to);
            for (int r = 0; r < count; ++r) to[r] += kColumns;
          }
          count = 0;
        };
        for (int row : group.rows) {
          if (row % size != thread) continue;
          from[count] = low(row, f), to[count] = y(row) + f.first_out;
          if (++count == kLowRows) add();
        }
        add();
      }
  }

 private:
  static const std::vector<Factors>& factors_of(const Group& group,
                                                int product) {
    static const std::vector<Factors> none;
    const auto& products = group.adapter->products;
    return product < int(products.size()) ? products[product] : none;
  }

  float* low(int row, const Factors& f) {
    return &low_[size_t(row) * width_ + f.first_low];
  }

  // Calls use(group, factors, part, rows, count) for tiles of rows, in the parts
  // of work that this thread takes.
  template <class Count, class Use>
  void for_tiles(int product, Count count_parts, Use use) {
    if (!has(product)) return;
    int next = queues_[product].take(1), i = 0;
    for (const Group& group : groups_)
      for (const Factors& f : factors_of(group, product))
        for (int part = 0; part < count_parts(f); ++part)
          for (int first = 0; first < int(group.rows.size());
               first += kRowsTaken) {
            if (i++ != next) continue;
            next = queues_[product].take(1);
            const int end =
              std::min(first + kRowsTaken, int(group.rows.size()));
            for (int at = first; at < end; at += kLowRows)
              use(group, f, part, &group.rows[at],
                  std::min(kLowRows, end - at));
          }
  }

  std::vector<Group> groups_;
  std::vector<WorkQueue> queues_;
  std::vector<float> low_;  // x A of each row, [rows, width_]
  int width_ = 0;
};

}  // namespace palm
