# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a network whose two stages are on two virtual slices.

  python run.py
  python run.py --local_servers=2

The second command starts two server processes. Both print the same numbers.
"""

import argparse

from palm_mtf import runtime  # isort: skip, makes Mesh TensorFlow importable

import mesh_tensorflow as mtf
import numpy as np
import tensorflow as tf


def encode(mesh: mtf.Mesh, x: mtf.Tensor) -> mtf.Tensor:
  """Returns hidden features, [batch, hidden], of x, [batch, pixels]."""
  del mesh  # that of x
  hidden = mtf.Dimension("hidden", 64)
  return mtf.layers.dense(x, hidden, activation=mtf.relu, name="encode")


def classify(mesh: mtf.Mesh, x: mtf.Tensor) -> mtf.Tensor:
  """Returns logits, [batch, classes], of hidden features."""
  del mesh
  return mtf.layers.dense(x, mtf.Dimension("classes", 10), name="classify")


def count(logits: tf.Tensor) -> tf.Tensor:
  """Returns how often each class wins, [1, 10] on every device."""
  winners = tf.one_hot(tf.argmax(logits, axis=1), 10)
  return runtime.all_sum(tf.reduce_sum(winners, axis=0, keepdims=True))


def main() -> None:
  """Sends three batches through the network at once, and prints the winners."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--local_servers", type=int, default=0)
  servers = parser.parse_args().local_servers
  with runtime.connect(servers, devices=2) as client:
    first, second = client.slices("2", "2")
    hidden = runtime.mesh_function(
      encode, dims=["batch pixels"], layout="batch:x"
    )
    logits = runtime.mesh_function(
      classify, dims=["batch hidden"], layout="hidden:x"
    )
    winners = runtime.function(count)

    @client.program
    def run(x):
      return winners.on(second)(logits.on(second)(hidden.on(first)(x)))

    batches = np.random.default_rng(0).standard_normal((3, 32, 100))
    results = [run(np.float32(x)) for x in batches]
    for i, result in enumerate(results):
      print(f"batch {i}: {result.fetch()[0].astype(int)}")


if __name__ == "__main__":
  main()
