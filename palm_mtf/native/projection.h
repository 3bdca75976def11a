// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Splits a row of a joined product into the parts that attention and the MLP
// read, and computes the row's gradient (model/projection.py). The product's
// columns are q, k, v, wi_gate and wi; serial blocks have only q, k and v, or
// only wi_gate and wi.

#pragma once

#include <vector>

#include "arithmetic.h"

namespace palm {

// How a row of a joined product is split, and how q and k are rotated.
struct Columns {
  std::vector<int> sizes;  // columns of each kernel
  bool is_gated;           // whether the last two kernels are wi_gate and wi
  int d_kv = 0;
  int length = 0;  // rows per sequence
  // [length, d_kv / 2] each; null if no column is rotated.
  const float *sines = nullptr, *cosines = nullptr;

  // Number of results per row; wi_gate and wi give one, the hidden layer.
  int num_parts() const { return int(sizes.size()) - is_gated; }
};

// Rotates the halves (x1, x2) of each head in a row by the angles of the row's
// position, or by the opposite angles if `sign` is -1.
template <class T>
inline void rotate(const T* x, int size, const Columns& columns, int row,
                   float sign, T* y) {
  const int half = columns.d_kv / 2;
  const float* sin = columns.sines + size_t(row % columns.length) * half;
  const float* cos = columns.cosines + size_t(row % columns.length) * half;
  for (const T* end = x + size; x < end; x += 2 * half, y += 2 * half)
    for_vectors(half, [&](int i, auto kind) {
      using V = decltype(kind);
      V a = get<V>(x + i), b = get<V>(x + i + half);
      V s = get<V>(sin + i) * sign, c = get<V>(cos + i);
      put(y + i, V(a * c - b * s));
      put(y + i + half, V(b * c + a * s));
    });
}

// Splits a row of the product into `parts`, [rows, columns] each; rotates q and
// k, and applies SwiGLU.
template <class T>
void read_row(const T* wide, const Columns& columns, int row,
              const std::vector<T*>& parts) {
  for (int i = 0; i < columns.num_parts(); ++i) {
    const int size = columns.sizes[i];
    T* to = parts[i] + size_t(row) * size;
    if (columns.is_gated && i == columns.num_parts() - 1) {
      for_vectors(size, [&](int j, auto kind) {
        using V = decltype(kind);
        V gate = get<V>(wide + j);
        put(to + j, V(gate * sigmoid(gate) * get<V>(wide + size + j)));
      });
    } else if (columns.sines && i < 2) {
      rotate(wide, size, columns, row, 1, to);
    } else {
      std::copy_n(wide, size, to);
    }
    wide += size;
  }
}

// Writes the gradient of a row of the product, given the gradients of the
// results of `read_row`.
template <class T>
void read_row_gradient(const T* wide, const Columns& columns, int row,
                       const std::vector<const T*>& gradients, T* to) {
  for (int i = 0; i < columns.num_parts(); ++i) {
    const int size = columns.sizes[i];
    const T* dy = gradients[i] + size_t(row) * size;
    if (columns.is_gated && i == columns.num_parts() - 1) {
      for_vectors(size, [&](int j, auto kind) {
        using V = decltype(kind);
        V gate = get<V>(wide + j), x = get<V>(wide + size + j);
        V d = get<V>(dy + j), open = sigmoid(gate);
        put(to + j, V(d * x * open * (1 + gate * (1 - open))));
        put(to + size + j, V(d * gate * open));
      });
    } else if (columns.sines && i < 2) {
      rotate(dy, size, columns, row, -1, to);
    } else {
      std::copy_n(dy, size, to);
    }
    wide += size, to += size;
  }
}

}  // namespace palm
