# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Assertions give the severities of docs/evaluation.md, and end no run."""

import dataclasses
import json
import math
import sys

import pytest

from palm_mtf.assertions import assertions
from palm_mtf.assertions.assertions import Assertions, Example
from palm_mtf.cli.gin_files import load
from palm_mtf.config import DataConfig, TaskEvalConfig
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.errors import UserError
from tests.generation.serving.live_server import small_config
from tests.refusals import message_of

OWN = ["finite", "json", "language", "length", "repetition"]

GUARDS = """
import os, sys, time

def polite(inputs, outputs):
  print("to stdout")
  os.write(1, b"to descriptor 1")
  return 0.5 * ("please" not in inputs + outputs)

def raises(inputs, outputs):
  raise ValueError("bad day")

def exits(inputs, outputs):
  sys.exit(3)

def nan(inputs, outputs):
  return float("nan")

def hangs(inputs, outputs):
  time.sleep(1000)

def forks(inputs, outputs):
  os.fork()  # the child has the same pipes
  time.sleep(1000)

def kills(inputs, outputs):
  os._exit(4)

def three(a, b, c):
  return 0
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
  """Makes Assertions of a run in tmp_path, whose functions are in guards.py."""
  (tmp_path / "guards.py").write_text(GUARDS)
  monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

  def make(names, **settings):
    config = small_config()
    evaluation = TaskEvalConfig(assertions=names, **settings)
    config = dataclasses.replace(config, evaluation=evaluation)
    return Assertions(str(tmp_path), config, "test")

  return make


def read_flagged(folder):
  lines = (folder / "flagged.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


# 40 of these characters hold 9 runs of 32 characters, which begin with "a" or
# "b" in turn: 2 differ.
@pytest.mark.parametrize(
  ("example", "expected"),
  [
    (Example("", "{}", [-1.0, None]), {}),
    (Example("", '{"a": [1, 2.5]} '), {}),
    (Example("", "{} x"), {"json": 1}),
    (Example("", "[" * 100), {"json": 1, "repetition": 1 - 1 / 69}),
    (Example("", '{"a": NaN}'), {"json": 1}),
    (Example("", "1", [math.nan, -math.inf, -1.0, -2.0]), {"finite": 0.5}),
    (Example("", ""), {"json": 1, "length": 1}),
    (
      Example("", '"' + "x" * 198 + '"'),
      {"length": 0.5, "repetition": 1 - 3 / 169},
    ),
    (Example("", "ab" * 20), {"json": 1, "repetition": 1 - 2 / 9}),
    (Example("", "ab" * 15), {"json": 1}),  # shorter than a run
    (Example("abc", '"\u043f\u0440\u0438 ab"'), {"language": 3 / 5}),
    (Example("\u043f abc", '"\u043f\u0440\u0438 ab"'), {}),
    (Example("1 + 1 =", '"\u043f"'), {}),  # inputs without letters
    (Example("", "\0\x1b[31m\ud800"), {"json": 1}),
  ],
)
def test_severities_are_those_of_the_definitions(make, example, expected):
  found = make(OWN, output_length=[1, 100]).check([example], 3)
  assert {x: y for x, (y,) in found.items() if y} == pytest.approx(expected)


def test_flagged_examples_are_a_source_of_training_text(make, tmp_path):
  """Kang et al. (2020), section 4: flagged data is collected to train on."""
  checked = make(["json"])
  texts = ["one \u00e9\n", "[]", "two"]
  examples = [Example(f"{i}:", text) for i, text in enumerate(texts)]
  checks: list[int] = []  # of which a run's watchdog hears
  checked.check(examples, 7, lambda: checks.append(len(checks)))
  assert len(checks) == 3
  flagged = read_flagged(tmp_path)
  assert [x["outputs"] for x in flagged] == ["one \u00e9\n", "two"]
  assert {(x["origin"], x["step"], x["severity"]) for x in flagged} == {
    ("test", 7, 1.0)
  }
  files = str(tmp_path / "flagged.jsonl")
  data = DataConfig(text_files=files, vocabulary=None, validation_share=0.5)
  (source,) = open_sources(data)
  documents = [document.text for _, document in source.documents()]
  assert documents == ["0:one \u00e9\n", "2:two"]


def test_an_assertion_that_fails_is_logged_once_and_counted(
  make, tmp_path, monkeypatch, caplog, capfd
):
  monkeypatch.setattr(assertions, "_CALL_SECS", 0.5)
  faults = {
    "raises": "ValueError: bad day (",
    "exits": "SystemExit: 3 (",
    "nan": "returns nan, no number of at least 0",
    "hangs": "it takes more than 0.5 seconds",
    "forks": "it takes more than 0.5 seconds",
    "kills": "its process ended with code 4",
  }
  checked = make(["guards.polite", *(f"guards.{x}" for x in faults)])
  for text in ("please", "now", "now"):
    found = checked.check([Example("", text)], 1)
  assert found.pop("guards.polite") == [0.5]
  assert {x for y in found.values() for x in y} == {0.0}
  assert checked.results["guards.polite", "flagged"] == 2
  assert len(caplog.messages) == len(faults)
  for message, (name, fault) in zip(
    caplog.messages, faults.items(), strict=True
  ):
    assert message.startswith(f'ASSERTIONS: "guards.{name}": {fault}')
    assert checked.results[f"guards.{name}", "error"] == 3
  assert "to descriptor 1" not in capfd.readouterr().out
  assert [*read_flagged(tmp_path)[0]["assertions"]] == ["guards.polite"]


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("jason", '"jason" (did you mean "json"?): give one of finite, json, l'),
    (
      "guards.polit",
      "has no function 'polit' (did you mean \"polite\"?); give",
    ),
    ("guards.sys", "guards has no function 'sys'; give a function of inputs"),
    ("guards.three", "missing a required argument: 'c'; give a function of in"),
    ("guard.polite", "ModuleNotFoundError: No module named 'guard'; give a"),
    (
      "contamination",
      "has no examples of at least 8 words; give some in DECON",
    ),
  ],
)
def test_a_wrong_name_or_signature_is_one_line_at_the_start(
  make, name, message
):
  said = message_of(make, [name])
  assert said.startswith(f'ASSERTIONS: "{name}"')
  assert message in said


@pytest.mark.parametrize(
  "settings",
  [
    {"output_length": [2, 1]},
    {"output_length": 5},
    {"output_length": [-1, 1]},
    {"refuse_severity": {"repetition": 1.0}},
    {"refuse_severity": {"json": math.nan}},
    {"refuse_severity": ["json"]},
    {"assertions": "json"},
  ],
)
def test_settings_without_a_meaning_are_refused(settings):
  with pytest.raises(UserError):
    TaskEvalConfig(**{"assertions": ["json"]} | settings)


def test_texts_with_an_evaluation_example_are_contaminated(tmp_path):
  words = "a b c d e f g h i j"
  path = tmp_path / "set.jsonl"
  path.write_text(json.dumps({"text": words}))
  config = small_config()
  filters = dataclasses.replace(
    config.data.filters, decontaminate_files=str(path)
  )
  config = dataclasses.replace(
    config,
    data=dataclasses.replace(config.data, filters=filters),
    evaluation=TaskEvalConfig(assertions=["contamination"]),
  )
  checked = Assertions(str(tmp_path), config, "test")
  texts = [f"so {words} so", words[4:], words]
  found = checked.check([Example(words, text) for text in texts], 1)
  assert found == {"contamination": [1.0, 0.0, 1.0]}
  path.write_text(json.dumps({"text": "a b c"}))  # is not looked for
  said = message_of(Assertions, str(tmp_path), config, "test")
  assert "has no examples of at least 8 words" in said


def test_the_file_of_flagged_examples_has_a_limit_and_may_vanish(
  make, tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(assertions, "_MOST_BYTES", 1000)
  checked, path = make(["json"]), tmp_path / "flagged.jsonl"
  for _ in range(2):
    checked.check([Example("in", "out")] * 100, 1)
    assert 800 < path.stat().st_size <= 1000
    assert len(read_flagged(tmp_path)) >= 4
    path.unlink()
  path.mkdir()  # cannot be written
  checked.check([Example("in", "out")], 1)
  (message,) = caplog.messages
  assert message.endswith(
    "would exceed 1,000 bytes; flagged examples are only counted"
  )
  assert checked.results["json", "flagged"] == 201


@pytest.mark.parametrize(
  "line",
  ['ASSERTIONS = ["json", "os.system"]', 'X = ["os.system"]\nASSERTIONS = %X'],
)
def test_a_strangers_config_runs_no_function(tmp_path, line):
  (tmp_path / "config.gin").write_text(f"{line}\n")
  with pytest.raises(UserError, match="runs or permits code from the author"):
    load("serve", model_dir=str(tmp_path))
