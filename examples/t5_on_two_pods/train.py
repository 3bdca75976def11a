# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a T5 encoder-decoder of Mesh TensorFlow on pods.

  python train.py --num_pods 2
  python train.py --num_pods 1

Both commands print the same losses. The task is to reverse a row of tokens.
"""

import argparse
import os
import sys

# palm_mtf first, because it adds the names that TensorFlow 2 no longer has and
# that Mesh TensorFlow uses.
from palm_mtf import foreign_models  # isort: skip

import gin
import numpy as np
from mesh_tensorflow.transformer import transformer

from palm_mtf.errors import UserError

VOCAB_SIZE, LENGTH = 32, 16
# Adafactor as in T5: factored, no momentum, no decay.
OPTIMIZER = foreign_models.AdafactorConfig(
  learning_rate=1e-2,
  beta1=0.0,
  beta2_exponent=0.8,
  update_clip=1.0,
  gradient_clip=1e9,
  weight_decay_exponent=None,
  z_loss=0.0,
  second_moment="factored",
  norm_scale="plain",
)


def t5_loss(mesh, features):
  """Returns the mean loss over all targets, [] float32."""
  model = transformer.make_bitransformer(
    input_vocab_size=VOCAB_SIZE, output_vocab_size=VOCAB_SIZE
  )
  _, loss = model.call_simple(
    features["inputs"], features["targets"], compute_loss=True
  )
  return loss


def reversed_rows(step: int, batch_size: int) -> dict[str, np.ndarray]:
  """Returns the batch of a step, [batch_size, LENGTH] each."""
  rng = np.random.default_rng(step)
  inputs = rng.integers(1, VOCAB_SIZE, (batch_size, LENGTH))
  return {"inputs": inputs, "targets": inputs[:, ::-1]}


def main() -> None:
  """Trains, and prints the loss of each step."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--num_pods", type=int, default=2)
  parser.add_argument("--pods", default="in_process", help="or local_servers")
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--batch_size", type=int, default=16, help="of all pods")
  parser.add_argument("--save", help="npz file for parameters and moments")
  chosen = parser.parse_args()

  folder = os.path.dirname(os.path.abspath(__file__))
  gin.parse_config_file(os.path.join(folder, "t5.gin"))
  training = foreign_models.PodTraining(
    t5_loss,
    {
      "inputs": ("int32", f"length:{LENGTH}"),
      "targets": ("int32", f"length:{LENGTH}"),
    },
    # Two devices per pod, each with half of the pod's rows.
    mesh=foreign_models.DeviceMesh(mesh_shape="data:2", layout="batch:data"),
    optimizer=OPTIMIZER,
    global_batch_size=chosen.batch_size,
    pods=foreign_models.PodsConfig(num_pods=chosen.num_pods, pods=chosen.pods),
  )
  with training:
    for step in range(chosen.steps):
      metrics = training.step(reversed_rows(step, chosen.batch_size))
      print(f"step {step + 1}  loss {metrics['loss']:.4f}", flush=True)
    training.check_pods()
    print(f"after {training.num_steps} steps all pods hold the same bits")
    if chosen.save:
      np.savez(chosen.save, **training.variables())


if __name__ == "__main__":
  try:
    main()
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
