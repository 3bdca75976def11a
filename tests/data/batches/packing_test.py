# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import itertools
import re
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.batches import packing as packing_module
from palm_mtf.data.batches.packing import (
  JoinedRows,
  WholeRows,
  document_start,
)
from palm_mtf.data.batches.shuffle import shuffle
from tests.data.small_sources import EOD, examples, repeatable, token_array

_FEATURES = ("targets", "inputs", "segments", "loss_weights")


def joined(tokens, length, *, masked=False, **more):
  return JoinedRows(tokens, length, eod_id=EOD if masked else None, **more)


def whole(tokens, length, *, packed, seed=0, **more):
  return WholeRows(tokens, length, packed=packed, seed=seed, **more)


def written_example() -> dict[str, dict[str, list[list[str]]]]:
  """Returns the docstring's figure: packing -> feature -> rows of symbols."""
  figure, packing = {}, None
  for line in packing_module.__doc__.splitlines():
    line = line.replace("(the next epoch)", "")
    found = re.match(rf"  (\w*) +({'|'.join(_FEATURES)})  +(.*)", line)
    if found:
      packing = found[1] or packing
      cells = [row.split(" ") for row in re.split("  +", found[3].strip())]
      figure.setdefault(packing, {})[found[2]] = cells
  return figure


def number(symbol: str) -> int:
  if symbol.isdigit():
    return int(symbol)
  return {"_": 0, ".": EOD}.get(symbol, ord(symbol))


def in_written_order() -> int:
  """Returns a seed that packs three documents in their own order."""
  three = np.arange(3)
  return next(
    seed
    for seed in range(1000)
    if (shuffle(three, 3, f"seed {seed} packing") == three).all()
  )


@pytest.mark.parametrize(
  "packing", ["joined", "joined_masked", "packed", "single"]
)
def test_the_example_of_the_docstring_is_what_rows_hold(packing):
  a, b, c, d, e, f = map(ord, "abcdef")
  documents = [([], [a, b]), ([], [c]), ([d, e], [f])]
  tokens = token_array(documents, has_inputs=True)
  two_epochs = token_array(2 * documents, has_inputs=True)
  made = {
    "joined": lambda: joined(two_epochs, 6),
    "joined_masked": lambda: joined(two_epochs, 6, masked=True),
    "packed": lambda: whole(tokens, 6, packed=True, seed=in_written_order()),
    "single": lambda: whole(tokens, 6, packed=False),
  }[packing]()
  expected = written_example()[packing]
  count = len(expected["targets"])
  read = [made.read(i) for i in range(count)]
  if packing in ("packed", "single"):
    assert made.num_rows == count
  assert set(expected) == set(made.features)
  for row in read:
    for name, values in row.items():
      weights = name == "loss_weights"
      assert values.dtype == (np.float32 if weights else np.int32)
  for name, cells in expected.items():
    got = [row[name].tolist() for row in read]
    assert got == [[number(s) for s in row] for row in cells], name


_shards = st.lists(
  st.lists(examples(5), min_size=1, max_size=4), min_size=1, max_size=3
)


def documents_in(row) -> list[list[int]]:
  """Returns the targets of each segment of a packed row."""
  segments = row["segments"]
  return [
    row["targets"][segments == s].tolist() for s in range(1, segments.max() + 1)
  ]


@hypothesis.given(_shards, st.integers(3, 15), st.integers(0, 9))
@repeatable(60)
def test_no_packed_row_could_have_taken_the_next_document_too(
  shards, length, seed
):
  tokens = token_array(*shards, has_inputs=True)
  rows = whole(tokens, length, packed=True, seed=seed)
  found = [documents_in(rows.read(i)) for i in range(rows.num_rows)]
  for this, following in itertools.pairwise(found):
    assert sum(map(len, this)) + len(following[0]) > length


def test_another_seed_packs_other_documents_together():
  documents = [([], [i] * (i % 5)) for i in range(2, 50)]
  tokens = token_array(documents, has_inputs=False)
  packed = {
    whole(tokens, 12, packed=True, seed=seed).read(0)["targets"].tobytes()
    for seed in range(10)
  }
  assert len(packed) > 5


