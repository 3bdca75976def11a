# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks allow exactly the tokens that continue a text of the grammar."""

import contextlib
import json
import threading
import time
from concurrent import futures
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from palm_mtf.data.vocabulary import gguf_tokenizer
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.text_reader import decode_after
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.generation.inference import grammar_process
from palm_mtf.generation.inference.constraint import ConstraintError, Grammars
from palm_mtf.generation.serving.structure import read_grammar
from tests import tokenizer_files
from tests.prefixed_vocabulary import train_prefixed

TEXTS = ['{"one": [1, 2, true], "two": "four"}, {"name": null}\n' * 9]
SCHEMAS = json.loads(
  (Path(__file__).parent.parent / "serving/schemas.json").read_text()
)


def make_trained(folder):
  train_vocabulary(TEXTS, 300, path=f"{folder}/vocabulary.model")
  return f"{folder}/vocabulary.model"


def make_byte_level(folder):
  content = tokenizer_files.make_byte_level("qwen2", TEXTS, 300)
  return tokenizer_files.write(folder, content)


def make_byte_fallback(folder):
  content, _ = tokenizer_files.make_llama2(folder)
  return tokenizer_files.write(folder, content, eos_token="</s>")


def make_of_gguf(make):
  def made(folder):
    vocabulary = open_vocabulary(make(folder))
    how = {"start_id": None, "vocab_size": vocabulary.size + 3}
    metadata = gguf_tokenizer.make_gguf_tokenizer(vocabulary, **how)
    files = gguf_tokenizer.read_gguf_tokenizer(metadata)
    for name, content in files.items():
      (folder / f"gguf_{name}").write_bytes(content)
    return f"{folder}/gguf_{next(iter(files))}"

  return made


KINDS = {
  "SentencePiece": make_trained,
  "SentencePiece with a space before": lambda folder: (
    train_prefixed(TEXTS[0], folder, vocab_size=300).path
  ),
  "byte level": make_byte_level,
  "byte fallback": make_byte_fallback,
  "GGUF of SentencePiece": make_of_gguf(make_trained),
  "GGUF of byte level": make_of_gguf(make_byte_level),
}


@pytest.fixture(scope="module", params=KINDS)
def vocabulary(request, tmp_path_factory):
  return open_vocabulary(KINDS[request.param](tmp_path_factory.mktemp("v")))


@pytest.fixture(scope="module")
def grammars(vocabulary):
  return Grammars(vocabulary)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  """Grammars of one vocabulary."""
  path = make_byte_level(tmp_path_factory.mktemp("v"))
  return Grammars(open_vocabulary(path))


def of_schema(schema):
  described = {"name": "x", "schema": schema}
  body = {"type": "json_schema", "json_schema": described}
  return read_grammar({"response_format": body})


def of_output(**output):
  return read_grammar({"structured_outputs": output})


