# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--adapter: adds an adapter to the model that a command decodes.

The adapter is that of another run, or in a folder of PEFT. The command decodes
a checkpoint whose own files have the adapter, as those of an adapted run.
"""

import dataclasses
import hashlib
import os
import tempfile
from typing import TYPE_CHECKING

from palm_mtf.architecture.parameters import saved_shapes
from palm_mtf.checkpoints.manifest import WEIGHTS, Checkpoint, OpenWeights
from palm_mtf.checkpoints.weights_to_load import (
  check_same_model,
  find_weights,
  settings_of,
)
from palm_mtf.config import Config, ModelConfig, mesh_layout
from palm_mtf.errors import UserError

if TYPE_CHECKING:  # the module imports TensorFlow
  from palm_mtf.generation.inference.adapters import Factors


def add_adapter(
  path: str | None,
  config: Config,
  checkpoint: Checkpoint,
  flag: str = "--adapter",
) -> tuple[Config, Checkpoint]:
  """Returns settings and checkpoint with the adapter at `path`, if any.

  Args:
    path: the value of --adapter: a folder of PEFT; or of an adapted run, or of
      a checkpoint of such a run. None for no adapter.
    config: settings of the base.
    checkpoint: the base, held open.
    flag: what has the path, for messages.

  Raises UserError if there is no adapter, or if it is damaged or belongs to
  another base.
  """
  if path is None:
    return config, checkpoint
  from palm_mtf.export.huggingface.peft import CONFIG  # slow to import

  given = f"{flag} = {path!r}"
  if config.model.adapter != "none":
    raise UserError(
      f"{given}: the model of MODEL_DIR has an adapter already; give the "
      "MODEL_DIR of its base."
    )
  path = os.path.expanduser(path)
  is_peft = os.path.lexists(os.path.join(path, CONFIG))
  open_files = _read_peft_folder if is_peft else _open_run
  found = open_files(path, config.model, checkpoint, flag)
  model, files, digest, base = found
  if base not in ("", checkpoint.blake2b):
    raise UserError(
      f"{given}: adapts a checkpoint with the hash {base}, and "
      f"{checkpoint.path} has {checkpoint.blake2b}; give the MODEL_DIR of its "
      "base."
    )
  mesh_layout.check_layout(config.mesh_layout, model)
  shapes, own = saved_shapes(model), checkpoint.as_parent
  manifest = dataclasses.replace(checkpoint.manifest, shapes=shapes, base=own)
  both = hashlib.blake2b((checkpoint.blake2b + digest).encode(), digest_size=16)
  checkpoint = dataclasses.replace(
    checkpoint,
    manifest=manifest,
    blake2b=both.hexdigest(),
    held=files,
    base=checkpoint.held,
  )
  return dataclasses.replace(config, model=model), checkpoint


# Settings, files and hash of the adapter, and the hash of its base, or "".
_Opened = tuple[ModelConfig, OpenWeights, str, str]


def _open_run(
  path: str, base: ModelConfig, of: Checkpoint, flag: str
) -> _Opened:
  del of
  weights = find_weights(flag, path)
  found = weights.checkpoint
  if not found or not found.manifest.base:
    raise UserError(
      f"{weights.given}: {weights.place} has no adapter; give the MODEL_DIR of "
      "an adapted run, or a folder of PEFT."
    )
  settings = {
    name.lower(): value
    for name, value in settings_of(found.manifest).items()
    if name.startswith("ADAPTER")
  }
  model = dataclasses.replace(base, **settings)
  check_same_model(found, saved_shapes(model))
  return model, weights.files, found.blake2b, found.manifest.base["blake2b"]


def _read_peft_folder(
  path: str, base: ModelConfig, of: Checkpoint, flag: str
) -> _Opened:
  del flag  # messages name files
  from palm_mtf.checkpoints.variables import array_reader, write_arrays
  from palm_mtf.export.huggingface.peft import read_peft

  found = read_peft(path, base, array_reader(of))
  with tempfile.TemporaryDirectory() as folder:
    write_arrays(os.path.join(folder, WEIGHTS), found.parameters)
    files = OpenWeights(os.path.join(folder, WEIGHTS))
  return found.model, files, "".join(files.hashes()), found.base


def read_factors(
  config: Config, checkpoint: Checkpoint, path: str, flag: str
) -> "Factors":
  """Returns the factors of an adapter for texts of a server.

  Args:
    config: settings of the base.
    checkpoint: the base, held open.
    path: as for `add_adapter`.
    flag: what has the path, for messages.

  Raises UserError as `add_adapter` does, or if a server cannot add the adapter.
  """
  from palm_mtf._tf import tf
  from palm_mtf.checkpoints.variables import array_reader
  from palm_mtf.generation.inference.adapters import find_factors

  try:
    adapted, both = add_adapter(path, config, checkpoint, flag)
    if adapted.model.adapter != "lora":
      raise UserError(
        f"{flag} = {path!r}: has ADAPTER = {adapted.model.adapter!r}, and a "
        "server adds only factors of 'lora' to the products that texts share; "
        "serve the adapted run itself."
      )
    return find_factors(adapted.model, array_reader(both))
  except (OSError, tf.errors.OpError) as error:
    reason = str(error).partition("\n")[0]
    raise UserError(f"{flag} = {path!r}: {reason}") from None
