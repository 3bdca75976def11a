# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer on random gradients of a few variables."""

import numpy as np

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.session import session_config
from palm_mtf.ops.variables import Fill, SlicedVariable
from palm_mtf.optim.clip import (
  all_finite,
  clip_factor,
  global_norm,
  sums_of_squares,
)
from palm_mtf.optim.optimizer import optimizer_updates, rule_of
from tests.mtf_testing import load_parameters, lower, placement, read_variables

VOCAB, D_MODEL, HEADS = ("vocab", 12), ("d_model_stored", 6), ("heads", 4)
D_KV, D_FF, EXPERTS = ("d_kv", 3), ("d_ff", 8), ("experts", 2)
SHAPES = {
  "embedding": [VOCAB, D_MODEL],
  "layer_000/norm/scale": [D_MODEL],
  "layer_000/attention/o": [HEADS, D_KV, D_MODEL],
  "layer_000/mlp/wi": [D_MODEL, D_FF],
  "layer_001/mlp/wi": [D_MODEL, D_FF],
  "layer_001/mlp/experts/wo": [EXPERTS, D_FF, D_MODEL],
}
NUM_STEPS = 100


def random_arrays(seed, deviations):
  """Returns an array per shape; `deviations` are by name, 1 by default."""
  rng = np.random.default_rng(seed)
  return {
    x: deviations.get(x, 1.0) * rng.standard_normal([size for _, size in dims])
    for x, dims in SHAPES.items()
  }


def random_run():
  """Returns first parameters and the gradients of NUM_STEPS steps."""
  deviations = {"layer_000/norm/scale": 1e-5, "layer_001/mlp/wi": 0.3}
  params = random_arrays(0, deviations)
  # The scale minus its center is below the floor of the parameter scale.
  params["layer_000/norm/scale"] += 1.0
  small = {"embedding": 1e-6, "layer_001/mlp/wi": 0.1}
  gradients = [random_arrays(seed, small) for seed in range(1, NUM_STEPS + 1)]
  for arrays in gradients:
    arrays["embedding"][3] = 0.0  # a token that is never seen
  return params, gradients


def build_steps(optimizer, mesh):
  """Returns a session, and a function that takes a step per gradients in it.

  The function returns parameters and moments, and the norm of the gradients of
  each step.
  """
  with tf.Graph().as_default() as graph:
    mtf_mesh = mtf.Mesh(mtf.Graph(), "mesh")
    feeds, variables, mtf_gradients = {}, [], []
    for name, dims in SHAPES.items():
      shape = mtf.Shape([mtf.Dimension(*dim) for dim in dims])
      variable = SlicedVariable(mtf_mesh, name, shape, initializer=Fill(0.0))
      variables.append(variable)
      feeds[name] = tf.placeholder(tf.float32, shape.to_integer_list)
      mtf_gradients.append(mtf.import_tf_tensor(mtf_mesh, feeds[name], shape))
    k = tf.placeholder(tf.float32, [])
    norm = global_norm(sums_of_squares(mtf_gradients))
    rates = rule_of(optimizer).find_rates(k, optimizer)
    rates = [mtf.import_tf_tensor(mtf_mesh, x) for x in rates]
    clip = clip_factor(norm, optimizer.gradient_clip)
    scalars = {mtf_mesh: [clip, *rates, all_finite([norm])]}
    updates = optimizer_updates(variables, mtf_gradients, scalars, optimizer)
    lowered = lower({mtf_mesh: placement(mesh)}, {"norm": norm}, updates)
    session = tf.Session(config=session_config(mesh.num_devices))

  def run(params, gradients):
    session.run(lowered.initialize)
    load_parameters(session, lowered.slices[0], params)
    fetches, norms = [lowered.tensors["norm"], lowered.operations], []
    for step, arrays in enumerate(gradients):
      feed = {feeds[name]: array for name, array in arrays.items()}
      feed[k] = step + 1
      norms.append(session.run(fetches, feed)[0])
    with graph.as_default():
      return read_variables(session, lowered.slices[0]), norms

  return session, run
