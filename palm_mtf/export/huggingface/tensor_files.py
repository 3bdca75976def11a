# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The files of a model of transformers, whole or in shards."""

import os
import re
from collections.abc import Mapping

import numpy as np

from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.json_files import read_json_object, shown
from palm_mtf.export.huggingface.safetensors import SafetensorsFile

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # {"weight_map": {tensor: file}}
# Of SentencePiece; transformers does not read it.
VOCABULARY = "vocabulary.model"
# Files of weights: of PyTorch, TensorFlow, JAX, llama.cpp, ONNX, and of
# adapters, which transformers adds to the model.
_OF_WEIGHTS = re.compile(
  r".*\.(safetensors|bin|pt|pth|pkl|npz|h5|msgpack|gguf|onnx)"
  r"|.*\.ckpt(\.(index|data-.*))?|adapter_.*\.json",
  re.IGNORECASE,
)
# What the Trainer of transformers keeps next to the weights for itself.
_OF_TRAINER = re.compile(
  r"(training_args|optimizer|scheduler|scaler|rng_state\w*)\.(bin|pt|pth)"
)


class TensorFiles:
  """The tensors of a folder.

  Attributes:
    shapes: shape of every tensor, by name.
    dtypes: dtype of every tensor, by name.
  """

  def __init__(self, folder: str):
    """Reads the headers.

    Raises:
      UserError: a file is missing or broken, or the folder has weights that
        are not read.
    """
    self._files: dict[str, SafetensorsFile] = {}
    weight_map = _weight_map(folder)
    names = sorted({*weight_map.values()}) if weight_map else [WEIGHTS]
    for name in names:
      file = SafetensorsFile(os.path.join(folder, name))
      for tensor in file.shapes:
        if weight_map and weight_map.get(tensor) != name:
          raise UserError(
            f"{os.path.join(folder, name)}: its {shown(tensor)} is not listed "
            f"as this file's in {_INDEX}; copy the folder again."
          )
        self._files[tensor] = file
    for tensor in weight_map or ():
      if tensor not in self._files:
        raise UserError(
          f"{os.path.join(folder, _INDEX)}: {shown(tensor)} is not in "
          f"{weight_map[tensor]}; copy the folder again."
        )
    _check_no_other_weights(folder, names, _INDEX if weight_map else WEIGHTS)
    self.shapes = {x: file.shapes[x] for x, file in self._files.items()}
    self.dtypes = {x: file.dtypes[x] for x, file in self._files.items()}

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as float32; errors are those of SafetensorsFile."""
    return self._files[name].read(name)


def _weight_map(folder: str) -> Mapping[str, str] | None:
  """Returns the file of every tensor, by name; None for WEIGHTS.

  transformers reads WEIGHTS and no index where both are there.
  """
  path = os.path.join(folder, _INDEX)
  if not os.path.lexists(path) or os.path.lexists(
    os.path.join(folder, WEIGHTS)
  ):
    return None
  found = read_json_object(path, "copy the folder again").get("weight_map")
  if not isinstance(found, dict) or not found:
    raise UserError(f"{path}: has no weight_map; copy it again.")
  for file in found.values():
    if not isinstance(file, str) or not re.fullmatch(
      r"[^/\0]+\.safetensors", file
    ):
      raise UserError(
        f"{path}: weight_map names {shown(file)}; it names files of the "
        "folder that end in .safetensors."
      )
  return found


def _check_no_other_weights(folder: str, read: list[str], source: str) -> None:
  """Raises UserError if a folder has weights that are not read.

  Args:
    folder: path of the folder.
    read: names of the files that are read.
    source: name of the file that says so, for the message.
  """
  for name in sorted(os.listdir(folder)):
    if (
      name not in read
      and _OF_WEIGHTS.fullmatch(name)
      and not _OF_TRAINER.fullmatch(name)
    ):
      raise UserError(
        f"{folder}: only {source} is read, and {shown(name)} holds weights "
        f"too; if {source} is the whole model, move the other file out of the "
        "folder."
      )
