# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The features of a batch that a pod is fed, [batch, length] each."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError, check_choice
from palm_mtf.mesh.placement import Placement
from palm_mtf.model.dims import Dims

FEATURE_DTYPES = {
  "inputs": tf.int32,  # the tokens before `targets`
  "targets": tf.int32,  # the tokens to predict
  "segments": tf.int32,  # attention stays among equal numbers; else in a row
  "loss_weights": tf.float32,  # of each target in the mean loss; else 1
}
REQUIRED_FEATURES = ("inputs", "targets")


# Reads the features of a microbatch on a host, given the name of its CPU, the
# number of the step, [] int64, the part of the step's batch that the microbatch
# is, [] int32, and the number of parts.
ReadFeatures = Callable[[str, tf.Tensor, tf.Tensor, int], Sequence[tf.Tensor]]


class HostFeatures(NamedTuple):
  """Features that hosts read themselves where they are not fed."""

  names: Sequence[str]
  read: ReadFeatures


def placeholders(
  names: Sequence[str],
  dims: Dims,
  values: Sequence[tf.Tensor] | None = None,
) -> dict[str, tf.Tensor]:
  """Returns the placeholder of each feature, on the current device.

  Args:
    names: names of the features.
    dims: dimensions of the model.
    values: value of each feature where it is not fed.

  Raises:
    UserError: there is no such feature, or inputs or targets are missing.
  """
  for name in names:
    check_choice("feature", name, FEATURE_DTYPES)
  for name in REQUIRED_FEATURES:
    if name not in names:
      raise UserError(
        f"features = {', '.join(names)}: there is no {name}; every batch has "
        f"{' and '.join(REQUIRED_FEATURES)}."
      )
  shape = [dims.batch.size, dims.length.size]
  if values is None:
    return {
      name: tf.placeholder(FEATURE_DTYPES[name], shape, name) for name in names
    }
  return {
    name: tf.placeholder_with_default(
      tf.ensure_shape(value, shape), shape, name
    )
    for name, value in zip(names, values, strict=True)
  }


def import_features(
  mesh: mtf.Mesh,
  placement: Placement,
  features: Mapping[str, Mapping[str, tf.Tensor]],
  dims: Dims,
) -> dict[str, mtf.Tensor]:
  """Returns the features on a mesh, [batch, length] each.

  Args:
    mesh: mesh of the pod.
    placement: its devices.
    features: placeholders of each host that imports, by the name of its CPU.
    dims: dimensions of the model.
  """
  # host -> each device: its rows
  shape = mtf.Shape([dims.batch, dims.length])
  names = next(iter(features.values()))
  return {
    name: placement.import_copies(
      mesh, {host: x[name] for host, x in features.items()}, shape
    )
    for name in names
  }
