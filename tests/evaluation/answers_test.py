# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Stored answers are reused if everything that they depend on is the same."""

import dataclasses

from palm_mtf import config as configs
from palm_mtf.cli import gin_files
from palm_mtf.config.macros import macros_of
from palm_mtf.evaluation.answers import (
  INDEPENDENT,
  AnswerJournal,
  select_settings,
)
from tests import strict_json

BY = {"checkpoint": "f00d", "SEED": 0}


def journal(folder, **changes):
  return AnswerJournal(str(folder / "eval" / "a.jsonl"), {**BY, **changes})


def test_answers_survive_whatever_ends_the_process(tmp_path):
  with journal(tmp_path) as first:
    first.add("score", 3, -0.1)
    first.add("prediction", 0, ["a\nb", "\u00e9"])
    lines = (tmp_path / "eval" / "a.jsonl").read_bytes()  # file is still open
  (tmp_path / "eval" / "a.jsonl").write_bytes(lines + b'["score", 4, -1')
  with journal(tmp_path) as again:
    assert again.known("score") == {3: -0.1}
    assert again.known("prediction") == {0: ["a\nb", "\u00e9"]}
    again.add("score", 4, -2.5)
  with journal(tmp_path) as last:
    assert last.known("score") == {3: -0.1, 4: -2.5}


def test_answers_of_another_checkpoint_or_setting_are_forgotten(tmp_path):
  with journal(tmp_path) as first:
    first.add("score", 3, -0.1)
  with journal(tmp_path, SEED=1) as other:
    assert other.known("score") == {}
  with journal(tmp_path) as first:
    assert first.known("score") == {}


def test_a_score_that_is_not_finite_is_json_and_asked_again(tmp_path):
  with journal(tmp_path) as first:
    first.add("score", 0, float("-inf"))
    first.add("score", 1, -1.5)
    assert first.known("score") == {0: float("-inf"), 1: -1.5}
  strict_json.load_lines(tmp_path / "eval" / "a.jsonl")
  with journal(tmp_path) as again:
    assert again.known("score") == {1: -1.5}


INDEPENDENT_MACROS = " ".join(INDEPENDENT.values()).split()


def load(*settings):
  flags = ["MODEL_DIR='run'", "ACTIVATION_DTYPE='float32'", *settings]
  files = ["recipes/quickstart.gin"]
  return gin_files.load("evaluate", files, flags).build()[1]


def add_field(part):
  """Returns a copy of a part that has one field more."""
  cls = type(part)
  extended = dataclasses.make_dataclass(
    cls.__name__,
    [("added_later", int, dataclasses.field(default=7))],
    bases=(cls,),
    frozen=True,
    kw_only=True,
  )
  fields = dataclasses.fields(part)
  return extended(**{x.name: getattr(part, x.name) for x in fields})


def extend_copies(part):
  """Yields copies of a configuration; each has another part extended."""
  yield type(part).__name__, add_field(part)
  for field in dataclasses.fields(part):
    value = getattr(part, field.name)
    if dataclasses.is_dataclass(value):
      for name, copy in extend_copies(value):
        yield name, dataclasses.replace(part, **{field.name: copy})


def test_a_new_field_of_any_part_counts_by_default():
  copies = dict(extend_copies(load()))
  # Every class of settings that an evaluation has is extended.
  others = {"ConfigOfSweep", "CorpusConfig", "PlanConfig", "SweepConfig"}
  others |= {"CacheConfig", "StepConfig", "PodStepConfig"}
  others |= {"OptimizerConfig", "OPTIMIZERS"}
  others |= {x.__name__ for x in configs.OPTIMIZERS.values()}
  others -= {type(load().optimizer).__name__}
  assert copies.keys() == set(configs.__all__) - others
  for name, config in copies.items():
    assert select_settings(config)["ADDED_LATER"] == 7, name


def test_each_macro_that_is_left_out_exists_and_has_one_reason():
  assert len(INDEPENDENT_MACROS) == len(set(INDEPENDENT_MACROS))
  assert set(INDEPENDENT_MACROS) <= macros_of(configs.Config).keys()
