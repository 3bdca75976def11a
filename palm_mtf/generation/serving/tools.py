# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of a conversation: functions that the model may ask a client to call.

A chat template tells the model about the tools. Calls in an answer are read in
the forms of Hermes and Qwen, and of SmolLM2:

  <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>
  <tool_call>[{"name": "f", "arguments": {...}}, ...]</tool_call>
"""

import dataclasses
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from palm_mtf.data.vocabulary.chat import ChatTemplate, read_tools
from palm_mtf.errors import UserError, check_library, shorten
from palm_mtf.generation.inference.constraint import Grammar
from palm_mtf.generation.serving.structure import json_rule, make_grammar
from palm_mtf.json_text import STRICT_DECODER, json_text

BEGIN, _END = "<tool_call>", "</tool_call>"
_CHOICES = "none", "auto", "required"
# A call in a rendered conversation: text before, JSON, and text after.
_EXAMPLE = re.compile(rf"({BEGIN}\s*)([{{\[]).*?[}}\]](\s*{_END})", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Tools:
  """The tools of a request."""

  described: Sequence[Mapping[str, Any]]  # as the client gave them
  # The form of an answer that has to be a call; None if the model may choose.
  grammar: Grammar | None

  @property
  def names(self) -> list[str]:
    """Names of the functions."""
    return [x["function"]["name"] for x in self.described]


def take_tools(fields: dict[str, Any], template: ChatTemplate) -> Tools | None:
  """Removes the fields of tools from a body; returns the tools, or None.

  Raises UserError if a field is wrong, or the template does not support it.
  """
  tools, choice, is_parallel = (
    fields.pop(name, None)
    for name in ("tools", "tool_choice", "parallel_tool_calls")
  )
  if not isinstance(is_parallel, bool | None):
    raise UserError(
      f"parallel_tool_calls = {shorten(is_parallel)}: give true or false."
    )
  # A template need not read tools that are hidden from it.
  is_hidden = choice == "none"
  functions = read_tools(tools, {"tools"} if is_hidden else template.variables)
  choice, required = _read_choice(choice, functions)
  if not tools or is_hidden:
    return None
  if choice == "auto":
    if is_parallel is False:
      raise UserError(
        "parallel_tool_calls = False: needs tool_choice = 'required' or a "
        "function; leave it out."
      )
    return Tools(tools, None)
  is_single = is_parallel is False or choice == "named"
  return Tools(tools, _make_grammar(required, template, is_single))


def _read_choice(
  given: Any, functions: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]]:
  """Returns one of _CHOICES, or "named"; and the functions to choose from."""
  found = given.get("function") if isinstance(given, Mapping) else None
  name = found.get("name") if isinstance(found, Mapping) else None
  if isinstance(name, str) and name in functions:
    return "named", {name: functions[name]}
  if given in (None, *_CHOICES) and (functions or given != "required"):
    return given or "auto", functions
  raise UserError(
    f"tool_choice = {shorten(given)}: give 'none' or 'auto'; or, with tools, "
    '\'required\' or {"type": "function", "function": {"name": "..."}}.'
  )


def _make_grammar(
  functions: Mapping[str, Any], template: ChatTemplate, is_single: bool
) -> Grammar:
  """Returns the form of calls as the template writes them."""
  check_library("llguidance", "json", "tool_choice")
  found = _EXAMPLE.search(template.call_example)
  if not found:
    raise UserError(
      "tool_choice: the model's chat template does not write calls as "
      f"{BEGIN}{{...}}{_END}, so none can be required; give 'auto'."
    )
  before, bracket, after = found.groups()
  rules = []
  for i, (name, function) in enumerate(functions.items()):
    parameters = function.get("parameters") or {"additionalProperties": False}
    if parameters.get("type", "object") != "object":
      raise UserError(f"tools: parameters of {name}: give an object's schema.")
    head = json_text(f'{{"name": "{name}", "arguments": ')
    rules.append(f'call{i}: {head} arguments{i} "}}"')
    rule = json_rule({**parameters, "type": "object"})
    rules.append(f"arguments{i}: {rule}")
  begin, end = json_text(before), json_text(after)
  one = f"({' | '.join(f'call{i}' for i in range(len(functions)))})"
  if bracket == "[":
    more = "" if is_single else f' (", " {one})*'
    start = f'{begin} "[" {one}{more} "]" {end}'
  else:
    one = f"{begin} {one} {end}"
    start = one if is_single else rf'{one} ("\n" {one})*'
  return make_grammar("tools", "\n".join([f"start: {start}", *rules]))


def read_calls(
  text: str, names: Sequence[str]
) -> tuple[str, list[dict[str, Any]]]:
  """Returns the text before an answer's calls, and the calls in OpenAI's form.

  If a call is incomplete, is no JSON or names no function in `names`, the text
  is returned as it is, without calls.
  """
  content = text.partition(BEGIN)[0]
  calls: list[dict[str, Any]] = []
  place = len(content)
  while place < len(text):
    if not text.startswith(BEGIN, place):
      return text, []
    place = _skip_space(text, place + len(BEGIN))
    try:
      found, place = STRICT_DECODER.raw_decode(text, place)
      found = found if isinstance(found, list) else [found]
      calls += [_read_call(each, names) for each in found]
    except (ValueError, RecursionError):
      return text, []
    place = _skip_space(text, place)
    if not text.startswith(_END, place):
      return text, []
    place = _skip_space(text, place + len(_END))
  if not calls:
    return text, []
  return content, [{**x, "type": "function"} for x in calls]


def _read_call(given: object, names: Sequence[str]) -> dict[str, Any]:
  """Returns a call in OpenAI's form; raises ValueError if it is none."""
  call = given if isinstance(given, dict) else {}
  arguments = call.get("arguments")
  if call.get("name") not in names or not isinstance(arguments, dict):
    raise ValueError(given)
  function = {"name": call["name"], "arguments": json_text(arguments)}
  return {"id": f"call_{uuid.uuid4().hex}", "function": function}


_SPACE = re.compile(r"\s*")


def _skip_space(text: str, place: int) -> int:
  return _SPACE.match(text, place).end()
