# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import collections
import functools
import itertools
import re
import types
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.config.data import SpanCorruption
from palm_mtf.data.batches import packing as packing_module
from palm_mtf.data.batches.packing import (
  CAUSAL,
  JoinedRows,
  PrefixLM,
  SpanCorruptionLM,
  WholeRows,
  document_start,
  from_json,
  prompt_start,
  row_start,
  to_json,
)
from palm_mtf.data.batches.row_streams import MixedRows, RowSource
from tests.data.small_sources import (
  EOD,
  examples,
  repeatable,
  token_array,
)

_FEATURES = ("targets", "inputs", "segments", "loss_weights")
IN_ORDER = 7  # a seed that packs three documents in their own order


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


@pytest.mark.parametrize(
  "packing", ["joined", "joined_masked", "packed", "single", "virtual"]
)
def test_the_example_of_the_docstring_is_what_rows_hold(packing):
  a, b, c, d, e, f = map(ord, "abcdef")
  documents = [([], [a, b]), ([], [c]), ([d, e], [f])]
  tokens = token_array(documents, has_inputs=True)
  two_epochs = token_array(2 * documents, has_inputs=True)
  made = {
    "joined": lambda: joined(two_epochs, 6),
    "joined_masked": lambda: joined(two_epochs, 6, masked=True),
    "packed": lambda: whole(tokens, 6, packed=True, seed=IN_ORDER),
    "single": lambda: whole(tokens, 6, packed=False),
    "virtual": lambda: whole(tokens, 9, packed=True, seed=IN_ORDER, virtual=2),
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
@repeatable(30)
def test_no_packed_row_could_have_taken_the_next_document_too(
  shards, length, seed
):
  tokens = token_array(*shards, has_inputs=True)
  rows = whole(tokens, length, packed=True, seed=seed)
  found = [documents_in(rows.read(i)) for i in range(rows.num_rows)]
  for this, following in itertools.pairwise(found):
    assert sum(map(len, this)) + len(following[0]) > length


@pytest.mark.parametrize("packed", [True, False])
@hypothesis.given(_shards, st.integers(1, 15), st.integers(0, 9))
@repeatable(40)
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
@repeatable(80)
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


@pytest.mark.parametrize(
  ("packing", "settings", "pad", "start"),
  [
    ("joined", {}, 0, EOD),
    ("joined", {"start_id": EOD}, 0, EOD),
    ("joined_masked", {}, 0, 0),
    ("joined_masked", {"start_id": 3}, 0, 3),
    ("packed", {}, 0, 0),
    ("packed", {"start_id": 3}, 0, 3),
    ("packed", {}, None, EOD),
    ("packed", {"start_id": 3, "add_start": False}, 0, EOD),
    ("single", {}, 0, 0),
    ("single", {"start_id": 3}, 0, 3),
  ],
)
def test_the_start_of_a_document_is_the_input_before_it_in_training(
  packing, settings, pad, start
):
  """Except for the first document of a joined row, which is cut anywhere."""
  data = SimpleNamespace(
    packing=packing, **{"start_id": None, "add_start": True} | settings
  )
  vocabulary = SimpleNamespace(eod_id=EOD, is_control=lambda i: i in (pad, EOD))
  assert document_start(data, vocabulary) == start
  adds_start = settings.get("add_start", True)
  assert prompt_start(data, vocabulary) == (start if adds_start else None)
  tokens = token_array([([], [5, 6]), ([], [7, 8])], has_inputs=False)
  first = row_start(data, vocabulary)
  # The token "0" of a text begins no row that does not begin with it.
  assert first in (pad, EOD, settings.get("start_id"))
  rows = {
    "joined": functools.partial(joined, masked=False),
    "joined_masked": functools.partial(joined, masked=True),
    "packed": functools.partial(whole, packed=True),
    "single": functools.partial(whole, packed=False),
  }[packing](tokens, 6, first=first)
  second = rows.read(0)
  place = second["targets"].tolist().index(7 if 7 in second["targets"] else 5)
  assert second["inputs"][place] == start


SENTINEL = 1999  # <extra_id_0>
DENSITY, MEAN = 0.15, 3.0
SPANS = SpanCorruptionLM(DENSITY, MEAN, SENTINEL, EOD)
TEXTS = [
  list(range(100 * i, 100 * i + n)) for i, n in enumerate([9, 40, 1, 25])
]


def rows_of(objective, *, length=24, packed=True, texts=TEXTS, seed=0):
  tokens = token_array([([], text) for text in texts], has_inputs=False)
  return WholeRows(
    tokens, length, objective=objective, packed=packed, seed=seed
  )


def documents(rows, epoch=0):
  """Yields inputs and targets of each document, read from the features."""
  for number in range(rows.num_rows):
    row = rows.read(number, epoch)
    for segment in range(1, row["segments"].max() + 1):
      inside = row["segments"] == segment
      learned = row["loss_weights"][inside] > 0
      given = row["prefix"][inside] > 0
      # The prefix is all before the first target: the 0 and the inputs.
      assert given.sum() == 1 + (~learned).sum() and given[: given.sum()].all()
      assert row["inputs"][inside][0] == 0
      targets = row["targets"][inside]
      np.testing.assert_array_equal(row["inputs"][inside][1:], targets[:-1])
      yield targets[~learned].tolist(), targets[learned].tolist()


def restored(inputs, targets):
  """Returns the original text of a corrupted example."""
  assert targets[-1] == EOD
  spans, text = collections.defaultdict(list), []
  for token in targets[:-1]:
    if token > SENTINEL - 100:
      last = token
    else:
      spans[last].append(token)
  for token in inputs:
    text += spans.pop(token) if token > SENTINEL - 100 else [token]
  assert not spans
  return text


@pytest.mark.parametrize("packed", [False, True])
def test_a_prefix_and_its_rest_are_the_text_and_the_next_epoch_cuts_elsewhere(
  packed,
):
  rows = rows_of(PrefixLM(), packed=packed)
  found = [list(documents(rows, epoch)) for epoch in (0, 0, 1)]
  assert found[0] == found[1] != found[2]
  for epoch in found:
    whole = sorted(x + y for x, y in epoch)
    pieces = [
      text[i : i + 24]
      for text in ([*text, EOD] for text in TEXTS)
      for i in range(0, len(text), 24)
    ]
    assert whole == sorted(pieces)
    assert all(inputs and targets for inputs, targets in epoch)


def test_a_text_of_one_token_has_no_inputs():
  rows = rows_of(PrefixLM(), texts=[[]] * 3)
  assert list(documents(rows)) == [([], [EOD])] * 3


def test_every_place_for_the_cut_is_as_likely():
  tokens = np.arange(6, dtype=np.int32)
  cuts = collections.Counter(
    PrefixLM().example(tokens, f"key {i}").num_inputs for i in range(1000)
  )
  assert sorted(cuts) == [1, 2, 3, 4, 5]
  # Each count is binomial: 200, with a standard deviation of 12.6.
  assert all(abs(n - 200) < 5 * 12.6 for n in cuts.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [4, 5, 24, 100])
def test_the_spans_and_the_rest_are_the_text_and_the_next_epoch_takes_others(
  length, packed
):
  rows = rows_of(SPANS, length=length, packed=packed)
  found = [list(documents(rows, epoch)) for epoch in (0, 0, 1)]
  assert found[0] == found[1]
  # A single span is always the last, as in T5, so nothing is random.
  assert length < 100 or found[0] != found[2]
  for epoch in found:
    tokens = [token for each in epoch for token in restored(*each)]
    assert sorted(tokens) == sorted(x for text in TEXTS for x in text)


@pytest.fixture(scope="module")
def t5():
  pytest.importorskip("t5", reason="t5 is not installed")
  import t5.data.preprocessors

  import palm_mtf._tf  # noqa: F401 (makes Mesh TensorFlow importable)

  return t5.data.preprocessors


@pytest.mark.parametrize(
  ("density", "mean"), [(0.15, 3.0), (0.5, 3.0), (0.15, 8.0), (0.1, 2.0)]
)
def test_as_many_tokens_and_spans_are_taken_out_as_t5_takes(t5, density, mean):
  from palm_mtf._tf import tf

  with tf.Graph().as_default(), tf.Session() as session:
    length = tf.placeholder(tf.int32, [])
    mask = t5.random_spans_noise_mask(
      length, density, seeds=[(1, 2), (3, 4)], mean_noise_span_length=mean
    )
    counts = SpanCorruption(density, mean)
    for n in [*range(2, 60), 114, 512, 1000]:
      noise = session.run(mask, {length: n})
      starts = noise & ~np.concatenate([[False], noise[:-1]])
      assert counts.num_noise_tokens(n) == noise.sum(), n
      assert counts.num_spans(n) == starts.sum(), n


def test_inputs_and_targets_of_the_same_noise_are_t5_s(t5):
  from palm_mtf._tf import tf

  vocabulary = types.SimpleNamespace(vocab_size=SENTINEL + 1)
  with tf.Graph().as_default(), tf.Session() as session:
    for n in (2, 9, 57, 200):
      tokens = np.arange(3, 3 + n, dtype=np.int32)
      made, num_inputs = SPANS.example(tokens, f"key {n}")
      noise = np.isin(tokens, made[num_inputs:])
      assert noise[-1] and not noise[0]  # as in T5
      expected = session.run(
        [
          replace(tf.constant(tokens), tf.constant(noise), vocabulary, None)
          for replace in (
            t5.noise_span_to_unique_sentinel,
            t5.nonnoise_span_to_unique_sentinel,
          )
        ]
      )
      np.testing.assert_array_equal(made[:num_inputs], expected[0])
      np.testing.assert_array_equal(made[num_inputs:], [*expected[1], EOD])


def test_all_sizes_of_spans_are_equally_likely():
  """3 spans split 5 noise and 5 kept tokens in 6 ways each: 36 masks."""
  objective = SpanCorruptionLM(0.5, 5 / 3, SENTINEL, EOD)
  tokens = np.arange(10, dtype=np.int32)
  seen = collections.Counter(
    tuple(objective.example(tokens, f"key {i}").tokens) for i in range(360)
  )
  assert len(seen) == 36
  # 10 each, with a standard deviation of 3.1.
  assert max(seen.values()) < 10 + 5 * 3.1


@pytest.mark.parametrize("objective", [PrefixLM(), SPANS], ids=str)
def test_examples_keep_their_own_inputs(objective):
  tokens = token_array([([5] * 3, [6] * 4)] * 9, has_inputs=True)
  rows = WholeRows(tokens, 16, objective=objective, packed=True, seed=0)
  plain = WholeRows(tokens, 16, packed=True, seed=0)
  assert rows.num_rows == plain.num_rows
  for number in range(rows.num_rows):
    row = rows.read(number)
    for name, values in plain.read(number).items():
      np.testing.assert_array_equal(row[name], values)
  assert all(inputs and targets for inputs, targets in documents(rows))


def test_a_stream_of_rows_draws_anew_in_each_epoch():
  rows = rows_of(PrefixLM(), texts=[list(range(3, 23))], packed=False)
  stream = MixedRows([RowSource("mine", 1.0, rows)], seed=0)
  assert stream.features[-1] == "prefix"
  cuts = {int(x["prefix"].sum()) for x in stream.read(np.arange(40))}
  assert len(cuts) > 10


@pytest.mark.parametrize("objective", [CAUSAL, PrefixLM(), SPANS], ids=str)
def test_an_objective_goes_to_another_host_as_json(objective):
  assert from_json(to_json(objective)) == objective
