# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Exemplars: solved examples of a task, to stand before others.

drawn  for each example its own, from the training split, by hashes
first  the first of the training split, the same before each example

Those of the user's files are in exemplar_files.py. Features of an example that
matter, if a task has them:

  record          the question of several options, which share their exemplars
  is_correct      whether the example may be an exemplar
  exemplar_group  exemplars come from the same group, such as MMLU's subject
  unconditional   whether its targets are scored without exemplars
"""

import functools
import hashlib
import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from palm_mtf.config.task_eval import FIRST, FewShotConfig
from palm_mtf.data.sources.seqio_steps import apply_steps
from palm_mtf.data.sources.seqio_task import import_seqio
from palm_mtf.errors import UserError
from palm_mtf.user_text import (
  check_text,
  format_of,
  read_json_lines,
  read_text,
)

SEPARATOR = "\n\n"
# Examples that exemplars are drawn from, chosen by hash: enough that their
# choice does not matter, and few enough to keep.
_POOL = 1000


class Exemplars(Protocol):
  """Exemplars of one task."""

  @property
  def text(self) -> str:
    """Text that stands before each question, to the letter; "" for none."""

  def choose(self, key: str, group: str) -> list[str]:
    """Returns the exemplars of a question, by its key and its group."""


class _Exemplar(NamedTuple):
  key: str  # of its question
  group: str
  text: str  # inputs and targets


class SplitExemplars:
  """Exemplars of the training split, drawn for each question or the first."""

  text = ""

  def __init__(
    self, task: Any, to_text: Sequence[Callable], config: FewShotConfig
  ):
    """Reads nothing yet.

    Args:
      task: a `seqio.Task`.
      to_text: its preprocessors that make texts `inputs` and `targets`.
      config: number of exemplars, and how they are chosen.
    """
    self._task = task
    self._to_text = to_text
    self._num_shots = config.num_shots or 0
    self._is_first = config.exemplars == FIRST
    self._seed = config.seed

  def choose(self, key: str, group: str) -> list[str]:
    """Returns the exemplars of a question, by its key and its group."""
    if not self._num_shots:
      return []
    # Never the question itself, so that a task without a training split can
    # take them from the same split.
    candidates = [e for e in self._pool if e.group == group and e.key != key]
    if len(candidates) < self._num_shots:
      where = f" of {group!r}" if group else ""
      raise UserError(
        f"{self._task.name}: NUM_SHOTS = {self._num_shots}, but split "
        f"{self._split!r} has only {len(candidates)} other examples{where}; "
        "give a smaller number."
      )
    # PaLM does not say how it chose exemplars. Drawn ones are each question's
    # own: by hashes, the same in every order, machine and process.
    if not self._is_first:
      candidates.sort(key=lambda e: self._hash(key, e.key))
    return [exemplar.text for exemplar in candidates[: self._num_shots]]

  @functools.cached_property
  def _split(self) -> str:
    splits = list(self._task.splits)
    return next(
      (name for name in ("train", "validation", "test") if name in splits),
      splits[0],
    )

  @functools.cached_property
  def _pool(self) -> list[_Exemplar]:
    """The candidates, one for each question, read once."""
    if self._is_first:
      return list(self._first())
    chosen = heapq.nsmallest(
      _POOL, self._solved(), key=lambda e: self._hash(e.key, e.text)
    )
    return list({exemplar.key: exemplar for exemplar in chosen}.values())

  def _first(self) -> Iterator[_Exemplar]:
    keys, of_group = set(), Counter()
    for exemplar in self._solved():
      # One more than is shown: a question is never its own exemplar.
      if exemplar.key in keys or of_group[exemplar.group] > self._num_shots:
        continue
      keys.add(exemplar.key)
      of_group[exemplar.group] += 1
      yield exemplar

  def _solved(self) -> Iterator[_Exemplar]:
    dataset = apply_steps(
      self._task,
      self._to_text,
      split=self._split,
      sequence_length=None,
      seqio=import_seqio(self._task.name, "few_shot_task"),
      where=f"exemplars of {self._task.name}",
    )
    for example in dataset:
      # Of the options of a question the right one alone shows how to solve it.
      if example.get("is_correct", True) and not example.get("unconditional"):
        text = inputs_of(example) + text_of(example["targets"])
        yield _Exemplar(key_of(example), group_of(example), text)

  def _hash(self, *texts: str) -> bytes:
    """Returns the place of a candidate: as if at random, always the same."""
    # With lengths, so that ("ab", "c") and ("a", "bc") differ.
    digest = hashlib.blake2b(digest_size=8)
    for text in (str(self._seed), *texts):
      digest.update(f"{len(text)} {text}".encode())
    return digest.digest()


def key_of(example: Mapping[str, Any]) -> str:
  """Returns what tells the question of an example from others."""
  return text_of(example.get("record", example["inputs"]))


def group_of(example: Mapping[str, Any]) -> str:
  """Returns the group of an example, or ""."""
  return (
    text_of(example["exemplar_group"]) if "exemplar_group" in example else ""
  )


def inputs_of(example: Mapping[str, Any]) -> str:
  """Returns the inputs of an example, ready for its targets."""
  return ended(text_of(example["inputs"]), text_of(example["targets"]))


def ended(inputs: str, targets: str) -> str:
  """Returns inputs ready for targets, parted by white space or a line break."""
  parted = not inputs or inputs[-1].isspace() or targets[:1].isspace()
  return inputs if parted else f"{inputs}\n"


def text_of(value: Any) -> str:
  """Returns a text that TensorFlow holds."""
  return value.numpy().decode("utf-8", "replace")


_logger = logging.getLogger(__name__)

_MACRO = "EXEMPLAR_FILES"
_FORM = 'give {"inputs": "...", "targets": "..."}, and "group" if there are any'


def read_exemplars(path: str, num_shots: int | None) -> Exemplars:
  """Returns the exemplars of a file.

  Args:
    path: path of a file of JSON lines (.jsonl), or of a text.
    num_shots: number of JSON lines before each question, the first of its
      group; None for all. A text is used as a whole.

  Raises:
    UserError: the file cannot be read, or a line is no exemplar.
  """
  what, needed = f"{_MACRO} = {path!r}", "write the exemplars"
  if format_of(path) != ".jsonl":
    return _Text(read_text(path, what, needed), path)
  lines = read_json_lines(path, what, _FORM, needed=needed)
  exemplars = [_exemplar(fields, where) for _, where, fields in lines]
  return _Lines(exemplars, path, num_shots)


class _Text:
  """A text that stands before each question."""

  def __init__(self, text: str, path: str):
    self.text = text
    if not text.endswith(SEPARATOR if SEPARATOR in text else "\n"):
      _logger.warning(
        f"{_MACRO}: {path} does not end in an empty line, and the question "
        "follows its last character: end it as your protocol does"
      )

  def choose(self, key: str, group: str) -> list[str]:
    """Returns none: the text is all that stands before a question."""
    del key, group
    return []


class _Lines:
  """Exemplars of JSON lines: (group or None, text)."""

  text = ""

  def __init__(
    self,
    exemplars: list[tuple[str | None, str]],
    path: str,
    num_shots: int | None,
  ):
    self._exemplars, self._path = exemplars, path
    self._num_shots = num_shots

  def choose(self, key: str, group: str) -> list[str]:
    """Returns the exemplars of a question, by its group."""
    del key
    found = [text for of, text in self._exemplars if of in (None, group)]
    where = f" of group {group!r}" if group else ""
    if not found:
      raise UserError(
        f"{_MACRO}: {self._path} has no exemplar{where}; write some."
      )
    if len(found) < (self._num_shots or 0):
      raise UserError(
        f"{_MACRO}: NUM_SHOTS = {self._num_shots}, but {self._path} has only "
        f"{len(found)} exemplars{where}; give a smaller number."
      )
    return found[: self._num_shots]


def _exemplar(
  fields: Mapping[str, object], where: str
) -> tuple[str | None, str]:
  """Returns the group and the text of a line."""
  if not {"inputs", "targets"} <= {*fields} <= {"inputs", "targets", "group"}:
    raise UserError(f"{where} has the fields {sorted(fields)}; {_FORM}.")
  for name, text in fields.items():
    if not check_text(text, f"{where}: {name!r}", _FORM):
      raise UserError(f"{where}: {name!r} is empty; {_FORM}.")
  inputs, targets = fields["inputs"], fields["targets"]
  return fields.get("group"), ended(inputs, targets) + targets
