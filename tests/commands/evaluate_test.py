# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf evaluate` with tasks, and training that evaluates on its way."""

import itertools
import json
import shutil
import time
import types

import numpy as np
import pytest

from palm_mtf.commands.evaluate import find_checkpoints
from palm_mtf.config import TaskEvalConfig
from palm_mtf.data.sources.document import Document
from palm_mtf.evaluation import answers
from tests import runs, strict_json
from tests.checkpoint_files import SHAPES, write
from tests.refusals import message_of

EXAMPLES = {
  "inputs": ["one two", "three four", "seven"],
  "targets": [" three", " five", " eight"],
}
TRAIN = {"TRAIN_STEPS": 8, "CHECKPOINT_STEPS": 8, "PROMPTS": []}


def not_finite(targets, scores):
  del targets, scores
  infinite = float("-inf")
  found = {"nan": np.float32("nan"), "inf": infinite, "inf_clean": infinite}
  return found | {"none": None}


def any_object(output, **unused):
  return {("a", 1): np.array([np.inf, 0.5]), "x": {output: float("nan")}}


@pytest.fixture(scope="module", autouse=True)
def registered():
  from tests.seqio_testing import (
    TOKENIZE,
    add_examples,
    exact,
    mean_score,
    registries_restored,
  )

  with registries_restored():
    for name, metrics in (
      ("counting", [mean_score, exact]),
      ("scored", [mean_score]),
      ("not_finite", [not_finite]),
    ):
      add_examples(
        name,
        {"validation": EXAMPLES},
        [TOKENIZE],
        features=("inputs", "targets"),
        metric_fns=metrics,
        postprocess_fn=any_object if name == "not_finite" else None,
      )
    yield


@pytest.fixture(scope="module")
def evaluated(corpus, registered, tmp_path_factory):
  """A run that evaluated after steps 4 and 8."""
  model_dir = tmp_path_factory.mktemp("evaluate") / "run"
  macros = {"EVAL_TASKS": ["counting"], "TASK_EVAL_STEPS": 4}
  assert runs.run("train", corpus, model_dir, **TRAIN, **macros) == 0
  return model_dir


@pytest.fixture
def evaluate(evaluated, palm_mtf):
  """Runs the command; returns its exit code, output and errors."""

  def run(*flags, tasks=("counting",)):
    names = f"--gin.EVAL_TASKS={list(tasks)!r}"
    settings = ["--model_dir", evaluated, names]
    return palm_mtf("evaluate", *settings, *flags)

  return run


def in_metrics(model_dir):
  names = ("counting/exact", "counting/mean_score")  # SeqIO's order
  return {
    line["step"]: [line[name] for name in names]
    for line in runs.read_metrics(model_dir)
    if names[0] in line
  }


@pytest.mark.slow
def test_training_evaluates_on_its_way_what_evaluate_finds(evaluated, evaluate):
  shutil.rmtree(evaluated / "eval")  # or else it would read the answers there
  code, out, err = evaluate("--gin.EVAL_CHECKPOINTS=[4, 8]", "--json")
  assert code == 0, err
  found = [json.loads(line) for line in out.splitlines()]
  metrics = {x["step"]: [*x["metrics"].values()] for x in found}
  assert metrics == in_metrics(evaluated)
  assert set(metrics) == {4, 8}
  assert metrics[4] != metrics[8]


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 8])
def test_an_evaluation_that_was_cut_off_is_made_by_the_resumed_run(
  evaluated, corpus, tmp_path, step
):
  # The run was killed between writing the checkpoint of a step and its metrics.
  model_dir = tmp_path / "run"
  shutil.copytree(evaluated, model_dir, ignore=shutil.ignore_patterns("eval"))
  metrics = model_dir / "metrics.jsonl"
  kept = [x for x in runs.read_metrics(evaluated) if x["step"] < step]
  metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
  if step == 4:
    shutil.rmtree(model_dir / "checkpoints" / "step_00000008")
  macros = {"EVAL_TASKS": ["counting"], "TASK_EVAL_STEPS": 4}
  assert runs.run("train", corpus, model_dir, **TRAIN, **macros) == 0
  assert in_metrics(model_dir) == in_metrics(evaluated)
  steps = [x["step"] for x in runs.read_metrics(model_dir)]
  assert steps == sorted(set(steps)), "a line a step"
  # It is not made twice.
  before = metrics.read_bytes()
  assert runs.run("train", corpus, model_dir, **TRAIN, **macros) == 0
  assert metrics.read_bytes() == before


def test_evaluating_changes_no_bit_of_a_run(finished, evaluated):
  runs.assert_same_tensors(finished, evaluated, 8)


