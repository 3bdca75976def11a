# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked cross-attention (Borgeaud et al. 2022)."""

import dataclasses
import itertools

import numpy as np
import pytest

from palm_mtf.data.batches.neighbours import NeighbourIndex, write_index
from palm_mtf.data.batches.packing import JoinedRows
from tests import neighbours_oracle
from tests.blocks import Z_LOSS, check
from tests.cases import slow
from tests.data.small_sources import token_array
from tests.mtf_testing import (
  SINGLE,
  mesh_layout,
  run_model,
  small_config,
  training,
)
from tests.neighbours_cases import CONFIG, make_batch, make_case
from tests.settings import ADAMW


@pytest.mark.parametrize(
  ("changes", "layout"),
  [
    ({}, None),
    slow(
      {"block": "serial", "attention": "multi_head", "remat": "layer"},
      "PaLM's 2D",
    ),
    slow({"positions": "none"}, None),
  ],
)
def test_logits_and_gradients_are_those_of_the_paper(changes, layout):
  config = dataclasses.replace(CONFIG, **changes)
  case = make_case(config)
  mesh = mesh_layout(layout) if layout else SINGLE
  result = run_model(config, case.params, case.batch, mesh=mesh, z_loss=Z_LOSS)
  check(case, result)


def test_a_token_changes_no_logits_before_it_nor_through_its_neighbours():
  params = neighbours_oracle.random_parameters(CONFIG, seed=1)
  batch, m = make_batch(CONFIG), CONFIG.chunk_length

  def logits(batch):
    return run_model(CONFIG, params, batch, backward=False).logits

  own = logits(batch)
  place = 7
  changed = {x: y.copy() for x, y in batch.items()}
  changed["inputs"][:, place] += 1 - 2 * (batch["inputs"][:, place] == 43)
  # The chunk of the token finds other neighbours, and so may later ones.
  found = changed["neighbours"].reshape(2, -1, 4 * m)
  found[:, place // m :] = (found[:, place // m :] + 1) % 44
  moved = np.abs(logits(changed) - own).max(-1) > 0
  assert not moved[:, :place].any()
  assert moved[:, place].all()
  # Only what the changed neighbours change: from the end of the chunk on.
  changed["inputs"] = batch["inputs"]
  moved = np.abs(logits(changed) - own).max(-1) > 0
  end = place // m * m + m - 1
  assert not moved[:, :end].any()
  assert moved[:, end].all()


# A model of three layers, the last of which attends to neighbours.
LEARNING = small_config(
  layers="2*plain, reading",
  variants={"plain": {}, "reading": {"NEIGHBOURS": 1}},
  **{"num_layers": 3, "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64},
  **{"sequence_length": 64, "chunk_length": 8},
)
STEPS, ROWS = 120, 16


def make_documents(rng, passages, count):
  """Returns documents of four passages each, which fill a row with [eod]."""
  chosen = rng.integers(len(passages), size=[count, 4])
  found = [np.concatenate(passages[x]).tolist()[:-1] for x in chosen]
  return token_array([((), x) for x in found], has_inputs=False)


def make_rows(documents, index):
  """Returns batches of rows with neighbours; without an index, of none."""
  length = LEARNING.sequence_length
  rows = JoinedRows(documents, length, eod_id=None, neighbours=index)
  return [
    {x: np.stack([row[x] for row in read]) for x in read[0]}
    for first in range(0, rows.num_rows - ROWS + 1, ROWS)
    for read in [[rows.read(i) for i in range(first, first + ROWS)]]
  ]


def of_other_rows(batches):
  """Returns batches whose rows have the neighbours of other rows."""
  return [x | {"neighbours": np.roll(x["neighbours"], 1, 0)} for x in batches]


@pytest.mark.slow
def test_held_out_text_is_learned_from_neighbours_of_training_text(tmp_path):
  """Passages recur in other documents; three seeds, equal steps.

  Neighbours of held-out text are of training documents only. With neighbours
  of other rows, or without any, nothing tells the next random token.
  """
  rng = np.random.default_rng(0)
  passages = rng.integers(2, LEARNING.vocab_size, [3000, 2 * 8])
  trained, held_out = (
    make_documents(rng, passages, n) for n in (STEPS * ROWS, 2 * ROWS)
  )
  write_index(str(tmp_path / "chunks"), [trained], 8, "v")
  index = NeighbourIndex(str(tmp_path / "chunks"), 1, 8, "v")
  batches, held = make_rows(trained, index), make_rows(held_out, index)
  plain = dataclasses.replace(LEARNING, layers="", variants=None)
  found = {}

  def learn(config, kinds):
    features = list(held[0]) if config is LEARNING else ["inputs", "targets"]
    with training(config, ADAMW, features, batch_size=ROWS) as run:
      for kind, seed in itertools.product(kinds, range(3)):
        learned, tested = kinds[kind]
        initial = neighbours_oracle.random_parameters(config, seed)
        params, _ = run(learned, initial)
        # The loss of a step is that of its initial weights.
        losses = [run([x], params)[1][0]["loss"] for x in tested]
        found[kind, seed] = np.mean(losses)
        print(f"{kind}, seed {seed}: {found[kind, seed]:.3f}", flush=True)

  others = of_other_rows(batches), of_other_rows(held)
  learn(LEARNING, {"with": (batches, held), "of other rows": others})
  without = make_rows(trained, None), make_rows(held_out, None)
  learn(plain, {"without": without})
  for seed in range(3):
    assert found["with", seed] < 3.0
    # The entropy is log(42) = 3.74, but the last token of each row is [eod].
    others = found["of other rows", seed], found["without", seed]
    assert min(others) > 63 / 64 * np.log(42) - 0.05
