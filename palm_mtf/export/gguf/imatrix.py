# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's files of importance matrices: statistics of a text.

The file is a GGUF file. For each kernel, it has NAME.in_sum2, the sum of x^2 of
each input, and NAME.counts, the number of tokens, both for each expert of a
stack: [experts, inputs] and [experts, 1] float32. NAME is the kernel's name in
the GGUF file of the model.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from palm_mtf.architecture.column_statistics import ColumnStatistics
from palm_mtf.architecture.parameters import logits_table, parse_name
from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError, shorten
from palm_mtf.export.gguf.files import GgufFile, write_gguf
from palm_mtf.export.gguf.metadata import find_gguf_architecture
from palm_mtf.export.huggingface.weights import (
  find_tensor_shapes,
  find_tensors,
)
from palm_mtf.export.trained_model import Export, Reader, TrainedModel

_SUMS, _COUNTS = ".in_sum2", ".counts"
_TYPE = {"general.type": "imatrix"}


def make_imatrix(
  trained: TrainedModel,
  collect: Callable[[], Mapping[str, ColumnStatistics]],
  datasets: Sequence[str],
) -> Export:
  """Makes a file with the statistics that `collect` returns.

  They are those of the model over the texts `datasets`. Raises UserError if
  llama.cpp lacks the architecture.
  """
  model = trained.model
  kernels, architecture = _find_kernels(model), find_gguf_architecture(model)
  shapes = {
    name + end: (count, columns)
    for name, (count, inputs, _) in kernels.items()
    for end, columns in ((_SUMS, inputs), (_COUNTS, 1))
  }

  def write(path: str, read: Reader) -> None:
    del read  # the file has no weights
    statistics = collect()
    tensors = {}
    for name, (_, _, ours) in kernels.items():
      found = statistics[ours[0]]
      tensors |= {name + _SUMS: found.sums, name + _COUNTS: found.tokens}
    tokens = max(int(x.tokens.max()) for x in statistics.values())
    metadata = {
      **_TYPE,
      "general.architecture": architecture.name,
      **trained.gguf_origin,
      "imatrix.datasets": [*datasets],
      "imatrix.chunk_count": tokens // model.sequence_length,
      "imatrix.chunk_size": model.sequence_length,
    }
    given = path, metadata, shapes, "float32"
    write_gguf(*given, lambda name: tensors[name].reshape(shapes[name]))

  size = sum(4 * count * columns for count, columns in shapes.values())
  return Export("an imatrix", size, write)


def read_imatrix(path: str, model: ModelConfig) -> dict[str, ColumnStatistics]:
  """Returns {parameter: statistics}; the table of the logits may be missing.

  Raises UserError if there is no such file, it is broken, or it has statistics
  of another model.
  """
  file, found = GgufFile(path), {}
  if file.metadata.get("general.type") != _TYPE["general.type"]:
    raise UserError(
      f"{path}: is no imatrix; give a file of palm_mtf export "
      "--format=imatrix, or of llama-imatrix."
    )
  kernels = _find_kernels(model)
  for name, (count, inputs, ours) in kernels.items():
    wanted = {name + _SUMS: count * inputs, name + _COUNTS: count}
    if ours == [logits_table(model)] and file.shapes.keys().isdisjoint(wanted):
      continue
    for each, size in wanted.items():
      shape = file.shapes.get(each, ())
      if math.prod(shape) != size or not shape:
        raise UserError(
          f"{path}: {each} is {shape or 'missing'}, and the model wants "
          f"{size:,} numbers: it has statistics of another model, or of too "
          "little text; collect them from this model."
        )
    sums, tokens = (file.read(x).astype(np.float64) for x in wanted)
    stack = [count] if parse_name(ours[0]).is_expert else []
    statistics = ColumnStatistics(
      sums.reshape(*stack, inputs), tokens.reshape(stack).astype(np.int64)
    )
    found |= dict.fromkeys(ours, statistics)
  known = {name + x for name in kernels for x in (_SUMS, _COUNTS)}
  if unknown := sorted(file.shapes.keys() - known):
    raise UserError(
      f"{path}: has {shorten(unknown[0])}, which the model lacks: it has "
      "statistics of another model; collect them from this model."
    )
  return found


def _find_kernels(
  model: ModelConfig,
) -> dict[str, tuple[int, int, list[str]]]:
  """Returns {name in GGUF: numbers of experts and inputs, our parameters}.

  These are all kernels, and the table of the logits.
  """
  layout = find_gguf_architecture(model).layout
  shapes = find_tensor_shapes(model, layout)
  return {
    theirs: (math.prod(shapes[theirs][:-2]), shapes[theirs][-1], names)
    for theirs, names in find_tensors(model, layout).items()
    if names
    and (parse_name(names[0]).is_kernel or names == [logits_table(model)])
  }
