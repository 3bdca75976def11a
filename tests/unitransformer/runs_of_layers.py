# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs Mesh TensorFlow's Unitransformer with our layers and given weights."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping

import gin
import numpy as np
from mesh_tensorflow.transformer.transformer import Unitransformer

from palm_mtf._tf import mtf, tf
from palm_mtf.config import MeshLayout, PalmConfig
from palm_mtf.mesh.session import session_config
from tests.mtf_testing import SINGLE

FLOAT32 = mtf.VariableDType(tf.float32, tf.float32, tf.float32)
_PALM = 'include "palm_mtf/gin/mesh_tensorflow/palm.gin"'
# Test vocabularies are not multiples of 128.
_UNPADDED = "transformer.Unitransformer.vocab_divisor = 1"
SERIAL = """
transformer.make_layer_stack.layers = [
  @palm_mtf.unitransformer.MultiQueryAttention,
  @palm_mtf.unitransformer.SwiGlu,
]
"""


@contextlib.contextmanager
def configured(config: PalmConfig, *lines: str) -> Iterator[Unitransformer]:
  """Yields the model that the shipped gin file makes from the macros."""
  macros = [f"{name} = {x!r}" for name, x in config.macros().items()]
  serial = [SERIAL] if config.block == "serial" else []
  try:
    gin.parse_config([_PALM, _UNPADDED, *macros, *serial, *lines])
    yield Unitransformer()
  finally:
    gin.clear_config()


def our_name(name: str) -> str:
  """Returns our checkpoint name of a Mesh TensorFlow variable."""
  name = name.removeprefix("transformer/")
  if name == "norm/scale":
    return "final_norm/scale"
  in_layer = re.fullmatch(r"block_(\d+)/layer_(\d+)/(.+)", name)
  if not in_layer:
    return name
  block, layer, part = in_layer.groups()
  part = part.removeprefix("ParallelBlock/")
  part = part.replace("MultiQueryAttention/", "attention/")
  part = part.replace("SwiGlu/", "mlp/")
  if layer == "001":
    part = part.replace("norm/", "mlp_norm/")
  return f"layer_{block}/{part}"


def placement(layout: MeshLayout) -> mtf.MeshImpl:
  """Returns Mesh TensorFlow's own mesh of virtual CPU devices."""
  return mtf.placement_mesh_impl.PlacementMeshImpl(
    mtf.convert_to_shape(layout.mesh_shape),
    mtf.convert_to_layout_rules(layout.layout),
    [f"/device:cpu:{i}" for i in range(layout.num_devices)],
  )


def masters_of(
  graph: mtf.Graph, params: Mapping[str, np.ndarray]
) -> dict[str, tf.Variable]:
  """Returns {our name: variable} of each parameter, before lowering.

  Lowering stacks variables with the same shape.
  """
  masters = {
    our_name(x.name): x.get_master() for x in graph.trainable_variables
  }
  assert masters.keys() == params.keys()
  return masters


class Run:
  """A lowered graph, in a session that has the weights.

  Attributes:
    values: values of the tensors that `build` returns, by name.
  """

  def __init__(
    self,
    build: Callable[[mtf.Mesh], Mapping[str, mtf.Tensor]],
    params: Mapping[str, np.ndarray],
    layout: MeshLayout = SINGLE,
    num_steps: int = 1,
  ):
    with tf.Graph().as_default():
      graph = mtf.Graph()
      mesh = mtf.Mesh(graph, "mesh")
      tensors = build(mesh)
      updates = [x for x in graph.operations if isinstance(x, mtf.Assign)]
      masters = masters_of(graph, params)
      lowering = mtf.Lowering(graph, {mesh: placement(layout)})
      fetches = {
        name: lowering.export_to_tf_tensor(x) for name, x in tensors.items()
      }
      done = tf.group([lowering.lowered_operation(x) for x in updates])
      start = tf.global_variables_initializer()
      copy = lowering.copy_masters_to_slices()
      with tf.Session(config=session_config(layout.num_devices)) as session:
        session.run(start)
        for name, master in masters.items():
          session.run(
            master.initializer, {master.initializer.inputs[1]: params[name]}
          )
        session.run(copy)
        self.values = [
          session.run([fetches, done])[0] for _ in range(num_steps)
        ]


def imported(
  mesh: mtf.Mesh, batch: Mapping[str, np.ndarray]
) -> dict[str, mtf.Tensor]:
  """Returns features [batch, length] on the mesh."""
  return {
    name: mtf.import_tf_tensor(
      mesh,
      tf.constant(x),
      mtf.Shape(
        [mtf.Dimension("batch", len(x)), mtf.Dimension("length", x.shape[1])]
      ),
    )
    for name, x in batch.items()
  }
