# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests select adapters, which are loaded and unloaded under way."""

import asyncio
import contextlib
import itertools
import threading

import pytest

from palm_mtf.errors import UserError
from palm_mtf.generation.inference.adapters import NOTHING, Adapter
from palm_mtf.generation.serving.adapters import ServedAdapters
from tests.generation.serving.live_server import (
  Repeating,
  ask,
  complete,
  serving,
  until,
)

PROMPT = {"prompt": "one", "max_tokens": 20}


class Recording(Repeating):
  """Records the adapters of prompts and texts; holds texts on request."""

  def __init__(self):
    super().__init__()
    self.read, self.stepped = [], []

  def insert(self, slot, ids, adapter=0):
    self.read.append(adapter)

  def steps(self, texts, count, *, wants_log_probs, feed=None):
    self.stepped.append({x.adapter for x in texts.values()})
    return super().steps(texts, 1, wants_log_probs=wants_log_probs)


def read(path, given):
  """Reads an adapter that exists."""
  if path == "broken":
    raise UserError(f"{given} = {path!r}: is broken.")
  return NOTHING


@contextlib.asynccontextmanager
async def adapted(decoder=None, read=read, **more):
  """Runs a server with the adapter `a`, which clients may replace."""
  numbers = itertools.count(1)
  adapters = ServedAdapters("m", read, lambda unused: Adapter(next(numbers)))
  adapters.add({"a": NOTHING})
  more = {"loads_adapters": True, "adapters": adapters, **more}
  async with serving(decoder=decoder, **more) as (_, address):
    yield address


async def load(address, name, path="there", **more):
  body = {"lora_name": name, "lora_path": path, **more}
  return await ask(address, "POST", "/v1/load_lora_adapter", body)


async def unload(address, name):
  body = {"lora_name": name}
  return await ask(address, "POST", "/v1/unload_lora_adapter", body)


async def list_names(address):
  _, answer = await ask(address, "GET", "/v1/models")
  return [(x["id"], x.get("parent")) for x in answer["data"]]


def test_the_field_model_selects_an_adapter():
  decoder = Recording()

  async def run():
    async with adapted(decoder) as address:
      for name in ("m", "a", None):
        given = {} if name is None else {"model": name}
        status, answer = await complete(address, {**PROMPT, **given})
        assert status == 200 and answer["model"] == (name or "m")
      assert await list_names(address) == [("m", None), ("a", "m")]
      status, answer = await ask(address, "GET", "/v1/models/a")
      assert (status, answer["parent"]) == (200, "m")
      return await complete(address, {**PROMPT, "model": "b"})

  status, answer = asyncio.run(run())
  assert status == 404
  assert answer["error"]["message"] == (
    "there is no model 'b': give 'm' or an adapter of /v1/models."
  )
  assert decoder.read == [0, 1, 0]


def test_a_text_ends_with_the_adapter_with_which_it_began():
  """The name is replaced or removed meanwhile; other texts continue."""
  decoder = Recording()

  async def run():
    async with adapted(decoder) as address:
      decoder.may_step.clear()
      first = asyncio.create_task(complete(address, {**PROMPT, "model": "a"}))
      await until(lambda: decoder.stepped)
      assert (await load(address, "a"))[0] == 400
      status, text = await load(address, "a", load_inplace=True)
      assert (status, text) == (
        200,
        "Success: LoRA adapter 'a' added successfully.",
      )
      second = asyncio.create_task(complete(address, {**PROMPT, "model": "a"}))
      await asyncio.sleep(0.1)
      status, text = await unload(address, "a")
      assert (status, text) == (
        200,
        "Success: LoRA adapter 'a' removed successfully.",
      )
      assert (await complete(address, {**PROMPT, "model": "a"}))[0] == 404
      assert (await unload(address, "a"))[0] == 404
      decoder.may_step.set()
      for task in (first, second):
        status, answer = await task
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 20

  asyncio.run(run())
  assert decoder.read == [1, 2]
  assert set().union(*decoder.stepped) == {1, 2}


@pytest.mark.parametrize(
  ("body", "message"),
  [
    ([], "the body is no JSON object."),
    ({"lora_path": "there"}, "lora_name is missing."),
    ({"lora_name": "b"}, "lora_path is missing."),
    ({"lora_name": 1, "lora_path": "there"}, "lora_name = 1: give a text."),
    (
      {"lora_name": "b", "lora_path": "there", "load_inplace": 1},
      "load_inplace = 1: give true or false.",
    ),
    (
      {"lora_name": "b", "lora_path": "there", "rank": 1},
      "unknown field 'rank'.",
    ),
    (
      {"lora_name": "a", "lora_path": "there"},
      "lora_name = 'a': is loaded already; give load_inplace = true to replace "
      "it.",
    ),
    (
      {"lora_name": "m", "lora_path": "there"},
      "the adapter's name 'm': is that of the base; give another.",
    ),
    (
      {"lora_name": "x/y", "lora_path": "there"},
      "the adapter's name 'x/y': give at most 100 letters, digits or _ . : -",
    ),
    (
      {"lora_name": "a", "lora_path": "broken", "load_inplace": True},
      "lora_path = 'broken': is broken.",
    ),
  ],
)
def test_a_wrong_load_is_one_line_and_changes_nothing(body, message):
  decoder = Recording()

  async def run():
    async with adapted(decoder) as address:
      status, answer = await ask(address, "POST", "/v1/load_lora_adapter", body)
      assert await list_names(address) == [("m", None), ("a", "m")]
      await complete(address, {**PROMPT, "model": "a"})
      return status, answer["error"]["message"]

  assert asyncio.run(run()) == (400, message)
  assert decoder.read == [1]


def test_adapters_are_loaded_one_at_a_time_while_texts_continue():
  here, most = [], []
  may_end = threading.Event()

  def slow(path, given):
    here.append(path)
    most.append(len(here))
    assert may_end.wait(60)
    here.remove(path)
    return NOTHING

  async def run():
    async with adapted(read=slow) as address:
      names = ("b", "b", "c")
      loads = [asyncio.create_task(load(address, x)) for x in names]
      await until(lambda: here)
      assert (await complete(address, {**PROMPT, "model": "a"}))[0] == 200
      may_end.set()
      statuses = sorted([(await each)[0] for each in loads])
      return statuses, sorted(await list_names(address))

  statuses, names = asyncio.run(run())
  assert statuses == [200, 200, 400]
  assert [x for x, _ in names] == ["a", "b", "c", "m"]
  assert set(most) == {1}


def test_long_prompts_do_not_wait_for_loads():
  """Python's default executor has at most 32 threads."""
  here = []
  may_end = threading.Event()

  def slow(path, given):
    here.append(path)
    assert may_end.wait(60)
    return NOTHING

  async def run():
    async with adapted(read=slow) as address:
      names = [f"b{i}" for i in range(40)]
      loads = [asyncio.create_task(load(address, x)) for x in names]
      await until(lambda: here)
      await asyncio.sleep(0.2)
      long = {"prompt": ["o" * 4000] * 3, "max_tokens": 1}
      status, answer = await complete(address, long)
      may_end.set()
      for each in loads:
        assert (await each)[0] == 200
      return status, answer["error"]["message"]

  status, message = asyncio.run(run())
  assert status == 400 and "more than SEQUENCE_LENGTH" in message


def test_clients_load_adapters_only_if_the_operator_allows_it():
  async def run():
    async with adapted(loads_adapters=False) as address:
      return await load(address, "b"), await unload(address, "a")

  assert [status for status, _ in asyncio.run(run())] == [404, 404]
