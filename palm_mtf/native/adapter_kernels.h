// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// PalmKeepAdapter keeps an adapter under a number, or drops it. PalmAddAdapter
// adds x A B to the rows of a prompt's product.

#pragma once

#include <mutex>
#include <vector>

#include "call.h"
#include "low_rank.h"
#include "product_kernel.h"
#include "shared.h"

namespace palm {

struct KeepAdapterKernel {
  explicit KeepAdapterKernel(const Attributes&) {}

  template <class T>
  void compute(Call& call) const {
    const int number = *call.next_data<int32_t>();
    const Matrix<const int32_t> parts = call.next_matrix<const int32_t>();
    const float* numbers = call.next_data<float>();
    std::shared_ptr<const Adapter<T>> next;
    if (parts.rows) next = std::make_shared<Adapter<T>>(parts, numbers);
    std::lock_guard lock(shared().mutex);
    std::swap(adapters<T>()[number], next);
    if (!parts.rows) adapters<T>().erase(number);
    *call.allocate<int32_t>(0, 1, 1).data = adapters<T>().size();
  }
};

struct AddAdapterKernel {
  int product, threads;

  explicit AddAdapterKernel(const Attributes& attrs)
      : product(attrs.number("product")), threads(attrs.number("threads")) {}

  template <class T>
  void compute(Call& call) const {
    constexpr int kRows = 192;  // per iteration; bounds the buffers' size
    const int number = *call.next_data<int32_t>();
    const Matrix<const T> product_rows = call.next_matrix<const T>();
    std::vector<Matrix<const T>> parts;
    int inner = 0;
    while (call.has_next()) {
      parts.push_back(call.next_matrix<const T>());
      inner += parts.back().columns;
    }
    const Matrix<T> y = call.allocate<T>(0, product_rows.rows,
                                         product_rows.columns);
    std::copy_n(product_rows.data, size_t(y.rows) * y.columns, y.data);
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    Team& team = with.team_of(threads);
    for (int first = 0; first < y.rows; first += kRows) {
      const int count = std::min(kRows, y.rows - first);
      LowRankRows<T> rows;
      if (!rows.begin(std::vector<int>(count, number), product + 1))
        return call.fail(kNoAdapter);
      if (!rows.has(product)) return;
      with.inputs.resize(count, inner);
      team.run([&](int thread) {
        for (int row = thread; row < count; row += team.size())
          read_parts(parts, first + row, with.inputs.row(row, inner));
        team.meet();
        rows.multiply_in(
          product, [&](int row) { return with.inputs.row(row, inner); });
        team.meet();
        rows.add_out(product, thread, team.size(),
                     [&](int row) { return y.row(first + row); });
      });
    }
  }
};

}  // namespace palm
