# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures how many times as fast a chat model answers with prompt lookup.

  python -m tools.bench lookup --model_dir MODEL
  python -m tools.bench lookup --model_dir MODEL --batch_sizes 4 --bits 8

Both kinds of decoding take turns with the same weights; reading the prompts is
timed, too. Greedy answers repeat a paragraph of Python's help with one word
replaced ("edit"), or are its JSON, by a schema ("json"); drawn answers tell a
story ("story"). The case fails if any answer depends on PROMPT_LOOKUP.
"""

import argparse
import functools
import json
import pydoc_data.topics
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.cli.gin_files import load_run
from palm_mtf.config import DecodeConfig
from palm_mtf.console import configure_logging
from palm_mtf.data.batches.packing import prompt_start
from palm_mtf.data.vocabulary.chat import ChatTemplate
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from tools.bench import pairs
from tools.bench.command import REQUIRED, Flag, choices, count

if TYPE_CHECKING:  # the module imports TensorFlow, which takes seconds
  from palm_mtf.generation.inference.sessions import LoadedDecoder

_DTYPES = {16: "activation", 8: "int8", 4: "int4"}
_TEMPERATURES = {"edit": 0.0, "json": 0.0, "story": 1.0}
# The form of answers of the kind "json".
_FIELDS = {
  "topic": {"type": "string"},
  "paragraph": {"type": "string"},
  "words": {"type": "integer"},
}
_SCHEMA = {
  "type": "object",
  "properties": _FIELDS,
  "required": [*_FIELDS],
  "additionalProperties": False,
}
_WARM_UP, LENGTH = 1, 1024
BOUNDS = {"tokens_per_sec": pairs.POSITIVE, "ratio": pairs.POSITIVE}
HEAD = f"{'texts':<6} {'bits':>4} {'rows':>4} {'tokens/s':>9}  times as fast"
FLAGS = {
  "--model_dir": Flag(None, "a model with a chat template", settings=REQUIRED),
  "--bits": Flag("16,8,4", "bits per weight", choices([*map(str, _DTYPES)])),
  "--texts": Flag(
    ",".join(_TEMPERATURES), "kinds of texts", choices([*_TEMPERATURES])
  ),
  "--batch_sizes": Flag(
    None, "numbers of texts at once; else 1 4 16", count(), {"nargs": "+"}
  ),
  "--tokens": Flag(192, "of an answer, at most"),
  "--rounds": Flag(9, "turns of each kind"),
}


def ask(kind: str, number: int) -> list[str]:
  """Returns questions of a kind, different ones."""
  topics = pydoc_data.topics.topics
  names = sorted(topics)
  if kind == "story":
    return [f"Tell me a story about {x.lower()}." for x in names[:number]]
  paragraphs = [
    (name, " ".join(part.split()))
    for name in names
    for part in topics[name].split("\n\n")
    if 400 < len(part) < 700
  ][: 7 * number : 7]
  if kind == "json":
    records = [
      {"topic": topic, "paragraph": text, "words": len(text.split())}
      for topic, text in paragraphs
    ]
    return [f"Write this as JSON:\n\n{json.dumps(x)}" for x in records]
  return [
    f'Repeat this text, but write "a" in place of "the":\n\n{paragraph}'
    for _, paragraph in paragraphs
  ]


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per number of bits, kind of texts and batch size."""
  from palm_mtf.generation.inference.sessions import LoadedDecoder

  configure_logging()
  for bits in map(int, chosen.bits):
    macros = {
      "WEIGHT_DTYPE": _DTYPES[bits],
      "SAMPLE_TOKENS": chosen.tokens,
      "SEQUENCE_LENGTH": LENGTH,
    }
    _, config = load_run("generate", chosen.model_dir, macros)
    checkpoint, vocabulary = open_newest(chosen.model_dir, config)
    start_id = prompt_start(config.data, vocabulary)
    template = ChatTemplate(vocabulary, start_id)
    with LoadedDecoder.of_run(checkpoint, config, for_steps=True) as loaded:
      for kind in chosen.texts:
        for rows in chosen.batch_sizes or [1, 4, 16]:
          prompts = [
            template.encode([{"role": "user", "content": text}])
            for text in ask(kind, rows)
          ]
          yield {
            "texts": kind,
            "bits": bits,
            "batch_size": rows,
            **_compare(chosen, loaded, vocabulary, kind, prompts),
          }


def _compare(
  chosen: argparse.Namespace,
  loaded: "LoadedDecoder",
  vocabulary: Vocabulary,
  kind: str,
  prompts: Sequence[Sequence[int]],
) -> dict:
  """Returns the figures of a record."""
  from palm_mtf.generation.inference.constrained import ConstrainedGenerator
  from palm_mtf.generation.inference.generator import Generator
  from palm_mtf.generation.serving.structure import json_rule, make_grammar

  form: Callable[..., Generator] = Generator
  if kind == "json":
    grammar = make_grammar("schema", f"start: {json_rule(_SCHEMA)}")
    form = functools.partial(ConstrainedGenerator, grammar=grammar)
  answers: dict[bool, list] = {}

  def make(looks_up: bool) -> Callable[[int], None]:
    generator = form(
      loaded,
      vocabulary,
      DecodeConfig(temperature=_TEMPERATURES[kind], prompt_lookup=looks_up),
      sample_tokens=chosen.tokens,
      seed=0,
      start_id=prompts[0][0],
    )

    def run(step: int) -> None:
      found = generator.continue_tokens([x[1:] for x in prompts])
      answers[looks_up] = [*found]

    return run

  kinds = {"plain": make(False), "lookup": make(True)}
  turns = pairs.take_turns(kinds, _WARM_UP, chosen.rounds)
  if answers[False] != answers[True]:
    raise UserError("PROMPT_LOOKUP: changes an answer.")
  tokens = sum(x.num_tokens for (x,) in answers[True])
  secs = statistics.median(x.secs for x in turns["lookup"])
  return {
    "tokens_per_sec": tokens / secs,
    **pairs.ratio_fields(turns["plain"], turns["lookup"]),
  }


def row(record: dict) -> str:
  """Returns a line of the table."""
  return (
    f"{record['texts']:<6} {record['bits']:>4} {record['batch_size']:>4} "
    f"{record['tokens_per_sec']:>9,.0f}  {pairs.describe_ratio(record)}"
  )