@pytest.mark.parametrize("packed", [True, False])
@hypothesis.given(_shards, st.integers(1, 15), st.integers(0, 9))
@repeatable(120)
def test_every_document_comes_once_and_whole_unless_it_is_longer_than_a_row(
  packed, shards, length, seed
):
  tokens = token_array(*shards, has_inputs=False)
  rows = whole(tokens, length, packed=packed, seed=seed)
  found = []
  for row in map(rows.read, range(rows.num_rows)):
    used = int(row["loss_weights"].sum())
    found += documents_in(row) if packed else [row["targets"][:used].tolist()]
    assert used > 0
    for name in ("loss_weights", "targets", *("segments",) * packed):
      assert row[name][:used].all(), name
      assert not row[name][used:].any(), name
  expected = []
  for inputs, text in list(itertools.chain(*shards)):
    document = [*inputs, *text, EOD]
    expected += [
      document[i : i + length] for i in range(0, len(document), length)
    ]
  assert rows.num_cut == 0
  assert sorted(found) == sorted(expected)
  assert packed or found == expected


@hypothesis.given(_shards, st.integers(1, 9))
@repeatable(300)
def test_an_example_that_is_too_long_keeps_its_targets_and_the_end_of_inputs(
  shards, length
):
  tokens = token_array(*shards, has_inputs=True)
  rows = whole(tokens, length, packed=False)
  num_cut = 0
  documents = list(itertools.chain(*shards))
  assert rows.num_rows == len(documents)
  for index, (inputs, text) in enumerate(documents):
    targets = [*text, EOD][:length]
    given = inputs[max(0, len(inputs) - (length - len(targets))) :]
    num_cut += len(inputs) + len(text) + 1 > length
    padding = [0] * (length - len(given) - len(targets))
    row = rows.read(index)
    assert row["targets"].tolist() == given + targets + padding
    expected = [0.0] * len(given) + [1.0] * len(targets) + [0.0] * len(padding)
    assert row["loss_weights"].tolist() == expected
    shifted = [0, *given, *targets][: len(given) + len(targets)]
    assert row["inputs"].tolist() == shifted + padding
  assert rows.num_cut == num_cut


@pytest.mark.parametrize("packed", [True, False])
def test_rows_of_whole_documents_are_as_few_as_they_fill(packed):
  documents = [([], [i] * 4) for i in range(2, 9)]
  tokens = token_array(documents, has_inputs=False)
  rows = whole(tokens, 11, packed=packed)
  assert rows.num_rows == (4 if packed else 7)
  found = [piece for i in range(rows.num_rows) for piece in rows.pieces(i)]
  assert sorted(found) == [(i, 0, 5) for i in range(7)]


@pytest.mark.parametrize(
  ("packing", "start_id", "start"),
  [
    ("joined", None, EOD),
    ("joined", EOD, EOD),
    ("joined_masked", None, 0),
    ("joined_masked", 3, 3),
    ("packed", None, 0),
    ("packed", 3, 3),
    ("single", None, 0),
    ("single", 3, 3),
  ],
)
def test_the_start_of_a_document_is_the_input_before_it_in_training(
  packing, start_id, start
):
  """Except for the first document of a joined row, which is cut anywhere."""
  data = SimpleNamespace(packing=packing, start_id=start_id)
  assert document_start(data, EOD) == start
  tokens = token_array([([], [5, 6]), ([], [7, 8])], has_inputs=False)
  first = start_id or 0
  if packing.startswith("joined"):
    is_masked = packing == "joined_masked"
    rows = joined(tokens, 6, masked=is_masked, first=first)
  else:
    rows = whole(tokens, 6, packed=packing == "packed", first=first)
  second = rows.read(0)
  place = second["targets"].tolist().index(7 if 7 in second["targets"] else 5)
  assert second["inputs"][place] == start
