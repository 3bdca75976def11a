# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the epochs that a run reads of each source, from document lengths."""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.batches.mixed_rows import BLOCK_ROWS, Mixture
from palm_mtf.data.batches.objectives import Objective
from palm_mtf.data.batches.packing import WholeRows
from palm_mtf.data.sources.document import Document, Source, num_repeats
from palm_mtf.data.tokens.array import Shard, TokenArray


class EpochLengths:
  """Lengths of one source's training documents; takes 16 bytes per document."""

  def __init__(self) -> None:
    self._inputs, self._texts = array("q"), array("q")

  def add(self, document: Document, num_inputs: int, num_text: int) -> None:
    """Adds a training document as many times as one epoch reads it.

    `num_inputs` and `num_text` count tokens, without [eod].
    """
    times = num_repeats(document)
    self._inputs.extend([num_inputs] * times)
    self._texts.extend([num_text + 1] * times)

  def tokens(self, has_inputs: bool) -> TokenArray:
    """Returns documents of the added lengths, whose token ids are all 0."""
    inputs, texts = (
      np.frombuffer(x, np.int64) for x in (self._inputs, self._texts)
    )
    ends = np.cumsum(inputs + texts)
    total = int(ends[-1]) if len(ends) else 0
    tokens = np.broadcast_to(np.uint16(0), [total])  # takes no memory
    return TokenArray(
      [Shard(tokens, np.stack([ends - texts, ends]), has_inputs)]
    )


class Reading(NamedTuple):
  """How much a run reads of one source."""

  rate: float  # share of the run's tokens, or of its rows if PACKING pads rows
  epoch_tokens: int  # tokens of all training documents, [eod] included
  epochs: float | None  # None if there is no training document


def epochs_of_run(
  sources: Sequence[Source],
  lengths: Sequence[EpochLengths],
  *,
  num_rows: int,
  sequence_length: int,
  packing: str,
  objective: Objective,
  seed: int,
) -> Mapping[str, Reading]:
  """Returns how much a run reads of each source, by the source's name.

  `lengths` has an item per source; `num_rows` is the number of rows in all
  steps; `packing` is PACKING, such as "joined".
  """
  rates = np.array([source.rate for source in sources])
  rates /= rates.sum()
  tokens = [
    each.tokens(source.has_inputs)
    for source, each in zip(sources, lengths, strict=True)
  ]
  if packing in ("packed", "single"):
    # Count epochs in rows, not in tokens, because rows may hold padding.
    rates = Mixture(rates, seed=seed).rows_of_block / BLOCK_ROWS
    sizes = [
      WholeRows(
        each,
        sequence_length,
        objective=objective,
        packed=packing == "packed",
        seed=seed,
      ).num_rows
      if len(each)
      else 0
      for each in tokens
    ]
    read = num_rows * rates
  else:
    sizes = list(map(len, tokens))
    read = num_rows * sequence_length * rates
  return {
    source.name: Reading(
      float(rate), len(each), float(part) / size if size else None
    )
    for source, rate, each, part, size in zip(
      sources, rates, tokens, read, sizes, strict=True
    )
  }
