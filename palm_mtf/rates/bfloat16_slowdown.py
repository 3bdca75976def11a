# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Slowdown of bfloat16 on machines without native bfloat16 products."""

import logging
import time

from palm_mtf._tf import tf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.machine.activation_dtype import is_slow
from palm_mtf.ops.bfloat16 import matmul

_logger = logging.getLogger(__name__)

_TOKENS = 1024
_REPEATS = 5


def warn_if_slow(
  model: PalmConfig, mesh: MeshLayout, config: tf.ConfigProto
) -> None:
  """Warns of a model whose products are in bfloat16 that is not native.

  Args:
    model: architecture, its dtype resolved.
    mesh: devices of a pod.
    config: configuration of the sessions to come.
  """
  if not is_slow(model, mesh):
    return
  slowdown = bfloat16_slowdown(model, config)
  _logger.warning(
    'ACTIVATION_DTYPE = "bfloat16": this machine computes it in float32 and '
    f"rounds, which takes {slowdown:.1f} times as long as float32 (measured, a "
    'product of the MLP); "auto" or "float32" avoids that'
  )


def bfloat16_slowdown(model: PalmConfig, config: tf.ConfigProto) -> float:
  """Returns the time of an MLP's product in bfloat16 over that in float32."""
  # With the configuration of later sessions: a process keeps the threads of its
  # first one.
  with tf.Graph().as_default(), tf.Session(config=config) as session:
    products = []
    for dtype in (tf.bfloat16, tf.float32):
      # Variables: a product of constants would be folded away.
      # x: [tokens, d_model], w: [d_model, d_ff]
      x, w = (
        tf.Variable(tf.ones(shape, dtype), use_resource=True)
        for shape in ([_TOKENS, model.d_model], [model.d_model, model.d_ff])
      )
      session.run([x.initializer, w.initializer])
      products.append(session.make_callable(matmul(x, w).op))
    times = [[], []]
    for _ in range(_REPEATS + 1):
      for product, secs in zip(products, times, strict=True):
        start = time.perf_counter()
        product()
        secs.append(time.perf_counter() - start)
  # The first call of each makes its kernel.
  bfloat16, float32 = (min(secs[1:]) for secs in times)
  return bfloat16 / float32
