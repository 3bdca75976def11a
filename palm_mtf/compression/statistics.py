# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of the inputs of all products with weights, over a text.

For x, the input of a product x W of a token, the statistics of W are the sums
over tokens of x^2 (of each column of x) and, on request, of x^T x. Pruning by
Wanda (Sun et al. 2023) and llama.cpp's quantizer need the former; GPTQ (Frantar
et al. 2022) and SparseGPT (Frantar and Alistarh 2023) need the latter, which is
half the Hessian of the squared error of the product. Of a kernel of experts,
each expert has its own statistics, over the tokens that chose it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import Branch, Projection, Read
from palm_mtf.architecture.column_statistics import ColumnStatistics
from palm_mtf.architecture.parameters import logits_table
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.variables import CheckpointReader
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.errors import UserError
from palm_mtf.mesh.cpu_gpu import local_devices
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.slices import Slice, variables_of
from palm_mtf.model.activations import activate
from palm_mtf.model.dims import model_dims
from palm_mtf.model.experts import find_rows, multiply, take_rows
from palm_mtf.model.layers import to_rows
from palm_mtf.model.palm import Palm
from palm_mtf.model.weights import TrainedWeights
from palm_mtf.programs.features import (
  REQUIRED_FEATURES,
  find_palm_features,
  import_features,
  make_placeholders,
)
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program, state_of

_MASK = "loss_weights"  # feature that is 1 for tokens that count, 0 for padding


class _Observer(mtf.Operation):
  """Calls a function with the values of its inputs on the only device."""

  def __init__(self, fn: Callable[..., None], *inputs: mtf.Tensor):
    super().__init__([*inputs], name="observer")
    self._fn = fn
    self._outputs: list[mtf.Tensor] = []

  def lower(self, lowering: mtf.Lowering) -> None:
    values = (lowering.tensors[x].to_laid_out_tensor() for x in self.inputs)
    self._fn(*(x.tensor_list[0] for x in values))


class _ObservedWeights(TrainedWeights):
  """Weights that also compute statistics of the inputs of products.

  Attributes:
    mask: 1 for tokens that count, [batch, length] float32.
    hessians: whether to compute x^T x.
    found: {parameters that read one input: fields of its statistics}.
  """

  mask: mtf.Tensor
  hessians: bool
  found: dict[tuple[str, ...], dict[str, tf.Tensor]]

  def project_in(
    self, x: mtf.Tensor, layer: str, read: Read, angles: Sequence[mtf.Tensor]
  ) -> list[mtf.Tensor]:
    """Observes x; see `TrainedWeights`."""
    self._observe(x, *(f"{layer}/{part}" for part in read.parts))
    return super().project_in(x, layer, read, angles)

  def project_out(
    self,
    layer: str,
    branches: Mapping[Projection, mtf.Tensor],
    others: Sequence[mtf.Tensor] = (),
  ) -> mtf.Tensor:
    """Observes the branches; see `TrainedWeights`."""
    for each, x in branches.items():
      self._observe(x, f"{layer}/{each.part}")
    return super().project_out(layer, branches, others)

  def run_experts(
    self, x: mtf.Tensor, layer: str, branch: Branch
  ) -> mtf.Tensor:
    """Observes each expert's inputs; see `TrainedWeights`."""
    router, *inputs = (f"{layer}/{each.part}" for each in branch.inputs)
    output, mlp = f"{layer}/{branch.output.part}", branch.experts.mlp
    self._observe(x, router)

    def observe(x, mask, choice, *kernels):
      choice = tf.where_v2(mask[..., tf.newaxis] > 0, choice, -1)
      rows = find_rows(to_rows(choice), 0, kernels[0].shape[0])
      taken, (count, sizes, _) = take_rows(to_rows(x), rows), rows.groups
      wide = multiply(taken, tf.concat(kernels, 2), rows.groups)
      hidden = activate(tf.split(wide, len(kernels), 1), mlp.activation)
      for names, values in (((*inputs,), taken), ((output,), hidden)):
        *parts, _ = tf.split(values, sizes, num=count + 1)
        sums = [self._sum(x) for x in parts]
        self.found[names] = {k: tf.stack([x[k] for x in sums]) for k in sums[0]}

    _, choice = self.route(x, layer, branch)
    kernels = [self._variables[name] for name in inputs]
    _Observer(observe, x, self.mask, choice, *kernels)
    return super().run_experts(x, layer, branch)

  def unembed(self, x: mtf.Tensor) -> mtf.Tensor:
    """Observes x; see `TrainedWeights`."""
    self._observe(x, logits_table(self._config))
    return super().unembed(x)

  def _observe(self, x: mtf.Tensor, *names: str) -> None:
    def observe(x, mask):
      rows = tf.reshape(x, [mask.shape.num_elements(), -1])
      rows = tf.boolean_mask(rows, tf.reshape(mask, [-1]) > 0)
      self.found[names] = self._sum(rows)

    _Observer(observe, x, self.mask)

  def _sum(self, rows: tf.Tensor) -> dict[str, tf.Tensor]:
    # `rows` are [tokens, inputs].
    sums = tf.reduce_sum(tf.square(tf.cast(rows, tf.float64)), 0)
    found = {"sums": sums, "tokens": tf.shape(rows, out_type=tf.int64)[0]}
    if self.hessians:
      x = tf.cast(rows, tf.float32)
      found["hessian"] = tf.matmul(x, x, transpose_a=True)
    return found


