# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks of the dialogues' questions.

dialogue_answers   the share of exact answers
dialogue_choices   the share of questions whose answer is likelier, per token,
                   than three answers of other questions

Split "validation" has the held-out questions. Split "train" has about as many
first questions of training conversations. The folder `dialogues` has the files.
"""

import json
import pathlib
import random

import tensorflow as tf

from palm_mtf.tasks.questions import (
  Choice,
  Question,
  add_choices,
  add_questions,
)
from palm_mtf.tasks.records import OrderedSource

_FOLDER = pathlib.Path("dialogues")


def _read_lines(name: str) -> list[dict]:
  text = (_FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
  return [json.loads(line) for line in text.splitlines()]


def _read(split: str) -> tf.data.Dataset:
  held_out = [(x["inputs"], x["targets"]) for x in _read_lines("held_out")]
  pairs = held_out
  if split == "train":
    chats = [each["messages"] for each in _read_lines("train")]
    pairs = [(f"Q: {x[0]['content']}\nA:", x[1]["content"]) for x in chats]
  answers: dict[str, list[str]] = {}  # a question may have several answers
  for inputs, answer in pairs:
    answers.setdefault(inputs, []).append(answer.strip())
  records = [json.dumps(each) for each in answers.items()]
  step = len(records) // len(dict(held_out))
  return tf.data.Dataset.from_tensor_slices({"record": records[::step]})


def _ask(record: list) -> list[Question]:
  inputs, answers = record
  return [Question(inputs, f" {answers[0]}", answers)]


def _choose(record: list) -> list[Choice]:
  inputs, answers = record
  every = [line["targets"].strip() for line in _read_lines("held_out")]
  others = sorted({*every} - {*answers})
  wrong = random.Random(inputs).sample(others, 3)
  return [Choice(inputs, [f" {x}" for x in (answers[0], *wrong)], [0])]


def exact(targets: list[list[str]], predictions: list[str]) -> dict[str, float]:
  """Returns the percentage of predictions that equal the answer."""
  pairs = list(zip(targets, predictions, strict=True))
  return {"exact": 100 * sum(y in x for x, y in pairs) / len(pairs)}


add_questions(
  "dialogue_answers",
  OrderedSource(_read, ["train", "validation"]),
  _ask,
  [exact],
)
add_choices(
  "dialogue_choices",
  OrderedSource(_read, ["train", "validation"]),
  _choose,
  "tokens",
)
