# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches of token sequences, each a function of (SEED, step) alone.

The joined documents are cut into sequences of SEQUENCE_LENGTH tokens, wherever
that falls, as in PaLM 5; the last tokens, fewer than one sequence, are left
over. A run reads sequence number n = step * batch_size + i at place i of step
`step`. An epoch is one shuffle of all sequences, and every epoch has its own:

  n               0 1 2 3 4 | 5 6 7 8 9 | 10 11 ...     5 sequences in all
  epoch                   0 |         1 |         2
  sequence        3 0 4 2 1 | 1 4 0 3 2 | ...
  step 0, 1, ...  [2 a step: 3 0], [4 2], [1 1], [4 0], [3 2], ...

Nothing is replayed to reach a step, so a run resumes at once, and what number n
holds does not depend on the batch size. permutation.py is the shuffle.
"""

from collections.abc import Iterator

import numpy as np

from palm_mtf.data.permutation import permute
from palm_mtf.errors import UserError

Batch = dict[str, np.ndarray]


class Batches:
  """The training batches of a run.

  Attributes:
    num_sequences: sequences in one epoch.
  """

  def __init__(
    self,
    tokens: np.ndarray,
    sequence_length: int,
    *,
    batch_size: int,
    seed: int,
  ):
    """Cuts `tokens`, [num_tokens], into sequences."""
    self._sequences = _cut_sequences(tokens, sequence_length)
    self._batch_size = batch_size
    self._seed = seed
    self.num_sequences = len(self._sequences)
    if not self.num_sequences:
      raise UserError(
        f"training text = {len(tokens):,} tokens: less than one sequence; give "
        f"more text, or lower SEQUENCE_LENGTH = {sequence_length:,}."
      )

  def batch(self, step: int) -> Batch:
    """Returns the batch of a step, counted from 0.

    Returns:
      "targets": [batch, length], int32, the tokens; "inputs": [batch, length],
      int32, the targets moved right by one with token 0 first.
    """
    return _to_batch(self._sequences[self.sequence_indices(step)])

  def sequence_indices(self, step: int) -> np.ndarray:
    """Returns which sequences a step reads, [batch], int64."""
    number = step * self._batch_size + np.arange(self._batch_size)
    epoch, place = np.divmod(number, self.num_sequences)
    indices = np.empty_like(place)
    for one_epoch in np.unique(epoch):
      inside = epoch == one_epoch
      key = f"seed {self._seed} epoch {one_epoch}"
      indices[inside] = permute(place[inside], self.num_sequences, key)
    return indices


def validation_batches(
  tokens: np.ndarray,
  sequence_length: int,
  *,
  batch_size: int,
  eval_batches: int,
) -> Iterator[Batch]:
  """Returns the validation batches: the first sequences, in order, each once.

  There are `eval_batches` of them, or as many full ones as `tokens` holds.

  Raises:
    UserError: `tokens` holds less than one batch; raised at once.
  """
  sequences = _cut_sequences(tokens, sequence_length)
  available = len(sequences) // batch_size
  if not available:
    raise UserError(
      f"validation text = {len(sequences):,} sequences of SEQUENCE_LENGTH = "
      f"{sequence_length:,} tokens: less than one batch of {batch_size:,}; "
      "raise VALIDATION_SHARE, give more text, or lower GLOBAL_BATCH_SIZE."
    )
  return (
    _to_batch(sequences[i * batch_size : (i + 1) * batch_size])
    for i in range(min(available, eval_batches))
  )


def _cut_sequences(tokens: np.ndarray, sequence_length: int) -> np.ndarray:
  """Returns a view of [num_sequences, length]."""
  num_sequences = len(tokens) // sequence_length
  whole = tokens[: num_sequences * sequence_length]
  return whole.reshape(num_sequences, sequence_length)


def _to_batch(sequences: np.ndarray) -> Batch:
  targets = np.array(sequences, np.int32)
  inputs = np.zeros_like(targets)
  inputs[:, 1:] = targets[:, :-1]
  return {"inputs": inputs, "targets": targets}
