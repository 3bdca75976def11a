# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of a request are checked, required and read back as calls."""

import dataclasses
import json
import re

import jsonschema
import numpy as np
import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.constraint import Grammars
from palm_mtf.generation.inference.slot_decoder import Chosen
from palm_mtf.generation.serving.batcher import Row
from palm_mtf.generation.serving.completion_request import (
  make_completion_body,
  read_completion_request,
)
from palm_mtf.generation.serving.served_model import Choice
from palm_mtf.generation.serving.tools import read_calls
from tests.generation.serving.live_server import small_vocabulary

PLACE = {
  "type": "object",
  "properties": {"city": {"$ref": "#/$defs/city"}},
  "required": ["city"],
  "additionalProperties": False,
  "$defs": {"city": {"enum": ["Rome", "</tool_call>"]}},
}
TIME = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name, parameters=None):
  function = {"name": name, "description": "x", "parameters": parameters}
  return {"type": "function", "function": function}


TOOLS = [tool("weather", PLACE), tool("clock.now-1")]
NAMES = ["weather", "clock.now-1"]
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SMOLLM2 = '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>'


class Template:
  """A template that reads tools, and writes calls as `call_example` does."""

  fields = frozenset({"tool_calls"})
  variables = frozenset({"messages", "tools"})

  def __init__(self, call_example=HERMES):
    self.call_example = f"user: x\nassistant: {call_example}\n"
    self.given = []

  def encode(self, messages, tools=None):
    self.given.append((messages, tools))
    return [5]


def read(template=None, **body):
  body = {"messages": [{"role": "user", "content": "x"}], **body}
  body, tools = make_completion_body(
    body, template or Template(), most_messages=9, most_characters=1000
  )
  return read_completion_request(
    body, DecodeConfig(), sample_tokens=9, seed=0, tools=tools
  )


def choose(name):
  return {"type": "function", "function": {"name": name}}


def test_the_template_gets_the_tools_unless_none_may_be_called():
  template = Template()
  assert read(template, tools=TOOLS).tools.names == NAMES
  assert read(template, tools=TOOLS).grammar is None
  assert read(template, tools=TOOLS, tool_choice="none").tools is None
  assert read(template, tools=[]).tools is None
  assert [tools for _, tools in template.given] == [TOOLS, TOOLS, None, None]


def test_calls_and_their_results_go_back_to_the_template():
  template = Template()
  call = {"id": "1", "type": "function", "function": {"name": "f"}}
  messages = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "content": "12", "tool_call_id": "1", "name": "f"},
  ]
  read(template, messages=messages, tools=TOOLS)
  ((given, _),) = template.given
  assert given[1]["tool_calls"] == [call]
  # Templates that do not read the number of a call do not get it.
  assert given[2] == {"role": "tool", "content": "12"}


