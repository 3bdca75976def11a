# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Streams on real sockets get each token while a call of many steps runs."""

import asyncio
import json
import re
import socket
import struct
import threading

import pytest

from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import SlotDecoder
from palm_mtf.native.operations import operations
from tests import oracle
from tests.decode_testing import save_checkpoint
from tests.generation.serving import batcher_test
from tests.generation.serving.live_server import (
  EVERY_SECS,
  answer_to,
  complete,
  http,
  serving,
  small_config,
  small_vocabulary,
  until,
)
from tests.mtf_testing import SINGLE
from tests.mtf_testing import small_config as small_model

pytest.importorskip("aiohttp", reason="aiohttp, which serve needs, is absent")

run = batcher_test.run
LENGTH, LONG = 4096, 4000
in_cpp = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  vocab = small_vocabulary().size
  config = small_model(vocab_size=vocab, sequence_length=LENGTH)
  params = oracle.random_parameters(config, seed=1)
  folder = tmp_path_factory.mktemp("checkpoint")
  with LoadedDecoder(
    save_checkpoint(config, params, folder), config, SINGLE
  ) as loaded:
    yield loaded


@pytest.fixture
def decoder(loaded):
  """Slots of a model in C++, and the number of steps of each call."""
  decoder = SlotDecoder(loaded, small_vocabulary().size, 3)
  steps, decoder.calls = decoder.steps, []

  def count(*args, **more):
    found = steps(*args, **more)
    decoder.calls.append(max(map(len, found.values())))
    return found

  decoder.steps = count
  return decoder


def serve(decoder):
  return serving(decoder=decoder, config=small_config(LENGTH))


def texts_of(content):
  """Returns the text of each event of a stream, and why the text ended."""
  # Each event is a chunk of the body.
  events = re.findall(r"data: (.+)\n\n", content)
  assert events[-1] == "[DONE]"
  choices = [json.loads(x)["choices"][0] for x in events[:-1]]
  return [x["text"] for x in choices], choices[-1]["finish_reason"]


async def stream(address, body):
  request = http("POST", "/v1/completions", {**body, "stream": True})
  status, _, content = await answer_to(address, request)
  assert status == 200, content
  return texts_of(content)


async def whole(address, body):
  status, answer = await complete(address, body)
  assert status == 200, answer
  return answer["choices"][0]["text"]


def asked(prompt, max_tokens, seed=0):
  return {
    **{"prompt": prompt, "max_tokens": max_tokens},
    **{"temperature": 1.0, "seed": seed, "top_k": 20},
  }


@in_cpp
def test_streams_get_the_texts_of_whole_answers_before_their_calls_end(decoder):
  bodies = [asked(x, 300, i) for i, x in enumerate(["one", "two", "three"])]

  async def run():
    async with serve(decoder) as (_, address):
      texts = [await whole(address, x) for x in bodies]
      decoder.calls.clear()
      return texts, await asyncio.gather(*(stream(address, x) for x in bodies))

  texts, found = asyncio.run(run())
  assert ["".join(pieces) for pieces, _ in found] == texts
  # Without tokens from inside of calls, there would be no more events.
  assert sum(len(pieces) for pieces, _ in found) > 3 * len(decoder.calls)


@in_cpp
def test_nothing_after_a_stop_string_inside_of_a_call_is_sent(decoder):
  body, other = asked("one", 300), asked("two", 300, 1)

  async def run():
    async with serve(decoder) as (server, address):
      texts = [await whole(address, x) for x in (body, other)]
      stop = texts[0][90:96]
      decoder.calls.clear()
      found = await asyncio.gather(
        stream(address, {**body, "stop": stop}), stream(address, other)
      )
      again = await whole(address, {**body, "stop": stop})
      return texts, stop, found, again, server._counters.cancelled

  texts, stop, ((pieces, why), (others, _)), again, cancelled = asyncio.run(
    run()
  )
  before = texts[0][: texts[0].find(stop)]
  assert len(before) > 40
  assert ("".join(pieces), why) == (before, "stop")
  assert again == before
  assert "".join(others) == texts[1]
  # The stop string ended its texts before their last token.
  assert cancelled == 2