def test_the_table_has_a_line_a_metric_and_every_checkpoint_that_there_is(
  evaluate, evaluated
):
  code, out, err = evaluate('--gin.EVAL_CHECKPOINTS="every"')
  assert code == 0, err
  head, *lines = [line.split() for line in out.splitlines()]
  assert head == ["step", "task", "split", "examples", "metric", "value"]
  assert [(line[0], line[4]) for line in lines] == [
    (step, metric) for step in ("4", "8") for metric in ("exact", "mean_score")
  ]
  value = in_metrics(evaluated)[8][1]
  assert lines[3][1:] == (
    f"counting validation 3 mean_score {value:.4f}".split()
  )


def test_what_is_not_finite_is_null_in_whatever_is_printed_and_written(
  evaluate, evaluated
):
  code, out, err = evaluate("--json", tasks=["not_finite"])
  assert code == 0, err
  (line,) = map(strict_json.loads, out.splitlines())
  nulls = dict.fromkeys(["nan", "inf", "inf_clean", "none"])
  assert line["metrics"] == nulls
  path = evaluated / "eval" / "step_00000008" / "not_finite-validation"
  written = strict_json.loads(path.with_suffix(".json").read_text())
  assert written["metrics"] == nulls
  records = strict_json.load_lines(path.with_suffix(".jsonl"))
  assert [record["expected"] for record in records] == [
    {"('a', 1)": [None, 0.5], "x": {target: None}}
    for target in EXAMPLES["targets"]
  ]
  strict_json.load_lines(path.with_suffix(".answers.jsonl"))


def test_a_task_s_own_metric_named_clean_is_of_all_examples(evaluate):
  code, out, err = evaluate(tasks=["not_finite"])
  assert code == 0, err
  lines = [line.split() for line in out.splitlines()]
  assert [x[3:] for x in lines if "inf_clean" in x] == [
    ["3", "inf_clean", "-inf"]
  ]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_evaluated(
  evaluate, evaluated, tmp_path, monkeypatch
):
  copy = tmp_path / "run"
  shutil.copytree(evaluated, copy, ignore=shutil.ignore_patterns("eval"))
  real = answers.LoadedDecoder.of_run

  def after_training_removed_it(checkpoint, *rest, **more):
    if checkpoint.manifest.step == 4:
      shutil.rmtree(checkpoint.path)
    return real(checkpoint, *rest, **more)

  monkeypatch.setattr(
    answers.LoadedDecoder, "of_run", after_training_removed_it
  )
  code, out, err = evaluate(
    f"--gin.MODEL_DIR={str(copy)!r}", '--gin.EVAL_CHECKPOINTS="every"', "--json"
  )
  assert code == 0, err
  assert not (copy / "checkpoints" / "step_00000004").exists()
  found = [json.loads(line) for line in out.splitlines()]
  metrics = {x["step"]: [*x["metrics"].values()] for x in found}
  assert metrics == in_metrics(evaluated)


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    (
      "EVAL_SPLIT='test'",
      "counting has no split 'test', only 'validation'; se",
    ),
    ("EVAL_CHECKPOINTS=[5]", "it has: 4, 8."),
    ("NUM_SHOTS=3", "split 'validation' has only 2 other examples; give"),
    (
      "EXEMPLAR_FILES={'counting': '/none.jsonl'}",
      "EXEMPLAR_FILES = '/none.jsonl': No such file or directory; give a text",
    ),
    (
      "PROMPT_HEADERS={'counting': 'About {group}:'}",
      "PROMPT_HEADERS: 'About {group}:' of counting, whose examples have no",
    ),
    (
      "ANSWER_PATTERNS={'scored': 'is (.*)'}",
      "ANSWER_PATTERNS: scored compares likelihoods and has no output to",
    ),
    (
      "CATEGORY_GROUPS={'counting': {'law': ['art']}}",
      "CATEGORY_GROUPS: 'art' in 'law' is not a category of counting; correct",
    ),
    ("EVAL_TASKS=['countin']", 'is registered (did you mean "counting"?)'),
  ],
)
def test_bad_input_is_one_line(evaluate, flag, message):
  tasks = ["scored"] if "'scored'" in flag else ["counting"]
  code, out, err = evaluate(f"--gin.{flag}", tasks=tasks)
  assert (code, out) == (2, "")
  (line,) = err.splitlines()
  assert message in line


def test_a_loss_on_text_that_was_trained_on_warns(evaluate):
  share = "--gin.VALIDATION_SHARE=0.5"
  code, _, err = evaluate("--gin.TASK_EVAL_STEPS=None", share, tasks=())
  assert code == 0
  assert "part of the validation text was trained on" in err
  code, _, err = evaluate(share)
  assert code == 0
  assert "tasks on held-out text also use text that the model was" in err
  code, _, err = evaluate()
  assert code == 0 and "held-out" not in err


