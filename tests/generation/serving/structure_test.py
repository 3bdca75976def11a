# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers in a form that the request gives, over HTTP, by a random model."""

import asyncio
import functools
import importlib.util
import json
import re
import threading

import numpy as np
import pytest

from palm_mtf.data.vocabulary.text_reader import TextReader
from palm_mtf.generation.inference import constraint, grammar_process
from palm_mtf.generation.inference.slot_decoder import Chosen
from palm_mtf.generation.serving import structure
from tests.generation.serving.live_server import (
  Repeating,
  complete,
  http,
  serving,
  small_vocabulary,
  until,
)

SEVERAL = {"enum": ["one", "two", True, None]}
CHOICES = ['"one"', '"two"', "true", "null"]


class Drawing(Repeating):
  """Draws allowed tokens; without a mask, repeats the prompt's last token."""

  def __init__(self):
    super().__init__()
    self.masked = []  # number of texts with a mask in each call

  def steps(self, texts, count, *, wants_log_probs, feed=None):
    self.masked.append(sum(bool(x.masks) for x in texts.values()))
    found = super().steps(
      texts, 1 if self.masked[-1] else count, wants_log_probs=wants_log_probs
    )
    for slot, text in texts.items():
      if text.masks:
        bits = np.unpackbits(text.masks[0].view(np.uint8), bitorder="little")
        rng = np.random.default_rng([*np.abs(text.key), text.place])
        token = int(rng.choice(np.flatnonzero(bits)))
        found[slot] = [Chosen(token, -1.0, {5: -0.5})]
    return found


def form(schema, **more):
  described = {"name": "x", "schema": schema, "strict": True}
  body = {"type": "json_schema", "json_schema": described}
  return {
    **{"prompt": "one", "max_tokens": 20, "response_format": body},
    **more,
  }


def run(*bodies, **settings):
  """Returns (status, answer) of each body; the server gets them together."""

  async def ask_all():
    async with serving(decoder=Drawing(), **settings) as (_, address):
      return await asyncio.gather(*(complete(address, x) for x in bodies))

  return asyncio.run(ask_all())


def texts(answer):
  status, content = answer
  assert status == 200, content
  assert {x["finish_reason"] for x in content["choices"]} <= {"stop"}, content
  return [x["text"] for x in content["choices"]]


@pytest.mark.parametrize(
  "output, expected",
  [
    ({"json": SEVERAL}, CHOICES),
    ({"regex": "[ab]{2}"}, ["aa", "ab", "ba", "bb"]),
    ({"choice": ["yes", "no"]}, ["yes", "no"]),
  ],
)
def test_the_fields_of_openai_and_vllm_give_the_form(output, expected):
  plain = {"prompt": "one", "max_tokens": 20, "n": 4}
  (first, second) = run(
    {**plain, "structured_outputs": output}, form(SEVERAL, n=4)
  )
  assert {*texts(first)} <= {*expected}
  assert {*texts(second)} <= {*CHOICES}
  assert len({*texts(second)}) > 1  # each of the `n` has its own state


def test_an_object_and_any_text_may_be_asked_for():
  body = {"prompt": "one", "max_tokens": 20}
  answers = run(
    {**body, "response_format": {"type": "json_object"}},
    {**body, "response_format": {"type": "text"}},
    body,
  )
  assert answers[0][1]["choices"][0]["text"].startswith("{")
  assert answers[1][1]["choices"] == answers[2][1]["choices"]


def test_a_text_that_max_tokens_cuts_says_length():
  ((status, answer),) = run(form({"const": "a" * 99}, max_tokens=5))
  assert status == 200
  assert answer["choices"][0]["finish_reason"] == "length"


def test_rows_with_and_without_a_form_are_those_of_their_own_requests():
  plain = {"prompt": "two three", "max_tokens": 20}
  bodies = [form(SEVERAL, seed=3), plain, form({"enum": [1, 22]}), plain]
  alone = [run(body)[0][1]["choices"] for body in bodies]
  together = [answer["choices"] for _, answer in run(*bodies)]
  assert together == alone


