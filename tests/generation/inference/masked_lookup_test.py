# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts with masks are the same with and without prompt lookup."""

import dataclasses
import itertools
import json
import time
import types

import numpy as np
import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.data.vocabulary.text_reader import decode_after
from palm_mtf.generation.decode import slot_program
from palm_mtf.generation.inference.constraint import Grammars
from palm_mtf.generation.inference.slot_decoder import SlotDecoder, SlotText
from palm_mtf.generation.serving.batcher import Batcher, Row
from palm_mtf.generation.serving.completion_request import (
  read_completion_request,
)
from palm_mtf.generation.serving.counters import Counters
from palm_mtf.native.operations import operations
from tests.cases import slow
from tests.generation.serving.live_server import Weights, small_vocabulary
from tests.served_adapters import EACH_DTYPE, find_logits, serving

pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler"
)
TOKENS, ROWS = 12, 12
RIGHT = [8, 0, 3, 8, 1, 2, 5, 3, 8, 8, 2, 4]  # right tokens in a row's drafts
PROMPTS = [[0, 5, 9, 13], [0, 7], [0, 40, 2, 2, 8, 21, 3]]


class Planted:
  """Texts in slots, half of them with masks; drafts are planted."""

  def __init__(self, served):
    self.decoder, self.adapters = served.decoder, served.adapters
    vocab = served.models[0][0].vocab_size
    allowed = np.random.default_rng(2).random([TOKENS, vocab]) < 0.3
    allowed[:, 3] = True  # never none
    allowed[5] = np.arange(vocab) == 11  # only this one
    bits = np.packbits(allowed, axis=1, bitorder="little")
    padding = -bits.shape[1] % 4
    self.words = np.pad(bits, [[0, 0], [0, padding]]).view(np.int32)
    self.allowed = allowed

  def text_of(self, row, chosen, draft=()):
    tokens = [*PROMPTS[row % 3], *(x.token for x in chosen)]
    place = len(chosen)
    return SlotText(
      *(tokens[-1], len(tokens) - 1, place, np.array([row, 3], np.int32)),
      temperature=30.0 * (row % 4 > 0),
      top_k=20 if row % 4 == 2 else None,
      top_p=0.9 if row % 4 == 3 else 1.0,
      limit=TOKENS - place,
      masks=[*self.words[place : place + len(draft) + 1]] if row % 2 else (),
      adapter=self.adapters[row % 5].number,
      draft=draft,
    )

  def insert(self, slot, row):
    adapter = self.adapters[row % 5].number
    self.decoder.insert(slot, PROMPTS[row % 3], adapter)

  def read_alone(self, row):
    """Returns the tokens of a row by single steps, with logits."""
    self.insert(0, row)
    found = []
    while len(found) < TOKENS:
      texts = {0: self.text_of(row, found)}
      found += self.decoder.steps(texts, 1, wants_log_probs=True)[0]
    return found


@pytest.mark.parametrize(
  ("block", "dtype"),
  [
    *EACH_DTYPE,
    *(
      slow(block, dtype)
      for block in ("Gemma 3", "OLMoE")
      for dtype in ("float32", "bfloat16", "int8", "int4")
    ),
  ],
)
def test_drafts_change_neither_texts_nor_logits(
  block, dtype, tmp_path, monkeypatch
):
  """Greedy and drawn, with masks or none, of all adapters in one batch.

  Some drafts are right, some from a token on wrong. The logits are those of the
  tokens after a draft, to the bit.
  """
  # TensorFlow sums exponentials of one row in another order than of several
  # rows, so log p may differ in the last bits; take the logits.
  monkeypatch.setattr(slot_program, "_find_log_probs", find_logits)
  with serving(block, dtype, tmp_path) as served:
    planted = Planted(served)
    alone = [planted.read_alone(row) for row in range(ROWS)]
    found, drafts, expected = [[] for _ in range(ROWS)], {}, {}
    counts = set(), set()  # of tokens of a step, without masks and with
    monkeypatch.setattr(served.decoder, "draft", lambda i: drafts[i])
    for row in range(ROWS):
      planted.insert(row, row)
    for call in itertools.count():
      going = [i for i, x in enumerate(found) if len(x) < TOKENS]
      if not going:
        break
      for row in going:
        after = [x.token for x in alone[row][len(found[row]) :]]
        right = min(RIGHT[row], len(after) - 1)
        wrong = (after[right] + 1) % 40
        drafts[row] = [*after[:right], wrong][: min(8, len(after) - 1)]
        expected[row] = right + 1
      texts = {i: planted.text_of(i, found[i], drafts[i]) for i in going}
      wants = call % 3 == 1
      steps = served.decoder.steps(texts, 1, wants_log_probs=wants)
      for row, chosen in steps.items():
        most = 1 if wants else expected[row]
        if any(i % 2 for i in going):  # the call has masks
          assert 1 <= len(chosen) <= most
          counts[row % 2].add(len(chosen))
        found[row] += chosen
  # The second step drafts whatever the computer's speed: further rows seem to
  # cost little, because no step with a draft has been measured.
  assert min(map(max, counts)) > 1
  for row, texts in enumerate(found):
    assert [x.token for x in texts] == [x.token for x in alone[row]]
    for ours, theirs in zip(texts, alone[row], strict=True):
      assert ours.log_prob in (None, theirs.log_prob)
      assert not ours.likeliest or ours.likeliest == theirs.likeliest
    if row % 2:
      assert planted.allowed[range(TOKENS), [x.token for x in texts]].all()
  assert sum(x.log_prob is not None for each in found for x in each) > ROWS


