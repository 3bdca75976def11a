# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server checks its answers without delay, and refuses what it must."""

import asyncio
import dataclasses
import json
import re
import threading

import pytest

from palm_mtf.assertions import assertions as module
from palm_mtf.assertions.assertions import Assertions
from palm_mtf.config import TaskEvalConfig
from tests.generation.serving.live_server import (
  EVERY_SECS,
  ask,
  complete,
  serving,
  small_config,
  until,
)

pytest.importorskip("aiohttp", reason="aiohttp, which serve needs, is absent")

PROMPT = {"prompt": "one", "max_tokens": 20}


def make(folder, names, refused=None):
  evaluation = TaskEvalConfig(assertions=names, refuse_severity=refused)
  config = dataclasses.replace(small_config(), evaluation=evaluation)
  return Assertions(str(folder), config, "serve")


def serve_each(checked, bodies):
  """Returns the answers to requests, one after the other, and /metrics."""

  async def run():
    async with serving(assertions=checked) as (_, address):
      found = [await complete(address, x) for x in bodies]
      rows = sum(x.get("n", 1) for x in bodies if x["max_tokens"])
      calls = rows * len(checked.results) // 4  # each has four counts
      await until(lambda: checked.results.total() == calls)
      return [*found, await ask(address, "GET", "/metrics")]

  return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_counted_and_logged(tmp_path, stream):
  checked = make(tmp_path, ["json", "finite"])
  body = {**PROMPT, "stream": stream, "n": 2}
  scored = {**PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
  (status, _), (other, _), (_, page) = serve_each(checked, [scored, body])
  assert status == other == 200
  lines = page.splitlines()
  for name, result, count in (
    ("json", "flagged", 2),
    ("json", "error", 0),
    ("finite", "passed", 2),
  ):
    labels = f'assertion="{name}",result="{result}"'
    assert f"palm_mtf_assertions_total{{{labels}}} {count}" in lines
  text = (tmp_path / "flagged.jsonl").read_text()
  flagged = [json.loads(line) for line in text.splitlines()]
  assert [(x["inputs"], x["step"]) for x in flagged] == [("one", 600)] * 2
  assert flagged[0]["text"] == flagged[0]["inputs"] + flagged[0]["outputs"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_answer_is_an_error_and_no_part_of_it_is_sent(
  tmp_path, stream
):
  """So a stream is sent when the whole text is known, and has been checked."""
  refusing = make(tmp_path, ["json"], {"json": 1.0})
  lenient = make(tmp_path, ["json"], {"json": 1.5})
  body = {**PROMPT, "stream": stream}
  (status, answer), _ = serve_each(refusing, [body])
  assert status == 422
  assert answer["error"]["message"] == (
    "the assertion 'json' refuses the answer (severity 1); ask for another."
  )
  (accepted, answer), _ = serve_each(lenient, [body])
  (plain, expected), _ = serve_each(make(tmp_path, ["finite"]), [body])
  assert accepted == plain == 200
  if stream:
    assert texts_of(answer) == texts_of(expected)
  else:
    assert answer["choices"] == expected["choices"]


def texts_of(stream):
  events = re.findall("^data: (.*)$", stream, re.MULTILINE)
  assert events.pop() == "[DONE]"
  return "".join(json.loads(x)["choices"][0]["text"] for x in events)


def test_slow_assertions_delay_no_answer_and_keep_a_short_queue(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(module, "_MOST_WAITING", 3)
  checked, may_end = make(tmp_path, ["json"]), threading.Event()
  monkeypatch.setitem(
    checked._all, "json", lambda _: float(not may_end.wait(EVERY_SECS))
  )

  async def run():
    async with serving(assertions=checked) as (_, address):
      found = [await complete(address, PROMPT) for _ in range(10)]
      may_end.set()
      await until(lambda: checked.results.total() == len(found))
      return found

  assert {status for status, _ in asyncio.run(run())} == {200}
  assert checked.results["json", "passed"] == 3
  assert checked.results["json", "skipped"] == 7


def test_answers_that_must_be_checked_wait_no_longer_than_the_limit(
  tmp_path, monkeypatch
):
  checked, may_end = make(tmp_path, ["json"], {"json": 1.0}), threading.Event()
  monkeypatch.setitem(
    checked._all, "json", lambda _: float(not may_end.wait(EVERY_SECS))
  )

  async def run():
    async with serving(assertions=checked, most_secs=1) as (_, address):
      found = [complete(address, PROMPT) for _ in range(2)]
      found = await asyncio.gather(*found)
      may_end.set()
      return [*found, await complete(address, PROMPT)]

  *late, (status, _) = asyncio.run(run())
  assert {status for status, _ in late} == {503}
  said = [answer["error"]["message"] for _, answer in late]
  assert sorted(said) == [
    "checks of other answers take too long.",
    "the assertions take too long.",
  ]
  assert status == 200
  assert checked.results["json", "passed"] == 2  # what was late was not checked
