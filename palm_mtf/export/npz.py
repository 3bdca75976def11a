# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--format=npz: a folder with the weights as NumPy arrays.

weights.npz        every parameter by name, float32
config.json        macros of the architecture, constants and token ids
vocabulary.model   the SentencePiece model, or
tokenizer.json     the tokenizer, with tokenizer_config.json
"""

import math
import os
import zipfile

import numpy as np

from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.export.trained_model import Export, Reader, TrainedModel
from palm_mtf.json_text import json_text


def make_npz(trained: TrainedModel) -> Export:
  """Makes a folder with NumPy arrays, the settings and the vocabulary."""
  shapes = parameter_shapes(trained.model)

  def write(path: str, read: Reader) -> None:
    os.mkdir(path)
    described = {
      **trained.model.macros(),
      "PACKING": trained.config.data.packing,
      "start_id": trained.start_id,
      "prompt_start": trained.prompt_start,
      "eod_id": trained.vocabulary.eod_id,
      "end_ids": trained.vocabulary.end_ids,
      "step": trained.checkpoint.manifest.step,
    }
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
      file.write(json_text(described, indent=1))
    trained.vocabulary.write(path)
    # Do not call np.savez, because np.savez needs all arrays in memory.
    weights = os.path.join(path, "weights.npz")
    with zipfile.ZipFile(weights, "w") as archive:
      for name in shapes:
        with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
          np.lib.format.write_array(file, read(name), allow_pickle=False)

  num_bytes = 4 * sum(map(math.prod, shapes.values()))
  return Export("a folder of NumPy arrays", num_bytes, write)