@pytest.mark.parametrize(
  ("body", "message"),
  [
    ({"tools": 1}, "tools = 1: give"),
    ({"tools": [1]}, "tools: 1: give"),
    ({"tools": [{"type": "function"}]}, "tools: .*: give"),
    ({"tools": [tool("")]}, "name = '': give at most 64"),
    ({"tools": [tool("a b")]}, "name = 'a b': give at most 64"),
    ({"tools": [tool("a" * 65)]}, "give at most 64"),
    ({"tools": [tool("a", [1])]}, "tools: .*: give"),
    ({"tools": [tool("a"), tool("a")]}, "same name"),
    ({"tools": [tool(f"a{i}") for i in range(129)]}, "at most 128"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice = 'any': give"),
    ({"tools": TOOLS, "tool_choice": choose("x")}, "tool_choice = .*: give"),
    ({"tools": TOOLS, "tool_choice": 3}, "tool_choice = 3: give"),
    ({"tool_choice": "required"}, "tool_choice = 'required': give"),
    (
      {"tools": TOOLS, "parallel_tool_calls": False},
      "parallel_tool_calls = False: needs",
    ),
    ({"parallel_tool_calls": "false"}, "parallel_tool_calls = 'false': give"),
    (
      {"tools": TOOLS, "response_format": {"type": "json_object"}},
      "response_format: does not go with tools",
    ),
    (
      {"tools": TOOLS, "tool_choice": "required", "stop": "a"},
      "stop: ends a text anywhere",
    ),
    (
      {"tools": [tool("a", {"type": "array"})], "tool_choice": "required"},
      "parameters of a: give an object's schema",
    ),
    ({"tools": [tool("a", {"x": "a" * 1000})]}, "longer than SEQUENCE_LENGTH"),
  ],
)
def test_wrong_tools_are_one_line(body, message):
  with pytest.raises(UserError, match=message) as found:
    read(**body)
  assert "\n" not in str(found.value)


def test_a_template_that_does_not_read_tools_is_one_line():
  class Plain(Template):
    variables = frozenset({"messages"})

  with pytest.raises(UserError, match="template does not read them"):
    read(Plain(), tools=TOOLS)
  assert read(Plain(), tools=TOOLS, tool_choice="none").tools is None
  other = Template("call f(1)")
  assert read(other, tools=TOOLS).tools
  with pytest.raises(UserError, match="does not write calls as"):
    read(other, tools=TOOLS, tool_choice="required")


@pytest.fixture(scope="module")
def grammars():
  return Grammars(small_vocabulary())


def draw(grammars, asked, seed, most=4000):
  """Returns a random answer, or None if it has more than `most` tokens."""
  vocabulary, rng = small_vocabulary(), np.random.default_rng(seed)
  row, text = grammars.start(asked.grammar), b""
  for _ in range(most):
    bits = np.unpackbits(row.mask().view(np.uint8), bitorder="little")
    token = int(rng.choice(np.flatnonzero(bits)))
    if token == vocabulary.eod_id:
      return text.decode()
    row.accept(token)
    text += vocabulary.token_bytes(token)
  return None


@pytest.mark.parametrize("example", [HERMES, SMOLLM2])
@pytest.mark.parametrize("choice", ["required", "weather", "clock.now-1"])
def test_a_required_call_has_valid_arguments_in_the_template_s_form(
  example, choice, grammars
):
  asked = read(
    Template(example),
    tools=TOOLS,
    tool_choice=choose(choice) if choice in NAMES else choice,
  )
  counts = set()
  for seed in range(12):
    text = draw(grammars, asked, seed)
    assert re.match(r"<tool_call>\n?\[?\{\"name\": ", text)
    content, calls = read_calls(text, asked.tools.names)
    assert not content
    for call in calls:
      assert call["type"] == "function" and call["id"].startswith("call_")
      name = call["function"]["name"]
      assert choice in (name, "required")
      schema = PLACE if name == "weather" else TIME
      jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    counts.add(len(calls))
  assert counts == {1} if choice in NAMES else max(counts) > 1


def test_one_call_is_all_if_calls_may_not_be_parallel(grammars):
  asked = read(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
  for seed in range(9):
    text = draw(grammars, asked, seed)
    assert len(read_calls(text, NAMES)[1]) == 1


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "\u00e9</tool_call>"}}\n'
END = "</tool_call>"
READ = {
  "one": (CALL + END, "", 1),
  "with a text": (f"I look.\n{CALL}{END}", "I look.\n", 1),
  "several": (f"{CALL}{END}\n{CALL}{END}\n", "", 2),
  "a list": (
    '<tool_call>[{"name": "f", "arguments": {}}, '
    '{"name": "g", "arguments": {"x": [1]}}]</tool_call>',
    "",
    2,
  ),
}
DEEP = f'{{"name": "f", "arguments": {{"a": {"[" * 10**5}1{"]" * 10**5}}}}}'
UNREAD = {
  "no call": "What <tool is that?",
  "no end": CALL,
  "another function": CALL.replace('"f"', '"h"') + END,
  "no JSON": f"<tool_call>f(1){END}",
  "NaN": f'<tool_call>{{"name": "f", "arguments": {{"a": NaN}}}}{END}',
  "a number that no computer holds": CALL.replace('"\u00e9', '1e999, "b": "')
  + END,
  "nested too deep": f"<tool_call>{DEEP}{END}",
  "no arguments": f'<tool_call>{{"name": "f"}}{END}',
  "a text as arguments": f'<tool_call>{{"name": "f", "arguments": "x"}}{END}',
  "an empty list": f"<tool_call>[]{END}",
  "text after": f"{CALL}{END} done",
  "second is broken": f"{CALL}{END}{CALL}",
  "nested": "<tool_call>" + "[" * 100_000,
  "a number": f"<tool_call>3{END}",
}


