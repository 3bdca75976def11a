// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Activations of a gated MLP.

#pragma once

#include <cmath>

#include "arithmetic.h"

namespace palm {

// In the order of ACTIVATIONS in decoding.py.
enum class Activation { kSwish, kGelu, kGeluTanh };

// Writes activation(gates) * linear to `to`. All three are [size].
inline void gate_row(Activation activation, const float* gates,
                     const float* linear, int size, float* to) {
  auto apply = [&](auto function) {
    for (int i = 0; i < size; ++i) to[i] = function(gates[i]) * linear[i];
  };
  switch (activation) {
    case Activation::kSwish:
      return apply([](float x) { return swish(x); });
    case Activation::kGelu:
      return apply([](float x) {
        return 0.5f * x * (1 + std::erf(x * float(M_SQRT1_2)));
      });
    case Activation::kGeluTanh:
      // (1 + tanh(y)) / 2 = sigmoid(2 y), and 1.59576912 = 2 sqrt(2 / pi).
      return apply([](float x) {
        return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
      });
  }
}

}  // namespace palm