def test_streams_echo_and_log_p_work_with_a_form():
  ((status, events),) = run(form(SEVERAL, stream=True))
  assert status == 200
  found = re.findall("^data: ({.*})$", events, re.MULTILINE)
  parts = [json.loads(x)["choices"][0] for x in found]
  assert "".join(x["text"] for x in parts) in CHOICES
  assert parts[-1]["finish_reason"] == "stop"
  ((_, answer),) = run(form(SEVERAL, echo=True, logprobs=1))
  (choice,) = answer["choices"]
  assert choice["text"].removeprefix("one") in CHOICES
  found = choice["logprobs"]
  assert "".join(found["tokens"]) == choice["text"]
  # log p is the model's, so the likeliest token may be forbidden.
  likely = TextReader(small_vocabulary()).token_text(5)
  assert all(likely in x for x in found["top_logprobs"][1:])
  ((_, scored),) = run(form(SEVERAL, echo=True, logprobs=1, max_tokens=0))
  assert scored["choices"][0]["text"] == "one"


WRONG = [
  ({"response_format": 3}, "response_format = 3: give"),
  ({"response_format": {"type": "json"}}, "response_format = .*: give"),
  ({"response_format": {"type": "json_schema"}}, "response_format = .*: give"),
  (form([1]), "response_format = .*: give"),
  (form({}, structured_outputs={"regex": "a"}), "give one of them"),
  ({"structured_outputs": {"grammar": "a"}}, "structured_outputs = .*: give"),
  ({"structured_outputs": {"regex": ""}}, "structured_outputs = .*: give"),
  ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs = .*: gi"),
  ({"structured_outputs": {"choice": []}}, "structured_outputs = .*: give"),
  ({"structured_outputs": {"choice": "a"}}, "structured_outputs = .*: give"),
  ({"structured_outputs": {}}, "structured_outputs = .*: give"),
  ({"structured_outputs": {"regex": "("}}, "structured_outputs: cannot be us"),
  ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs: cann"),
  (form({"enum": ["a" * 40_000]}), "has 40,.* give at most 32,768"),
  (form(False), "Unsatisfiable"),
  (form(SEVERAL, stop="o"), "stop: ends a text anywhere; leave it out with r"),
]


def test_a_wrong_form_is_400_and_one_line():
  answers = run(*({"prompt": "one", **body} for body, _ in WRONG))
  for (status, answer), (body, message) in zip(answers, WRONG, strict=True):
    assert status == 400, body
    line = answer["error"]["message"]
    assert "\n" not in line
    assert re.search(message, line), line


def test_a_deep_schema_is_400_and_one_line():
  schema = '{"items":' * 480 + "{}" + "}" * 480
  text = json.dumps(form("SCHEMA")).replace('"SCHEMA"', schema)

  async def send():
    async with serving(decoder=Drawing()) as (_, address):
      return await complete(address, text.encode())

  status, answer = asyncio.run(send())
  assert status == 400
  assert "\n" not in answer["error"]["message"]


def test_without_the_library_the_extra_is_named(monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    "importlib.util.find_spec",
    lambda name, *rest: None if name == "llguidance" else find(name, *rest),
  )
  ((status, answer),) = run(form(SEVERAL))
  assert status == 400
  assert answer["error"]["message"] == (
    "response_format: needs llguidance, which is not installed: pip install "
    "'palm_mtf[json]'."
  )


def test_a_text_whose_form_becomes_too_complex_is_an_error(monkeypatch):
  limits = {**grammar_process._LIMITS, "max_items_in_row": 50}
  monkeypatch.setattr(grammar_process, "_LIMITS", limits)
  wide = {"type": "object", "properties": {f"{i}": {} for i in range(60)}}
  (first, second) = run(form(wide), form(SEVERAL))
  assert first[0] == 400
  assert "response_format: became too complex" in first[1]["error"]["message"]
  assert texts(second)[0] in CHOICES


def slow_compiler(monkeypatch, start=constraint.Grammars.start):
  """Makes compilation, by `start`, wait for the returned event."""
  event, begun = threading.Event(), threading.Event()

  def wait(self, grammar):
    begun.set()
    assert event.wait(60)
    return start(self, grammar)

  monkeypatch.setattr(constraint.Grammars, "start", wait)
  return event, begun