def test_a_task_that_is_unknown_ends_training_before_it_begins(
  corpus, tmp_path, capsys
):
  macros = {"EVAL_TASKS": ["countin"], "TASK_EVAL_STEPS": 4}
  assert runs.run("train", corpus, tmp_path / "run", **TRAIN, **macros) == 2
  assert 'did you mean "counting"?' in capsys.readouterr().err
  assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.fixture
def texts(tmp_path):
  """Texts of random words, each another's text or near it, in JSON lines."""
  rng = np.random.default_rng(0)
  words = [f"{word}{i}" for i in range(100) for word in runs.WORDS]
  texts = [" ".join(rng.choice(words, 60)) for _ in range(50)]
  folder = tmp_path / "texts"
  folder.mkdir()
  lines = [*texts, *texts[:5], *(f"{text} end" for text in texts[5:8])]
  content = [json.dumps({"text": text}) + "\n" for text in lines]
  (folder / "a.jsonl").write_text("".join(content))
  return texts


@pytest.mark.slow
def test_a_corpus_is_filtered_trained_on_and_evaluated(
  texts, tmp_path, palm_mtf, capsys
):
  from tests.seqio_testing import TOKENIZE, add_examples, mean_score

  # Documents with the first task's examples are removed; half of the second
  # task's stay in the text.
  trained = [text for text in texts[10:] if Document(text).rank >= 0.05]
  ends = [text.rsplit(" ", 2) for text in trained[:4]]
  new = [("eleven twelve " * 6 + str(i), "new") for i in range(2)]
  for name, pairs in (
    ("removed", [(a, b) for a, b, _ in ends[:2]]),
    ("half_seen", [*((a, b) for a, b, _ in ends[2:]), *new]),
    ("unseen", new),
  ):
    inputs, targets = map(list, zip(*pairs, strict=True))
    add_examples(
      name,
      {"validation": {"inputs": inputs, "targets": targets}},
      [TOKENIZE],
      features=("inputs", "targets"),
      metric_fns=[mean_score],
    )
  macros = {
    "TEXT_FILES": f"{tmp_path}/texts/*.jsonl",
    "CACHE_DIR": str(tmp_path / "cache"),
    "REMOVE_DUPLICATES": "near",
    "DECONTAMINATE_TASKS": ["removed"],
    "VALIDATION_SHARE": 0.05,
    "EVAL_BATCHES": 1,
  }
  model_dir = tmp_path / "run"
  command = runs.arguments("data cache", tmp_path, model_dir, **macros)
  code, out, err = palm_mtf(*command, "--json")
  assert code == 0, err
  assert json.loads(out)["removed_contaminated"] == 2
  short = {"TRAIN_STEPS": 2, "CHECKPOINT_STEPS": 2, "PROMPTS": []}
  macros |= {"EVAL_TASKS": ["half_seen"], "TASK_EVAL_STEPS": 2}
  macros |= {"CLEAN_SUBSET": True}
  assert runs.run("train", tmp_path, model_dir, **macros, **short) == 0
  # The decisions and the tokens of `data cache` are read.
  err = capsys.readouterr().err
  assert "tokens of text_files are read from" in err
  assert "filters of text_files" not in err
  logged = runs.read_metrics(model_dir)[-1]
  code, out, err = palm_mtf(
    *("evaluate", "--model_dir", model_dir, "--json"),
    '--gin.EVAL_TASKS=["removed", "half_seen", "unseen"]',
  )
  assert code == 0, err
  assert "half_seen: the training text contains 2 of 4 examples" in err
  removed, half, unseen = map(json.loads, out.splitlines())
  assert (removed["num_clean"], half["num_clean"]) == (2, 2)
  scores = removed["metrics"]
  assert scores["mean_score_clean"] == scores["mean_score"]
  clean = pytest.approx(unseen["metrics"]["mean_score"], abs=1e-5)
  assert half["metrics"]["mean_score_clean"] == clean
  assert logged["half_seen/mean_score_clean"] == clean
  assert half["metrics"]["mean_score"] != clean


def find(folder, choice, train_steps=30, wait_secs=0.0, shapes=SHAPES):
  config = TaskEvalConfig(eval_checkpoints=choice, eval_wait_secs=wait_secs)
  return find_checkpoints(str(folder), shapes, config, train_steps)


def steps(checkpoints):
  return [each.manifest.step for each in checkpoints]


@pytest.fixture
def folder(tmp_path):
  for step in (10, 20):
    write(tmp_path, step)
  return tmp_path


