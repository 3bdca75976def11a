# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Records in JSON lines are read like all user text; errors are one line."""

import bz2
import codecs
import gzip
import json
import os
from collections.abc import Callable

import pytest
import tensorflow as tf

from palm_mtf.data.filters.filtered_source import evaluation_examples
from palm_mtf.evaluation.few_shot import few_shot_task
from palm_mtf.tasks import fewshot, records
from palm_mtf.tasks.questions import Choice, add_choices
from tests.refusals import message_of
from tests.seqio_testing import bind
from tests.tasks.evaluation_records import EXPECTED

COPA = fewshot.TASKS["copa"].dataset
RECORDS = [
  {"passage": f"One {n}.", "question": "is it", "label": n % 2, "more": None}
  for n in range(3)
]
ASKED = [
  f"One {n}.\nQuestion: is it?\nAnswer:" for n in range(3) for _ in range(2)
]


def content_of(values: list[dict], end: str = "\n") -> bytes:
  return "".join(json.dumps(value) + end for value in values).encode()


@pytest.fixture
def put(tmp_path, monkeypatch) -> Callable[..., str]:
  """Returns a function that writes records and returns their path."""
  monkeypatch.chdir(tmp_path)
  bind(records__places__folder="sets")

  def write(content: bytes, name="validation.jsonl", of="super_glue/boolq"):
    folder = tmp_path / "sets" / of
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return f"sets/{of}/{name}"

  return write


def asked(name: str = "boolq") -> list[str]:
  return [x.inputs for x in evaluation_examples(name, "EVAL_TASKS")]


def refusal(name: str = "boolq") -> str:
  return message_of(asked, name)


def test_records_are_read_by_the_rules_of_all_text(put):
  first, *others = content_of(RECORDS, "\r\n").splitlines(keepends=True)
  put(codecs.BOM_UTF8 + first + b"\n \n" + b"".join(others).rstrip())
  assert asked() == ASKED


def test_records_may_be_compressed(put):
  put(gzip.compress(content_of(RECORDS)), "validation.jsonl.gz")
  assert asked() == ASKED
  path = put(bz2.compress(content_of(RECORDS)), "validation.jsonl")
  assert refusal() == (
    f"{path}: is compressed, and its name does not say so; let it end in .bz2, "
    "or decompress it."
  )


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b'{"question": "caf\xe9"}', ": not UTF-8, byte 0xe9 at column 18; conv"),
    (b"[1]", ": [1] is no JSON object; mend the line."),
    (
      b'{"question": "a", "passage": "b", "lable": 1}',
      ": no field 'label' (did you mean \"lable\"?); mend the record.",
    ),
    (
      b'{"question": null, "passage": "b", "label": 1}',
      ": field 'question' is null, not a text; mend the record.",
    ),
    (
      b'{"question": "a", "passage": "b", "label": 2}',
      ": the right option is 2, and there are 2 from 0 on; mend the record.",
    ),
  ],
)
def test_a_broken_record_is_one_line_with_file_line_and_field(
  put, line, message
):
  path = put(content_of(RECORDS) + line + b"\n")
  assert refusal().startswith(f"{path}, line 4{message}")


def test_a_broken_record_of_exemplars_is_named_too(put):
  put(content_of(RECORDS))
  path = put(content_of([*RECORDS, {"question": "a"}]), "train.jsonl")
  assert refusal(few_shot_task("boolq", 1)) == (
    f"{path}, line 4: no field 'passage'; mend the record."
  )


def test_what_a_prompt_cannot_use_is_named_by_its_place(put):
  path = put(content_of([{**EXPECTED["copa"][1], "question": "why"}]), of=COPA)
  assert refusal("copa") == f"{path}, line 1: KeyError: 'why'; mend the record."


def test_what_is_no_file_of_records_is_named(put):
  path = put(b"")
  os.unlink(path)
  assert refusal() == (
    f"records.places.folder: there is no file {path}; put the records there, "
    "one JSON object per line."
  )
  os.mkfifo(path)
  assert refusal() == (
    f"records.places.folder: {path} is a folder, a pipe or a device, and "
    "records are read more than once; put them into a file."
  )


def test_records_without_an_origin_are_named_by_their_number():
  lines = content_of(RECORDS).splitlines()
  source = records.OrderedSource(
    lambda split: tf.data.Dataset.from_tensor_slices({"record": lines}),
    ["validation"],
  )

  def prompt(record):
    yield Choice("q", ["a", "b"], [1 // record["label"]])

  add_choices("mine", source, prompt, "sum")
  line = refusal("mine")
  assert line.startswith("record 0: ZeroDivisionError: integer division or ")
  assert line.endswith(", in prompt); mend the record.")
