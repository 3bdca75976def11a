# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of a request that ask for an answer in a form.

response_format      of OpenAI's API: a JSON schema, or any JSON object
structured_outputs   of vLLM: a JSON schema, a regular expression, or choices
"""

from collections.abc import Mapping

from palm_mtf.errors import UserError, are_texts, check_library, shorten
from palm_mtf.generation.inference.constraint import Grammar
from palm_mtf.json_text import json_text

# llguidance compiles longer grammars too slowly: 2,000 optional fields of an
# object take 7 seconds.
MOST_CHARACTERS = 2**15
# A model may choose any tokens that spell a text, not only those that the
# tokenizer would choose.
_HEAD = '%llguidance {"no_forcing": true}\n'
# JSON is one line, as Python writes it. If white space were free, a model could
# write it without end.
_JSON_STYLE = {
  "whitespace_flexible": False,
  "item_separator": ", ",
  "key_separator": ": ",
}
_FORMATS = (
  'give {"type": "json_schema", "json_schema": {"name": "...", "schema": '
  '{...}}}, {"type": "json_object"} or {"type": "text"}'
)
_OUTPUTS = 'give {"json": {...}}, {"regex": "..."} or {"choice": ["...", ...]}'


def make_grammar(field: str, rules: str) -> Grammar:
  """Returns the grammar with some rules of Lark, of which one is `start`."""
  if len(rules) > MOST_CHARACTERS:
    raise UserError(
      f"{field}: has {len(rules):,} characters; give at most "
      f"{MOST_CHARACTERS:,}."
    )
  return Grammar(field, _HEAD + rules)


def json_rule(schema: Mapping[str, object] | bool) -> str:
  """Returns the right side of a rule for JSON that satisfies a schema."""
  if isinstance(schema, Mapping):
    # Set the client's own options aside: they would allow invalid JSON.
    schema = {**schema, "x-guidance": _JSON_STYLE}
  elif schema:
    schema = {"x-guidance": _JSON_STYLE}
  try:
    return f"%json {json_text(schema)}"
  except RecursionError:
    raise UserError("the JSON schema is nested too deep.") from None


def read_grammar(body: Mapping[str, object]) -> Grammar | None:
  """Returns the form that a body asks for; None for any text.

  Raises UserError if a field is wrong.
  """
  given = {
    name: body[name]
    for name in ("response_format", "structured_outputs")
    if body.get(name) not in (None, {"type": "text"})
  }
  if not given:
    return None
  if len(given) > 1:
    raise UserError(f"{' and '.join(given)}: give one of them.")
  ((field, value),) = given.items()
  check_library("llguidance", "json", field)
  read = _read_format if field == "response_format" else _read_outputs
  rule = read(value) if isinstance(value, Mapping) else ""
  if not rule:
    fix = _FORMATS if field == "response_format" else _OUTPUTS
    raise UserError(f"{field} = {shorten(value)}: {fix}.")
  return make_grammar(field, f"start: {rule}")


def _read_format(value: Mapping[str, object]) -> str:
  """Returns the rule of a `response_format`; "" if it is wrong."""
  if value == {"type": "json_object"}:
    return json_rule({"type": "object"})
  described = value.get("json_schema")
  if (
    value.get("type") != "json_schema"
    or not isinstance(described, Mapping)
    or not value.keys() <= {"type", "json_schema"}
    or not described.keys() <= {"name", "description", "schema", "strict"}
    or not isinstance(described.get("name"), str)
    or not isinstance(described.get("strict"), bool | None)
  ):
    return ""
  schema = described.get("schema")
  return json_rule(schema) if isinstance(schema, Mapping | bool) else ""


def _read_outputs(value: Mapping[str, object]) -> str:
  """Returns the rule of `structured_outputs`; "" if it is wrong."""
  ((kind, wanted),) = [*value.items()] if len(value) == 1 else [("", None)]
  if kind == "json" and isinstance(wanted, Mapping | bool):
    return json_rule(wanted)
  if kind == "regex" and isinstance(wanted, str) and wanted:
    from palm_mtf.generation.inference.grammar_process import regex_rule

    try:
      return regex_rule(wanted)
    except UnicodeEncodeError:  # half of a surrogate pair
      return ""
  if kind == "choice" and are_texts(wanted) and wanted:
    return " | ".join(map(json_text, wanted))
  return ""
