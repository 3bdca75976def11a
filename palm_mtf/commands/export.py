# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf export` and `import`: models for and from other software."""

import dataclasses
import functools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf import __version__
from palm_mtf.accounting.optimizer_state import NO_MOMENTS
from palm_mtf.adapters.merge import merged_reader
from palm_mtf.architecture.column_statistics import ColumnStatistics
from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.checkpoints.lineage import IMPORTED, LINK, hash_source
from palm_mtf.checkpoints.manifest import (
  WEIGHTS,
  Checkpoint,
  Manifest,
  write_manifest,
)
from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.config import Config, ModelConfig
from palm_mtf.config.macros import macros_of, values_of
from palm_mtf.data.vocabulary.chat import FILE_NAME as CHAT_FILE
from palm_mtf.data.vocabulary.chat import read_template
from palm_mtf.data.vocabulary.gguf_tokenizer import (
  read_gguf_ends,
  read_gguf_start,
  read_gguf_tokenizer,
  read_key,
)
from palm_mtf.data.vocabulary.load import open_vocabulary, read_start
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.adapter import make_gguf_adapter
from palm_mtf.export.gguf.files import GgufFile
from palm_mtf.export.gguf.imatrix import make_imatrix
from palm_mtf.export.gguf.metadata import read_model_metadata
from palm_mtf.export.gguf.mixtures import MIXTURES
from palm_mtf.export.gguf.model import (
  CHAT_TEMPLATE,
  import_gguf_parameters,
  make_gguf,
)
from palm_mtf.export.huggingface.config_json import read_config
from palm_mtf.export.huggingface.folder import make_hf
from palm_mtf.export.huggingface.peft import make_peft
from palm_mtf.export.huggingface.tensor_files import TensorFiles
from palm_mtf.export.huggingface.weights import check_tensors, import_parameters
from palm_mtf.export.npz import make_npz
from palm_mtf.export.saved_model.folder import make_saved_model
from palm_mtf.export.trained_model import TrainedModel
from palm_mtf.machine.activation_dtype import log_dtype, resolve_dtype
from palm_mtf.machine.host_memory import memory_bytes
from palm_mtf.model_dir.atomic_files import new_path
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.report.page import read_evaluations

_FORMATS = {"hf": make_hf, "npz": make_npz, "saved_model": make_saved_model}
_OF_ADAPTERS = ("hf", "gguf")  # formats that have adapters


