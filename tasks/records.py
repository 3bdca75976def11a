# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the records of evaluation sets are: in TFDS, or in JSON lines.

  from palm_mtf.tasks import records
  records.places.folder = "/data/sets"      # or
  records.places.data_dir = "/data/tfds"

With a folder, split "validation" of super_glue/boolq is read from
/data/sets/super_glue/boolq/validation.jsonl: a line is one record as TFDS
yields it, features by their names, a sequence of features as an object of
lists, a class by its number. Without one, the dataset has to be prepared in
TFDS's own folder, or in `data_dir`; nothing is downloaded.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gin
import numpy as np
import seqio
import tensorflow as tf

from palm_mtf.errors import UserError


class Places(NamedTuple):
  """Where records are.

  Attributes:
    folder: folder of JSON lines, <folder>/<dataset>/<split>.jsonl; None for
    TFDS.
    data_dir: TFDS's folder, or None for its own default.
  """

  folder: str | None
  data_dir: str | None


@gin.configurable
def places(folder: str | None = None, data_dir: str | None = None) -> Places:
  """Returns where the records of all evaluation sets are."""
  return Places(folder, data_dir)


class OrderedSource(seqio.FunctionDataSource):
  """A SeqIO source in an order of its own, whatever seed SeqIO has."""

  def __init__(
    self, read: Callable[[str], tf.data.Dataset], splits: Iterable[str]
  ):
    """Reads nothing yet; `read` takes the name of a split."""

    def dataset_fn(split, shuffle_files, seed=None):
      del shuffle_files, seed
      return read(split)

    super().__init__(dataset_fn, splits=tuple(splits))


class RecordSource(OrderedSource):
  """A SeqIO source of feature "record": a record of a dataset, as JSON."""

  def __init__(
    self, dataset: str, version: str | None, splits: Mapping[str, str]
  ):
    """Reads nothing yet.

    Args:
      dataset: its name in TFDS, with its configuration.
      version: version of the dataset in TFDS; None if TFDS has no such dataset.
      splits: what TFDS calls each split.
    """
    self._dataset = dataset
    self._version = version
    self._names = splits
    super().__init__(self._read, splits)

  def _read(self, split: str) -> tf.data.Dataset:
    where = places()
    if where.folder is None:
      records = self._of_tfds(split, where.data_dir)
    else:
      records = _of_file(Path(where.folder) / self._dataset / f"{split}.jsonl")
    return tf.data.Dataset.from_generator(
      lambda: ({"record": json.dumps(record)} for record in records()),
      output_signature={"record": tf.TensorSpec((), tf.string)},
    )

  def _of_tfds(
    self, split: str, data_dir: str | None
  ) -> Callable[[], Iterator[Any]]:
    if self._version is None:
      raise UserError(
        f"{self._dataset} is not in TFDS: set records.places.folder to a "
        f"folder with {self._dataset}/{split}.jsonl."
      )
    try:
      dataset = seqio.TfdsDataSource(
        f"{self._dataset}:{self._version}",
        data_dir,
        splits={split: self._names[split]},
        read_only=True,
      ).get_dataset(split, shuffle=False)
    except (AssertionError, ValueError, tf.errors.OpError) as error:
      line = str(error).strip().partition("\n")[0]
      raise UserError(
        f"{self._dataset}: not prepared in TFDS ({line}); prepare it, set "
        "records.places.data_dir, or set records.places.folder to JSON lines."
      ) from error
    return lambda: map(_plain, dataset)


def _of_file(path: Path) -> Callable[[], Iterator[Any]]:
  if not path.is_file():
    raise UserError(
      f"records.places.folder: there is no file {path}; put the records there, "
      "one JSON object a line."
    )

  def read() -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
      for number, line in enumerate(file, 1):
        try:
          yield json.loads(line)
        except json.JSONDecodeError as error:
          raise UserError(
            f"{path}, line {number:,}: not JSON: {error}; mend the line."
          ) from error

  return read


def _plain(value: Any) -> Any:
  """Returns tensors as what JSON can hold."""
  if isinstance(value, dict):
    return {name: _plain(each) for name, each in value.items()}
  if isinstance(value, tf.RaggedTensor):
    return _plain(value.to_list())
  if isinstance(value, tf.Tensor):
    return _plain(value.numpy())
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, list):
    return [_plain(each) for each in value]
  return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
