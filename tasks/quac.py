# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of QuAC: dialogues about a section of an article (Choi et al. 2018).

Records are QuAC's own files, each of one line: train_v0.2.json as
<folder>/quac/train.jsonl, and val_v0.2.json as <folder>/quac/validation.jsonl.
TFDS shuffles questions and keeps neither dialogue nor turn, so each question in
TFDS's records is asked separately.
"""

import functools
import logging
from collections.abc import Iterator

from palm_mtf.tasks.fields import check_fields
from palm_mtf.tasks.prompts import NO_ANSWER, asked, paragraph
from palm_mtf.tasks.questions import Question

_logger = logging.getLogger(__name__)


def quac(record: dict) -> Iterator[Question]:
  """Asks each question of a dialogue about a section of an article."""
  # "data" in the published line holds sections; a line may also be one section.
  # Each paragraph of a section is a dialogue.
  for section in record.get("data", [record]):
    check_fields(section, {"title": str, "section_title": str})
    title = f"Title: {section['title']}, {section['section_title']}"
    if "paragraphs" not in section:  # a record of TFDS
      _warn_of_single_turns()
    for dialogue in section.get("paragraphs", [{**record, "qas": [record]}]):
      check_fields(dialogue, {"context": str, "qas": [{}]})
      # QuAC ends each article with its answer to unanswerable questions.
      text = paragraph(dialogue["context"].removesuffix("CANNOTANSWER"))
      text = f"{title}\n{text}"
      # Earlier questions, with the teacher's answers, precede a later question.
      for turn in dialogue["qas"]:
        check_fields(turn, {"question": str})
        first, *answers = _answers(turn)
        text = f"{text}\nQ: {turn['question'].strip()}\nA:"
        yield asked(text, [first, *answers])
        text = f"{text} {first.strip()}"


def _answers(turn: dict) -> list[str]:
  """Returns the answers to a question; the dialogue's answer is first."""
  answers = turn.get("answers")
  in_tfds = isinstance(answers, dict)
  kind = {"text": [str]} if in_tfds else [{"text": str}]
  check_fields(turn, {"answers": kind})
  if in_tfds:  # TFDS stores a list of objects as an object of lists
    answers = [{"text": text} for text in answers["text"]]
  given = [turn["orig_answer"]] if "orig_answer" in turn else []
  return [
    NO_ANSWER if answer["text"] == "CANNOTANSWER" else answer["text"]
    for answer in [*given, *answers]
  ]


@functools.cache
def _warn_of_single_turns() -> None:
  _logger.warning(
    "quac: records of TFDS do not name a question's dialogue, so each question "
    "is asked separately; for dialogues put QuAC's train_v0.2.json and "
    "val_v0.2.json into records.places.folder, as quac/train.jsonl and "
    "quac/validation.jsonl"
  )
