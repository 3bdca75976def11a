# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs Mesh TensorFlow's own programs for four TPUs on a CPU."""

from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf._tf import mtf, tf
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.executors.xla.tpu_places import host_places, tpu_places
from palm_mtf.mesh.session import session_config
from tests.mtf_testing import mesh_layout
from tests.tpu_simulation import simulated
from tests.unitransformer.runs_of_layers import masters_of

_TPU = "v4-8"


def _placement(name: str) -> mtf.simd_mesh_impl.SimdMeshImpl:
  """Returns Mesh TensorFlow's own mesh of four chips, for one of LAYOUTS."""
  where, layout = tpu_slice(_TPU), mesh_layout(name, tpu=_TPU)
  topology = tf.tpu.experimental.Topology(
    mesh_shape=where.mesh_shape, device_coordinates=host_places(where)
  )
  model_size = list(layout.axes.values())[-1]
  assignment = tf.tpu.experimental.DeviceAssignment(
    topology, [[x] for x in tpu_places(where, model_size)]
  )
  return mtf.simd_mesh_impl.SimdMeshImpl(
    mtf.convert_to_shape(layout.mesh_shape),
    mtf.convert_to_layout_rules(layout.layout),
    device_assignment=assignment,
  )


def run_on_simulated_tpus(
  build: Callable[[mtf.Mesh], Mapping[str, mtf.Tensor]],
  params: Mapping[str, np.ndarray],
  layout: str,
  *max_rounds: int,
) -> list[dict[str, np.ndarray]]:
  """Returns each device's slices of the tensors of `build`; see `simulated`."""
  graph, placement = mtf.Graph(), _placement(layout)
  mesh = mtf.Mesh(graph, "mesh")
  built = {}

  def computation():
    tensors = build(mesh)
    built["names"] = list(tensors)
    built["masters"] = masters_of(graph, params)
    whole = [mtf.anonymize(x) for x in tensors.values()]  # whole on each device
    built["lowering"] = lowering = mtf.Lowering(graph, {mesh: placement})
    return [lowering.export_to_tf_tensor(x) for x in whole]

  with tf.Graph().as_default() as tf_graph:
    devices = placement.device_assignment
    inputs = [[]] * placement.size
    outputs = tf.tpu.replicate(computation, inputs, device_assignment=devices)
    start = tf.group(
      tf.global_variables_initializer(),
      tf.variables_initializer(tf.get_collection("TPU_VAR")),
    )
    copy = built["lowering"].copy_masters_to_slices()
  moved = simulated(tf_graph, *max_rounds)

  def here(x):
    return moved.as_graph_element(x.name)

  with tf.Session(graph=moved, config=session_config(1)) as session:
    session.run(here(start))
    for name, master in built["masters"].items():
      write = master.initializer
      session.run(here(write), {here(write.inputs[1]): params[name]})
    session.run(here(copy))
    values = session.run([[here(x) for x in each] for each in outputs])
  return [dict(zip(built["names"], each, strict=True)) for each in values]
