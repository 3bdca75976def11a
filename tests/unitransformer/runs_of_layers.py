# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs Mesh TensorFlow's Unitransformer with our layers and given weights."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import gin
import numpy as np
from mesh_tensorflow.transformer.transformer import Unitransformer

from palm_mtf._tf import mtf, tf
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.mesh.session import session_config
from tests.blocks import Z_LOSS
from tests.mtf_testing import SINGLE, ModelResult

FLOAT32 = mtf.VariableDType(tf.float32, tf.float32, tf.float32)
_PALM = 'include "palm_mtf/gin/mesh_tensorflow/palm.gin"'
# Test vocabularies are not multiples of 128.
_UNPADDED = "transformer.Unitransformer.vocab_divisor = 1"
_MODULE = "palm_mtf.unitransformer"
# {layer: fields of ModelConfig that are its arguments}
_SETTINGS = {
  "Attention": (
    *("num_heads", "d_kv", "attention", "num_kv_heads", "attention_window"),
    *("qk_norm", "score_scale", "norm_epsilon", "positions"),
    "rotary_fraction",
    *("rotary_pairs", "rotary_base", "rotary_scaling", "rotary_factor"),
    "biases",
  ),
  "Mlp": ("d_ff", "mlp", "biases"),
}


def _lines(config: ModelConfig) -> Iterator[str]:
  """Yields the gin statements of a block, if it is not that of the gin file."""
  names = {x for names in _SETTINGS.values() for x in names}
  names -= {"num_heads", "d_kv", "d_ff"}
  fields = {x.name: x.default for x in dataclasses.fields(config)}
  layers = ["MultiQueryAttention", "SwiGlu"]
  yield f"{_MODULE}.sublayer_norm.norm_epsilon = {config.norm_epsilon}"
  if any(getattr(config, x) != fields[x] for x in names - {"norm_epsilon"}):
    layers = list(_SETTINGS)
    for layer, settings in _SETTINGS.items():
      for x in settings:
        yield f"{_MODULE}.{layer}.{x} = {getattr(config, x)!r}"
  where = {
    "parallel": f"{_MODULE}.ParallelBlock.layer_classes",
    "serial": "transformer.make_layer_stack.layers",
  }[config.block]
  references = ", ".join(f"@{_MODULE}.{x}" for x in layers)
  yield f"{where} = [{references}]"


@contextlib.contextmanager
def configured(config: ModelConfig, *lines: str) -> Iterator[Unitransformer]:
  """Yields the model that the shipped gin file makes from the macros."""
  macros = [f"{name} = {x!r}" for name, x in config.macros().items()]
  try:
    gin.parse_config([_PALM, _UNPADDED, *macros, *_lines(config), *lines])
    yield Unitransformer()
  finally:
    gin.clear_config()


def our_name(name: str) -> str:
  """Returns our checkpoint name of a Mesh TensorFlow variable."""
  name = name.removeprefix("transformer/")
  if name.startswith("norm/"):
    return f"final_{name}"
  in_layer = re.fullmatch(r"block_(\d+)/layer_(\d+)/(.+)", name)
  if not in_layer:
    return name
  block, layer, part = in_layer.groups()
  part = part.removeprefix("ParallelBlock/")
  part = re.sub("^(MultiQuery)?Attention/", "attention/", part)
  part = re.sub("^(SwiGlu|Mlp)/", "mlp/", part)
  if layer == "001":
    part = re.sub("^norm/", "mlp_norm/", part)
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
  variables = graph.trainable_variables
  masters = {our_name(x.name): x.get_master() for x in variables}
  assert masters.keys() == params.keys()
  return masters


def split_by(mesh_shape: str, rules: str) -> MeshLayout:
  """Returns a mesh with layout rules that palm_mtf itself lacks."""
  axes = [x.partition(":")[0] for x in mesh_shape.split(",")]
  ours = map(":".join, zip(("batch", "heads"), axes, strict=False))
  layout = MeshLayout(mesh_shape=mesh_shape, layout=",".join(ours))
  object.__setattr__(layout, "layout", rules)
  return layout


def run(
  build: Callable[[mtf.Mesh], Mapping[str, mtf.Tensor]],
  params: Mapping[str, np.ndarray],
  layout: MeshLayout = SINGLE,
) -> dict[str, np.ndarray]:
  """Returns the values of the tensors that `build` returns, by name."""
  with tf.Graph().as_default():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    tensors = build(mesh)
    masters = masters_of(graph, params)
    lowering = mtf.Lowering(graph, {mesh: placement(layout)})
    export = lowering.export_to_tf_tensor
    fetches = {name: export(x) for name, x in tensors.items()}
    start = tf.global_variables_initializer()
    copy = lowering.copy_masters_to_slices()
    with tf.Session(config=session_config(layout.num_devices)) as session:
      session.run(start)
      for name, master in masters.items():
        write = master.initializer
        session.run(write, {write.inputs[1]: params[name]})
      session.run(copy)
      return session.run(fetches)


