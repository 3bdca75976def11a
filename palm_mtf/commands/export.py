# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf export`: writes the newest checkpoint for other software."""

import json
import logging
import math
import os
import shutil

from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.checkpoints.same_model import check_same_model, newest_checkpoint
from palm_mtf.config import Config
from palm_mtf.data.batches.packing import document_start
from palm_mtf.data.vocabulary.vocabulary import load_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.huggingface.architecture import architecture_of, to_config
from palm_mtf.huggingface.folder import VOCABULARY, WEIGHTS
from palm_mtf.huggingface.safetensors import write_safetensors
from palm_mtf.huggingface.tokenizer import (
  tokenizer_config,
  tokenizer_json,
  why_not_exact,
)
from palm_mtf.huggingface.weights import exported, tensor_shapes
from palm_mtf.model_dir.atomic_files import check_model_dir, new_folder

_logger = logging.getLogger(__name__)


def export(*, model_dir: str, config: Config, output: str, target: str) -> None:
  """Writes a folder that transformers loads, its weights in float32.

  Args:
    model_dir: MODEL_DIR of a training run.
    config: every setting; those of model and data are read.
    output: path of the folder to make.
    target: format of the folder, "hf".
  """
  assert target == "hf", target
  check_model_dir(model_dir)
  check_new(output)
  model, packing = config.model, config.data.packing
  architecture = architecture_of(model)
  shapes = parameter_shapes(model)
  checkpoint = newest_checkpoint(model_dir, shapes)
  vocabulary = load_vocabulary(
    model_dir, config.data, vocab_size=model.vocab_size
  )
  check_same_model(checkpoint, shapes, vocabulary.sha256)
  start_id = document_start(packing, vocabulary.eod_id)
  ids = {"start_id": start_id, "eod_id": vocabulary.eod_id}
  described = to_config(model, packing=packing, **ids)
  files = {
    "config.json": described,
    "generation_config.json": {
      name: described[name]
      for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    },
  }
  if reason := why_not_exact(vocabulary):
    _logger.warning(
      f"no tokenizer.json is written for {vocabulary.path}: {reason}; encode "
      f"with SentencePiece and {VOCABULARY}"
    )
  else:
    files["tokenizer.json"] = tokenizer_json(vocabulary, start_id)
    files["tokenizer_config.json"] = tokenizer_config(
      vocabulary, start_id=start_id, sequence_length=model.sequence_length
    )
  # TensorFlow takes seconds to import: wrong input is told before.
  from palm_mtf.checkpoints.arrays import array_reader

  tensors = tensor_shapes(model)
  num_bytes = 4 * sum(map(math.prod, tensors.values()))
  output = os.path.abspath(output)
  with new_folder(output, num_bytes, make_way=check_new) as folder:
    for name, content in files.items():
      with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    shutil.copyfile(vocabulary.path, os.path.join(folder, VOCABULARY))
    read = array_reader(checkpoint.prefix)
    write_safetensors(
      os.path.join(folder, WEIGHTS),
      tensors,
      exported(model, architecture, read),
    )
  step = checkpoint.manifest.step
  print(f"step {step} of {model_dir} is in {output}, a {architecture}")


def check_new(path: str) -> None:
  """Raises UserError if there is something at a path to be written."""
  if os.path.lexists(path):
    raise UserError(f"--output = {path!r}: exists; give a new folder.")