def build_statistics(
  config: ModelConfig,
  features: Sequence[str],
  batch_size: int,
  *,
  hessians: bool,
) -> tuple[Program, list[tuple[str, ...]], Mapping[str, list[Slice]]]:
  """Builds the statistics of a batch, on a CPU, in the current tf.Graph.

  Returns the program, which takes `features` by name, and returns the fields of
  a list of `ColumnStatistics`; for each item of the list, the parameters that
  read the same input; and the weights, by name in checkpoints.
  """
  layout = MeshLayout(mesh_shape="", layout="")
  mesh = mtf.Mesh(mtf.Graph(), "pod")
  placement = local_devices(1).placement(layout, 0)
  config = dataclasses.replace(config, remat="none")
  dims = model_dims(config, batch_size, layout)
  specs = find_palm_features(features, dims)
  with tf.device(placement.cpu):
    fed = make_placeholders(specs)
  batch = import_features(mesh, placement, {placement.cpu: fed}, specs)
  weights = _ObservedWeights(mesh, config, dims)
  weights.mask, weights.hessians, weights.found = batch[_MASK], hessians, {}
  given = (batch.get(x) for x in ("inputs", "segments", "prefix"))
  Palm(config, dims, weights).logits(*given)
  (slices,) = placement.lower({mesh: placement}).slices
  reads = state_of(variables_of([slices]))
  program = Program(fed, [*weights.found.values()], reads=reads)
  return program, [*weights.found], slices


def collect_statistics(
  checkpoint: Checkpoint,
  config: ModelConfig,
  batches: Iterable[Batch],
  *,
  hessians: bool = False,
) -> dict[str, ColumnStatistics]:
  """Returns {parameter: statistics} of a checkpoint, from one pass over a text.

  The parameters are all kernels and the table of the logits. Those that read
  the same input, such as q, k and v, share their arrays. Padding does not
  count. Raises UserError if a sum is not finite.

  Args:
    checkpoint: weights of `config`, with its base if it is an adapter.
    config: architecture; ACTIVATION_DTYPE is resolved.
    batches: at least one batch, all of one size; only the inputs, segments and
      prefixes matter.
    hessians: whether to add up x^T x, which takes 4 bytes * inputs^2 per input.
  """
  session = tf.Session(graph=tf.Graph(), config=session_config(1))
  with Client(session) as client:
    features = map(_take_features, batches)
    batch = next(features)
    size = len(batch["inputs"])
    with client.graph.as_default():
      built = build_statistics(config, [*batch], size, hessians=hessians)
    program, parameters, slices = built
    with CheckpointReader(client).open_model(checkpoint) as restore:
      restore([slices])
    found = client.call(program, batch)
    for batch in features:
      new = client.call(program, batch)
      for total, part in zip(found, new, strict=True):
        for key, x in part.items():
          total[key] = total[key] + x
  for (name, *_), total in zip(parameters, found, strict=True):
    if not all(np.isfinite(x).all() for x in total.values()):
      raise UserError(
        f"{checkpoint.path}: inputs of {name} are too large or not numbers in "
        "the text; take an earlier checkpoint."
      )
  return {
    name: ColumnStatistics(**total)
    for names, total in zip(parameters, found, strict=True)
    for name in names
  }


def _take_features(batch: Batch) -> Batch:
  """Returns the features of the forward pass, and the mask."""
  names = (*REQUIRED_FEATURES, "segments", "prefix")
  mask = batch.get("segments", batch.get(_MASK, np.ones_like(batch["inputs"])))
  # Rows without segments have padding only after their last target. Other
  # weights of 0 are those of tokens that are given, such as a prompt's.
  mask = np.maximum.accumulate((mask != 0)[:, ::-1], 1)[:, ::-1]
  found = {name: batch[name] for name in names if name in batch}
  return found | {_MASK: mask.astype(np.float32)}
