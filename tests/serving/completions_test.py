# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows that end early are answered as the documentation says."""

import asyncio
import functools

import pytest

from palm_mtf.config.decode import DecodeConfig
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.inference.slot_decoder import Chosen
from palm_mtf.serving.batcher import FullError
from palm_mtf.serving.counters import Counters
from palm_mtf.serving.served_model import ServedModel

test_utils = pytest.importorskip(
  "aiohttp.test_utils", reason="aiohttp, which serve needs, is absent"
)


class Ending:
  """A batcher that ends all rows after some tokens, for one reason."""

  def __init__(self, tokens, why):
    self._tokens, self._why = tokens, why

  def submit(self, rows):
    if self._why == "full":
      raise FullError
    for row in rows:
      row.chosen.extend(Chosen(token, -1.0, {}) for token in self._tokens)
      row.ended = self._why
      row.changed()

  def cancel(self, rows):
    pass


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("vocabulary") / "vocabulary.model")
  train_vocabulary(["one two three four\n" * 20], 290, path=path)
  return Vocabulary(path)


@pytest.fixture
def ask(vocabulary):
  """Returns status and answer of a request whose rows end so."""
  from palm_mtf.serving.server import Server  # imports aiohttp

  model = ServedModel(
    activation_dtype="float32",
    name="m",
    created=0,
    vocabulary=vocabulary,
    decode=DecodeConfig(),
    sample_tokens=5,
    seed=0,
    start_id=0,
    sequence_length=32,
    most_rows=4,
    most_secs=30,
  )

  async def asked(text, why, body, **headers):
    batcher = Ending(vocabulary.encode(text), why)
    app = Server(model, batcher, Counters())._app()
    async with test_utils.TestClient(test_utils.TestServer(app)) as client:
      sent = functools.partial(client.post, "/v1/completions")
      answer = await sent(json=body, headers=headers)
      return answer.status, await answer.text()

  return lambda *given, **headers: asyncio.run(asked(*given, **headers))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
  ("text", "why", "status", "part"),
  [
    ("one", "time", 200, '"finish_reason": "length"'),
    ("", "time", 503, "its time was over before the first token"),
    ("one", "failed", 503, "this server stops."),
    ("one", "full", 429, "as many completions as may are waiting"),
  ],
)
def test_what_ended_a_row_is_told(ask, text, why, status, part, stream):
  found, answer = ask(text, why, {"prompt": "two", "stream": stream})
  assert found == status
  assert part in answer


def test_a_charset_that_nobody_knows_is_a_wrong_body(ask):
  head = {"Content-Type": "application/json; charset=none"}
  found, _ = ask("one", "eod", {"prompt": "two"}, **head)
  assert found == 400
