// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// PalmExperts sums, for each row of a prompt, the results of the experts that
// the row chooses, multiplied by their gates.

#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include "call.h"
#include "experts.h"
#include "shared.h"

namespace palm {

struct ExpertsKernel {
  Experts experts;
  int threads, tile_rows;

  explicit ExpertsKernel(const Attributes& attrs)
      : threads(attrs.number("threads")),
        tile_rows(attrs.number("tile_rows")) {
    experts.count = attrs.number("experts");
    experts.d_expert = attrs.number("d_expert");
    experts.activation = Activation(attrs.number("activation"));
    experts.format = Format(attrs.number("format"));
  }

  template <class T>
  void compute(Call& call) const {
    constexpr int kChoices = 1536;  // per iteration; bounds the buffers' size
    const Matrix<const T> x = call.next_matrix<const T>();
    const Matrix<const float> gates = call.next_matrix<const float>();
    const int32_t* chosen = call.next_data<int32_t>();
    const uint8_t* in = call.next_data<uint8_t>();
    const uint8_t* out = call.next_data<uint8_t>();
    const Matrix<T> y = call.allocate<T>(0, x.rows, x.columns);
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    with.copies.tile_rows = with.inputs.tile_rows = tile_rows;
    ExpertRows rows = {with.team_of(threads), with.copies, with.inputs,
                       with.wide, experts};
    rows.experts.d_model = x.columns, rows.experts.per_row = gates.columns;
    const int most = std::max(1, kChoices / gates.columns);
    for (int first = 0; first < x.rows; first += most) {
      const int count = std::min(most, x.rows - first);
      rows.resize(count);
      WorkQueue queues[2];
      const Choices choices(rows.experts, chosen + first * gates.columns, count,
                            in, out);
      rows.team.run([&](int thread) {
        rows.take(thread, choices, [&](int row, float* to) {
          const T* from = x.row(first + row);
          for (int i = 0; i < x.columns; ++i) to[i] = to_float(from[i]);
        });
        rows.run(thread, choices, queues);
        std::vector<float> sum;
        for (int row = thread; row < count; row += rows.team.size()) {
          sum.assign(x.columns, 0);
          rows.add(choices, row, gates.row(first + row), sum.data());
          T* to = y.row(first + row);
          for (int i = 0; i < x.columns; ++i) to[i] = from_float<T>(sum[i]);
        }
      });
    }
  }
};

}  // namespace palm
