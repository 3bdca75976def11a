# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf evaluate` with tasks, and training that evaluates on its way."""

import functools
import json
import shutil

import numpy as np
import pytest
import seqio

from palm_mtf.evaluation import answers
from tests import runs
from tests.seqio_testing import add_examples, registries_restored

EXAMPLES = {
  "inputs": ["one two", "three four", "seven"],
  "targets": [" three", " five", " eight"],
}
TRAIN = {"TRAIN_STEPS": 8, "CHECKPOINT_STEPS": 8, "PROMPTS": []}


def mean_score(targets, scores):
  del targets
  return {"mean_score": np.mean(scores)}


def exact(targets, predictions):
  same = [t == p for t, p in zip(targets, predictions, strict=True)]
  return {"exact": np.mean(same)}


@pytest.fixture(scope="module", autouse=True)
def registered():
  with registries_restored():
    for name, metrics in (
      ("counting", [mean_score, exact]),
      ("scored", [mean_score]),
      ("bare", []),
    ):
      add_examples(
        name,
        {"validation": EXAMPLES},
        [seqio.preprocessors.tokenize],
        features=("inputs", "targets"),
        metric_fns=metrics,
      )
    yield


@pytest.fixture(scope="module")
def finished(corpus, registered, tmp_path_factory):
  """A run that evaluated after steps 4 and 8."""
  model_dir = tmp_path_factory.mktemp("evaluate") / "run"
  macros = {"EVAL_TASKS": ["counting"], "TASK_EVAL_STEPS": 4}
  assert runs.run("train", corpus, model_dir, **TRAIN, **macros) == 0
  return model_dir


@pytest.fixture
def evaluate(finished, palm_mtf):
  """Runs the command; returns its exit code, output and errors."""

  def run(*flags, tasks=("counting",)):
    names = f"--gin.EVAL_TASKS={list(tasks)!r}"
    settings = ["--model_dir", finished, runs.IN_FLOAT32, names]
    return palm_mtf("evaluate", *settings, *flags)

  return run


def in_metrics(model_dir):
  names = ("counting/exact", "counting/mean_score")  # SeqIO's order
  return {
    line["step"]: [line[name] for name in names]
    for line in runs.read_metrics(model_dir)
    if names[0] in line
  }


def test_training_evaluates_on_its_way_what_evaluate_finds(finished, evaluate):
  shutil.rmtree(finished / "eval")  # or else it would read the answers there
  code, out, err = evaluate("--gin.EVAL_CHECKPOINTS=[4, 8]", "--json")
  assert code == 0, err
  found = [json.loads(line) for line in out.splitlines()]
  metrics = {x["step"]: [*x["metrics"].values()] for x in found}
  assert metrics == in_metrics(finished)
  assert set(metrics) == {4, 8}
  assert metrics[4] != metrics[8]


def test_evaluating_changes_no_bit_of_a_run(finished, corpus, tmp_path):
  assert runs.run("train", corpus, tmp_path / "plain", **TRAIN) == 0
  runs.assert_same_tensors(finished, tmp_path / "plain", 8)


def test_the_table_has_a_line_a_metric_and_every_checkpoint_that_there_is(
  evaluate, finished
):
  code, out, err = evaluate('--gin.EVAL_CHECKPOINTS="every"')
  assert code == 0, err
  head, *lines = [line.split() for line in out.splitlines()]
  assert head == ["step", "task", "split", "examples", "metric", "value"]
  assert [(line[0], line[4]) for line in lines] == [
    (step, metric) for step in ("4", "8") for metric in ("exact", "mean_score")
  ]
  value = in_metrics(finished)[8][1]
  assert lines[3][1:] == (
    f"counting validation 3 mean_score {value:.4f}".split()
  )