SCHEMA = {
  "type": "object",
  "properties": {
    "one": {
      "type": "array",
      "items": {"const": "two"},
      "minItems": 4,
      "maxItems": 5,
    },
    "three": {"type": "boolean"},
  },
  "required": ["one", "three"],
  "additionalProperties": False,
}


def serve(served, decoder, numbers):
  """Returns the texts and the kinds of end of the requests with `numbers`."""
  vocabulary = small_vocabulary()
  grammars, counters, rows = Grammars(vocabulary), Counters(), []
  form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
  for i in numbers:
    body = {"prompt": "one two three"[: 4 + i], "max_tokens": 80, "seed": i}
    body |= {"response_format": form} if i % 3 else {}
    asked = read_completion_request(
      {**body, "temperature": float(i % 2)},
      DecodeConfig(),
      sample_tokens=1,
      seed=0,
    )
    if i >= 5:
      adapter = types.SimpleNamespace(adapter=served.adapters[i % 5])
      asked = dataclasses.replace(asked, adapter=adapter)
    (text,) = asked.prompts
    row = Row(
      prompt=[0, *vocabulary.encode(text)],
      asked=asked,
      key=np.array([i, 7], np.int32),
      deadline=time.monotonic() + 600,
      client="a",
      changed=lambda: None,
      constraint=asked.grammar and grammars.start(asked.grammar),
    )
    rows.append(row)
  batcher = Batcher(
    *(Weights(decoder), counters),
    end_ids=vocabulary.end_ids,
    most_waiting=len(rows),
  )
  batcher.submit(rows)
  batcher.stop()
  batcher.run()
  assert batcher.failure is None
  return [([x.token for x in row.chosen], row.ended) for row in rows]


def test_forms_of_adapters_in_one_batch_are_those_alone_and_valid(tmp_path):
  """Next to texts without a form, greedy and drawn, as `serve` decodes them."""
  pytest.importorskip("llguidance", reason="llguidance is not installed")
  vocabulary = small_vocabulary()
  sizes = {"vocab_size": vocabulary.size + 3, "sequence_length": 100}
  with serving("LLaMA 3", "float32", tmp_path, **sizes) as served:
    counts = set()  # of tokens that a call chose for a text with masks

    def step(texts, *given, **more):
      found = steps(texts, *given, **more)
      counts.update(len(found[i]) for i, x in texts.items() if x.masks)
      return found

    plain = SlotDecoder(served.loaded, vocabulary.size, 1)
    alone = [serve(served, plain, [i])[0] for i in range(10)]
    looked_up = SlotDecoder(
      served.loaded, vocabulary.size, 10, prompt_lookup=True
    )
    steps, looked_up.steps = looked_up.steps, step
    assert serve(served, looked_up, range(10)) == alone
  assert max(counts) > 1
  forms = [x for i, x in enumerate(alone) if i % 3]
  answers = [
    json.loads(decode_after(vocabulary, None, ids[:-1]))
    for ids, ended in forms
    if ended == "eod"
  ]
  assert len(answers) == len(forms)
  assert len({*map(tuple, (x for x, _ in forms))}) > 3
  for answer in answers:
    assert answer.keys() == {"one", "three"}
    assert {*answer["one"]} == {"two"} and len(answer["one"]) in (4, 5)
    assert isinstance(answer["three"], bool)
