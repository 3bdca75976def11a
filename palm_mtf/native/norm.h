// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// The norm of a row and its gradients (model/layers.py).

#pragma once

#include <cmath>

#include "arithmetic.h"

namespace palm {

struct Norm {
  bool is_centered;  // LayerNorm without bias; otherwise RMSNorm
  float epsilon;     // number that is added to the mean square
};

// A row x with its mean (0 for RMSNorm), and a factor such that
// (x - mean) * factor has a mean square of 1.
template <class T>
struct NormedRow {
  const T* x;
  int size;
  float mean = 0, factor;

  NormedRow(const T* x, int size, Norm norm) : x(x), size(size) {
    if (norm.is_centered)
      mean = sum_of(size, [&](int i, auto kind) {
        return get<decltype(kind)>(x + i);
      }) / size;
    const float squares = sum_of(size, [&](int i, auto kind) {
      auto d = get<decltype(kind)>(x + i) - mean;
      return d * d;
    });
    factor = 1 / std::sqrt(squares / size + norm.epsilon);
  }

  template <class V>
  V at(int i) const {
    return (get<V>(x + i) - mean) * factor;
  }
};

template <class T>
void norm_row(const T* x, const float* scale, int size, Norm norm, T* y) {
  const NormedRow<T> row(x, size, norm);
  for_vectors(size, [&](int i, auto kind) {
    using V = decltype(kind);
    put(y + i, V(row.template at<V>(i) * get<V>(scale + i)));
  });
}

// Writes the gradient of x to dx, and adds the gradient of scale to dscale.
template <class T>
void norm_row_gradient(const T* x, const float* scale, const T* dy, int size,
                       Norm norm, T* dx, float* dscale) {
  const NormedRow<T> row(x, size, norm);
  // Returns the mean of scale * dy * factor. Such means are subtracted, so that
  // dx is orthogonal to normalized x and, in LayerNorm, to the vector of ones.
  auto mean_of_scaled = [&](auto factor) {
    return sum_of(size, [&](int i, auto kind) {
      using V = decltype(kind);
      return V(get<V>(dy + i) * get<V>(scale + i) * factor(i, kind));
    }) / size;
  };
  const float along = mean_of_scaled([&](int i, auto kind) {
    return row.template at<decltype(kind)>(i);
  });
  const float mean =
    norm.is_centered ? mean_of_scaled([](int, auto) { return 1.0f; }) : 0;
  for_vectors(size, [&](int i, auto kind) {
    using V = decltype(kind);
    const V normed = row.template at<V>(i), d = get<V>(dy + i);
    put(dscale + i, V(get<V>(dscale + i) + d * normed));
    const V own = d * get<V>(scale + i) - along * normed - mean;
    put(dx + i, V(own * row.factor));
  });
}

}  // namespace palm
