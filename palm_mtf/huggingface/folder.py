# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The files of a model of transformers, whole or in shards."""

import json
import os

import numpy as np

from palm_mtf.errors import UserError
from palm_mtf.huggingface.safetensors import SafetensorsFile

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # {"weight_map": {tensor: file}}
# Of SentencePiece; transformers does not read it.
VOCABULARY = "vocabulary.model"


class TensorFiles:
  """The tensors of a folder.

  Attributes:
    shapes: shape of every tensor, by name.
  """

  def __init__(self, folder: str):
    """Reads the headers; raises UserError if a file is missing or broken."""
    index = os.path.join(folder, _INDEX)
    names = [WEIGHTS]
    if os.path.exists(index):
      try:
        with open(index, encoding="utf-8") as file:
          names = sorted(set(json.load(file)["weight_map"].values()))
      except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{index}: has no weight_map; copy it again.") from None
    files = [SafetensorsFile(os.path.join(folder, name)) for name in names]
    self._files = {name: file for file in files for name in file.shapes}
    self.shapes = {
      name: file.shapes[name] for name, file in self._files.items()
    }

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as float32; raises UserError for another dtype."""
    return self._files[name].read(name)
