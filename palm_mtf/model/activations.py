# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Activation functions of MLPs."""

import math
from collections.abc import Sequence

from palm_mtf._tf import tf


def _gelu(x):  # Hendrycks and Gimpel 2016
  return 0.5 * x * (1.0 + tf.math.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x):
  inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
  return 0.5 * x * (1.0 + tf.tanh(inner))


# {activation of an MLP (architecture/block.py): function of a float32 tensor}
_ACTIVATIONS = {
  "swish": lambda x: x * tf.sigmoid(x),
  "gelu": _gelu,
  "gelu_tanh": _gelu_tanh,
  "relu": tf.nn.relu,
  "relu2": lambda x: tf.square(tf.nn.relu(x)),
}


def activate(products: Sequence[tf.Tensor], activation: str) -> tf.Tensor:
  """Returns the hidden layer of an MLP, in the dtype of the products.

  `products` is [x wi], [..., d_ff]; or, for an MLP with a gate, [x wi_gate,
  x wi], whose hidden layer is activation(x wi_gate) * (x wi).
  """
  first, *others = (tf.cast(x, tf.float32) for x in products)
  y = _ACTIVATIONS[activation](first)
  for x in others:
    y *= x
  return tf.cast(y, products[0].dtype)
