# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the HTTP server on a free port, with a decoder without weights."""

import asyncio
import contextlib
import functools
import json
import socket
import tempfile
import threading
import time

from palm_mtf.cli.gin_files import load
from palm_mtf.config import Config
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.generation.inference.slot_decoder import Chosen
from palm_mtf.generation.serving.batcher import Batcher
from palm_mtf.generation.serving.counters import Counters
from palm_mtf.generation.serving.served_model import ServedModel
from tests import strict_json

EVERY_SECS = 60  # limit for operations that take milliseconds


@functools.cache
def small_vocabulary() -> Vocabulary:
  """Returns a vocabulary of 290 pieces."""
  with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/vocabulary.model"
    train_vocabulary(["one two three four\n" * 20], 290, path=path)
    return open_vocabulary(path)


@functools.cache
def small_config(sequence_length: int = 32) -> Config:
  """Returns settings of a run with a sequence length."""
  macros = [
    *('MODEL_DIR="unused"', 'ACTIVATION_DTYPE="float32"', "SEED=0"),
    *('PACKING="packed"', "SAMPLE_TOKENS=5"),
    f"SEQUENCE_LENGTH={sequence_length}",
  ]
  _, config = load("serve", ["recipes/quickstart.gin"], macros).build()
  return config


class Repeating:
  """Decoder that chooses the last token of each prompt again.

  Attributes:
    log_prob: log p of every token.
    may_step: event that lets steps proceed.
  """

  num_slots, sequence_length = 4, 32
  part_tokens = 0  # prompts are read whole
  sends_tokens = False  # before a call returns

  def __init__(self, log_prob=-1.0):
    self.log_prob = log_prob
    self.may_step = threading.Event()
    self.may_step.set()

  def insert(self, slot, ids, adapter=0):
    pass

  def draft(self, slot):
    return ()

  def steps(self, texts, count, *, wants_log_probs, feed=None):
    assert self.may_step.wait(EVERY_SECS)
    return {
      slot: [Chosen(x.token, self.log_prob, {x.token: self.log_prob})] * count
      for slot, x in texts.items()
    }

  def score(self, ids, adapter=0):
    return [Chosen(i, self.log_prob, {i: self.log_prob}) for i in ids[1:]]


class Weights:
  """The part of ServedWeights that a batcher needs, with any decoder."""

  def __init__(self, decoder, step=600):
    self.decoder, self.step, self.created = decoder, step, 7

  def score(self, ids, adapter=0):
    return self.decoder.score(ids, adapter)


@contextlib.asynccontextmanager
async def serving(access=None, decoder=None, *, loads_adapters=False, **model):
  """Runs a server; yields it, and its address."""
  from palm_mtf.generation.serving.access import Access
  from palm_mtf.generation.serving.server import Server  # imports aiohttp

  decoder = decoder or Repeating()
  counters = Counters()
  batcher = Batcher(Weights(decoder), counters, end_ids=(1,), most_waiting=4)
  given = {"most_rows": batcher.most_rows, "most_secs": 60, **model}
  given.setdefault("config", small_config())
  served = ServedModel(name="m", vocabulary=small_vocabulary(), **given)
  listening = socket.create_server(("127.0.0.1", 0))
  address = listening.getsockname()
  server = Server(
    *(served, batcher, counters, access or Access()),
    loads_adapters=loads_adapters,
  )
  task = asyncio.create_task(server.serve(listening))
  try:
    await ask(address, "GET", "/health")
    yield server, address
  finally:
    server.stop("SIGTERM")
    assert await task == "SIGTERM"
    assert batcher.failure is None


async def exchange(address, data, *, half_closes=False):
  """Sends bytes on a new connection; returns the whole answer."""
  reader, writer = await asyncio.open_connection(*address[:2])
  writer.write(data)
  if half_closes:
    writer.write_eof()
  async with asyncio.timeout(EVERY_SECS):
    answer = b""
    with contextlib.suppress(ConnectionError):
      await writer.drain()
      while part := await reader.read(2**16):
        answer += part
  writer.close()
  return answer


def http(method, path, body=b"", **headers):
  """Returns an HTTP request, after which the connection is closed."""
  if not isinstance(body, bytes):
    body = json.dumps(body).encode()
  head = {
    "Host": "localhost",
    "Connection": "close",
    "Content-Type": "application/json",
    "Content-Length": len(body),
    **{name.replace("_", "-"): value for name, value in headers.items()},
  }
  lines = [f"{name}: {x}" for name, x in head.items() if x is not None]
  return (
    "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + body
  )


async def ask(address, method, path, body=b"", **headers):
  """Returns the status of an answer and its JSON or text."""
  status, _, content = await answer_to(
    address, http(method, path, body, **headers)
  )
  return status, content


async def answer_to(address, data):
  """Returns status, headers and content of the answer to some bytes."""
  reader, writer = await asyncio.open_connection(*address[:2])
  writer.write(data)
  async with asyncio.timeout(EVERY_SECS):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    length = int(headers.get("content-length", -1))
    content = await (
      reader.read() if length < 0 else reader.readexactly(length)
    )
  writer.close()
  is_json = headers.get("content-type", "").startswith("application/json")
  text = content.decode()
  return (
    int(first.split()[1]),
    headers,
    strict_json.loads(text) if is_json else text,
  )


async def complete(address, body, **headers):
  """Returns status and JSON of an answer to POST /v1/completions."""
  return await ask(address, "POST", "/v1/completions", body, **headers)


async def until(happens):
  """Waits until a condition is true."""
  end = time.monotonic() + EVERY_SECS
  while not happens():
    assert time.monotonic() < end
    await asyncio.sleep(0.001)