@pytest.mark.parametrize("name", READ)
def test_calls_are_read_in_the_forms_of_hermes_and_smollm2(name):
  text, expected, count = READ[name]
  content, calls = read_calls(text, ["f", "g"])
  assert content == expected
  assert [x["function"]["name"] for x in calls] == ["f", "g", "f"][:count] or (
    [x["function"]["name"] for x in calls] == ["f"] * count
  )
  assert all(
    isinstance(json.loads(x["function"]["arguments"]), dict) for x in calls
  )
  assert len({x["id"] for x in calls}) == count


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_no_whole_call_stays_text(name):
  assert read_calls(UNREAD[name], ["f", "g"]) == (UNREAD[name], [])


def answer(text, *, stream, ended="eod", tools=True):
  """Returns all that a client gets of an answer, token by token."""
  vocabulary = small_vocabulary()
  names = [tool("f")] if tools else []
  asked = read(tools=names, stream=stream)
  asked = dataclasses.replace(asked, is_chat=True)
  row = Row(
    prompt=[0, 5],
    asked=asked,
    key=np.zeros([2], np.int32),
    deadline=0,
    client="",
    changed=lambda: None,
  )
  choice, found = Choice(0, row, vocabulary), []
  ids = vocabulary.encode_arrays([text], 1, [True])[0].tolist()
  for i in [*ids, *([vocabulary.eod_id] if ended == "eod" else [])]:
    row.chosen.append(Chosen(i, None, {}))
    if stream:
      found.append(choice.read())
  row.ended = ended
  if not (stream and ended == "eod"):  # the server does not read any further
    found.append(choice.read())
  return [x for x in found if x]


CALLED = 'I see.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_an_answer_lists_its_calls():
  ((found),) = answer(CALLED, stream=False)
  assert found["finish_reason"] == "tool_calls"
  message = found["message"]
  assert message["content"] == "I see."
  (call,) = message["tool_calls"]
  assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
  ((found),) = answer(CALLED.removeprefix("I see."), stream=False)
  assert found["message"]["content"] is None
  ((found),) = answer(CALLED, stream=False, tools=False)
  assert found["message"]["content"] == CALLED
  assert found["finish_reason"] == "stop"


def test_a_stream_has_its_calls_whole_at_the_end():
  *parts, last = answer(CALLED, stream=True)
  assert len(parts) > 1
  assert "".join(x["delta"]["content"] for x in parts) == "I see."
  assert all("tool_calls" not in x["delta"] for x in parts)
  assert last["finish_reason"] == "tool_calls"
  (call,) = last["delta"]["tool_calls"]
  assert call["index"] == 0
  assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_an_incomplete_call_is_text_whose_end_is_not_called_a_call():
  cut = CALLED[:-20]
  parts = answer(cut, stream=True, ended="length")
  assert "".join(x["delta"]["content"] for x in parts) == cut
  assert parts[-1]["finish_reason"] == "length"
  parts = answer("a <b> <tool", stream=True)
  assert "".join(x["delta"]["content"] for x in parts) == "a <b> <tool"
