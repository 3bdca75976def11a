# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sources without the documents that the filters of a run remove.

Filtering takes a pass over all text, so a file saves the decisions for later
runs. The file has a hash, then the compressed decisions: a JSON line with the
number of documents per source, and a byte per document, which is an index into
REASONS. A filter may remove documents that contain an example of an evaluation
set.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from palm_mtf.config import DataConfig
from palm_mtf.config.data import FilterConfig
from palm_mtf.data.filters.decide import count_removed, decide
from palm_mtf.data.ngrams import ContainedExamples
from palm_mtf.data.sources.document import TRAIN, Document, Source, hash_parts
from palm_mtf.data.sources.files import FileDigests, writable_folder
from palm_mtf.data.sources.seqio_task import (
  apply_steps,
  find_provider,
  import_seqio,
  kind_of_feature,
  read_examples,
  split_at_tokenize,
)
from palm_mtf.data.sources.text_files import (
  MACROS,
  Fields,
  TextFiles,
  open_sources,
)
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.user_code import user_code

_logger = logging.getLogger(__name__)

_VERSION = 1  # add 1 if a filter changes, so that old decisions are not used
_HASH_BYTES = 16
_BATCH = 32  # examples per call of TensorFlow, which takes 0.1 ms


def open_filtered(
  model_dir: str, data: DataConfig, sequence_length: int | None = None
) -> list[Source]:
  """Returns the sources of a run without the documents that filters remove.

  Args:
    model_dir: MODEL_DIR; saves the decisions if CACHE_DIR is not writable.
    sequence_length: SEQUENCE_LENGTH, for preprocessors that truncate token ids.

  Raises:
    UserError: `open_sources` fails.
  """
  sources = open_sources(data, sequence_length)
  if not data.filters.removes:
    return sources
  shared, own = data.cache_folder, ModelDir(model_dir).tokens
  folders = [writable_folder(shared, own), *filter(None, [shared, own])]
  decisions = _Decisions(sources, data, folders)
  return [
    FilteredSource(source, number, decisions)
    for number, source in enumerate(sources)
  ]


def write_decisions(path: str, decisions: Sequence[np.ndarray]) -> None:
  """Writes a file with each source's decisions, [documents], uint8.

  Raises UserError if the disk is full, or the path may not be written.
  """
  counts = json_text([len(each) for each in decisions]).encode()
  # Most decisions are 0 (keep), so a million decisions compress to a few KB.
  content = zlib.compress(counts + b"\n" + b"".join(decisions), 1)
  write_atomically(path, _hash_content(content) + content)


def read_decisions(path: str) -> list[np.ndarray] | None:
  """Returns the decisions in a file; None if the file is missing or damaged."""
  try:
    with open(path, "rb") as file:
      found, content = file.read(_HASH_BYTES), file.read()
  except OSError:
    return None
  if found != _hash_content(content):
    _logger.warning(f"{path} is damaged: its documents are filtered again")
    return None
  counts, _, flat = zlib.decompress(content).partition(b"\n")
  ends = np.cumsum(json.loads(counts))
  return np.split(np.frombuffer(flat, np.uint8), ends[:-1])


def _hash_content(content: bytes) -> bytes:
  return hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()


class _Decisions:
  """Which documents of all sources to remove; decided once, at first use."""

  def __init__(
    self, sources: Sequence[Source], data: DataConfig, folders: Sequence[str]
  ):
    # Read earlier runs' decisions in any of `folders`; write to the first.
    self._sources, self._folders = sources, folders
    self._data, self._filters = data, data.filters
    self._has_examples = bool(
      data.filters.decontaminate_tasks or data.filters.decontaminate_files
    )
    self._known: list[str] | None = None

  def fingerprint(self, number: int, digests: FileDigests | None) -> str:
    # Read the examples first, so that a wrong task name is an error before all
    # text is hashed, which is slow.
    examples = self._examples_fingerprint
    if self._known is None:
      self._known = [each.fingerprint(digests) for each in self._sources]
    # Do not hash the names of evaluation tasks and files, because `examples`
    # already is a hash of the examples in them.
    plain = dataclasses.replace(
      self._filters, decontaminate_tasks=(), decontaminate_files=None
    )
    changed = set(dataclasses.asdict(plain).items())
    changed -= set(dataclasses.asdict(FilterConfig()).items())
    parts = [_VERSION, self._known[number], sorted(changed)]
    if examples:
      parts.append(examples)
    # A document may duplicate a document of another source, so a source's
    # fingerprint covers all sources.
    if self._filters.remove_duplicates:
      parts += [number, *self._known]
    return hash_parts(tuple(parts))

  @functools.cached_property
  def _examples_fingerprint(self) -> str:
    """A hash of the evaluation examples; "" if the settings name none."""
    if not self._has_examples:
      return ""
    digests = {each.digest() for each in read_evaluation_sets(self._data)}
    return _hash_content(b"".join(sorted(digests))).hex()

  @functools.cached_property
  def by_source(self) -> list[np.ndarray]:
    """Each source's decisions: indices into REASONS, [documents], uint8."""
    with FileDigests(os.path.join(self._folders[0], "digests.json")) as digests:
      prints = [self.fingerprint(i, digests) for i in range(len(self._sources))]
    name = f"removed-{hash_parts((prints,))[:16]}"
    for folder in self._folders:
      found = read_decisions(os.path.join(folder, name))
      if found is not None:
        return found
    examples = None
    if self._has_examples:
      examples = ContainedExamples(read_evaluation_sets(self._data))
      _logger.info(
        f"documents that contain one of {examples.num_examples:,} evaluation "
        f"examples are removed; {examples.num_short:,} of fewer than 8 words "
        "are not looked for"
      )
    found = decide(self._sources, self._filters, examples)
    write_decisions(os.path.join(self._folders[0], name), found)
    return found


