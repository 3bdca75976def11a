# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--format=hf: a folder that Hugging Face transformers loads."""

import logging
import math
import os

from palm_mtf.export.huggingface.config_json import (
  find_architecture,
  make_config,
)
from palm_mtf.export.huggingface.tensor_files import (
  VOCABULARY,
  WEIGHTS,
  write_safetensors,
)
from palm_mtf.export.huggingface.tokenizer import (
  explain_inexact,
  make_tokenizer_config,
  make_tokenizer_json,
)
from palm_mtf.export.huggingface.weights import (
  find_tensor_shapes,
  make_tensor_reader,
)
from palm_mtf.export.trained_model import Reader, TrainedModel
from palm_mtf.json_text import json_text

_logger = logging.getLogger(__name__)


class HuggingFaceFolder:
  """The export `Format` of a folder that transformers loads, in float32."""

  subfolder = ""

  def __init__(self, trained: TrainedModel):
    """Raises UserError if no class of transformers computes the model."""
    self._trained = trained
    self._architecture = find_architecture(trained.model)
    self._shapes = find_tensor_shapes(trained.model)
    self.num_bytes = 4 * sum(map(math.prod, self._shapes.values()))
    self.kind = f"a {self._architecture}"

  def write(self, path: str, read: Reader) -> None:
    """Writes safetensors, configuration and tokenizer; see `Format`."""
    os.mkdir(path)
    for name, content in self._make_json_files().items():
      with open(os.path.join(path, name), "w", encoding="utf-8") as file:
        file.write(json_text(content, indent=1))
    with open(os.path.join(path, VOCABULARY), "wb") as file:
      file.write(self._trained.vocabulary.model)
    write_safetensors(
      os.path.join(path, WEIGHTS),
      self._shapes,
      make_tensor_reader(self._trained.model, self._architecture, read),
    )

  def _make_json_files(self) -> dict[str, object]:
    model, vocabulary = self._trained.model, self._trained.vocabulary
    start_id = self._trained.start_id
    described = make_config(
      model,
      start_id=start_id,
      eod_id=vocabulary.eod_id,
      packing=self._trained.config.data.packing,
    )
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    files = {
      "config.json": described,
      "generation_config.json": {name: described[name] for name in ids},
    }
    if reason := explain_inexact(vocabulary):
      _logger.warning(
        f"no tokenizer.json is written for {vocabulary.path}: {reason}; "
        f"encode with SentencePiece and {VOCABULARY}"
      )
      return files
    return files | {
      "tokenizer.json": make_tokenizer_json(vocabulary, start_id),
      "tokenizer_config.json": make_tokenizer_config(
        vocabulary, start_id=start_id, sequence_length=model.sequence_length
      ),
    }
