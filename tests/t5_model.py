# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A tiny T5 encoder-decoder in Mesh TensorFlow, with reference results.

`t5_loss` is a model function; `MeshTensorFlow` runs it without palm_mtf's mesh,
variables, driver and optimizer.
"""

import functools

import numpy as np
from mesh_tensorflow.transformer import moe, transformer, transformer_layers

from palm_mtf._tf import mtf, tf

VOCAB_SIZE, LENGTH = 32, 8
FEATURES = {
  "inputs": ("int32", f"length:{LENGTH}"),
  "targets": ("int32", f"length:{LENGTH}"),
}


def _stack(*layers):
  return transformer.make_layer_stack(
    layers=[[cls, settings] for cls, settings in layers],
    num_layers=1,
    layer_stack_cls=functools.partial(
      transformer.LayerStack,
      sublayers_initial=[],
      sublayers_per_layer=[
        transformer.sublayer_rms_norm,
        transformer.sublayer_call_layer,
        transformer.sublayer_residual,
      ],
      sublayers_final=[transformer.sublayer_rms_norm],
    ),
  )


def t5_model() -> transformer.Bitransformer:
  """Returns T5 1.1, without dropout."""
  heads = {"num_heads": 4, "key_value_size": 4}
  relative = {**heads, "relative_attention_type": "bias_shared"}
  attention = (transformer_layers.SelfAttention, relative)
  feed_forward = (
    transformer_layers.DenseReluDense,
    {"hidden_size": 32, "activation": ["gelu", "linear"]},
  )
  unitransformer = functools.partial(
    transformer.Unitransformer,
    d_model=16,
    input_vocab_size=VOCAB_SIZE,
    max_length=LENGTH,
    vocab_divisor=VOCAB_SIZE,
    positional_embedding=False,
  )
  return transformer.Bitransformer(
    unitransformer(
      layer_stack=_stack(attention, feed_forward),
      output_vocab_size=None,
      autoregressive=False,
      name="encoder",
    ),
    unitransformer(
      layer_stack=_stack(
        attention, (transformer_layers.EncDecAttention, heads), feed_forward
      ),
      output_vocab_size=VOCAB_SIZE,
      autoregressive=True,
      name="decoder",
    ),
  )


def t5_loss(mesh, features):
  """Returns the mean loss over all targets, including z-loss."""
  _, loss = t5_model().call_simple(
    features["inputs"], features["targets"], compute_loss=True
  )
  return loss


def experts_loss(mesh, features):
  """Returns the mean loss of a decoder whose MLPs are mixtures of experts."""
  experts = {
    "num_experts": 4,
    "hidden_size": 16,
    "moe_gating": "switch",
    "switch_policy_train": "argmax",
    "capacity_factor_train": 2.0,
  }
  model = transformer.Unitransformer(
    layer_stack=_stack(
      (transformer_layers.SelfAttention, {"num_heads": 4, "key_value_size": 4}),
      (moe.MoE1D, experts),
    ),
    d_model=16,
    input_vocab_size=VOCAB_SIZE,
    output_vocab_size=VOCAB_SIZE,
    autoregressive=True,
    max_length=LENGTH,
    vocab_divisor=VOCAB_SIZE,
    positional_embedding=True,
    layout="batch:a,experts:b",  # a group of tokens per slice of the batch
    mesh_shape="a:2,b:2",
  )
  targets = features["targets"]
  _, loss = model.call_simple(
    transformer.autoregressive_inputs(targets),
    targets,
    compute_loss=True,
    variable_dtype=mtf.VariableDType(tf.float32, tf.float32, tf.float32),
    sequence_id=mtf.ones(mesh, targets.shape, tf.int32),
  )
  return loss


def reversed_rows(batch_size: int, seed: int) -> dict[str, np.ndarray]:
  """Returns random inputs, and the reversed inputs as targets."""
  rng = np.random.default_rng(seed)
  inputs = rng.integers(1, VOCAB_SIZE, (batch_size, LENGTH), np.int32)
  return {"inputs": inputs, "targets": inputs[:, ::-1]}


class MeshTensorFlow:
  """`t5_loss` and its gradients by Mesh TensorFlow itself, on one device."""

  def __init__(self, batch_size: int):
    """Builds the graph; `run` feeds the weights."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape(
      [mtf.Dimension("batch", batch_size), mtf.Dimension("length", LENGTH)]
    )
    with tf.Graph().as_default():
      self._fed = {
        name: tf.placeholder(tf.int32, shape.to_integer_list)
        for name in FEATURES
      }
      loss = t5_loss(
        mesh,
        {
          name: mtf.import_tf_tensor(mesh, x, shape)
          for name, x in self._fed.items()
        },
      )
      variables = graph.trainable_variables
      gradients = mtf.gradients([loss], [x.value for x in variables])
      impl = mtf.placement_mesh_impl.PlacementMeshImpl([], [], [""])
      lowering = mtf.Lowering(graph, {mesh: impl})
      self._loss = lowering.export_to_tf_tensor(loss)
      self._gradients = {
        x.name: lowering.export_to_tf_tensor(gradient)
        for x, gradient in zip(variables, gradients, strict=True)
      }
      self._masters = {x.name: x.get_master() for x in variables}
      self._session = tf.Session()

  def loss_and_gradients(self, params, batch):
    """Returns the loss, and gradients by the names of `params`, in float64."""
    with self._session.graph.as_default():
      for name, master in self._masters.items():
        master.load(params[name].astype(np.float32), self._session)
    loss, gradients = self._session.run(
      (self._loss, self._gradients),
      {x: batch[name] for name, x in self._fed.items()},
    )
    return loss, {name: np.float64(x) for name, x in gradients.items()}
