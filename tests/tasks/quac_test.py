# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""QuAC's published files give dialogues; TFDS's records, single questions."""

import json

from palm_mtf.evaluation.few_shot import few_shot_task
from palm_mtf.tasks import fewshot, quac
from tests.cases import needs_t5
from tests.seqio_testing import bind, examples_of, targets_of, text_of

pytestmark = needs_t5

assert fewshot.TASKS["quac"]


def turn(number, question, given, *answers):
  """A question as in val_v0.2.json."""
  return {
    "followup": "y",
    "yesno": "x",
    "question": question,
    "id": f"C_1_q#{number}",
    "answers": [{"text": x, "answer_start": 0} for x in answers],
    "orig_answer": {"text": given, "answer_start": 0},
  }


def section(title, *dialogues):
  return {
    "title": title,
    "section_title": "History",
    "background": f"{title} are old.",
    "paragraphs": [
      {"id": f"C_{i}", "context": "Ada had a boat. CANNOTANSWER", "qas": turns}
      for i, turns in enumerate(dialogues)
    ],
  }


FIRST = [
  turn(0, "Who had a boat?", "Ada", "Ada had", "Ada"),
  turn(1, "Who built it?", "CANNOTANSWER", "CANNOTANSWER", "Ada"),
  turn(2, "What did she have? ", "a boat", "boat"),
]
SECOND = [turn(0, "A boat?", "Yes", "boat")]
DATA = {"data": [section("Boats", FIRST, SECOND), section("Lakes", SECOND)]}
HEAD = "Title: Boats, History\nAda had a boat.\n"


def test_earlier_turns_of_a_dialogue_stand_before_a_question_and_no_others():
  made = [*quac.quac(DATA)]
  assert [x.inputs for x in made] == [
    f"{HEAD}Q: Who had a boat?\nA:",
    f"{HEAD}Q: Who had a boat?\nA: Ada\nQ: Who built it?\nA:",
    f"{HEAD}Q: Who had a boat?\nA: Ada\nQ: Who built it?\nA: unanswerable\n"
    "Q: What did she have?\nA:",
    f"{HEAD}Q: A boat?\nA:",
    "Title: Lakes, History\nAda had a boat.\nQ: A boat?\nA:",
  ]
  # The exemplar shows the dialogue's answer; any annotator's is right.
  assert made[0].targets == " Ada"
  assert [x.answers for x in made[:3]] == [
    ["Ada", "Ada had"],
    ["unanswerable", "Ada"],
    ["a boat", "boat"],
  ]


def test_a_line_may_be_a_section():
  expected = [*quac.quac(DATA)]
  assert [x for each in DATA["data"] for x in quac.quac(each)] == expected


def test_the_task_reads_the_published_files_under_their_split(
  tmp_path, vocabulary
):
  folder = tmp_path / "quac"
  folder.mkdir()
  for name in ("train", "validation"):
    (folder / f"{name}.jsonl").write_text(json.dumps(DATA))
  bind(
    documents__vocabulary__path=vocabulary.path,
    records__places__folder=str(tmp_path),
  )
  made = examples_of("quac")
  assert [text_of(x, "inputs") for x in made] == [
    x.inputs for x in quac.quac(DATA)
  ]
  assert targets_of("quac", made)[1] == ["unanswerable", "Ada"]
  solved = {x.inputs + x.targets for x in quac.quac(DATA)}
  for example in examples_of(few_shot_task("quac", 1)):
    shot, _ = text_of(example, "inputs").split("\n\n")
    assert shot in solved


def test_a_record_of_tfds_is_asked_alone_and_it_is_said(caplog):
  record = {
    "title": "Boats",
    "section_title": "History",
    "context": "Ada had a boat. CANNOTANSWER",
    "question": "Who built it?",
    "answers": {"text": ["CANNOTANSWER", "Ada"], "answer_start": [0, 0]},
    "orig_answer": {"text": "Ada", "answer_start": 0},
  }
  quac._warn_of_single_turns.cache_clear()
  for _ in range(2):
    (made,) = quac.quac(record)
  assert made.inputs == f"{HEAD}Q: Who built it?\nA:"
  assert made.targets == " Ada"
  assert made.answers == ["Ada", "unanswerable"]
  (line,) = [x.message for x in caplog.records]
  assert "do not name a question's dialogue, so each question is asked" in line
