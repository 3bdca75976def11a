# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Exemplars: solved examples of a task, which are put before a question.

Exemplars come from a user's file, or from the training split. EXEMPLARS says
how to choose from the split:

  "drawn"  each question has different exemplars, chosen by hashes
  "first"  all questions have the first examples of the split

A task's examples may have these features:

  record          identifies the question, whose options share exemplars
  is_correct      whether the example may be an exemplar
  exemplar_group  group, such as MMLU's subject, to choose exemplars from
  unconditional   whether the targets are scored without exemplars
"""

import functools
import hashlib
import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf.config.task_eval import FIRST, FewShotConfig
from palm_mtf.data.sources.seqio_steps import apply_steps
from palm_mtf.errors import UserError
from palm_mtf.user_text import check_text, format_of, read_json_lines, read_text

_logger = logging.getLogger(__name__)

SEPARATOR = "\n\n"
# Draw exemplars from this many examples of the training split, because the
# whole split may not fit in memory.
_POOL = 1000


class Exemplars(NamedTuple):
  """The exemplars of one task, for all of its questions."""

  # Returns exemplars for a question, given its `key_of` and `group_of`.
  choose: Callable[[str, str], list[str]]
  text: str = ""  # text to put unchanged before every question


class _Exemplar(NamedTuple):
  key: str  # identifies the question
  group: str
  text: str  # inputs and targets


class SplitExemplars:
  """Exemplars from a task's training split, chosen as `config` says.

  `to_text` holds the task's preprocessors before `tokenize`, which make the
  texts `inputs` and `targets`.
  """

  def __init__(
    self, task: Any, to_text: Sequence[Callable], config: FewShotConfig
  ):
    self._task = task
    self._to_text = to_text
    self._num_shots = config.num_shots or 0
    self._is_first = config.exemplars == FIRST
    self._seed = config.seed

  def choose(self, key: str, group: str) -> list[str]:
    """Returns the exemplars for one question; see `Exemplars`."""
    if not self._num_shots:
      return []
    # Exclude the question itself, because exemplars may come from the
    # evaluated split.
    candidates = [e for e in self._pool if e.group == group and e.key != key]
    if len(candidates) < self._num_shots:
      where = f" of {group!r}" if group else ""
      raise UserError(
        f"{self._task.name}: NUM_SHOTS = {self._num_shots}, but split "
        f"{self._split!r} has only {len(candidates)} other examples{where}; "
        "give a smaller number."
      )
    # Sort by hash, so that exemplars differ between questions, but depend
    # neither on the machine nor on the order of questions. The PaLM paper does
    # not say how it chose exemplars.
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
    """The examples that may be exemplars, at most one per question."""
    if self._is_first:
      return list(self._find_first())
    chosen = heapq.nsmallest(
      _POOL, self._read_solved(), key=lambda e: self._hash(e.key, e.text)
    )
    return list({exemplar.key: exemplar for exemplar in chosen}.values())

  def _find_first(self) -> Iterator[_Exemplar]:
    keys, of_group = set(), Counter()
    for exemplar in self._read_solved():
      # Keep NUM_SHOTS + 1 examples per group, because a question must not be an
      # exemplar for itself.
      if exemplar.key in keys or of_group[exemplar.group] > self._num_shots:
        continue
      keys.add(exemplar.key)
      of_group[exemplar.group] += 1
      yield exemplar

  def _read_solved(self) -> Iterator[_Exemplar]:
    dataset = apply_steps(
      self._task,
      self._to_text,
      split=self._split,
      where=f"exemplars of {self._task.name}",
    )
    for example in dataset:
      # Only the correct option of a question may be an exemplar.
      if example.get("is_correct", True) and not example.get("unconditional"):
        text = inputs_of(example) + text_of(example["targets"])
        yield _Exemplar(key_of(example), group_of(example), text)

  def _hash(self, *texts: str) -> bytes:
    """Returns a pseudorandom sort key, which is the same in every process."""
    # With the lengths, ("ab", "c") and ("a", "bc") have different keys.
    digest = hashlib.blake2b(digest_size=8)
    for text in (str(self._seed), *texts):
      digest.update(f"{len(text)} {text}".encode())
    return digest.digest()


def key_of(example: Mapping[str, Any]) -> str:
  """Returns a text that identifies the question of an example."""
  return text_of(example.get("record", example["inputs"]))


def group_of(example: Mapping[str, Any]) -> str:
  """Returns the group of an example, or "" if it has none."""
  return (
    text_of(example["exemplar_group"]) if "exemplar_group" in example else ""
  )


def inputs_of(example: Mapping[str, Any]) -> str:
  """Returns an example's inputs; see `separate`."""
  return separate(text_of(example["inputs"]), text_of(example["targets"]))


def separate(inputs: str, targets: str) -> str:
  """Appends a line break to `inputs` unless white space separates `targets`."""
  parted = not inputs or inputs[-1].isspace() or targets[:1].isspace()
  return inputs if parted else f"{inputs}\n"


def text_of(value: Any) -> str:
  """Decodes the UTF-8 of a scalar string tensor."""
  return value.numpy().decode("utf-8", "replace")


_MACRO = "EXEMPLAR_FILES"
_FORM = 'give {"inputs": "...", "targets": "..."}, and "group" if there are any'


def read_exemplars(path: str, num_shots: int | None) -> Exemplars:
  """Returns the exemplars in a file.

  Args:
    path: path of a file of JSON lines (.jsonl), or of a text file. The whole
      text of a text file precedes every question.
    num_shots: each question gets the first `num_shots` JSON lines of its group,
      or, if None, all JSON lines of its group.

  Raises:
    UserError: if the file cannot be read, or a line is not an exemplar.
  """
  what, needed = f"{_MACRO} = {path!r}", "write the exemplars"
  if format_of(path) != ".jsonl":
    text = read_text(path, what, needed)
    if not text.endswith(SEPARATOR if SEPARATOR in text else "\n"):
      _logger.warning(
        f"{_MACRO}: {path} does not end in an empty line, and the question "
        "follows its last character: end it as your protocol does"
      )
    return Exemplars(lambda key, group: [], text)
  lines = read_json_lines(path, what, _FORM, needed=needed)
  exemplars = [_parse_exemplar(fields, where) for _, where, fields in lines]

  def choose(key: str, group: str) -> list[str]:
    del key
    found = [text for of, text in exemplars if of in (None, group)]
    where = f" of group {group!r}" if group else ""
    if not found:
      raise UserError(f"{_MACRO}: {path} has no exemplar{where}; write some.")
    if len(found) < (num_shots or 0):
      raise UserError(
        f"{_MACRO}: NUM_SHOTS = {num_shots}, but {path} has only {len(found)} "
        f"exemplars{where}; give a smaller number."
      )
    return found[:num_shots]

  return Exemplars(choose)


def _parse_exemplar(
  fields: Mapping[str, object], where: str
) -> tuple[str | None, str]:
  """Returns (group, text) of an exemplar; group None is for all groups."""
  if not {"inputs", "targets"} <= {*fields} <= {"inputs", "targets", "group"}:
    raise UserError(f"{where} has the fields {sorted(fields)}; {_FORM}.")
  for name, text in fields.items():
    if not check_text(text, f"{where}: {name!r}", _FORM):
      raise UserError(f"{where}: {name!r} is empty; {_FORM}.")
  inputs, targets = fields["inputs"], fields["targets"]
  return fields.get("group"), separate(inputs, targets) + targets