def test_a_compilation_stalls_no_other_request(monkeypatch):
  event, begun = slow_compiler(monkeypatch)

  async def race():
    async with serving(decoder=Drawing()) as (_, address):
      slow = asyncio.create_task(complete(address, form(SEVERAL)))
      await until(begun.is_set)
      plain = await complete(address, {"prompt": "one", "max_tokens": 3})
      assert not slow.done()
      event.set()
      return plain, await slow

  plain, slow = asyncio.run(race())
  assert plain[0] == 200
  assert texts(slow)[0] in CHOICES


def test_a_client_that_leaves_during_a_compilation_leaves_no_row(monkeypatch):
  event, begun = slow_compiler(monkeypatch)

  async def leave():
    async with serving(decoder=Drawing()) as (server, address):
      _, writer = await asyncio.open_connection(*address[:2])
      writer.write(http("POST", "/v1/completions", form(SEVERAL)))
      await until(begun.is_set)
      writer.close()
      await until(lambda: server._counters.requests[499] == 1)
      event.set()
      answer = await complete(address, form(SEVERAL))
      counters = server._counters
      await until(lambda: counters.running == counters.waiting == 0)
      return answer, counters.generated_tokens

  answer, generated = asyncio.run(leave())
  assert texts(answer)[0] in CHOICES
  assert generated == answer[1]["usage"]["completion_tokens"]


def test_a_compilation_that_takes_too_long_is_told_which_one_it_was(
  monkeypatch,
):
  event, _ = slow_compiler(monkeypatch)

  async def ask_both():
    async with serving(decoder=Drawing(), most_secs=2) as (_, address):
      asked = (complete(address, form(SEVERAL)) for _ in range(2))
      answers = await asyncio.gather(*asked)
      event.set()
      return answers

  answers = asyncio.run(ask_both())
  assert {status for status, _ in answers} == {503}
  assert {answer["error"]["message"] for _, answer in answers} == {
    "the schema takes too long.",
    "other schemas take too long.",
  }


def test_a_flood_of_schemas_does_not_stall_requests_without(monkeypatch):
  """Nobody waits for a schema but those who sent one."""
  bodies = [form({"enum": [f"{i}"]}, max_tokens=9) for i in range(20)]
  # Twenty compilations take as long as the machine is busy. So all wait for one
  # that is made here, without the process and its limits of time.
  vocabulary = small_vocabulary()
  grammars = constraint.Grammars(vocabulary)
  tokenizer = grammar_process.make_tokenizer(
    [*map(grammars._read_token, range(vocabulary.size))], vocabulary.end_ids
  )
  text = structure.read_grammar(bodies[0]).text
  compiled = constraint._Compiled(
    lambda: grammar_process.compile_grammar(tokenizer, text)
  )
  event, begun = slow_compiler(
    monkeypatch, lambda *_: constraint.Constraint(compiled, vocabulary)
  )

  async def flood():
    async with serving(decoder=Drawing()) as (_, address):
      others = [asyncio.create_task(complete(address, x)) for x in bodies]
      await until(begun.is_set)
      plain = await complete(address, {"prompt": "one", "max_tokens": 3})
      assert not [x.result() for x in others if x.done()]
      event.set()
      return plain, await asyncio.gather(*others)

  plain, others = asyncio.run(flood())
  assert plain[0] == 200
  # One client: its rows fill the queue.
  assert {status for status, _ in others} in ({200}, {200, 429})


def test_the_run_s_own_stop_strings_do_not_cut_a_form(monkeypatch):
  from palm_mtf.config import DecodeConfig
  from palm_mtf.generation.serving.completion_request import (
    read_completion_request,
  )

  read = functools.partial(
    read_completion_request,
    decode=DecodeConfig(stop_strings=["o"]),
    sample_tokens=3,
    seed=0,
  )
  assert read({"prompt": "a"}).stop == ["o"]
  assert read(form(SEVERAL)).stop == []
  assert len(structure.read_grammar(form(SEVERAL)).text) < 300
