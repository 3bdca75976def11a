# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Log p of each token of a prompt, and the likeliest tokens in its place."""

from collections.abc import Sequence

import numpy as np

from palm_mtf.generation.decode.score_program import (
  ScoreProgram,
  build_score_program,
)
from palm_mtf.generation.inference.decoder_session import LoadedDecoder
from palm_mtf.generation.inference.score_windows import row_length
from palm_mtf.generation.inference.slot_decoder import Chosen


class PromptScorer:
  """Scores prompts one by one with the weights of one checkpoint."""

  def __init__(self, loaded: LoadedDecoder):
    """Readies scoring; programs are built when they are needed."""
    self._loaded = loaded
    self._programs: dict[int, ScoreProgram] = {}

  def score(self, ids: Sequence[int]) -> list[Chosen]:
    """Returns the tokens behind the first, as if they had been chosen.

    Args:
      ids: tokens, two at least; at most SEQUENCE_LENGTH behind the first.
    """
    count = len(ids) - 1
    length = row_length(count, self._loaded.model.config.sequence_length)
    program = self._program(length)
    inputs, targets = np.zeros([2, *program.inputs.shape], np.int32)
    inputs[:, :count], targets[:, :count] = ids[:-1], ids[1:]
    # Any of these tokens could have been chosen: only the first is given.
    feed = {
      program.inputs: inputs,
      program.targets: targets,
      program.num_given: np.ones([len(inputs)], np.int32),
    }
    fetches = [program.token_loss, program.likeliest, program.likeliest_loss]
    loss, likeliest, theirs = (
      x[0, :count].tolist() for x in self._loaded.session.run(fetches, feed)
    )
    return [
      Chosen(
        ids[i + 1],
        -loss[i],
        {x: -y for x, y in zip(likeliest[i], theirs[i], strict=True)},
      )
      for i in range(count)
    ]

  def _program(self, length: int) -> ScoreProgram:
    if length not in self._programs:
      slices = self._loaded.mesh.axis_size_of("batch")
      with self._loaded.graph.as_default():
        program = build_score_program(self._loaded.model, slices, length)
      self._programs[length] = program
    return self._programs[length]
