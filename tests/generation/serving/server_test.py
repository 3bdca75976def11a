# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server keeps time limits and its number of rows, and says so."""

import asyncio
import math
import time
import types
from concurrent import futures

import pytest

from palm_mtf.generation.serving import batcher, served_model
from tests import strict_json
from tests.generation.serving.live_server import (
  Repeating,
  ask,
  complete,
  serving,
  until,
)

PROMPT = {"prompt": "one", "max_tokens": 20}
STREAMS = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def clock(monkeypatch):
  """The clock of time limits; it moves only when a test sets `now`."""
  clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
  for module in (batcher, served_model):
    monkeypatch.setattr(module, "time", clock)
  return clock


@STREAMS
def test_a_text_ends_at_its_time_limit(clock, stream):
  class Slow(Repeating):
    def steps(self, texts, count, *, wants_log_probs, feed=None):
      clock.now += 25
      return super().steps(texts, count, wants_log_probs=wants_log_probs)

  async def run():
    async with serving(decoder=Slow(), most_secs=60) as (_, address):
      return await complete(address, {**PROMPT, "stream": stream})

  status, answer = asyncio.run(run())
  assert status == 200
  assert '"finish_reason": "length"' in str(answer).replace("'", '"')


def test_a_conversation_that_takes_too_long_is_told_which_one_it_was(
  monkeypatch,
):
  """The first one holds the only thread; the second one waits for it."""
  monkeypatch.setattr(
    served_model.ServedModel, "read", lambda *_, **__: time.sleep(1)
  )

  async def run():
    async with serving(most_secs=0.4) as (_, address):
      return await asyncio.gather(
        *(ask(address, "POST", "/v1/chat/completions", {}) for _ in range(2))
      )

  answers = asyncio.run(run())
  assert {status for status, _ in answers} == {503}
  assert {answer["error"]["message"] for _, answer in answers} == {
    "the chat template takes too long.",
    "other conversations take too long.",
  }


@STREAMS
def test_a_text_without_a_token_in_time_is_refused(clock, stream):
  decoder = Repeating()

  async def run():
    async with serving(decoder=decoder, most_secs=60) as (server, address):
      decoder.may_step.clear()
      first = asyncio.create_task(complete(address, PROMPT))
      await until(lambda: server._batcher._running)
      late = asyncio.create_task(
        complete(address, {**PROMPT, "stream": stream})
      )
      await until(lambda: len(server._batcher._waiting) == 1)
      clock.now += 61
      decoder.may_step.set()
      return await late, await first

  (status, answer), (first, _) = asyncio.run(run())
  assert (status, first) == (503, 200)
  assert "time limit passed before the first token" in str(answer)


@STREAMS
def test_a_text_that_a_failure_ends_is_answered(stream):
  decoder = Repeating()

  async def run():
    async with serving(decoder=decoder) as (server, address):
      decoder.may_step.clear()
      asked = asyncio.create_task(
        complete(address, {**PROMPT, "stream": stream})
      )
      await until(lambda: server._batcher._running)
      server._batcher.give_up()
      decoder.may_step.set()
      return await asked

  status, answer = asyncio.run(run())
  assert status == 503 and "this server is stopping." in str(answer)


@STREAMS
def test_requests_beyond_what_may_wait_are_refused(stream):
  decoder = Repeating()

  async def run():
    async with serving(decoder=decoder) as (server, address):
      decoder.may_step.clear()
      asked = asyncio.create_task(complete(address, {**PROMPT, "n": 8}))
      rows = server._batcher
      await until(lambda: len(rows._waiting) + len(rows._running) == 8)
      refused = await complete(address, {**PROMPT, "stream": stream})
      decoder.may_step.set()
      return refused, await asked

  (status, answer), (first, _) = asyncio.run(run())
  assert (status, first) == (429, 200)
  assert "too many completions are waiting" in str(answer)


@STREAMS
@pytest.mark.parametrize("log_prob", [math.nan, -math.inf, math.inf])
def test_numbers_that_json_lacks_are_null(stream, log_prob):
  body = {**PROMPT, "max_tokens": 2, "logprobs": 1, "echo": True}

  async def run():
    async with serving(decoder=Repeating(log_prob)) as (_, address):
      return await complete(address, {**body, "stream": stream})

  status, answer = asyncio.run(run())
  assert status == 200
  events = [answer]
  if stream:
    lines = [x for x in answer.splitlines() if x.startswith("data: {")]
    events = [strict_json.loads(line.removeprefix("data: ")) for line in lines]
  told = [event["choices"][0]["logprobs"] for event in events]
  found = [x for each in told for x in each["token_logprobs"]]
  assert found and set(found) == {None}
  tops = [
    x for each in told for top in each["top_logprobs"] for x in top.values()
  ]
  assert set(tops) == {None}


def test_a_server_answers_from_any_thread():
  async def answer():
    async with serving() as (_, address):
      return await complete(address, {"prompt": "one"})

  with futures.ThreadPoolExecutor() as pool:
    status, _ = pool.submit(asyncio.run, answer()).result()
  assert status == 200
