# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json

import numpy as np
import pytest

from palm_mtf.config import DataConfig, FilterConfig
from palm_mtf.data.filters import filtered_source
from palm_mtf.data.filters.filtered_source import (
  FilteredSource,
  evaluation_examples,
  open_filtered,
  read_decisions,
  read_evaluation_sets,
  write_decisions,
)
from palm_mtf.data.sources.document import Document
from palm_mtf.errors import UserError
from tests.log_lines import without_stamps
from tests.refusals import message_of

seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")

from tests.seqio_testing import (  # noqa: E402
  REKEY,
  add_examples,
)

pytestmark = pytest.mark.usefixtures("registries")

TOKENIZE = [seqio.preprocessors.tokenize]
BOTH = ("inputs", "targets")


def examples_of(name) -> list[Document]:
  return list(evaluation_examples(name, "SETTING"))


LONG = "one two three four five six seven eight"


def question(text: str) -> dict:
  return {"inputs": [f"{text}?"], "targets": [f"{text}!"]}


def test_examples_are_those_of_all_tasks_and_all_splits_but_train():
  splits = {name: question(name) for name in ("train", "validation", "test")}
  add_examples("one", splits, TOKENIZE, features=BOTH)
  add_examples("two", {"test": question("last")}, TOKENIZE, features=BOTH)
  seqio.MixtureRegistry.add("both", ["one", "two"], default_rate=1.0)
  assert sorted(examples_of("both"), key=lambda each: each.text) == [
    Document(f"{name}!", inputs=f"{name}?")
    for name in ("last", "test", "validation")
  ]


def test_an_option_without_its_question_is_no_example():
  rows = {
    "inputs": ["question", ""],
    "targets": ["option", "option"],
    "unconditional": [False, True],
  }
  add_examples("one", {"test": rows}, TOKENIZE, features=BOTH)
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
  add_examples("some", splits, [], features=BOTH)
  assert message_of(examples_of, "some").startswith(message)
  assert message_of(examples_of, "sme").startswith(
    "SETTING = 'sme': no such SeqIO task or mixture is registered (did you "
    'mean "some"?)'
  )


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
  add_examples(name, {"validation": examples}, TOKENIZE, features=BOTH)


def test_examples_come_of_tasks_and_files(tmp_path):
  add("first", LONG, "short")
  path = tmp_path / "a.jsonl"
  path.write_text(json.dumps({"body": f"{LONG} nine"}) + "\n")
  both = data_of(decontaminate_tasks=["first"], decontaminate_files=str(path))
  texts = [each.text for each in read_evaluation_sets(both)]
  assert texts == [LONG, "short", f"{LONG} nine"]


def test_the_number_of_examples_is_logged(opened, capsys):
  add("first", LONG, "short")
  source = opened(decontaminate_tasks=["first"])
  assert source.counts["documents_read"] == 5
  assert without_stamps(capsys.readouterr().err) == (
    "palm_mtf: documents that contain one of 2 evaluation examples are removed;"
    " 1 of fewer than 8 words are not looked for\n"
  )


def test_decisions_are_read_and_a_missing_or_damaged_file_has_none(
  tmp_path, capsys
):
  path, decisions = tmp_path / "folder" / "removed", [[0, 1, 4], [], [2]]
  write_decisions(str(path), [np.array(x, np.uint8) for x in decisions])
  assert [x.tolist() for x in read_decisions(str(path))] == decisions
  assert read_decisions(f"{path}.missing") is None
  path.write_bytes(path.read_bytes()[:-1])
  assert read_decisions(str(path)) is None
  assert (
    "is damaged: its documents are filtered again" in capsys.readouterr().err
  )


LINES = [("aa", 0.1), ("b", 0.9), ("cc", 0.5), ("cc", 0.7), ("ddddd", 0.9)]


@pytest.fixture
def opened(tmp_path):
  """Opens texts/*.jsonl with filters, as the run tmp_path/run does."""
  folder = tmp_path / "texts"
  folder.mkdir()
  lines = [json.dumps({"text": t, "q": q}) + "\n" for t, q in LINES]
  (folder / "a.jsonl").write_text("".join(lines))

  def opened(cache_dir=None, **filters):
    data = DataConfig(
      text_files=f"{folder}/*.jsonl",
      vocabulary=None,
      validation_share=0.2,
      cache_dir=cache_dir and str(cache_dir),
      filters=FilterConfig(**filters),
    )
    (source,) = open_filtered(str(tmp_path / "run"), data)
    return source

  return opened


def texts(source) -> list[str]:
  return [document.text for _, document in source.documents()]


QUALITY = {"quality_field": "q", "min_quality": 0.5}


