# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of tasks follow from the oracle's likelihoods and texts."""

import collections
import dataclasses
import functools
import json
import sys

import numpy as np
import pytest

seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")

from palm_mtf._tf import tf  # noqa: E402
from palm_mtf.checkpoints.manifest import Checkpoint  # noqa: E402
from palm_mtf.checkpoints.variables import WeightsCopier  # noqa: E402
from palm_mtf.config import (  # noqa: E402
  Config,
  DataConfig,
  DecodeConfig,
  FewShotConfig,
  RunConfig,
  TaskEvalConfig,
)
from palm_mtf.data.vocabulary.training import train_vocabulary  # noqa: E402
from palm_mtf.data.vocabulary.vocabulary import Vocabulary  # noqa: E402
from palm_mtf.evaluation.answers import INDEPENDENT  # noqa: E402
from palm_mtf.evaluation.evaluator import TaskEvaluation  # noqa: E402
from palm_mtf.evaluation.seqio_tasks import open_eval_tasks  # noqa: E402
from palm_mtf.programs.forward_program import build_forward_program  # noqa: E402
from palm_mtf.runtime.client.client import Client  # noqa: E402
from tests import checkpoint_files, oracle  # noqa: E402
from tests.mtf_testing import (  # noqa: E402
  PALM_OPTIMIZER,
  SINGLE,
  load_parameters,
  small_config,
)
from tests.seqio_testing import add_examples, registries_restored  # noqa: E402

SAMPLE_TOKENS = 6
DATA = DataConfig(text_files="none.txt", vocabulary=None, validation_share=0.1)
RUN = RunConfig(
  train_steps=8,
  global_batch_size=1,
  seed=0,
  log_steps=1,
  eval_steps=1,
  eval_batches=1,
  checkpoint_steps=1,
  keep_checkpoints=1,
  chip="a100",
  prompts=[],
  sample_tokens=SAMPLE_TOKENS,
)
GREEDY = DecodeConfig(temperature=0.0)
# Eight questions with four options each; the place of the right one varies.
OPTIONS = [
  (number, question, option, place == number % 4)
  for number, question in enumerate(
    ["abc", "b", "cabcab", "aab", "bbc", "c", "ab", "cc"]
  )
  for place, option in enumerate(["ab", "bc", "cab", "bca"])
]
QUESTIONS = ["abc", "b", "c" * 44, "cabcab"]


def accuracy(targets, scores):
  """Returns the share of questions whose right option has the highest score."""
  options = collections.defaultdict(list)
  for (number, is_right), score in zip(targets, scores, strict=True):
    options[number].append((score, is_right))
  return {"accuracy": np.mean([max(each)[1] for each in options.values()])}


def begins_with_a(targets, predictions):
  del targets
  return {"begins_with_a": np.mean([x[:1] == "a" for x in predictions])}


def number_and_right(text, example, is_target):
  del text, is_target
  return int(example["number"]), bool(example["is_right"])


@pytest.fixture(scope="module", autouse=True)
def tasks():
  def add(name, metric, columns, **changes):
    add_examples(
      name,
      {"validation": columns},
      [seqio.preprocessors.tokenize],
      features=("inputs", "targets"),
      metric_fns=[metric],
      **changes,
    )

  with registries_restored():
    names = ("number", "inputs", "targets", "is_right")
    columns = zip(names, map(list, zip(*OPTIONS, strict=True)), strict=True)
    columns = dict(columns)
    add("options", accuracy, columns, postprocess_fn=number_and_right)
    columns = {**columns, "within_document": [True] * len(OPTIONS)}
    add("cut_out", accuracy, columns, postprocess_fn=number_and_right)
    add("open", begins_with_a, {"inputs": QUESTIONS, "targets": ["a"] * 4})
    yield


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("vocabulary") / "vocabulary.model")
  train_vocabulary(["abc\ncab\nbca\n" * 20], 275, path=path)
  return Vocabulary(path)


@pytest.fixture(scope="module")
def config(vocabulary):
  return small_config(sequence_length=48, vocab_size=vocabulary.size)


@pytest.fixture(scope="module")
def params(config):
  return oracle.random_parameters(config, seed=5)


@pytest.fixture
def checkpoint(config, params, tmp_path):
  folder = tmp_path / "checkpoint"
  folder.mkdir()
  checkpoint = Checkpoint(
    str(folder), checkpoint_files.manifest(200), files={}, blake2b="f00d"
  )
  with tf.Graph().as_default(), tf.Session() as session:
    program = build_forward_program(config, SINGLE, batch_size=1)
    load_parameters(session, program.slices, params)
    WeightsCopier(Client(session), [program.slices]).copy()(checkpoint.prefix)
  return checkpoint


