# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json

import pytest

seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")

from palm_mtf.config import DataConfig  # noqa: E402
from palm_mtf.config.data import FilterConfig  # noqa: E402
from palm_mtf.data.filters.evaluation_sets import (  # noqa: E402
  evaluation_examples,
  read_evaluation_sets,
)
from palm_mtf.data.filters.filtered_source import (  # noqa: E402
  FilteredSource,
  open_filtered,
)
from palm_mtf.data.sources.document import Document  # noqa: E402
from palm_mtf.errors import UserError  # noqa: E402
from tests.log_lines import without_stamps  # noqa: E402
from tests.seqio_testing import (  # noqa: E402
  REKEY,
  add_examples,
  registries_restored,
)

TOKENIZE = [seqio.preprocessors.tokenize]


@pytest.fixture(autouse=True)
def restored():
  with registries_restored():
    yield


def examples_of(name) -> list[Document]:
  return list(evaluation_examples(name, "SETTING"))


def question(text: str) -> dict:
  return {"inputs": [f"{text}?"], "targets": [f"{text}!"]}


def test_examples_are_those_of_all_splits_but_train():
  splits = {name: question(name) for name in ("train", "validation", "test")}
  add_examples("one", splits, TOKENIZE, features=("inputs", "targets"))
  assert examples_of("one") == [
    Document("validation!", inputs="validation?"),
    Document("test!", inputs="test?"),
  ]


def test_a_mixture_has_the_examples_of_all_its_tasks():
  both = ("inputs", "targets")
  for name in ("first", "second"):
    add_examples(name, {"test": question(name)}, TOKENIZE, features=both)
  seqio.MixtureRegistry.add("both", ["first", "second"], default_rate=1.0)
  assert sorted(d.text for d in examples_of("both")) == ["first!", "second!"]


def test_an_option_without_its_question_is_no_example():
  rows = {
    "inputs": ["question", ""],
    "targets": ["option", "option"],
    "unconditional": [False, True],
  }
  add_examples("one", {"test": rows}, TOKENIZE, features=("inputs", "targets"))
  assert examples_of("one") == [Document("option", inputs="question")]


def test_texts_without_inputs_come_in_their_order():
  texts = [f"text {i}" for i in range(100)]
  add_examples("texts", {"test": {"text": texts}}, [REKEY, *TOKENIZE])
  assert examples_of("texts") == [Document(text) for text in texts]


@pytest.mark.parametrize(
  ("splits", "message"),
  [
    (
      {"train": question("a")},
      "SETTING = 'some': some has no split but 'train'; give a task with ",
    ),
    (
      {"test": {"inputs": [[1, 2]], "targets": [[3]]}},
      "SETTING: some, split 'test': its preprocessors make no texts 'inputs' ",
    ),
  ],
)
def test_a_task_without_texts_for_evaluation_is_an_error(splits, message):
  add_examples("some", splits, [], features=("inputs", "targets"))
  with pytest.raises(UserError) as info:
    examples_of("some")
  assert str(info.value).startswith(message)


def test_an_unknown_task_is_an_error_with_the_nearest_name():
  add_examples("my_task", {"test": question("a")}, TOKENIZE)
  with pytest.raises(
    UserError, match=r"SETTING = 'my_tsk': no such .* \"my_ta"
  ):
    examples_of("my_tsk")


LONG = "one two three four five six seven eight"


def data_of(**filters) -> DataConfig:
  return DataConfig(
    text_files="any",
    text_field="body",
    vocabulary=None,
    validation_share=0.2,
    filters=FilterConfig(**filters),
  )


def add(name, *targets) -> None:
  examples = {"inputs": [""] * len(targets), "targets": [*targets]}
  add_examples(
    name,
    {"validation": examples},
    [seqio.preprocessors.tokenize],
    features=("inputs", "targets"),
  )


def test_examples_come_of_tasks_and_files(tmp_path):
  add("first", LONG, "short")
  path = tmp_path / "a.jsonl"
  path.write_text(json.dumps({"body": f"{LONG} nine"}) + "\n")
  both = data_of(decontaminate_tasks=["first"], decontaminate_files=str(path))
  texts = [each.text for each in read_evaluation_sets(both)]
  assert texts == [LONG, "short", f"{LONG} nine"]


def open_source(tmp_path, name) -> FilteredSource:
  path = tmp_path / "text.jsonl"
  path.write_text("".join(json.dumps({"body": x}) + "\n" for x in "abc"))
  data = data_of(decontaminate_tasks=[name])
  data = dataclasses.replace(data, text_files=str(path))
  (source,) = open_filtered(str(tmp_path / "run"), data)
  return source


def test_the_number_of_examples_is_logged(tmp_path, capsys):
  add("first", LONG, "short")
  assert open_source(tmp_path, "first").counts["documents_read"] == 3
  assert without_stamps(capsys.readouterr().err) == (
    "palm_mtf: documents that contain one of 2 evaluation examples are removed;"
    " 1 of fewer than 8 words are not looked for\n"
  )


def test_the_fingerprint_is_of_the_examples_in_any_order(tmp_path):
  add("one", "a", "b")
  add("other", "b", "a", "a")
  add("more", "a", "b", "c")
  one, other, more = (
    open_source(tmp_path, name).fingerprint()
    for name in ("one", "other", "more")
  )
  assert one == other != more


def test_nothing_is_read_by_default():
  assert not list(read_evaluation_sets(data_of()))
  assert not list(read_evaluation_sets(data_of(min_document_bytes=1)))