@in_cpp
def test_who_leaves_during_a_call_frees_the_slot_before_the_call_is_over(
  decoder,
):
  async def run():
    async with serve(decoder) as (server, address):
      body = {**asked("one", LONG), "temperature": 0.0, "stream": True}
      reader, writer = await asyncio.open_connection(*address[:2])
      writer.write(http("POST", "/v1/completions", body))
      await reader.readuntil(b"data: ")
      writer.close()
      await until(lambda: server._counters.cancelled)
      await until(lambda: not server._batcher._running)
      return server._counters.generated_tokens

  assert asyncio.run(run()) < LONG / 2


@in_cpp
def test_a_client_that_does_not_read_delays_no_other_stream(decoder):
  long = {**asked("one", LONG), "temperature": 0.0}

  def read_late(address, may_read, found):
    with socket.socket() as connection:
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      connection.settimeout(EVERY_SECS)
      connection.connect(address[:2])
      body = {**long, "stream": True}
      connection.sendall(http("POST", "/v1/completions", body))
      may_read.wait(EVERY_SECS)
      parts = iter(lambda: connection.recv(2**16), b"")
      found.append(b"".join(parts))

  async def run():
    async with serve(decoder) as (server, address):
      # Each event has the name, so few events fill the buffers of the sockets.
      object.__setattr__(server._model, "name", "m" * 2**15)
      text = await whole(address, long)
      may_read, found = threading.Event(), []
      late = asyncio.create_task(
        asyncio.to_thread(read_late, address, may_read, found)
      )
      await until(lambda: server._batcher._running)
      bodies = [asked("two", 50, i) for i in range(3)]
      pieces = [await stream(address, x) for x in bodies]
      texts = [await whole(address, x) for x in bodies]
      await until(lambda: not server._batcher._running)
      may_read.set()
      await late
      return text, found[0], pieces, texts

  text, late, pieces, texts = asyncio.run(run())
  assert ["".join(x) for x, _ in pieces] == texts
  late_pieces, _ = texts_of(late.decode())
  assert "".join(late_pieces) == text
  # Tokens that came before the client read are in one event.
  assert max(map(len, late_pieces)) > LONG / 20


class Sending(batcher_test.Counting):
  """Sends tokens as steps in C++ do."""

  sends_tokens = True

  def steps(self, texts, count, *, wants_log_probs, feed=None):
    found = {slot: [] for slot in texts}
    with socket.socket(fileno=socket.dup(feed.socket)) as ours:
      for i, step in enumerate(self.steps_of(texts, count)):
        for slot, token in step.items():
          found[slot].append(batcher_test.Chosen(token + 1, None, {}))
          place = texts[slot].place + i
          ours.send(struct.pack("=3i", slot, place, token + 1))
        self.counts.append(1)
        try:
          if ours.recv(64):
            break
        except BlockingIOError:
          pass
    return found


def test_the_end_of_a_text_inside_of_a_call_ends_the_call(run):
  decoder = Sending()
  decoder.may_step = threading.Semaphore(0)
  run.decoder = run.batcher.engine.decoder = decoder
  ends, long = (
    run.row(x, max_tokens=90, stream=True) for x in (batcher_test.EOD - 3, 50)
  )
  run.batcher.submit([ends, long])
  run.thread.start()
  taken = 0
  for taken in range(1, 90):
    decoder.may_step.release()
    while len(decoder.counts) < taken and not ends.ended:
      pass
    run.batcher.take_tokens()
    assert len(long.chosen) >= taken - 1
    if ends.ended:
      break
  assert (taken, ends.ended) == (3, "eod") and not long.ended
  assert batcher_test.tokens(ends)[-1] == batcher_test.EOD
  # The text does not wait for the end of the call to leave its slot.
  decoder.may_step.release(1)
  while run.batcher._running.get(0) is ends:
    pass
  decoder.may_step.release(10**6)
  run.end()
  assert batcher_test.tokens(long) == [*range(51, 141)]
  assert batcher_test.tokens(ends)[-1] == batcher_test.EOD


def test_where_no_step_sends_tokens_a_call_for_a_stream_has_one_step(run):
  run.decoder.most = 10**6
  run.serve(run.row(10, max_tokens=64, stream=True))
  assert run.decoder.counts == [1] * 64
