# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf export`: writes the newest checkpoint for other software."""

import os

from palm_mtf.checkpoints.same_model import open_newest
from palm_mtf.config import Config
from palm_mtf.errors import UserError
from palm_mtf.export.gguf import make_gguf
from palm_mtf.export.huggingface.folder import make_hf
from palm_mtf.export.npz import make_npz
from palm_mtf.export.saved_model.folder import make_saved_model
from palm_mtf.export.trained_model import TrainedModel
from palm_mtf.model_dir.atomic_files import new_path

_FORMATS = {
  "hf": make_hf,
  "npz": make_npz,
  "saved_model": make_saved_model,
}


def export(
  *, model_dir: str, config: Config, output: str, target: str, dtype: str
) -> None:
  """Writes a run's newest checkpoint in a format of other software."""
  if target != "gguf" and dtype != "float32":
    raise UserError(
      f"--dtype = {dtype!r}: --format={target} is written in float32; leave it "
      "out, or use --format=gguf."
    )
  checkpoint, vocabulary = open_newest(model_dir, config)
  trained = TrainedModel(config, checkpoint, vocabulary)
  if target == "gguf":
    exported = make_gguf(trained, dtype)
  else:
    exported = _FORMATS[target](trained)
  output = os.path.abspath(os.path.join(output, exported.subfolder))
  check_new(output)
  # Import TensorFlow, which takes seconds, only after all checks.
  from palm_mtf.checkpoints.variables import array_reader

  with new_path(output, exported.num_bytes, make_way=check_new) as path:
    exported.write(path, array_reader(checkpoint.prefix))
  step = checkpoint.manifest.step
  print(f"step {step} of {model_dir} is in {output}, {exported.kind}")


def check_new(path: str) -> None:
  """Raises UserError if `path`, the value of --output, already exists."""
  if os.path.lexists(path):
    raise UserError(f"--output = {path!r}: exists; give another path.")