def test_what_filters_keep_comes_in_its_order_with_its_split_and_that_is_said(
  opened, capsys
):
  plain = dict((d.text, split) for split, d in opened().documents())
  source = opened(**QUALITY, max_document_bytes=4, remove_duplicates="exact")
  assert texts(source) == ["b", "cc"]
  assert all(plain[d.text] == split for split, d in source.documents())
  assert source.counts == {
    "documents_read": 5,
    "removed_low_quality": 1,
    "removed_too_short": 0,
    "removed_too_long": 1,
    "removed_contaminated": 0,
    "removed_exact_duplicates": 1,
    "removed_near_duplicates": 0,
    "removed_by_attributes": 0,
  }
  source.report_skipped()
  assert without_stamps(capsys.readouterr().err) == (
    "palm_mtf: filters of text_files: 5 documents read, 1 removed low quality, "
    "1 removed too long, 1 removed exact duplicates\n"
  )


def test_each_filter_changes_the_fingerprint(opened):
  settings = [{}, QUALITY, QUALITY | {"min_quality": 0.6}]
  settings += [{"min_document_bytes": 1}, {"max_document_bytes": 4}]
  settings += [{"remove_duplicates": "exact"}]
  assert len({opened(**each).fingerprint() for each in settings}) == 6
  assert opened(**QUALITY).fingerprint() == opened(**QUALITY).fingerprint()


def test_the_fingerprint_is_that_of_the_examples_wherever_they_lie(
  opened, tmp_path
):
  def fingerprint(name, text):
    (tmp_path / name).write_text(text)
    return opened(decontaminate_files=str(tmp_path / name)).fingerprint()

  # In any order, too.
  one = fingerprint("one.jsonl", '{"text": "a"}\n{"text": "b"}')
  assert fingerprint("b.jsonl", '{"text": "b"}\n{"text": "a"}') == one
  assert fingerprint("one.jsonl", '{"text": "a"}\n{"text": "c"}') != one
  assert opened().fingerprint() != one


def test_with_duplicates_the_fingerprint_depends_on_the_other_sources(opened):
  def prints(**filters):
    sources = [opened(), opened()]
    decisions = filtered_source._Decisions(sources, data_of(**filters), [])
    return [
      FilteredSource(source, number, decisions).fingerprint()
      for number, source in enumerate(sources)
    ]

  one, other = prints(min_document_bytes=1)
  assert one == other == opened(min_document_bytes=1).fingerprint()
  one, other = prints(remove_duplicates="exact")
  assert one != other  # the first source keeps the documents that both have


def test_decisions_are_made_once_and_read_from_cache_dir_or_the_run(
  opened, tmp_path, monkeypatch
):
  first = texts(opened(**QUALITY))
  cache = tmp_path / "cache"
  cache.mkdir()
  texts(opened(cache, min_document_bytes=2))
  assert len([*cache.glob("removed-*")]) == 1
  monkeypatch.setattr(filtered_source, "decide", None)
  assert texts(opened(**QUALITY)) == first
  assert texts(opened(cache, **QUALITY)) == first
  assert texts(opened(cache, min_document_bytes=2))
  with pytest.raises(TypeError):
    texts(opened(min_document_bytes=2))


def test_text_that_changes_while_it_is_read_is_an_error(opened, tmp_path):
  source = opened(**QUALITY)
  documents = source.documents()
  next(documents)
  with open(tmp_path / "texts" / "a.jsonl", "a") as file:
    file.write('{"text": "new", "q": 1}\n')
  with pytest.raises(UserError, match=r"^text_files: its documents changed "):
    texts(source)


def test_filters_that_keep_nothing_are_an_error_with_the_counts(opened):
  bounds = {"min_document_bytes": 2, "max_document_bytes": 2}
  source = opened(**bounds, **QUALITY | {"min_quality": 0.8})
  assert message_of(texts, source) == (
    "text_files: filters remove every document (5 documents read, 3 removed "
    "low quality, 1 removed too short, 1 removed too long); change them, or "
    "give other text."
  )


def test_a_mixture_keeps_a_text_in_the_first_of_its_tasks(tmp_path):
  steps = [REKEY, *TOKENIZE]
  add_examples("a", {"train": {"text": ["one", "two", "one"]}}, steps)
  splits = {"train": {"text": ["x", "two"]}, "validation": {"text": ["y", "x"]}}
  add_examples("b", splits, steps)
  seqio.MixtureRegistry.add("both", [("b", 1), ("a", 3)])
  data = dataclasses.replace(
    data_of(remove_duplicates="exact"), task="both", text_files=None
  )
  sources = open_filtered(str(tmp_path), data)
  assert [(x.name, x.rate) for x in sources] == [("a", 0.75), ("b", 0.25)]
  assert texts(sources[0]) == ["one", "two"]
  assert [*sources[1].documents()] == [
    ("validation", Document("y")),
    ("validation", Document("x")),
  ]
