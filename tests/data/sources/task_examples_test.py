# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")

from palm_mtf.data.sources.document import Document  # noqa: E402
from palm_mtf.data.sources.task_examples import (  # noqa: E402
  evaluation_examples,
)
from palm_mtf.errors import UserError  # noqa: E402
from tests.seqio_testing import REKEY, add_examples  # noqa: E402

pytestmark = pytest.mark.usefixtures("registries")

TOKENIZE = [seqio.preprocessors.tokenize]


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