@pytest.fixture
def evaluate(config, vocabulary, checkpoint, tmp_path):
  """Evaluates the checkpoint; returns {name of a task: outcome}."""

  def run(
    *names,
    decode=GREEDY,
    answered=lambda: None,
    model=config,
    prepared=lambda settings: settings,
    **settings,
  ):
    asked = TaskEvalConfig(eval_tasks=names, **settings)
    whole = Config(
      model=model,
      mesh_layout=SINGLE,
      optimizer=PALM_OPTIMIZER,
      data=DATA,
      run=RUN,
      decode=decode,
      evaluation=asked,
    )
    tasks = open_eval_tasks(asked, vocabulary, config.sequence_length)
    evaluation = TaskEvaluation(
      str(tmp_path), prepared(whole), vocabulary, tasks
    )
    return {x.task: x for x in evaluation.evaluate(checkpoint, answered)}

  return run


def records(tmp_path, name):
  path = tmp_path / "eval" / "step_00000200" / name
  return [json.loads(line) for line in path.read_text().splitlines()]


def journal(folder, name):
  path = folder / f"{name}-validation.answers.jsonl"
  return path.read_text().splitlines()


def greedy(config, params, vocabulary, prompt):
  """Returns the likeliest continuation by the oracle, as text."""
  tokens = vocabulary.encode(prompt)[-(48 - SAMPLE_TOKENS) :]
  added = []
  while len(added) < SAMPLE_TOKENS and vocabulary.eod_id not in added:
    # In training, [eod] precedes a document.
    inputs = np.array([[vocabulary.eod_id, *tokens, *added]])
    added.append(int(oracle.forward(config, params, inputs)[0, -1].argmax()))
  return vocabulary.decode(added)


def test_accuracy_over_options_is_that_of_the_oracles_likelihoods(
  evaluate, config, params, vocabulary, tmp_path
):
  outcome = evaluate("options")["options"]
  likelihoods = [
    oracle.log_likelihood(
      config,
      params,
      vocabulary.encode(question),
      vocabulary.encode(option),
      vocabulary.eod_id,
    )
    for _, question, option, _ in OPTIONS
  ]
  best = np.reshape(likelihoods, [-1, 4]).argmax(1)
  assert outcome.metrics == {"accuracy": np.mean(best == np.arange(8) % 4)}
  assert 0 < outcome.metrics["accuracy"] < 1, "the task tells nothing"
  kept = records(tmp_path, "options-validation.jsonl")
  np.testing.assert_allclose([x["score"] for x in kept], likelihoods, rtol=1e-5)
  assert [x["targets"] for x in kept] == [x[2] for x in OPTIONS]


def test_inputs_that_are_cut_out_of_a_document_follow_no_eod(
  evaluate, config, params, vocabulary, tmp_path
):
  evaluate("cut_out")
  kept = records(tmp_path, "cut_out-validation.jsonl")
  for (_, question, option, _), found in zip(OPTIONS, kept, strict=True):
    texts = map(vocabulary.encode, (question, option))
    expected = oracle.log_likelihood(config, params, *texts, start=0)
    assert found["score"] == pytest.approx(expected, rel=1e-5)


def test_predictions_are_the_oracles_likeliest_and_long_inputs_lose_the_front(
  evaluate, config, params, vocabulary, tmp_path, capsys
):
  outcome = evaluate("open")["open"]
  expected = [greedy(config, params, vocabulary, x) for x in QUESTIONS]
  kept = records(tmp_path, "open-validation.jsonl")
  assert [x["prediction"] for x in kept] == expected
  assert outcome.num_cut == 1
  assert (
    "open: the inputs of 1 of 4 examples were too long and lost their "
    "beginning" in capsys.readouterr().err
  )
  share = np.mean([x[:1] == "a" for x in expected])
  assert outcome.metrics == {"begins_with_a": share}


def test_predictions_end_before_a_stop_string(evaluate, tmp_path):
  evaluate("open")
  whole = [x["output"] for x in records(tmp_path, "open-validation.jsonl")]
  stop = next(text[-1] for text in whole if len(text) > 1)
  evaluate("open", decode=DecodeConfig(temperature=0.0, stop_strings=[stop]))
  cut = [x["output"] for x in records(tmp_path, "open-validation.jsonl")]
  assert cut == [text.partition(stop)[0] for text in whole]
  assert cut != whole


