# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the tensors of a folder of transformers.

A safetensors file is a JSON header, then the bytes of all tensors:

8 bytes   length of the header, little-endian
header    {name: {"dtype": "F32", "shape": [...], "data_offsets": [a, b]}}
tensors   row-major; offsets count from the end of the header

The safetensors library reads the files. It checks that the tensors fill the
file without overlaps and holes, and that each tensor has the size of its dtype
and shape. This module writes the files, because the library needs all tensors
in memory to write a file.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping

import ml_dtypes  # noqa: F401 (gives NumPy "bfloat16" for safetensors)
import numpy as np
from safetensors import SafetensorError, safe_open

from palm_mtf.errors import UserError, shorten
from palm_mtf.model_dir.foreign_files import check_regular, read_json_object

_logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # {"weight_map": {tensor: file}}
# Weight files of PyTorch, TensorFlow, JAX, llama.cpp and ONNX, and of adapters.
_ENDINGS = r".*\.(safetensors|bin|pt|pth|pkl|npz|h5|msgpack|gguf|onnx)"
_WEIGHT_FILES = re.compile(
  rf"{_ENDINGS}|.*\.ckpt(\.(index|data-.*))?", re.IGNORECASE
)
# Names such as x.safetensors.bak, of files that are ignored with a warning.
_NEXT_TO_WEIGHTS = re.compile(rf"{_ENDINGS}\..+", re.IGNORECASE)
# Such files are refused: transformers would add their adapter to the model.
_ADAPTER_CONFIG = re.compile(r"adapter_.*\.json", re.IGNORECASE)
_SHARD = re.compile(r"[^/\0]+\.safetensors")
_MOST_NAMED = 3  # maximum number of files named in a warning
# Files of transformers' Trainer are not refused: they hold no model weights.
_TRAINER_FILES = re.compile(
  r"(training_args|optimizer|scheduler|scaler|rng_state\w*)\.(bin|pt|pth)"
)