def export(
  *,
  model_dir: str,
  config: Config,
  output: str,
  target: str,
  dtype: str,
  merge: bool = False,
  base_model: str | None = None,
  rounding: str | None = None,
  calibration: Sequence[str] = (),
  imatrix: str | None = None,
) -> None:
  """Writes a run's newest checkpoint in another software's format.

  Of an adapted run, writes the adapter if the format has adapters, or the whole
  model if it has none or `merge` is true. `base_model` is what the export calls
  the model with which the run began, if not by its id in the Hub's cache.
  `rounding` ("int8" or "int4") rounds kernels for WEIGHT_DTYPE. `calibration`
  has paths of texts, for statistics; without paths, the run's training text
  gives the statistics. `imatrix` is the path of statistics that weigh the
  errors of a mixture of types.
  """
  model = config.model
  is_adapter = model.adapter != "none" and target in _OF_ADAPTERS and not merge
  _check_adapter(model, target, merge=merge, base_model=base_model)
  _check_dtype(target, dtype, imatrix)
  if rounding and (is_adapter or dtype != "float32" or target == "imatrix"):
    raise UserError(
      f"--round = {rounding!r}: rounded kernels are exact only in float32, and "
      "in a whole model; use another --format, --dtype=float32 or --merge."
    )
  if calibration and not rounding and target != "imatrix":
    raise UserError(
      f"--calibration = {', '.join(calibration)}: give --round or "
      "--format=imatrix, which need statistics, or leave it out."
    )
  checkpoint, vocabulary = open_newest(model_dir, config)
  given = model_dir, config, checkpoint, vocabulary, calibration
  collect = functools.partial(_collect, *given)
  if not is_adapter:
    config = dataclasses.replace(config, model=model.base)
  kind = "merged" if model != config.model else "exported"
  kind = "quantized" if rounding or dtype != "float32" else kind
  step = checkpoint.manifest.step
  results = read_evaluations(ModelDir(model_dir).evaluations)
  results = [x for x in results if x["step"] == step]
  trained = TrainedModel(
    *(config, checkpoint, vocabulary, kind, results),
    folder=os.path.dirname(os.path.abspath(output)),
    given_base=base_model,
  )
  if target == "imatrix":
    datasets = [*map(trained.publish, calibration or [model_dir])]
    exported = make_imatrix(trained, collect, datasets)
  elif target == "gguf" and is_adapter:
    exported = make_gguf_adapter(trained, dtype)
  elif target == "gguf":
    exported = make_gguf(trained, dtype, imatrix)
  else:
    exported = make_peft(trained) if is_adapter else _FORMATS[target](trained)
  output = os.path.abspath(os.path.join(output, exported.subfolder))
  check_new(output)
  from palm_mtf.checkpoints.variables import array_reader

  with new_path(output, exported.num_bytes, make_way=check_new) as path:
    read = array_reader(checkpoint)
    read = read if is_adapter else merged_reader(model, read)
    if rounding:
      from palm_mtf.compression.rounding import rounding_reader

      statistics = collect(hessians=True)
      read = rounding_reader(model.base, read, statistics, rounding)
    exported.write(path, read)
  print(f"step {step} of {model_dir} is in {output}, {exported.kind}")


def _check_adapter(
  model: ModelConfig, target: str, *, merge: bool, base_model: str | None
) -> None:
  if merge and model.adapter == "none":
    raise UserError(
      'ADAPTER = "none": there is nothing to merge; leave --merge out.'
    )
  if model.adapter_length and (merge or target != "hf"):
    raise UserError(
      f"ADAPTER = {model.adapter!r} and "
      f"{'--merge' if merge else f'--format={target}'}: the model's kernels "
      "cannot hold the adapter; use --format=hf, which writes it for PEFT."
    )
  if base_model and target not in _OF_ADAPTERS:
    raise UserError(
      f"--base_model = {base_model!r}: --format={target} names no base; leave "
      "it out."
    )


def _check_dtype(target: str, dtype: str, imatrix: str | None) -> None:
  if target != "gguf" and dtype != "float32":
    raise UserError(
      f"--dtype = {dtype!r}: --format={target} is written in float32; leave it "
      "out, or use --format=gguf."
    )
  if imatrix and dtype not in MIXTURES:
    raise UserError(
      f"--imatrix = {imatrix!r}: weighs errors of the mixtures; give "
      f"--format=gguf and --dtype={' or '.join(MIXTURES)}, or leave it out."
    )


def _collect(
  model_dir: str,
  config: Config,
  checkpoint: Checkpoint,
  vocabulary: Vocabulary,
  texts: Sequence[str],
  *,
  hessians: bool = False,
) -> dict[str, ColumnStatistics]:
  """Returns the statistics of a run's newest checkpoint over texts."""
  from palm_mtf.compression.calibration import calibration_batches
  from palm_mtf.compression.statistics import collect_statistics

  batches = calibration_batches(model_dir, config, vocabulary, texts)
  model = resolve_dtype(config.model, config.mesh_layout)
  log_dtype(model, config.mesh_layout)
  return collect_statistics(checkpoint, model, batches, hessians=hessians)


def check_new(path: str) -> None:
  """Raises UserError if `path`, the value of --output, already exists."""
  if os.path.lexists(path):
    raise UserError(f"--output = {path!r}: exists; give another path.")


class _Foreign(NamedTuple):
  # A model that other software has written.
  model: ModelConfig
  data: Mapping[str, object]  # {macro of DataConfig: value}
  vocabulary: Vocabulary
  chat_template: str  # "" if there is none
  files: TensorFiles | GgufFile
  read: Callable[[], dict[str, np.ndarray]]  # returns parameters by name


