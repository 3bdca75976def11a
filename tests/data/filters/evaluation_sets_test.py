# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json

import pytest

seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")

from palm_mtf.config import DataConfig, FilterConfig  # noqa: E402
from palm_mtf.data.filters.evaluation_sets import EvaluationSets  # noqa: E402
from tests.log_lines import without_stamps  # noqa: E402
from tests.seqio_testing import (  # noqa: E402
  add_examples,
  registries_restored,
)


@pytest.fixture(autouse=True)
def restored():
  with registries_restored():
    yield


LONG = "one two three four five six seven eight"


def sets(**filters) -> EvaluationSets:
  return EvaluationSets(
    DataConfig(
      text_files="any",
      text_field="body",
      vocabulary=None,
      validation_share=0.2,
      filters=FilterConfig(**filters),
    )
  )


def add(name, *targets) -> None:
  examples = {"inputs": [""] * len(targets), "targets": [*targets]}
  add_examples(
    name,
    {"validation": examples},
    [seqio.preprocessors.tokenize],
    features=("inputs", "targets"),
  )


def test_examples_come_of_tasks_and_files(tmp_path, capsys):
  add("first", LONG, "short")
  path = tmp_path / "a.jsonl"
  path.write_text(json.dumps({"body": f"{LONG} nine"}) + "\n")
  both = sets(decontaminate_tasks=["first"], decontaminate_files=str(path))
  assert both
  found = both.read()
  assert (found.num_examples, len(found.table)) == (3, 2)
  assert without_stamps(capsys.readouterr().err) == (
    "palm_mtf: documents that contain one of 3 evaluation examples are removed;"
    " 1 of fewer than 8 words are not looked for\n"
  )


def test_the_fingerprint_is_of_the_examples_in_any_order():
  add("one", "a", "b")
  add("other", "b", "a", "a")
  add("more", "a", "b", "c")
  one, other, more = (
    sets(decontaminate_tasks=[name]).fingerprint
    for name in ("one", "other", "more")
  )
  assert one == other != more


def test_nothing_is_read_by_default():
  assert not sets()
  assert not sets(min_document_bytes=1)