def allowed(mask, size):
  bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
  assert len(mask) == -(-size // 32) and not bits[size:].any()
  return bits[:size].astype(bool)


def values(*values):
  return [json.dumps(x, ensure_ascii=False) for x in values]


def obj(required=(), **properties):
  return {
    "type": "object",
    "properties": properties,
    "required": [*required],
    "additionalProperties": False,
  }


BIT = {"type": "boolean"}
# (grammar's maker, all texts of the grammar), with texts that are written here
# or by the library json.
FINITE = {
  "null": (of_schema, {"type": "null"}, values(None)),
  "boolean": (of_schema, BIT, values(True, False)),
  "enum": (
    of_schema,
    {"enum": ["a", 'b"c\\', "\u00e9\U0001f600", 1, None, 2.5]},
    values("a", 'b"c\\', "\u00e9\U0001f600", 1, None, 2.5),
  ),
  "const": (of_schema, {"const": {"k": [1, "x"]}}, values({"k": [1, "x"]})),
  "integer": (
    of_schema,
    {"type": "integer", "minimum": -3, "maximum": 12},
    [*values(*range(-3, 13)), "-0"],
  ),
  "multiple": (
    of_schema,
    {"type": "integer", "minimum": 1, "maximum": 30, "multipleOf": 7},
    values(7, 14, 21, 28),
  ),
  "pattern": (
    of_schema,
    {"type": "string", "pattern": "^[ab]{1,2}$"},
    values("a", "b", "aa", "ab", "ba", "bb"),
  ),
  "array": (
    of_schema,
    {"type": "array", "items": BIT, "minItems": 1, "maxItems": 2},
    values(*([x] for x in (True, False)))
    + values(*([x, y] for x in (True, False) for y in (True, False))),
  ),
  "empty array": (of_schema, {"type": "array", "maxItems": 0}, ["[]"]),
  "tuple": (
    of_schema,
    {
      "type": "array",
      "prefixItems": [{"type": "null"}, BIT],
      "items": False,
      "minItems": 1,
    },
    values([None], [None, True], [None, False]),
  ),
  "empty object": (of_schema, obj(), ["{}"]),
  "required": (
    of_schema,
    obj(["a", "b"], a=BIT, b={"enum": ["x", 1]}),
    values(*({"a": x, "b": y} for x in (True, False) for y in ("x", 1))),
  ),
  "optional": (
    of_schema,
    obj(["b"], a={"const": 1}, b=BIT, c={"type": "null"}),
    values(
      *(
        {**a, "b": b, **c}
        for a in ({}, {"a": 1})
        for b in (True, False)
        for c in ({}, {"c": None})
      )
    ),
  ),
  "nested": (
    of_schema,
    obj(["a"], a=obj(["b"], b=obj(["c"], c=BIT))),
    values(*({"a": {"b": {"c": x}}} for x in (True, False))),
  ),
  "names": (
    of_schema,
    obj(["a b", '\u00e9"'], **{"a b": {"const": 1}, '\u00e9"': BIT}),
    values(*({"a b": 1, '\u00e9"': x} for x in (True, False))),
  ),
  "anyOf": (
    of_schema,
    {"anyOf": [BIT, {"const": "t"}, {"enum": [[], {}]}]},
    [*values(True, False, "t"), "[]", "{}"],
  ),
  "allOf": (
    of_schema,
    {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
    values(2, 3),
  ),
  "types": (
    of_schema,
    {"type": ["boolean", "null"]},
    values(True, False, None),
  ),
  "references": (
    of_schema,
    {**obj(["a"], a={"$ref": "#/$defs/x"}), "$defs": {"x": {"enum": [7, 8]}}},
    values({"a": 7}, {"a": 8}),
  ),
  "json": (of_output, {"json": {"enum": [1, "x"]}}, values(1, "x")),
  "regex": (
    of_output,
    {"regex": "(cat|d[ou]g)s?/?"},
    [
      f"{x}{y}{z}"
      for x in ("cat", "dog", "dug")
      for y in ("", "s")
      for z in ("", "/")
    ],
  ),
  "choice": (
    of_output,
    {"choice": ["yes", " no", 'so "so"\n', "\u00e9/", "yes sir"]},
    ["yes", " no", 'so "so"\n', "\u00e9/", "yes sir"],
  ),
}


@pytest.mark.parametrize("name", FINITE)
def test_masks_allow_exactly_the_tokens_that_continue_a_text(
  name, vocabulary, grammars
):
  """All texts of each grammar are listed; an end comes only after a whole one.

  The bytes of the tokens are those that the text shows.
  """
  make, given, texts = FINITE[name]
  grammar = make(given) if make is of_schema else make(**given)
  wanted = {x.encode() for x in texts}
  pieces = [
    b""
    if vocabulary.is_control(i) or i in vocabulary.end_ids
    else vocabulary.token_bytes(i)
    for i in range(vocabulary.size)
  ]
  for seed in range(3):
    rng, before, ids = np.random.default_rng(seed), b"", []
    row = grammars.start(grammar)
    while True:
      rest = [x.removeprefix(before) for x in wanted if x.startswith(before)]
      expected = [
        bool(x) and any(y.startswith(x) for y in rest) for x in pieces
      ]
      for end in vocabulary.end_ids:
        expected[end] = before in wanted
      found = allowed(row.mask(), vocabulary.size)
      np.testing.assert_array_equal(found, expected, before.decode("latin1"))
      token = int(rng.choice(np.flatnonzero(found)))
      row.accept(token)
      if token in vocabulary.end_ids:
        break
      ids.append(token)
      before += pieces[token]
    assert decode_after(vocabulary, None, ids).encode() == before


def test_masks_along_a_draft_are_those_of_its_tokens_up_to_a_wrong_one(one):
  """Or up to an end; a draft leaves the text as it was."""
  vocabulary, schema = one._vocabulary, {"const": {"one": [1, 2, True]}}
  ids = vocabulary.encode('{"one": [1, 2, true]}')
  row, expected = one.start(of_schema(schema)), []
  for token in ids:
    expected.append(row.mask())
    row.accept(token)
  expected.append(row.mask())
  row = one.start(of_schema(schema))
  end, wrong = vocabulary.end_ids[0], vocabulary.encode("name")[0]
  for draft, count in (
    (None, 0),
    (ids, len(ids)),
    ([*ids, *ids], len(ids)),
    ([*ids, end, *ids], len(ids)),
    ([*ids[:3], wrong, *ids[3:]], 3),
    ([end], 0),
  ):
    found, masks = row.look_ahead(draft)
    assert [*found] == ids[:count]
    np.testing.assert_array_equal(masks, expected[: count + 1])
  row.accept(ids[0])
  np.testing.assert_array_equal(row.mask(), expected[1])


def test_what_must_come_next_is_a_draft(one):
  vocabulary, text = one._vocabulary, '{"one": [true, true]}'
  row = one.start(of_schema({"const": {"one": [True, True]}}))
  found, masks = row.look_ahead([])
  assert vocabulary.decode(found) == text and len(masks) == len(found) + 1
  row = one.start(of_schema({"const": "\u00e9" * 1000}))
  found, _ = row.look_ahead([])  # cut within a character of two bytes
  assert vocabulary.decode(found) == '"' + "\u00e9" * 15
  free = one.start(of_schema({"enum": ["a", 1]}))
  assert free.look_ahead([])[0] == ()


def draw(constraint, vocabulary, seed, most=300):
  """Returns a random text of a grammar, and whether it ended."""
  rng, ids = np.random.default_rng(seed), []
  # The same logits in all steps, as a model that learned nothing may have.
  shares = np.exp(rng.normal(size=vocabulary.size))
  for _ in range(most):
    weights = shares * allowed(constraint.mask(), vocabulary.size)
    token = int(rng.choice(vocabulary.size, p=weights / weights.sum()))
    if token in vocabulary.end_ids:
      return decode_after(vocabulary, None, ids), True
    constraint.accept(token)
    ids.append(token)
  return decode_after(vocabulary, None, ids), False


def check(schema, text):
  formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
  jsonschema.validate(json.loads(text), schema, format_checker=formats)


def test_every_finished_answer_of_a_random_model_is_valid(vocabulary, grammars):
  assert len(SCHEMAS) >= 50
  finished = 0
  for seed, schema in enumerate(SCHEMAS.values()):
    text, is_whole = draw(grammars.start(of_schema(schema)), vocabulary, seed)
    if is_whole:
      check(schema, text)
      assert "\n" not in text
      finished += 1
  assert finished >= 40  # others are long strings or trees


REFUSED = {
  "false": (False, "Unsatisfiable schema"),
  "lengths": (
    {"type": "string", "minLength": 5, "maxLength": 2},
    "minLength \\(5\\) is greater than maxLength \\(2\\)",
  ),
  "types": (
    {"allOf": [{"type": "string"}, {"type": "null"}]},
    "incompatible types",
  ),
  "itself": ({"$ref": "#"}, "no text satisfies it"),
  "no type": ({"type": "text"}, "Invalid type: text"),
  "no reference": ({"$ref": "#/$defs/x"}, "'/\\$defs/x' does not exist"),
  "network": ({"$ref": "http://127.0.0.1:1/x"}, "does not fetch"),
  "file": ({"$ref": "file:///etc/passwd"}, "does not fetch"),
  "not": ({"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
  "format": ({"type": "string", "format": "regex"}, "Unknown format: regex"),
  "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
  "options": (
    {"not": {}, "x-guidance": {"lenient": True}},
    'Unimplemented keys: \\["not"\\]',
  ),
  "deep": (json.loads('{"items":' * 200 + "{}" + "}" * 200), "recursion limit"),
  "half of a pair": ({"const": "\ud800"}, "hex escape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_without_answers_or_with_unknown_words_is_one_line(name, one):
  schema, message = REFUSED[name]
  with pytest.raises(UserError, match=message) as found:
    one.start(of_schema(schema))
  line = str(found.value)
  assert line.startswith("response_format: ") and "\n" not in line
  assert len(line) < 300


def chain(step, count):
  """A schema whose definitions refer to each other, `count` deep."""
  found = {str(i): step({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)}
  return {"$ref": "#/$defs/0", "$defs": {**found, str(count): {}}}


HOSTILE = {
  "references": chain(lambda x: x, 900),
  "allOf": chain(lambda x: {"allOf": [x, {"type": "object"}]}, 600),
  "properties": chain(lambda x: {"properties": {"": x}}, 700),
  "intersection": {
    "type": "string",
    "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(900)],
  },
  "optional": {
    "type": "object",
    "properties": {f"{i}": {} for i in range(999)},
  },
  "enum": {"enum": [str(i) for i in range(4000)]},
  "repetitions": {"type": "string", "pattern": "((a{1,999}){1,999}b?){1,999}"},
  "states": {"type": "string", "pattern": "^.*a.{500}$"},
  "items": {"type": "array", "minItems": 10**9},
  "products": {
    "allOf": [
      {"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(3)]}
      for i in range(30)
    ]
  },
}


@pytest.fixture(scope="module")
def thread(one):
  """A thread with a large stack, as in the server, and its grammars."""
  before = threading.stack_size(2**28)
  with futures.ThreadPoolExecutor(1) as thread:
    thread.submit(int).result()
    threading.stack_size(before)
    yield thread, Grammars(one._vocabulary)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_costs_seconds_and_stops_no_other_schema(name, thread):
  thread, grammars = thread

  def start():
    try:
      return grammars.start(of_schema(HOSTILE[name]))
    except UserError as error:
      return error

  begin = time.monotonic()
  found = thread.submit(start).result()
  # The machine may be slow, and starts a process after it has killed one.
  assert time.monotonic() - begin < 30
  if not isinstance(found, UserError):
    with contextlib.suppress(ConstraintError):
      draw(found, grammars._vocabulary, seed=0, most=50)
  other = thread.submit(grammars.start, of_schema(BIT)).result()
  assert draw(other, grammars._vocabulary, 0)[1]


def test_texts_of_one_grammar_do_not_share_their_state(one):
  first, second = (one.start(of_schema({"enum": ["ab", "ac"]})) for _ in "ab")
  before = second.mask().copy()
  for i in one._vocabulary.encode('"ab'):
    first.accept(i)
  np.testing.assert_array_equal(second.mask(), before)


# The states of its lexer are as many as the sets of places, of the last 12, at
# which a text has an "a".
EXPONENTIAL = {"type": "string", "pattern": "^[ab]*a[ab]{12}$"}


def test_other_texts_do_not_make_a_grammar_too_complex(one, monkeypatch):
  """Each text needs fewer states than the lexer may have; all need more."""
  limits = {**grammar_process._LIMITS, "max_lexer_states": 800}
  monkeypatch.setattr(grammar_process, "_LIMITS", limits)
  grammars, form = Grammars(one._vocabulary), of_schema(EXPONENTIAL)
  quote, *letters = (one._vocabulary.encode(x)[0] for x in '"ab')
  rng, early = np.random.default_rng(0), grammars.start(form)
  early.accept(quote)
  for _ in range(20):
    text = grammars.start(form)
    text.accept(quote)
    for _ in range(60):
      mask = allowed(text.mask(), one._vocabulary.size)
      assert mask[letters].all()
      text.accept(int(rng.choice(letters)))
    # This text lasts while the others begin and end.
    assert allowed(early.mask(), one._vocabulary.size)[letters].all()
    early.accept(letters[0])