def import_model(
  *, folder: str, output: str, vocabulary_path: str | None
) -> None:
  """Makes a MODEL_DIR with a checkpoint of step 0 from an imported model.

  `folder` is a folder of Hugging Face transformers, or a GGUF file.
  """
  check_new(output)
  open_model = _open_folder if os.path.isdir(folder) else _open_gguf
  with tempfile.TemporaryDirectory() as scratch:
    found = open_model(folder, vocabulary_path, scratch)
  found.vocabulary.check_size(found.model.vocab_size)
  num_bytes = _check_memory(found.files, folder)
  parameters = found.read()
  from palm_mtf.checkpoints.variables import write_arrays

  output = os.path.abspath(output)
  with new_path(output, num_bytes, make_way=check_new) as partial:
    paths = ModelDir(partial)
    checkpoint = paths.checkpoint(0)
    os.makedirs(checkpoint)
    write_arrays(os.path.join(checkpoint, WEIGHTS), parameters)
    manifest = Manifest(
      shapes=parameter_shapes(found.model),
      vocabulary_sha256=found.vocabulary.sha256,
      data={},
      settings=found.model.macros()
      | {**found.data, "SECOND_MOMENT": NO_MOMENTS},
      versions={"palm_mtf": __version__},
      origin=_describe_source(folder, found.files),
    )
    write_manifest(checkpoint, manifest)
    found.vocabulary.write(partial)
    if found.chat_template:
      path = os.path.join(partial, CHAT_FILE)
      with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(found.chat_template)
    with open(paths.config, "w", encoding="utf-8") as file:
      file.write(_format_gin(found.model, found.data))
  if not found.data["ADD_START"]:
    end = found.vocabulary.piece(found.vocabulary.eod_id)
    print(
      "no start token stands before texts, as in the model's tokenizer; the "
      f"log p of a first token is that after {end}, which separates documents"
    )
  print(f"{folder} is in {output}: give it as --model_dir or INIT_CHECKPOINT")


def _describe_source(
  path: str, files: TensorFiles | GgufFile
) -> dict[str, object]:
  """Returns `origin` of the manifest of an imported model."""
  path, metadata = os.path.abspath(path), files.metadata
  try:
    values = (IMPORTED, path, hash_source(path))
  except OSError as error:
    raise UserError(f"{error.filename}: {error.strerror}; copy it.") from None
  found: dict[str, object] = dict(zip(LINK, values, strict=True))
  if f"palm_mtf.{LINK[0]}" in metadata:
    texts = {x: read_key(metadata, f"palm_mtf.{x}", str) for x in LINK}
    # The export has a path relative to its folder.
    place = os.path.join(os.path.dirname(path), texts["checkpoint"])
    found["origin"] = {**texts, "checkpoint": os.path.normpath(place)}
  return found


def _open_folder(
  folder: str, vocabulary_path: str | None, scratch: str
) -> _Foreign:
  del scratch
  described = read_config(folder)
  model, family = described.model, described.family
  own = ModelDir(folder).vocabulary, os.path.join(folder, "tokenizer.model")
  found = [x for x in own if os.path.exists(x)]
  paths = [vocabulary_path] if vocabulary_path else found
  if not paths:
    raise UserError(
      f"{folder}: has none of vocabulary.model, tokenizer.json and "
      "tokenizer.model; give --vocabulary PATH, the vocabulary of its ids."
    )
  for path in paths:
    vocabulary = open_vocabulary(
      path, setting="--vocabulary", model_folder=folder
    )
    # The tokenizer.json of a Gemma 3 for texts also has a token for images,
    # for which the embedding has no row, and its tokenizer.model does not.
    if vocabulary.size <= model.vocab_size:
      break
  files = TensorFiles(folder)

  def read() -> dict[str, np.ndarray]:
    layout = family.in_files(files.shapes, model.num_layers)
    check_tensors(files, model, layout, folder)
    return import_parameters(model, layout, files.read)

  added = read_start(vocabulary, described.start_id)
  data = _make_data(model, vocabulary, described.start_id, added)
  data["PACKING"] = described.packing
  has_pad = described.packing != "joined" and vocabulary.is_control(0)
  if described.is_own and added == (0 if has_pad else vocabulary.eod_id):
    data["START_ID"] = None  # the default, which is the same id
  template = read_template(folder)
  return _Foreign(model, data, vocabulary, template, files, read)