def test_what_was_answered_is_not_asked_again(evaluate, tmp_path):
  """Also, `answered` is called for each answer, so that a watchdog sees it."""
  told = []
  answered = functools.partial(told.append, 1)
  first = evaluate("options", "open", answered=answered)
  assert len(told) == len(OPTIONS) + len(QUESTIONS)
  folder = tmp_path / "eval" / "step_00000200"
  answers = folder / "open-validation.answers.jsonl"
  whole = answers.read_text()
  result = json.loads((folder / "open-validation.json").read_text())
  assert result["metrics"] == first["open"].metrics
  # After an interruption, the file has half of the answers, and half a line.
  lines = whole.splitlines(keepends=True)
  answers.write_text("".join(lines[:3]) + lines[3][:9])
  told.clear()
  assert evaluate("options", "open", answered=answered) == first
  assert len(told) == 2
  again = answers.read_text()
  assert again.startswith("".join(lines[:3]))
  assert sorted(again.splitlines()) == sorted(whole.splitlines())
  # All answers are stored, so the model is not needed.
  for path in (tmp_path / "checkpoint").iterdir():
    path.unlink()
  told.clear()
  assert evaluate("options", "open", answered=answered) == first
  assert not told


def test_answers_of_another_model_function_are_asked_again(evaluate, config):
  told = []
  ask = functools.partial(
    evaluate,
    "options",
    eval_examples=4,
    answered=functools.partial(told.append, 1),
  )
  ask()
  other = dataclasses.replace(config, logits_dtype="activation")
  ask(model=other)
  assert len(told) == 2 * 4
  ask(model=other)
  assert len(told) == 2 * 4


def guard(part, names):
  """Returns a copy of settings and parts that raises if `names` are read."""
  # The code of dataclasses and of checks may read all fields, because it does
  # not compute answers.
  copying = {"<string>", dataclasses.__file__}
  checking = {"__post_init__", "values_of"}

  class Guarded(type(part)):
    def __getattribute__(self, name):
      if name.upper() in names:
        caller = sys._getframe(1).f_code
        allowed = caller.co_filename in copying or caller.co_name in checking
        assert allowed, f"{caller.co_qualname} reads {name.upper()}"
      return super().__getattribute__(name)

  copy = object.__new__(Guarded)
  for name, value in vars(part).items():
    is_part = dataclasses.is_dataclass(value)
    vars(copy)[name] = guard(value, names) if is_part else value
  return copy


def test_no_answer_reads_a_setting_that_answers_are_kept_without(evaluate):
  names = set(" ".join(INDEPENDENT.values()).split())
  names.remove("CLEAN_SUBSET")  # the evaluator reads it, but only for metrics
  with pytest.raises(AssertionError, match="reads TRAIN_STEPS"):
    _ = guard(RUN, names).train_steps
  found = evaluate(
    "options", "open", prepared=lambda settings: guard(settings, names)
  )
  assert found.keys() == {"options", "open"}


@pytest.mark.slow
def test_another_prompt_needs_new_answers_another_pattern_does_not(
  evaluate, tmp_path
):
  folder = tmp_path / "eval" / "step_00000200"
  cot = tmp_path / "cot.txt"
  journals = []
  for text, header in (("abc\n\n", "a"), ("abc\n\n", "b"), ("ab\n\n", "b")):
    cot.write_text(text)
    few_shot = FewShotConfig(
      exemplar_files={"open": str(cot)}, prompt_headers={"open": header}
    )
    evaluate("open", few_shot=few_shot)
    journals.append(journal(folder, "open_custom"))
  causes = [lines[0] for lines in journals]
  assert len(set(causes)) == 3
  for path in (tmp_path / "checkpoint").iterdir():
    path.unlink()
  # Without the model's files, only stored answers can be used.
  patterns = {"open": "^.(.*)"}
  evaluate("open", few_shot=few_shot, answer_patterns=patterns)
  assert journal(folder, "open_custom") == journals[-1]
  for record in records(tmp_path, "open_custom-validation.jsonl"):
    assert record["prediction"] == record["output"].partition("\n")[0][1:]


def test_tensorboard_has_the_metrics_once(evaluate, tmp_path):
  outcome = evaluate("open")["open"]
  evaluate("open")
  found = [
    (event.step, value.tag, value.simple_value)
    for path in (tmp_path / "eval").glob("events*")
    for event in tf.train.summary_iterator(str(path))
    for value in event.summary.value
  ]
  value = pytest.approx(outcome.metrics["begins_with_a"])
  assert found == [(200, "open/begins_with_a", value)]