class FilteredSource:
  """A Source of those documents of another source that filters keep."""

  def __init__(self, source: Source, number: int, decisions: _Decisions):
    # `number` is the index of `source` among the sources of `decisions`.
    self.name, self.rate = source.name, source.rate
    self.num_bytes = source.num_bytes
    self._source, self._number = source, number
    self._decisions = decisions

  @property
  def has_inputs(self) -> bool:
    """Whether the documents have inputs, which have no loss."""
    return self._source.has_inputs

  @property
  def form(self) -> str:
    """The form of all documents."""
    return self._source.form

  @property
  def counts(self) -> dict[str, int]:
    """Numbers of documents that were read, and that each filter removed."""
    return count_removed(self._decisions.by_source[self._number])

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of all that decides the documents; see `Source`."""
    return self._decisions.fingerprint(self._number, digests)

  def check_vocabulary(self, sha256: str | None) -> None:
    """Raises UserError if documents are token ids of another vocabulary."""
    self._source.check_vocabulary(sha256)

  def documents(self) -> Iterator[tuple[str, Document]]:
    """Yields (split, document) for each document that is kept; see `Source`."""
    decisions = self._decisions.by_source[self._number]
    if len(decisions) and decisions.all():
      raise UserError(
        f"{self.name}: filters remove every document "
        f"({_list_counts(self.counts)}); change them, or give other text."
      )
    # Iterate over a memoryview, because a list takes 8 bytes per decision.
    pairs = itertools.zip_longest(
      memoryview(decisions), self._source.documents()
    )
    for removed, each in pairs:
      if removed is None or each is None:
        raise UserError(
          f"{self.name}: its documents changed while they were read; start "
          "again."
        )
      if not removed:
        yield each

  def report_skipped(self) -> None:
    """Warns if the source skipped text; logs what the filters removed."""
    self._source.report_skipped()
    _logger.info(f"filters of {self.name}: {_list_counts(self.counts)}")


def _list_counts(counts: dict[str, int]) -> str:
  found = [f"{n:,} {x.replace('_', ' ')}" for x, n in counts.items() if n]
  return ", ".join(found)


def read_evaluation_sets(data: DataConfig) -> Iterator[Document]:
  """Yields the examples of DECONTAMINATE_TASKS, then of DECONTAMINATE_FILES.

  Raises UserError if a task or a file cannot be read.
  """
  for name in data.filters.decontaminate_tasks:
    yield from evaluation_examples(name, "DECONTAMINATE_TASKS")
  if globs := data.filters.decontaminate_files:
    yield from read_all(globs, data, "DECONTAMINATE_FILES")


def read_all(
  globs: str | Sequence[str], data: DataConfig, setting: str
) -> Iterator[Document]:
  """Yields every document in the files of an evaluation set.

  TEXT_FIELD applies to these files too. `setting` is the name of the setting
  that holds the globs, for messages.

  Raises UserError if a file cannot be read; see `TextFiles`.
  """
  files = TextFiles(
    globs,
    Fields(data.text_field),
    validation_share=data.validation_share,
    name=setting,
    settings=MACROS._replace(files=setting),
  )
  # Read both splits, because all documents here are for evaluation.
  for _, document in files.documents():
    yield document
  files.report_skipped()


def evaluation_examples(name: str, setting: str) -> Iterator[Document]:
  """Yields the examples of a task in `setting` from all splits but "train".

  Raises UserError if `name` is not registered, the code of a task fails, or a
  task has only the split "train" or makes no text.
  """
  seqio = import_seqio(name, setting)
  for task in seqio.get_subtasks(find_provider(name, setting)):
    with user_code(f"{setting}: the splits of {task.name}"):
      splits = [split for split in task.splits if split != TRAIN]
    if not splits:
      raise UserError(
        f"{setting} = {name!r}: {task.name} has no split but {TRAIN!r}; give a "
        "task with examples for evaluation."
      )
    for split in splits:
      yield from _read_split(task, split, setting)


def _read_split(task: Any, split: str, setting: str) -> Iterator[Document]:
  where = f"{setting}: {task.name}, split {split!r}"
  with user_code(where):
    # Omit the steps that encode text, because examples are compared as text.
    to_text, _ = split_at_tokenize(task)
    dataset = apply_steps(task, to_text, split=split, where=where)
    specs = dataset.element_spec
    names = [name for name in ("inputs", "targets") if name in specs]
    if not names or any(kind_of_feature(specs[x]) != "text" for x in names):
      raise UserError(
        f"{where}: its preprocessors make no texts 'inputs' and 'targets'; let "
        "them end in seqio.preprocessors.tokenize, or give another task."
      )
    # Drop SeqIO's "unconditional" examples, which are answers without question:
    # a document that has only the answer is not contaminated.
    if "unconditional" in specs:
      dataset = dataset.filter(lambda example: ~example["unconditional"])
    dataset = dataset.map(lambda example: {n: example[n] for n in names})
    dataset = dataset.batch(_BATCH)
  for batch in read_examples(dataset, where):
    for values in zip(*(batch[name] for name in names), strict=True):
      texts = [value.decode("utf-8", "replace") for value in values]
      yield Document(texts[-1], inputs=texts[0] if len(texts) > 1 else None)
