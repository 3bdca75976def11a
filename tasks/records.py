# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO sources of evaluation records: datasets of TFDS, or JSON lines.

from palm_mtf.tasks import records
records.places.folder = "/data/sets"      # or
records.places.data_dir = "/data/tfds"
"""

# With `folder`, split "validation" of super_glue/boolq is the file
# /data/sets/super_glue/boolq/validation.jsonl. A line is one record in the form
# of TFDS: features by name, a sequence of features as an object of lists, a
# class as its number. The file may be compressed (validation.jsonl.gz). Without
# `folder`, the dataset must be prepared in `data_dir` or in TFDS's default
# folder, because nothing is downloaded.

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import gin
import numpy as np
import seqio
import tensorflow as tf

from palm_mtf.errors import UserError
from palm_mtf.user_text import COMPRESSIONS, read_json_lines


class Places(NamedTuple):
  """Folders of records.

  Attributes:
    folder: folder of JSON lines, <folder>/<dataset>/<split>.jsonl; None for
      TFDS.
    data_dir: folder of TFDS; None is its default.
  """

  folder: str | None
  data_dir: str | None


@gin.configurable
def places(folder: str | None = None, data_dir: str | None = None) -> Places:
  """Returns the folders of records, as gin sets them."""
  return Places(folder, data_dir)


class OrderedSource(seqio.FunctionDataSource):
  """A SeqIO source whose examples have the same order for every seed."""

  def __init__(
    self, read: Callable[[str], tf.data.Dataset], splits: Iterable[str]
  ):
    """Keeps `read`, which maps the name of a split to its dataset."""

    def dataset_fn(split, shuffle_files, seed=None):
      # Examples are numbered in order, and EVAL_EXAMPLES = n means the first n,
      # so that every checkpoint gets the same examples.
      del shuffle_files, seed
      return read(split)

    super().__init__(dataset_fn, splits=tuple(splits))


class RecordSource(OrderedSource):
  """A SeqIO source of the records of a dataset.

  Its features are "record", a record as JSON, and "origin", the place of the
  record for messages: file and line, or dataset and number.
  """

  def __init__(
    self, dataset: str, version: str | None, splits: Mapping[str, str]
  ):
    """Keeps the names; gin may set the folders later.

    Args:
      dataset: name and configuration in TFDS, such as "super_glue/boolq".
      version: version in TFDS; None if TFDS has no such dataset.
      splits: name of each split in TFDS.
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
      folder = os.path.expanduser(where.folder)
      records = _of_file(f"{folder}/{self._dataset}/{split}.jsonl")
    # JSON carries a record of any schema through TensorFlow as one string.
    return tf.data.Dataset.from_generator(
      lambda: (
        {"record": json.dumps(record), "origin": origin}
        for origin, record in records()
      ),
      output_signature={
        name: tf.TensorSpec((), tf.string) for name in ("record", "origin")
      },
    )

  def _of_tfds(
    self, split: str, data_dir: str | None
  ) -> Callable[[], Iterator[tuple[str, Any]]]:
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
    # SeqIO and TFDS raise these if a dataset or a version does not exist.
    except (AssertionError, ValueError, tf.errors.OpError) as error:
      line = str(error).strip().partition("\n")[0]
      raise UserError(
        f"{self._dataset}: not prepared in TFDS ({line}); prepare it, set "
        "records.places.data_dir, or set records.places.folder to JSON lines."
      ) from error
    return lambda: (
      (f"{self._dataset}, {split}, record {number:,}", _plain(record))
      for number, record in enumerate(dataset)
    )


def _of_file(path: str) -> Callable[[], Iterator[tuple[str, Any]]]:
  names = [f"{path}{suffix}" for suffix in ("", *COMPRESSIONS)]
  found = next(filter(os.path.exists, names), None)
  if found is None:
    raise UserError(
      f"records.places.folder: there is no file {path}; put the records there, "
      "one JSON object per line."
    )
  if not os.path.isfile(found):
    raise UserError(
      f"records.places.folder: {found} is a folder, a pipe or a device, and "
      "records are read more than once; put them into a file."
    )

  def read() -> Iterator[tuple[str, Any]]:
    for _, where, record in read_json_lines(found, found, "mend the line"):
      yield where, record

  return read


def _plain(value: Any) -> Any:
  """Returns a tensor, or a structure of tensors, as values for JSON."""
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
  if isinstance(value, bytes):  # neither broken UTF-8 nor a NUL is text
    return value.decode("utf-8", "replace").replace("\0", "\ufffd")
  return value
