// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Operations on rows in a training step: PalmNorm, PalmReadProduct, their
// gradients, and PalmSumLogits.

#pragma once

#include <mutex>
#include <vector>

#include "call.h"
#include "loss.h"
#include "norm.h"
#include "projection.h"
#include "shared.h"

namespace palm {

constexpr int kParts = 64;  // runs of rows: fixed, so that sums keep their bits

// Calls use(part, first row, row after the last) for each run of rows.
template <class T, class Use>
void for_parts(Matrix<const T> x, int threads, Use use) {
  // Each thread gets at least 250 kB, because waking a thread takes as long as
  // writing about 250 kB.
  const size_t bytes = sizeof(T) * x.rows * x.columns;
  const int size = std::clamp<int>(bytes / 250'000, 1, threads);
  Shared& with = shared();
  std::lock_guard lock(with.mutex);
  const int share = (x.rows + kParts - 1) / kParts;
  WorkQueue queue;
  with.team_of(size, kNoPatience).run([&](int) {
    queue.each(kParts, [&](int i) {
      use(i, std::min(i * share, x.rows), std::min((i + 1) * share, x.rows));
    });
  });
}

template <class T, class Use>
void for_rows(Matrix<const T> x, int threads, Use use) {
  for_parts(x, threads, [&](int, int begin, int end) {
    for (int row = begin; row < end; ++row) use(row);
  });
}

struct NormKernel {
  Norm norm;
  int threads;

  explicit NormKernel(const Attributes& attrs)
      : norm{attrs.flag("is_centered"), attrs.real("epsilon")},
        threads(attrs.number("threads")) {}

  template <class T>
  void compute(Call& call) const {
    const Matrix<const T> x = call.next_matrix<const T>();
    const float* scale = call.next_data<float>();
    const Matrix<T> y = call.allocate<T>(0, x.rows, x.columns);
    for_rows(x, threads, [&](int row) {
      norm_row(x.row(row), scale, x.columns, norm, y.row(row));
    });
  }
};

struct NormGradientKernel : NormKernel {
  using NormKernel::NormKernel;

  template <class T>
  void compute(Call& call) const {
    const Matrix<const T> x = call.next_matrix<const T>();
    const TF_Tensor* scales = call.next();
    const float* scale = static_cast<float*>(TF_TensorData(scales));
    const Matrix<const T> dy = call.next_matrix<const T>();
    const Matrix<T> dx = call.allocate<T>(0, x.rows, x.columns);
    // Each run of rows has its own sums of scale gradients, which are added in
    // order afterwards, so that the result does not depend on the number of
    // threads.
    const int size = x.columns;
    std::vector<float> sums(size_t(kParts) * size);
    for_parts(x, threads, [&](int part, int begin, int end) {
      for (int i = begin; i < end; ++i)
        norm_row_gradient(x.row(i), scale, dy.row(i), size, norm,
                          dx.row(i), &sums[size_t(part) * size]);
    });
    float* dscale = call.allocate_like<float>(1, scales);
    std::copy_n(sums.data(), size, dscale);
    for (int part = 1; part < kParts; ++part)
      for (int i = 0; i < size; ++i) dscale[i] += sums[part * size + i];
  }
};

struct ReadKernel {
  Columns columns;
  int threads;

  explicit ReadKernel(const Attributes& attrs) : threads(attrs.number("threads")) {
    columns.sizes = attrs.numbers("sizes");
    columns.is_gated = attrs.flag("is_gated");
  }

  // Returns `columns`, with rotary angles if the call has more than
  // `num_inputs` inputs: the next inputs are sin and cos.
  Columns read_angles(Call& call, int num_inputs) const {
    Columns found = columns;
    if (call.num_inputs() == num_inputs) return found;
    TF_Tensor* sines = call.next();
    found.length = TF_Dim(sines, 0), found.d_kv = 2 * TF_Dim(sines, 1);
    found.sines = static_cast<float*>(TF_TensorData(sines));
    found.cosines = call.next_data<float>();
    return found;
  }
};

struct ReadProductKernel : ReadKernel {
  using ReadKernel::ReadKernel;

  template <class T>
  void compute(Call& call) const {
    const Matrix<const T> wide = call.next_matrix<const T>();
    const Columns with = read_angles(call, 1);
    std::vector<T*> parts;
    for (int i = 0; i < columns.num_parts(); ++i)
      parts.push_back(
        call.allocate<T>(i, wide.rows, columns.sizes[i]).data);
    for_rows(wide, threads, [&](int row) {
      read_row(wide.row(row), with, row, parts);
    });
  }
};

struct ReadProductGradientKernel : ReadKernel {
  using ReadKernel::ReadKernel;

  template <class T>
  void compute(Call& call) const {
    const Matrix<const T> wide = call.next_matrix<const T>();
    std::vector<const T*> gradients;
    for (int i = 0; i < columns.num_parts(); ++i)
      gradients.push_back(call.next_data<T>());
    const Columns with = read_angles(call, 1 + columns.num_parts());
    const Matrix<T> gradient = call.allocate<T>(0, wide.rows, wide.columns);
    for_rows(wide, threads, [&](int row) {
      read_row_gradient(wide.row(row), with, row, gradients, gradient.row(row));
    });
  }
};

struct SumLogitsKernel {
  int threads;

  explicit SumLogitsKernel(const Attributes& attrs)
      : threads(attrs.number("threads")) {}

  template <class T>
  void compute(Call& call) const {
    const Matrix<const T> logits = call.next_matrix<const T>();
    const int32_t* targets = call.next_data<int32_t>();
    for (int row = 0; row < logits.rows; ++row)
      if (targets[row] >= logits.columns)
        return call.fail("a target lies outside of the logits");
    const Matrix<float> sums = call.allocate<float>(0, logits.rows, 3);
    for_rows(logits, threads, [&](int row) {
      sum_row(logits.row(row), logits.columns, targets[row], sums.row(row));
    });
  }
};

}  // namespace palm