class TensorFiles:
  """The tensors of a model in a folder of transformers."""

  def __init__(self, folder: str):
    """Reads the headers of the weight files in `folder`.

    Raises UserError if a file is missing or broken, or the folder also has
    weights that are not read.
    """
    self._files: dict[str, SafetensorsFile] = {}
    weight_map = _read_weight_map(folder)
    names = sorted({*weight_map.values()}) if weight_map else [WEIGHTS]
    for name in names:
      file = SafetensorsFile(os.path.join(folder, name))
      for tensor in file.shapes:
        if weight_map and weight_map.get(tensor) != name:
          raise UserError(
            f"{os.path.join(folder, name)}: its {shorten(tensor)} is not "
            f"listed as this file's in {_INDEX}; copy the folder again."
          )
        self._files[tensor] = file
    for tensor in weight_map or ():
      if tensor not in self._files:
        raise UserError(
          f"{os.path.join(folder, _INDEX)}: {shorten(tensor)} is not in "
          f"{weight_map[tensor]}; copy the folder again."
        )
    source = _INDEX if weight_map else WEIGHTS
    _check_no_other_weights(folder, names, source)
    _warn_of_ignored_files(folder, source)
    self.shapes = {x: file.shapes[x] for x, file in self._files.items()}
    self.dtypes = {x: file.dtypes[x] for x, file in self._files.items()}
    self.metadata = dict(
      pair for x in self._files.values() for pair in x.metadata.items()
    )

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as float32, as `SafetensorsFile.read` does."""
    return self._files[name].read(name)


def _read_weight_map(folder: str) -> Mapping[str, str] | None:
  # Returns {tensor: file} from the index; None if only WEIGHTS is read. If both
  # files exist, only WEIGHTS is read, as in transformers.
  path, whole = os.path.join(folder, _INDEX), os.path.join(folder, WEIGHTS)
  if not os.path.lexists(path) or os.path.lexists(whole):
    return None
  found = read_json_object(path, "copy the folder again").get("weight_map")
  if not isinstance(found, dict) or not found:
    raise UserError(f"{path}: has no weight_map; copy it again.")
  for file in found.values():
    if not isinstance(file, str) or not _SHARD.fullmatch(file):
      raise UserError(
        f"{path}: weight_map names {shorten(file)}; it names files of the "
        "folder that end in .safetensors."
      )
  return found


def _check_no_other_weights(folder: str, read: list[str], source: str) -> None:
  # Raises UserError for other weight files, which would change the model.
  for name in sorted(os.listdir(folder)):
    if name not in read and _is_weight_file(name):
      raise UserError(
        f"{folder}: only {source} is read, and {shorten(name)} holds "
        f"weights too; if {source} is the whole model, move the other file out "
        "of the folder."
      )
    if _ADAPTER_CONFIG.fullmatch(name):
      raise UserError(
        f"{folder}: {shorten(name)} is the configuration of an adapter, "
        "which palm_mtf does not apply; merge the adapter into the model, or "
        "move the file out of the folder."
      )


def _warn_of_ignored_files(folder: str, source: str) -> None:
  # Warns of weights in subfolders and of files such as x.safetensors.bak, which
  # transformers ignores too. `source` is the file, or the index, that is read.
  found = []
  for path, _, names in os.walk(folder):
    below = os.path.relpath(path, folder)
    for name in names:
      if below == ".":
        if _NEXT_TO_WEIGHTS.fullmatch(name) and name != source:
          found.append(name)
      elif _is_weight_file(name) or _ADAPTER_CONFIG.fullmatch(name):
        found.append(os.path.join(below, name))
  if found:
    shown = ", ".join(map(shorten, sorted(found)[:_MOST_NAMED]))
    more = len(found) - _MOST_NAMED
    _logger.warning(
      f"{folder}: only {source} is read; ignored: {shown}"
      f"{f' and {more:,} more' if more > 0 else ''}."
    )


def _is_weight_file(name: str) -> bool:
  return bool(
    _WEIGHT_FILES.fullmatch(name) and not _TRAINER_FILES.fullmatch(name)
  )


# As in the safetensors library, the first tensor is aligned to this many bytes.
_ALIGNMENT = 8
# The header of a model with 10,000 layers is 10 MB. The safetensors library
# accepts 100 MB, but reading that takes seconds and gigabytes of memory.
_MAX_HEADER_BYTES = 20_000_000
_DTYPES = ("F32", "F16", "BF16")
# Advice in error messages about quantized weights.
ORIGINAL = "give the original weights, or a GGUF file"


def write_safetensors(
  path: str,
  shapes: Mapping[str, tuple[int, ...]],
  read: Callable[[str], np.ndarray],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes float32 tensors to a file, with one tensor at a time in memory.

  `shapes` is {name: shape}, `read` returns the tensor that has a name, and
  `metadata` has texts that the file keeps.
  """
  texts = {"format": "pt", **(metadata or {})}
  header: dict[str, object] = {"__metadata__": texts}
  end = 0
  for name, shape in shapes.items():
    begin, end = end, end + 4 * math.prod(shape)
    header[name] = {
      "dtype": "F32",
      "shape": list(shape),
      "data_offsets": [begin, end],
    }
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  with open(path, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for name, shape in shapes.items():
      tensor = np.ascontiguousarray(read(name), "<f4")
      assert tensor.shape == tuple(shape), name
      file.write(tensor.data)


class SafetensorsFile:
  """A memory-mapped safetensors file.

  Attributes:
    shapes: {name of a tensor: shape}.
    dtypes: {name of a tensor: dtype, such as "F32"}.
    metadata: {key: text}.
  """

  def __init__(self, path: str):
    """Reads and checks the header.

    Raises UserError if the file is missing, or not a complete safetensors file.
    """
    self._path = path
    try:
      check_regular(path)
      with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
      if length > _MAX_HEADER_BYTES:
        raise SafetensorError(
          f"a header of {length:,} bytes; it has at most {_MAX_HEADER_BYTES:,}"
        )
      self._file = safe_open(path, framework="np")
    except SafetensorError as error:
      reason = str(error).removeprefix("Error while deserializing header: ")
      raise UserError(
        f"{path}: is no whole safetensors file: {shorten(reason)}; copy it "
        "again."
      ) from None
    except OSError as error:
      reason = error.strerror or str(error)
      raise UserError(f"{path}: {reason}.") from None
    slices = {name: self._file.get_slice(name) for name in self._file.keys()}
    self.shapes = {name: (*x.get_shape(),) for name, x in slices.items()}
    self.dtypes = {name: x.get_dtype() for name, x in slices.items()}
    self.metadata: Mapping[str, str] = self._file.metadata() or {}

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as float32.

    Raises UserError if the dtype is not float32, float16 or bfloat16, or an
    element is not finite.
    """
    dtype = self.dtypes[name]
    if dtype not in _DTYPES:
      raise UserError(
        f"{self._path}: its {name} is {dtype}; weights are F32, F16 or BF16; "
        f"{ORIGINAL}."
      )
    value = self._file.get_tensor(name).astype(np.float32, copy=False)
    check_finite(value, self._path, name)
    return value


def check_finite(value: np.ndarray, path: str, name: str) -> None:
  """Raises UserError if a tensor has a number that is not finite."""
  if not np.isfinite(value).all():
    raise UserError(
      f"{path}: its {name} holds a number that is not finite; give a model "
      "without such weights."
    )
