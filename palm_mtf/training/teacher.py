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
import glob
import hashlib
import io
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from palm_mtf.checkpoints.teacher import teacher_model
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.generation.decode.teacher_program import TeachRows
from palm_mtf.generation.inference.scorer import count_rows_at_once
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.model_dir.atomic_files import writing
from palm_mtf.model_dir.foreign_files import hash_file
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program
from palm_mtf.training.job import TrainJob

_logger = logging.getLogger(__name__)

_FORMAT = 1  # of the files in TEACHER_CACHE


class _KeptRows:
  """The features of rows in a folder, to which several runs may add.

  A file, in NumPy's format, holds the rows of a call of `add`. Its name is the
  hash of its content, so that files need not be flushed to the disk: a damaged
  or incomplete file has another name than its hash, and is left out.
  """

  def __init__(self, folder: str):
    self._folder = folder
    self._places: dict[bytes, tuple[str, int]] = {}  # {key: (file, index)}
    for path in glob.glob(f"{glob.escape(folder)}/*.npy"):
      with contextlib.suppress(OSError):  # removed by now, or not readable
        if f"{hash_file(path)}.npy" == os.path.basename(path):
          self._index(path)

  def _index(self, path: str) -> None:
    keys = _open_rows(path)["key"]
    self._places |= {x.tobytes(): (path, i) for i, x in enumerate(keys)}

  def read(self, keys: Iterable[bytes]) -> dict[bytes, np.void]:
    """Returns {key: row} of the keys that have a row."""
    found = [(x, *self._places[x]) for x in keys if x in self._places]
    return {key: _open_rows(path)[index] for key, path, index in found}

  def add(self, rows: np.ndarray) -> None:
    """Writes a file; UserError if the disk is full."""
    content = io.BytesIO()
    np.save(content, rows)
    name = f"{_hash(content.getvalue()).hex()}.npy"
    path = os.path.join(self._folder, name)
    # Runs on several machines may write this file now, with equal process ids.
    temporary = f"{path}.{secrets.token_hex(4)}"
    with writing(path, content.tell()):
      os.makedirs(self._folder, exist_ok=True)
      with open(temporary, "wb") as file:
        file.write(content.getvalue())
      # Another run may have this file open, so do not write over it.
      os.replace(temporary, path)
    self._index(path)


_open_rows = functools.lru_cache(64)(functools.partial(np.load, mmap_mode="r"))


class Teacher(contextlib.AbstractContextManager):
  """Adds `teacher_features` (LossConfig) to batches; none without TEACHER.

  The teacher's weights are loaded when a row needs them.
  """

  def __init__(self, job: TrainJob, expect_slow: Callable[[], None]):
    """Finds the rows in TEACHER_CACHE.

    `expect_slow` tells the watchdog that the teacher is loaded next.
    """
    self._job, self._names = job, job.config.loss.teacher_features
    self._scope, self._expect_slow = contextlib.ExitStack(), expect_slow
    self._load = functools.cache(self._open_teacher)
    if not job.teacher:
      return
    config, loss = job.config, job.config.loss
    model, mesh = config.model, config.mesh_layout
    count, length = loss.teacher_tokens, model.sequence_length
    if loss.teacher_targets == "full":
      count = mesh.padded_vocab_size(model.vocab_size)
    dtypes = {"teacher_ids": "<i4", "teacher_log_p": "<f4"}
    fields = [(x, dtypes[x], (length, count)) for x in self._names]
    self._row = np.dtype([("key", "V16"), *fields])
    form = loss.teacher_targets, count, loss.teacher_temperature
    slices = mesh.axis_size_of("batch")
    most = -(-config.run.batch_sizes.largest // slices) * slices
    size = min(most, count_rows_at_once(length, slices))
    self._function = TeachRows(size, length, *form)
    teacher = job.teacher.blake2b, model.activation_dtype
    folder = loss.teacher_cache or ModelDir(job.model_dir).teacher
    name = _hash(repr((_FORMAT, *teacher, *form, length)).encode()).hex()
    self._kept = _KeptRows(os.path.join(os.path.expanduser(folder), name))

  def __exit__(self, *error: object) -> None:
    self._scope.__exit__(*error)

  def add(self, batch: Batch) -> Batch:
    """Returns the batch of a step with the teacher's features."""
    if not self._job.teacher:
      return batch
    inputs = batch["inputs"]
    given = inputs, batch.get("segments", np.ones_like(inputs))
    keys = [_hash(b"".join(x)) for x in zip(*given, strict=True)]
    found = self._kept.read(keys)
    # A row may be in a batch twice.
    new = {key: i for i, key in enumerate(keys) if key not in found}
    if new:
      rows = self._teach([*new], *(x[[*new.values()]] for x in given))
      found |= zip(new, rows, strict=True)
      if "teacher_ids" in self._names:
        self._kept.add(rows)
    rows = [found[key] for key in keys]
    return batch | {x: np.stack([row[x] for row in rows]) for x in self._names}

  def add_nothing(self, batch: Batch) -> Batch:
    """Returns a batch with features of 0, to measure its cross-entropy."""
    if not self._job.teacher:
      return batch
    zeros = np.zeros(len(batch["inputs"]), self._row)
    return batch | {name: zeros[name] for name in self._names}

  def _open_teacher(self) -> tuple[Client, Program]:
    config, checkpoint = self._job.config, self._job.teacher
    assert checkpoint
    _logger.info(f"loading the teacher, {checkpoint.path}")
    self._expect_slow()
    model = teacher_model(checkpoint, config.model)
    loaded = self._scope.enter_context(
      LoadedDecoder(checkpoint, model, config.mesh_layout, pods=config.pods)
    )
    return loaded.client, loaded.build(self._function, "")

  def _teach(
    self, keys: Sequence[bytes], inputs: np.ndarray, segments: np.ndarray
  ) -> np.ndarray:
    """Returns a row per key; `inputs` and `segments` are [rows, length]."""
    client, program = self._load()
    size, length = self._function.num_rows, self._function.length
    uniform = np.stack([_draw(key, length) for key in keys])
    fed = {"inputs": inputs, "segments": segments, "uniform": uniform}
    rows = np.zeros(len(keys), self._row)
    rows["key"] = np.frombuffer(b"".join(keys), "V16")
    for start in range(0, len(keys), size):
      part = rows[start : start + size]
      padding = [[0, size - len(part)], [0, 0]]
      found = client.call(
        program,
        {x: np.pad(y[start : start + size], padding) for x, y in fed.items()},
      )
      for name, values in found.items():
        part[name] = values[: len(part)]
    return rows


def _hash(content: bytes) -> bytes:
  return hashlib.blake2b(content, digest_size=16).digest()


def _draw(key: bytes, count: int) -> np.ndarray:
  """Returns numbers in [0, 1), [count] float32, which `key` decides."""
  bits = np.random.Philox(key=int.from_bytes(key, "little"))
  return np.random.Generator(bits).random(count, np.float32)
