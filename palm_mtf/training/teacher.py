# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adds to batches what the teacher (TEACHER) predicts at each position.

The teacher reads the rows that the model reads. What it predicts, and which
tokens are drawn, depends only on teacher and row, not on other rows, steps or
SEED. So TEACHER_CACHE keeps "top" and "sampled": runs that resume, and other
runs, need the teacher only for new rows.
"""

import contextlib
import functools
import hashlib
import io
import logging
import os
from collections.abc import Iterator, Sequence

import numpy as np

from palm_mtf.checkpoints.teacher import teacher_model
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.generation.decode.teacher_program import TeachRows
from palm_mtf.generation.inference.scorer import count_rows_at_once
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.foreign_files import hash_file
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.training.job import TrainJob

_logger = logging.getLogger(__name__)

_FORMAT = 1  # of the files in TEACHER_CACHE


def _hash(content: bytes) -> bytes:
  return hashlib.blake2b(content, digest_size=16).digest()


class _KeptRows:
  """The features of rows in a folder, to which several runs may add.

  A file holds the rows of a call of `add`: an array of NumPy's, with a "key"
  and features. Its name is the hash of its content.
  """

  def __init__(self, folder: str):
    self._folder = folder
    self._places: dict[bytes, tuple[str, int]] = {}  # {key: (file, index)}
    self._open = functools.lru_cache(64)(
      functools.partial(np.load, mmap_mode="r")
    )
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
      # A damaged or incomplete file has another name than its hash.
      if f"{hash_file(entry.path)}.npy" == entry.name:
        self._index(entry.path)

  def _index(self, path: str) -> None:
    keys = self._open(path)["key"]
    self._places |= {x.tobytes(): (path, i) for i, x in enumerate(keys)}

  def __contains__(self, key: bytes) -> bool:
    return key in self._places

  def __getitem__(self, key: bytes) -> np.void:
    path, index = self._places[key]
    row: np.void = self._open(path)[index]
    return row

  def add(self, rows: np.ndarray) -> None:
    """Writes a file; UserError if the disk is full."""
    content = io.BytesIO()
    np.save(content, rows)
    name = f"{_hash(content.getvalue()).hex()}.npy"
    path = os.path.join(self._folder, name)
    write_atomically(path, content.getvalue())
    self._index(path)


class Teacher(contextlib.AbstractContextManager):
  """Adds `teacher_features` (LossConfig) to batches; none without TEACHER.

  The teacher's weights are loaded when rows need them.
  """

  def __init__(self, job: TrainJob):
    """Reads which rows are known, and loads no weights."""
    self._job, self._loss = job, job.config.loss
    self._scope = contextlib.ExitStack()
    self._load = functools.cache(self._open_teacher)
    if not job.teacher:
      return
    loss, model = self._loss, job.config.model
    count, length = loss.teacher_tokens, model.sequence_length
    if loss.teacher_targets == "full":
      count = job.config.mesh_layout.padded_vocab_size(model.vocab_size)
    dtypes = {"teacher_ids": "<i4", "teacher_log_p": "<f4"}
    fields = [(x, dtypes[x], (length, count)) for x in loss.teacher_features]
    self._row = np.dtype([("key", "V16"), *fields])
    form = loss.teacher_targets, count, loss.teacher_temperature
    size = count_rows_at_once(
      length, job.config.mesh_layout.axis_size_of("batch")
    )
    self._function = TeachRows(size, length, *form)
    settings = (_FORMAT, job.teacher.blake2b, model.activation_dtype, *form)
    folder = loss.teacher_cache or ModelDir(job.model_dir).teacher
    name = _hash(repr((*settings, length)).encode()).hex()
    self._kept = _KeptRows(os.path.join(os.path.expanduser(folder), name))

  def __exit__(self, *error: object) -> None:
    self._scope.__exit__(*error)

  def add(self, batch: Batch) -> Batch:
    """Returns the batch of a step with the teacher's features."""
    if not self._job.teacher:
      return batch
    inputs = batch["inputs"]
    given = inputs, batch.get("segments", np.ones_like(inputs))
    pairs = zip(*given, strict=True)
    keys = [_hash(x.tobytes() + y.tobytes()) for x, y in pairs]
    # A row may be in a batch twice.
    new = {key: i for i, key in enumerate(keys) if key not in self._kept}
    found: dict[bytes, np.void] = {}
    if new:
      rows = [*self._teach(*(x[[*new.values()]] for x in given), [*new])]
      found = dict(zip(new, rows, strict=True))
      if self._loss.teacher_targets != "full":
        self._kept.add(np.stack(rows))
    rows = [found[x] if x in found else self._kept[x] for x in keys]
    names = self._loss.teacher_features
    return batch | {
      name: np.stack([row[name] for row in rows]) for name in names
    }

  def add_nothing(self, batch: Batch) -> Batch:
    """Returns a batch with features of 0, to measure its cross-entropy."""
    if not self._job.teacher:
      return batch
    zeros = np.zeros(len(batch["inputs"]), self._row)
    return batch | {name: zeros[name] for name in self._loss.teacher_features}

  def _open_teacher(self) -> tuple[LoadedDecoder, object]:
    config, checkpoint = self._job.config, self._job.teacher
    assert checkpoint
    _logger.info(f"loading the teacher, {checkpoint.path}")
    model = teacher_model(checkpoint, config.model)
    loaded = self._scope.enter_context(
      LoadedDecoder(checkpoint, model, config.mesh_layout, pods=config.pods)
    )
    return loaded.client, loaded.build(self._function, "")

  def _teach(
    self, inputs: np.ndarray, segments: np.ndarray, keys: Sequence[bytes]
  ) -> Iterator[np.ndarray]:
    """Yields the row for each key; `inputs` and `segments` are [n, length]."""
    client, program = self._load()
    size, length = self._function.num_rows, self._function.length
    # A generator's numbers are a function of its key.
    uniform = [
      np.random.Generator(
        np.random.Philox(key=int.from_bytes(key, "little"))
      ).random(length, np.float32)
      for key in keys
    ]
    fed = {"inputs": inputs, "segments": segments, "uniform": np.stack(uniform)}
    for start in range(0, len(keys), size):
      stop = min(start + size, len(keys))
      padding = [[0, size - stop + start], [0, 0]]
      part = {x: np.pad(y[start:stop], padding) for x, y in fed.items()}
      found = client.call(program, part)
      for i in range(start, stop):
        row = np.zeros([], self._row)
        row["key"] = np.void(keys[i])
        for name, value in found.items():
          row[name] = value[i - start]
        yield row