def _open_gguf(
  path: str, vocabulary_path: str | None, scratch: str
) -> _Foreign:
  file = GgufFile(path)
  own, model = read_model_metadata(file.metadata, file.shapes, path, file.read)
  try:
    read = read_gguf_ends if vocabulary_path else read_gguf_tokenizer
    content = read(file.metadata)
    starts = read_gguf_start(file.metadata)
    template = read_key(file.metadata, CHAT_TEMPLATE, str, "")
  except UserError as error:
    raise UserError(f"{path}: {error}") from None
  # Write the vocabulary to files, because vocabularies are opened by path.
  for name, value in content.items():
    with open(os.path.join(scratch, name), "wb") as part:
      part.write(value)
  vocabulary = open_vocabulary(
    vocabulary_path or os.path.join(scratch, next(iter(content))),
    setting="--vocabulary",
    source="" if vocabulary_path else path,
    model_folder=scratch,
  )
  data = _make_data(model, vocabulary, *starts)

  def read_all() -> dict[str, np.ndarray]:
    return import_gguf_parameters(file, model, own, path)

  return _Foreign(model, data, vocabulary, template, file, read_all)


def _make_data(
  model: ModelConfig,
  vocabulary: Vocabulary,
  bos_id: int | None,
  added: int | None,
) -> dict[str, object]:
  # Returns macros of DataConfig. The tokenizer puts token `added` before each
  # text unless `added` is None, and names `bos_id` as the start token.
  start = added if vocabulary.has_id(added) else None
  adds_start = start is not None
  # Do not use a `bos_id` that is an ordinary token, such as "!" with id 0.
  if not adds_start and vocabulary.has_id(bos_id):
    start = bos_id if vocabulary.is_control(bos_id) else None
  return {
    "PACKING": "packed",
    "START_ID": start,
    "ADD_START": adds_start,
    "CONTEXT_LENGTH": model.sequence_length,
  }


def _check_memory(files: TensorFiles | GgufFile, folder: str) -> int:
  """Returns the bytes of all tensors in float32, which must fit in memory."""
  # Check before reading, because a small sparse file can claim huge shapes.
  needed = 4 * sum(map(math.prod, files.shapes.values()))
  memory, _ = memory_bytes()  # at most the container's limit
  if needed > memory:
    raise UserError(
      f"{folder}: its weights need {needed:,} bytes in float32, and this "
      f"machine has {memory:,} of memory; use a larger machine."
    )
  return needed


def _format_gin(model: ModelConfig, data: Mapping[str, object]) -> str:
  # Returns the text of config.gin, a recipe to finetune `model`. It omits the
  # model's settings that have their default values.
  settings = {**values_of(model), **data}
  defaults = {**macros_of(ModelConfig), "START_ID": None, "ADD_START": True}
  lines = [
    'include "recipes/finetune.gin"',
    # The user has to set TASK or TEXT_FILES. Until then, the error message that
    # no file matches TEXT_FILES shows this text.
    "TASK = None",
    'TEXT_FILES = "set TEXT_FILES or TASK"',
    "VOCABULARY = None",  # None stands for the vocabulary in MODEL_DIR
    # Turn the recipe's dropout off: it would raise the loss of a model that was
    # trained without dropout more than finetuning lowers the loss.
    "DROPOUT = 0.0",
    *(
      f"{name} = {value!r}"
      for name, value in settings.items()
      if name not in defaults or value != defaults[name]
    ),
  ]
  return "\n".join(lines) + "\n"