def test_every_one_comes_once_as_it_is_written_up_to_the_last_step(
  folder, monkeypatch
):
  to_come = iter([[25], [], [30, 40]])

  def sleep(secs):
    assert secs > 0
    for step in next(to_come):
      write(folder, step)

  # Replace only this module's clock; other threads keep the real one.
  clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
  monkeypatch.setattr("palm_mtf.commands.evaluate.time", clock)
  found = find(folder, "every", wait_secs=60.0)
  assert steps(found) == [10, 20, 25, 30]


def test_waiting_has_an_end_and_says_so(folder, capsys):
  assert steps(find(folder, "every")) == [10, 20]
  assert (
    "no checkpoint after step 20 came within EVAL_WAIT_SECS = 0; the same "
    "command resumes" in capsys.readouterr().err
  )


def test_one_that_training_removes_meanwhile_is_passed_over(folder, capsys):
  found = find(folder, "every")
  assert next(found).manifest.step == 10
  write(folder, 30)
  shutil.rmtree(folder / "checkpoints" / "step_00000020")
  assert steps(itertools.islice(found, 1)) == [30]
  assert "DAMAGED" not in capsys.readouterr().err


def test_what_cannot_be_evaluated_is_one_line(folder, tmp_path):
  assert message_of(find, folder, [10, 15]) == (
    f"EVAL_CHECKPOINTS: {str(folder)!r} has no checkpoint of step 15; it has: "
    "10, 20."
  )
  assert "holds no checkpoint" in message_of(find, tmp_path / "none", "newest")
  other = {**SHAPES, "embedding": (8, 2)}
  for choice in ("newest", [10]):
    said = message_of(find, folder, choice, shapes=other)
    assert "it is of another model" in said
  data = folder / "checkpoints" / "step_00000010" / "weights.data"
  data.write_text("damaged")
  assert "is damaged: weights.data" in message_of(find, folder, [10])


def is_json(text):
  try:
    strict_json.loads(text)
  except ValueError:
    return False
  return True


@pytest.mark.slow
def test_training_and_evaluate_count_and_log_what_assertions_flag(
  corpus, registered, tmp_path, palm_mtf
):
  model_dir = tmp_path / "run"
  macros = {
    "EVAL_TASKS": ["counting", "scored"],
    "TASK_EVAL_STEPS": 4,
    "ASSERTIONS": ["json", "finite"],
    "PROMPTS": ["one two", "three"],
    "SAMPLE_STEPS": 4,
  }
  assert runs.run("train", corpus, model_dir, **TRAIN | macros) == 0
  samples = (model_dir / "samples.jsonl").read_text().splitlines()
  texts = [x for x in map(json.loads, samples) if x["step"] == 4]
  flagged = sum(not is_json(x["continuation"]) for x in texts)
  assert flagged
  (line,) = [x for x in runs.read_metrics(model_dir) if x["step"] == 4]
  assert line["assertions/json"] == flagged
  assert line["assertions/finite"] == 0
  assert "loss" in line
  path = model_dir / "eval" / "step_00000004" / "counting-validation.jsonl"
  answers = [json.loads(x) for x in path.read_text().splitlines()]
  wrong = sum(not is_json(str(x["prediction"])) for x in answers)
  assert line["counting/assertions/json"] == wrong
  assert line["scored/assertions/json"] == 0  # the model wrote no text
  path = model_dir / "flagged.jsonl"
  before = [json.loads(x) for x in path.read_text().splitlines()]
  assert {x["origin"] for x in before} == {"train"}
  assert sum(x["step"] == 4 for x in before) == flagged + wrong
  code, out, _ = palm_mtf("evaluate", "--model_dir", model_dir, "--json")
  assert code == 0
  lines = [x for x in out.splitlines() if x.startswith("{")]  # not the run's
  found = [json.loads(x)["metrics"] for x in lines]
  after = [json.loads(x) for x in path.read_text().splitlines()][len(before) :]
  assert found[0]["assertions/json"] == len(after)
  assert {x["origin"] for x in after} == {"evaluate"}
  # A run that is killed between samples and metrics makes both again.
  for folder in (model_dir / "checkpoints").iterdir():
    if folder.name > "step_00000004":
      shutil.rmtree(folder)
  kept = [x for x in runs.read_metrics(model_dir) if x["step"] < 4]
  (model_dir / "metrics.jsonl").write_text(
    "".join(f"{json.dumps(x)}\n" for x in kept)
  )
  macros |= {"EVAL_TASKS": [], "TASK_EVAL_STEPS": None}
  assert runs.run("train", corpus, model_dir, **TRAIN | macros) == 0
  (again,) = [x for x in runs.read_metrics(model_dir) if x["step"] == 4]
  assert again["assertions/json"] == flagged