def imported(
  mesh: mtf.Mesh, batch: Mapping[str, np.ndarray]
) -> dict[str, mtf.Tensor]:
  """Returns features [batch, length] on the mesh."""
  made = {}
  for name, x in batch.items():
    sizes = zip(("batch", "length"), x.shape, strict=True)
    shape = mtf.Shape([mtf.Dimension(*size) for size in sizes])
    made[name] = mtf.import_tf_tensor(mesh, tf.constant(x), shape)
  return made


def of_loss(
  config: ModelConfig,
  mesh: mtf.Mesh,
  batch: Mapping[str, np.ndarray],
  *lines: str,
  z_loss: float = Z_LOSS,
) -> dict[str, mtf.Tensor]:
  """Returns logits, loss, and gradients by our names."""
  lines = (*lines, f"transformer.Unitransformer.z_loss = {z_loss}")
  features = imported(mesh, batch)
  activations = tf.as_dtype(config.activation_dtype)
  with configured(config, *lines) as model:
    logits, loss = model.call_simple(
      features["inputs"],
      features["targets"],
      compute_loss=True,
      variable_dtype=mtf.VariableDType(tf.float32, tf.float32, activations),
      sequence_id=features.get("segments"),
    )
  variables = mesh.graph.trainable_variables
  gradients = mtf.gradients([loss], [x.outputs[0] for x in variables])
  names = [our_name(x.name) for x in variables]
  found = dict(zip(names, gradients, strict=True))
  return {"logits": mtf.cast(logits, tf.float32), "loss": loss, **found}


def as_result(values: Mapping[str, np.ndarray]) -> ModelResult:
  """Returns the values of `of_loss`; its loss includes the z-loss."""
  gradients = dict(values)
  logits, loss = gradients.pop("logits"), float(gradients.pop("loss"))
  return ModelResult(logits, loss, z_loss=None, gradients=gradients)


def run_unitransformer(
  config: ModelConfig,
  params: Mapping[str, np.ndarray],
  batch: Mapping[str, np.ndarray],
  *lines: str,
  layout: MeshLayout = SINGLE,
  z_loss: float = Z_LOSS,
) -> ModelResult:
  """Returns the logits, loss and gradients of a Unitransformer."""

  def build(mesh):
    return of_loss(config, mesh, batch, *lines, z_loss=z_loss)

  return as_result(run(build, params, layout))


def logits_of(
  config: ModelConfig,
  params: Mapping[str, np.ndarray],
  batch: Mapping[str, np.ndarray],
  *lines: str,
  layout: MeshLayout = SINGLE,
  batch_dims: Sequence[mtf.Dimension] = (),
) -> np.ndarray:
  """Returns logits; the batch is split into `batch_dims`, if there are any."""
  rows, length = batch["inputs"].shape
  batch_dims = batch_dims or [mtf.Dimension("batch", rows)]
  shape = mtf.Shape([*batch_dims, mtf.Dimension("length", length)])

  def build(mesh):
    features = {}
    for name, x in batch.items():
      x = tf.constant(x.reshape(shape.to_integer_list))
      features[name] = mtf.import_tf_tensor(mesh, x, shape)
    given = features["inputs"], features.get("targets")
    with configured(config, *lines) as model:
      how = {"compute_loss": False, "variable_dtype": FLOAT32}
      logits, _ = model.call_simple(*given, **how)
    return {"logits": logits}

  values = run(build, params, layout)
  return values["logits"].reshape([rows, length, config.vocab_size])


def sampling(
  config: ModelConfig, prompts: Sequence[Sequence[int]], *lines: str
) -> Callable[[mtf.Mesh], dict[str, mtf.Tensor]]:
  """Returns a function that builds prompts, continued to their end."""
  rows = np.zeros([len(prompts), config.sequence_length], np.int32)
  for row, prompt in zip(rows, prompts, strict=True):
    row[: len(prompt)] = prompt

  def build(mesh):
    with configured(config, *lines) as model:
      tokens = model.sample_autoregressive(
        imported(mesh, {"ids": rows})["ids"],
        stop_at_token=config.vocab_size,  # none
        temperature=0.0,
        variable_dtype=FLOAT32,
      )
    return {"tokens": tokens}

  return build
