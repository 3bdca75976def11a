# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Assertions find wrong outputs of a model (Kang et al. 2020, section 3).

An assertion returns a severity, at least 0; with 0, it abstains.
"""

import collections
import errno
import functools
import logging
import math
import os
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import NamedTuple

from palm_mtf.assertions import process
from palm_mtf.config import Config
from palm_mtf.data.filters.filtered_source import read_evaluation_sets
from palm_mtf.data.ngrams import ContainedExamples, find_ngrams
from palm_mtf.data.sources.document import Document
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.json_text import STRICT_DECODER, json_text
from palm_mtf.machine.helper_process import HelperError, HelperProcess
from palm_mtf.model_dir.paths import ModelDir

_logger = logging.getLogger(__name__)

_START_SECS, _CALL_SECS = 120.0, 10.0  # limits for the user's functions
_MOST_BYTES = 2**26  # in flagged.jsonl
_MOST_WAITING = 1000  # requests of a server that wait to be checked
_RUN = 32  # characters; words would miss loops in scripts without spaces
_MOST_CHARACTERS = 2**16  # at the end of an output, in which runs are compared
# Shares that are no fault, of repeated runs and of letters in other scripts.
_MOST_REPEATED, _MOST_FOREIGN = 0.1, 0.05


class Example(NamedTuple):
  """What a model read and wrote."""

  inputs: str
  outputs: str
  log_p: Sequence[float | None] = ()  # of tokens or of `outputs`, if known


Assertion = Callable[[Example], float]
_RESULTS = ("flagged", "passed", "error", "skipped")


def _finite(example: Example) -> float:
  known = [x for x in example.log_p if x is not None]
  return sum(not math.isfinite(x) for x in known) / max(1, len(known))


def _repetition(example: Example) -> float:
  text = example.outputs[-_MOST_CHARACTERS:]
  runs = [text[i : i + _RUN] for i in range(len(text) - _RUN + 1)]
  share = 1 - len({*runs}) / len(runs) if runs else 0.0
  return share if share > _MOST_REPEATED else 0.0


def _count_scripts(text: str) -> collections.Counter[str]:
  """Counts letters by the first word of their Unicode name, such as LATIN."""
  found: collections.Counter[str] = collections.Counter()
  for letter, count in collections.Counter(text).items():
    if letter.isalpha():
      found[unicodedata.name(letter, "").partition(" ")[0]] += count
  return found


def _language(example: Example) -> float:
  expected, found = map(_count_scripts, example[:2])
  foreign = sum(n for x, n in found.items() if x not in expected)
  share = foreign / max(1, found.total())
  return share if expected and share > _MOST_FOREIGN else 0.0


def _json(example: Example) -> float:
  try:
    STRICT_DECODER.decode(example.outputs)
  except (ValueError, RecursionError):
    return 1.0
  return 0.0


def _length(lengths: Sequence[int], example: Example) -> float:
  (least, most), size = lengths, len(example.outputs)
  return max(1 - size / max(1, least), 1 - most / max(1, size), 0.0)


def _contamination(examples: ContainedExamples, example: Example) -> float:
  found = find_ngrams(examples.table, Document(example.outputs))
  return float(examples.any_in(found))


_OWN: dict[str, Assertion] = {
  "finite": _finite,
  "json": _json,
  "language": _language,
  "repetition": _repetition,
}


def _make_users(name: str) -> Assertion:
  """Returns an assertion that calls the user's function in a process."""
  try:
    helper = HelperProcess(process.__name__, {"name": name}, _START_SECS)
  except HelperError as error:
    raise UserError(
      f'ASSERTIONS: "{name}": {error}; give a function of inputs and outputs, '
      "two texts, that returns a severity."
    ) from None

  def call(example: Example) -> float:
    if helper.has_ended:  # it would hang or end again
      raise HelperError("is not called again")
    asked = {"inputs": example.inputs, "outputs": example.outputs}
    return helper.ask(asked, _CALL_SECS)["severity"]

  return call


