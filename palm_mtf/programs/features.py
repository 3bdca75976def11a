# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Features of a batch, which the client feeds or the pods' servers read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError, check_choice
from palm_mtf.mesh.cpu_gpu import CpuGpuPlacement
from palm_mtf.model.dims import Dims
from palm_mtf.ops.placement import Placement

FEATURE_DTYPES = {
  "inputs": tf.int32,  # id of the token before each target
  "targets": tf.int32,  # id of the token to predict
  "segments": tf.int32,  # id of the document; bounds attention; default: 0
  "loss_weights": tf.float32,  # weight of each target in the loss; default: 1
  "prefix": tf.int32,  # 1 for inputs that attend in both directions; default: 0
  "neighbours": tf.int32,  # per row: its neighbours' tokens (`Neighbours`)
  "reference": tf.float32,  # per row: the reference's log ratio of a pair
  "teacher_ids": tf.int32,  # TEACHER_TOKENS tokens per position
  # The teacher's log p of these tokens or, without them, of all tokens.
  "teacher_log_p": tf.float32,
}
# Features are [batch, length], but these [batch] or [batch, length, tokens].
_RANKS = {"reference": 1, "teacher_ids": 3, "teacher_log_p": 3}
REQUIRED_FEATURES = ("inputs", "targets")


# A function that builds the operations by which a server reads one part (one
# microbatch of one pod) of a step's batch, so that the client need not send it.
# It returns one tensor per feature. Arguments: the name of the server's CPU; a
# JSON text that describes all batches, [] string; the number of steps done
# before, [] int64; the part's index, [] int32; and the number of parts.
ReadFeatures = Callable[
  [str, tf.Tensor, tf.Tensor, tf.Tensor, int], Sequence[tf.Tensor]
]


class ServerFeatures(NamedTuple):
  """Features that pods' servers read, so that the client feeds no features."""

  names: Sequence[str]
  read: ReadFeatures


def features_of_pod(
  features: Sequence[str] | ServerFeatures, pod: int, num_pods: int
) -> Sequence[str] | ServerFeatures:
  """Returns the features for a program of only one pod, with its rows."""
  if not isinstance(features, ServerFeatures):
    return features
  names, read_any = features

  def read(cpu: str, *given: Any) -> Sequence[tf.Tensor]:
    batches, step, part, num_parts = given
    part += pod * num_parts
    return read_any(cpu, batches, step, part, num_pods * num_parts)

  return ServerFeatures(names, read)


class Feature(NamedTuple):
  """Dtype and shape of one feature of a microbatch."""

  dtype: tf.DType
  shape: mtf.Shape  # the first dimension counts rows


class Stage(NamedTuple):
  """A stage of a pod, and its inputs for a microbatch."""

  mesh: mtf.Mesh
  placement: Placement
  features: dict[str, tf.Tensor]  # placeholders of a microbatch's rows
  # The same placeholders on the stage's other hosts, so no host sends rows.
  copies: list[dict[str, tf.Tensor]]
  numbers: dict[str, tf.Tensor]  # scalars such as the learning rate, by name
  batch: dict[str, mtf.Tensor]  # the rows, on the mesh
  # `Dropout.state` of the microbatch, [4] int32; None if DROPOUT is 0.
  dropout_state: mtf.Tensor | None
  # Operations that import tensors into the mesh. `find_parts` (mesh/stages.py)
  # counts operations that read the imported tensors to the same stage.
  imports: list[mtf.Operation]


def find_palm_features(
  names: Sequence[str],
  dims: Dims,
  teacher_tokens: int | None = None,
  neighbour_tokens: int = 0,
) -> dict[str, Feature]:
  """Returns the dtypes and shapes of PaLM's features.

  `teacher_tokens` is TEACHER_TOKENS, if there is a teacher, and
  `neighbour_tokens` the number of tokens of a row's neighbours.

  Raises UserError if a feature is unknown, or inputs or targets are missing.
  """
  for name in names:
    check_choice("feature", name, FEATURE_DTYPES)
  for name in REQUIRED_FEATURES:
    if name not in names:
      raise UserError(
        f"features = {', '.join(names)}: there is no {name}; every batch has "
        f"{' and '.join(REQUIRED_FEATURES)}."
      )
  taught = dims.vocab
  if "teacher_ids" in names:
    taught = mtf.Dimension("teacher_tokens", teacher_tokens)
  shape = dims.batch, dims.length, taught
  shapes = {name: shape[: _RANKS.get(name, 2)] for name in names}
  if "neighbours" in names:
    own = mtf.Dimension("length", neighbour_tokens)
    shapes["neighbours"] = dims.batch, own
  return {
    name: Feature(FEATURE_DTYPES[name], mtf.Shape(x))
    for name, x in shapes.items()
  }


def make_placeholders(
  features: Mapping[str, Feature], values: Sequence[tf.Tensor] | None = None
) -> dict[str, tf.Tensor]:
  """Makes a placeholder for each feature on the current device.

  `values` has the features' default values; None if every call feeds them all.
  """
  made = {}
  for i, (name, x) in enumerate(features.items()):
    shape = x.shape.to_integer_list
    if values is None:
      made[name] = tf.placeholder(x.dtype, shape, name)
    else:
      value = tf.ensure_shape(values[i], shape)
      made[name] = tf.placeholder_with_default(value, shape, name)
  return made


def import_features(
  mesh: mtf.Mesh,
  placement: CpuGpuPlacement,
  fed: Mapping[str, Mapping[str, tf.Tensor]],
  features: Mapping[str, Feature],
) -> dict[str, mtf.Tensor]:
  """Imports the features of a microbatch into a pod's mesh.

  `fed` is {name of a CPU device: {feature: placeholder on this CPU}}, with one
  CPU for each process that imports the features.
  """
  # A process sends to each of its devices only the rows of that device.
  return {
    name: placement.import_copies(
      mesh, {cpu: x[name] for cpu, x in fed.items()}, feature.shape
    )
    for name, feature in features.items()
  }
