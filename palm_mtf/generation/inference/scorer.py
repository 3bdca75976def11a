# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-likelihood of texts: the sum of log p of their tokens, in nats."""

import collections
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.generation.decode.score_program import (
  ScoreProgram,
  build_score_program,
)
from palm_mtf.generation.inference.decoder_session import LoadedDecoder
from palm_mtf.generation.inference.score_windows import (
  Window,
  row_length,
  rows_at_once,
  windows,
)


class Example(NamedTuple):
  """Token ids: targets to score, given inputs."""

  inputs: Sequence[int]  # may be empty
  targets: Sequence[int]  # at least one


class Score(NamedTuple):
  """What a model says of one example."""

  log_likelihood: float  # of the targets, in nats
  is_greedy: bool  # whether greedy decoding gives the targets


class Scorer:
  """Scores examples with the weights of one checkpoint."""

  def __init__(
    self, loaded: LoadedDecoder, stride: int | None = None, start_id: int = 0
  ):
    """Readies scoring; programs are built when they are needed.

    Args:
      loaded: weights of the model.
      stride: tokens between windows (score_windows.py); None for half of the
        sequence length.
      start_id: input before the first token of a text (packing.document_start).
    """
    self._loaded = loaded
    self._start_id = start_id
    self._length = loaded.model.config.sequence_length
    self._stride = stride or max(self._length // 2, 1)
    self._programs: dict[int, ScoreProgram] = {}

  def log_likelihoods(
    self, examples: Sequence[Example]
  ) -> Iterator[tuple[int, float]]:
    """Yields the place of each example, and log p of its targets."""
    for index, parts in self._found(examples, ["token_loss"]):
      yield index, -math.fsum(x for (loss,) in parts for x in loss.tolist())

  def scores(self, examples: Sequence[Example]) -> Iterator[tuple[int, Score]]:
    """Yields the place of each example, and its score."""
    for index, parts in self._found(examples, ["token_loss", "is_likeliest"]):
      losses, likeliest = (np.concatenate(x) for x in zip(*parts, strict=True))
      score = Score(-math.fsum(losses.tolist()), bool(likeliest.all()))
      yield index, score

  def _found(
    self, examples: Sequence[Example], names: Sequence[str]
  ) -> Iterator[tuple[int, list[list[np.ndarray]]]]:
    # Yields the place of each example, and of each of its windows the tensors
    # of ScoreProgram with these names, for its scored tokens.
    rows = collections.defaultdict(list)  # by their length
    missing = []
    for index, (inputs, targets) in enumerate(examples):
      first = len(inputs)
      found = windows(first + len(targets), first, self._length, self._stride)
      missing.append(len(found))
      for window in found:
        needed = row_length(window.stop - window.start, self._length)
        rows[needed].append((index, window))
    parts = collections.defaultdict(list)
    # The shortest rows come first, so that results come early.
    for length in sorted(rows):
      size = rows_at_once(length, self._loaded.mesh.axis_size_of("batch"))
      for start in range(0, len(rows[length]), size):
        some = rows[length][start : start + size]
        for (index, _), part in zip(
          some, self._batch(examples, some, length, size, names), strict=True
        ):
          parts[index].append(part)
          if len(parts[index]) == missing[index]:
            yield index, parts.pop(index)

  def _batch(
    self,
    examples: Sequence[Example],
    rows: Sequence[tuple[int, Window]],
    length: int,
    size: int,
    names: Sequence[str],
  ) -> list[list[np.ndarray]]:
    # Returns the tensors of each row's scored tokens. An input stands before
    # each of them, also before the first.
    program = self._program(size, length)
    inputs, targets = np.zeros([2, size, length], np.int32)
    num_given = np.zeros([size], np.int32)
    for row, (index, window) in enumerate(rows):
      ids = [*examples[index].inputs, *examples[index].targets]
      ids = ids[window.start : window.stop]
      targets[row, : len(ids)] = ids
      if window.start == 0:  # others begin within the text: 0, as in training
        inputs[row, 0] = self._start_id
      inputs[row, 1 : len(ids)] = ids[:-1]
      # All before the first scored token, in further windows too.
      num_given[row] = 1 + window.first - window.start
    values = self._loaded.session.run(
      [getattr(program, name) for name in names],
      {
        program.inputs: inputs,
        program.targets: targets,
        program.num_given: num_given,
      },
    )
    return [
      [x[row, w.first - w.start : w.stop - w.start] for x in values]
      for row, (_, w) in enumerate(rows)
    ]

  def _program(self, size: int, length: int) -> ScoreProgram:
    if length not in self._programs:
      with self._loaded.graph.as_default():
        program = build_score_program(self._loaded.model, size, length)
      self._programs[length] = program
    return self._programs[length]