def test_fewer_examples_are_the_first_ones(evaluate, finished):
  code, _, err = evaluate("--gin.EVAL_EXAMPLES=2")
  assert code == 0, err
  folder = finished / "eval" / "step_00000008"
  lines = (folder / "counting-validation.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  assert [x["inputs"] for x in records] == EXAMPLES["inputs"][:2]
  assert {*records[0]} == {
    *("inputs", "targets", "expected", "output", "prediction", "score")
  }


def test_a_checkpoint_that_is_removed_while_it_is_read_is_left_out(
  evaluate, finished, tmp_path, monkeypatch
):
  copy = tmp_path / "run"
  shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("eval"))
  real = answers.LoadedDecoder

  def after_training_removed_it(checkpoint, *rest):
    if checkpoint.manifest.step == 4:
      shutil.rmtree(checkpoint.path)
    return real(checkpoint, *rest)

  monkeypatch.setattr(answers, "LoadedDecoder", after_training_removed_it)
  code, out, err = evaluate(
    f"--gin.MODEL_DIR={str(copy)!r}", '--gin.EVAL_CHECKPOINTS="every"', "--json"
  )
  assert code == 0, err
  assert [json.loads(line)["step"] for line in out.splitlines()] == [8]
  assert "step_00000004 was removed while it was read; it is left out" in err


@pytest.mark.parametrize(
  ("flags", "tasks", "message"),
  [
    ([], ["countin"], 'is registered (did you mean "counting"?)'),
    ([], ["bare"], "EVAL_TASKS = 'bare': bare has no metric functions"),
    (
      ['--gin.EVAL_SPLIT="test"'],
      ["counting"],
      "counting has no split 'test', only 'validation'; set EVAL_SPLIT",
    ),
    (["--gin.EVAL_CHECKPOINTS=[5]"], ["counting"], "it has: 4, 8."),
    (["--gin.SAMPLE_TOKENS=32"], ["counting"], "leaves no room for a prompt"),
    (["--gin.D_MODEL=64"], ["counting"], "it is of another model; use the"),
    (
      ["--gin.NUM_SHOTS=3"],
      ["counting"],
      "NUM_SHOTS = 3, but split 'validation' has only 2 other examples; give",
    ),
    (
      ["--gin.EXEMPLAR_FILES={'counting': '/none.jsonl'}"],
      ["counting"],
      "EXEMPLAR_FILES = '/none.jsonl': No such file or directory; give a text",
    ),
    (
      ["--gin.EXEMPLAR_FILES={'countin': '/none.jsonl'}"],
      ["counting"],
      "EXEMPLAR_FILES = 'countin': no such SeqIO task or mixture is registered",
    ),
    (
      ["--gin.PROMPT_HEADERS={'counting': 'About {group}:'}"],
      ["counting"],
      "PROMPT_HEADERS: 'About {group}:' of counting, whose examples have no",
    ),
    (
      ["--gin.ANSWER_PATTERNS={'counting': 'is .*'}"],
      ["counting"],
      "ANSWER_PATTERNS: 'is .*' of counting: has 0 groups; put the answer",
    ),
    (
      ["--gin.ANSWER_PATTERNS={'scored': 'is (.*)'}"],
      ["scored"],
      "ANSWER_PATTERNS: scored compares likelihoods and has no output to",
    ),
    (
      ["--gin.CATEGORY_GROUPS={'counting': {'law': ['art']}}"],
      ["counting"],
      "CATEGORY_GROUPS: 'art' in 'law' is no category of counting; mend or",
    ),
  ],
)
def test_bad_input_is_one_line(evaluate, flags, tasks, message):
  code, out, err = evaluate(*flags, tasks=tasks)
  assert (code, out) == (2, "")
  (line,) = err.splitlines()
  assert message in line


def test_a_loss_on_text_that_was_trained_on_warns(evaluate):
  for_loss = functools.partial(evaluate, "--gin.TASK_EVAL_STEPS=None", tasks=())
  code, _, err = for_loss()
  assert (code, err) == (0, "")
  code, _, err = for_loss("--gin.VALIDATION_SHARE=0.5")
  assert code == 0
  assert "loss is of text that the model was trained on, too" in err


def test_a_task_that_is_unknown_ends_training_before_it_begins(
  corpus, tmp_path, capsys
):
  macros = {"EVAL_TASKS": ["countin"], "TASK_EVAL_STEPS": 4}
  assert runs.run("train", corpus, tmp_path / "run", **TRAIN, **macros) == 2
  assert 'did you mean "counting"?' in capsys.readouterr().err
  assert not (tmp_path / "run" / "checkpoints").exists()