class Assertions:
  """Checks what a run's model writes; only one thread at a time checks."""

  def __init__(self, model_dir: str, config: Config, origin: str):
    """Finds the functions in ASSERTIONS.

    `origin` says in flagged.jsonl what made the examples.

    Raises UserError if a function is missing, or takes other arguments.
    """
    given, names = config.evaluation, config.evaluation.assertions
    self._path, self._origin = ModelDir(model_dir).flagged, origin
    # {assertion: severity from which on the server refuses an answer}
    self.refused: Mapping[str, float] = given.refuse_severity or {}
    asks = "contamination" in names
    sets = ContainedExamples(read_evaluation_sets(config.data) if asks else ())
    if asks and sets.num_examples == sets.num_short:
      raise UserError(
        'ASSERTIONS: "contamination" has no examples of at least 8 words; give '
        "some in DECONTAMINATE_TASKS or DECONTAMINATE_FILES."
      )
    own = _OWN | {
      "contamination": functools.partial(_contamination, sets),
      "length": functools.partial(_length, given.output_length),
    }
    self._all: dict[str, Assertion] = {}
    for name in names:
      if "." not in name and name not in own:
        raise UserError(
          f'ASSERTIONS: "{name}"{did_you_mean(name, own)}: give one of '
          f'{", ".join(own)}, or a function of yours as "module.name".'
        )
      self._all[name] = own.get(name) or _make_users(name)
    # {(assertion, what came of it): number of examples}, for /metrics
    self.results = collections.Counter(
      {(name, x): 0 for name in self._all for x in _RESULTS}
    )
    self._logged: set[str] = set()  # what a warning was logged of
    self._thread = futures.ThreadPoolExecutor(1)
    self._room = threading.BoundedSemaphore(_MOST_WAITING)

  def check(
    self,
    examples: Sequence[Example],
    step: int,
    checked: Callable[[], None] = lambda: None,
  ) -> dict[str, list[float]]:
    """Returns {assertion: severity of each example}.

    Counts results, and appends flagged examples to flagged.jsonl. `step` is
    that of the checkpoint. Calls `checked` after each example.
    """
    found: dict[str, list[float]] = {name: [] for name in self._all}
    for example in examples if self._all else ():
      for name in self._all:
        found[name].append(self._call(name, example))
      if flagged := {x: y[-1] for x, y in found.items() if y[-1]}:
        self._log(example, flagged, step)
      checked()
    return found

  def count(
    self,
    examples: Sequence[Example],
    step: int,
    checked: Callable[[], None] = lambda: None,
  ) -> dict[str, float]:
    """Like `check`; returns and logs how many were flagged, as metrics."""
    found = self.check(examples, step, checked)
    counts = {x: len(y) - y.count(0.0) for x, y in found.items()}
    for name, count in counts.items():
      if count:
        _logger.warning(
          f"step {step}  {name} flagged {count:,} of {len(examples):,} texts, "
          f"see {self._path}"
        )
    return {f"assertions/{x}": float(count) for x, count in counts.items()}

  def submit(
    self, examples: Sequence[Example], step: int
  ) -> "futures.Future[dict[str, list[float]]] | None":
    """Lets a thread `check`; None if too many requests wait for it."""
    if not self._room.acquire(blocking=False):
      for name in self._all:
        self.results[name, "skipped"] += len(examples)
      return None
    made = self._thread.submit(self.check, examples, step)
    made.add_done_callback(lambda _: self._room.release())
    return made

  def close(self) -> None:
    """Drops what waits to be checked."""
    self._thread.shutdown(cancel_futures=True)

  def _call(self, name: str, example: Example) -> float:
    severity, result = 0.0, "error"
    try:
      severity = self._all[name](example)
      result = "flagged" if severity else "passed"
    except Exception as error:  # an assertion may end neither run nor server
      self._warn(name, f'ASSERTIONS: "{name}": {error}')
    self.results[name, result] += 1
    return severity

  def _log(
    self, example: Example, flagged: Mapping[str, float], step: int
  ) -> None:
    values = {
      "text": example.inputs + example.outputs,
      **{"inputs": example.inputs, "outputs": example.outputs},
      **{"severity": max(flagged.values()), "assertions": flagged},
      **{"origin": self._origin, "step": step, "time": time.time()},
    }
    line = json_text(values).encode() + b"\n"
    try:
      with open(self._path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size + len(line) > _MOST_BYTES:
          raise OSError(errno.EFBIG, f"would exceed {_MOST_BYTES:,} bytes")
        # Other processes append too. A call writes a line whole, or the disk
        # is full; then remove the part, which would spoil the next line.
        if file.write(line) < len(line):
          file.truncate(size)
          raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
      why = f"{error.strerror}; flagged examples are only counted"
      self._warn("file", f"{self._path}: {why}")

  def _warn(self, what: str, message: str) -> None:
    if what not in self._logged:
      self._logged.add(what)
      _logger.warning(message)
