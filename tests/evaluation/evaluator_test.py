# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of tasks follow from the oracle's likelihoods and texts."""

import collections
import dataclasses
import functools
import json
import shutil
import sys

import numpy as np
import pytest

seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")

from palm_mtf.config import (  # noqa: E402
  CorpusConfig,
  DataConfig,
  FewShotConfig,
  TaskEvalConfig,
)
from palm_mtf.data.vocabulary.load import open_vocabulary  # noqa: E402
from palm_mtf.data.vocabulary.training import train_vocabulary  # noqa: E402
from palm_mtf.evaluation import evaluator  # noqa: E402
from palm_mtf.evaluation.evaluator import find_clean_examples  # noqa: E402
from palm_mtf.evaluation.seqio_tasks import open_eval_tasks  # noqa: E402
from tests.evaluation.seqio_tasks_test import Says  # noqa: E402
from tests.mtf_testing import small_config  # noqa: E402
from tests.seqio_testing import add_examples, registries_restored  # noqa: E402

BOTH = ("inputs", "targets")
STEPS = [seqio.preprocessors.tokenize]
RNG = np.random.default_rng(0)


def words(count: int) -> str:
  return " ".join(f"{word}" for word in RNG.integers(0, 1000, count))


# Inputs and targets of twelve examples with 6 to 30 words each.
EXAMPLES = [(words(5 + 2 * i), words(1 + i // 2)) for i in range(12)]


def part(example: tuple[str, str], share: float) -> str:
  text = " ".join(example).split()
  return " ".join(text[: round(share * len(text))])


# Each document contains between 0% and 100% of an example.
DOCUMENTS = [
  f"{words(30)} {part(example, i % 6 / 5)} {words(30)}"
  for i, example in enumerate(EXAMPLES)
]


def ngrams(text: str) -> list[tuple[str, ...]]:
  split = text.lower().split()
  return [tuple(split[i : i + 8]) for i in range(len(split) - 7)]


def find_contaminated(examples, documents) -> list[int]:
  seen = {ngram for each in documents for ngram in ngrams(each)}
  found = []
  for number, example in enumerate(examples):
    mine = ngrams(" ".join(example))
    if mine and sum(each in seen for each in mine) / len(mine) >= 0.7:
      found.append(number)
  return found


def mean_score(targets, scores):
  assert len(targets) == len(scores)
  return {"mean_score": np.mean(scores)}


@pytest.fixture(autouse=True)
def registries():
  with registries_restored():
    yield


def columns(examples) -> dict[str, list[str]]:
  inputs, targets = zip(*examples, strict=True)
  return {"inputs": list(inputs), "targets": list(targets)}


def register(name, examples=None, train=None, **features) -> None:
  splits = {"validation": columns(examples or EXAMPLES) | features}
  if train:
    splits["train"] = columns(train)
  add_examples(name, splits, STEPS, features=BOTH, metric_fns=[mean_score])


@pytest.fixture
def find(tmp_path):
  """Returns a task and its contaminated examples, for a run on DOCUMENTS."""
  folder = tmp_path / "texts"
  folder.mkdir()
  lines = [json.dumps({"text": text}) + "\n" for text in DOCUMENTS]
  (folder / "a.jsonl").write_text("".join(lines))
  path = str(tmp_path / "vocabulary.model")
  train_vocabulary(["1 + 1 = 2\nabcxy?\n" * 20], 280, path=path)
  vocabulary = open_vocabulary(path)
  config = CorpusConfig(
    model=small_config(sequence_length=64, vocab_size=vocabulary.size),
    data=DataConfig(
      # All documents are training documents.
      text_files=f"{folder}/*.jsonl",
      vocabulary=path,
      validation_share=1e-4,
    ),
  )

  def find(name, **settings):
    settings = TaskEvalConfig(eval_tasks=[name], **settings)
    tasks = open_eval_tasks(settings, vocabulary, 64)
    (clean,) = find_clean_examples(
      str(tmp_path / "run"), config, tasks
    ).values()
    return tasks[0], sorted({*range(len(tasks[0].targets))} - {*clean})

  find.folder = folder
  return find


def evaluate_clean(task, contaminated, scores):
  """Returns the result of a task for answers with these scores."""
  clean = [n for n in range(len(scores)) if n not in contaminated]
  return task.evaluate(1, Says(numbers=scores), clean)


def test_contaminated_examples_are_those_of_sets_of_8_grams(find):
  register("plain")
  _, found = find("plain")
  assert found == find_contaminated(EXAMPLES, DOCUMENTS)
  assert 0 < len(found) < 12


def test_of_clean_examples_the_metric_functions_get_targets_and_answers(find):
  register("plain")
  task, found = find("plain")
  scores = [float(2**i) for i in range(12)]
  result = evaluate_clean(task, found, scores)
  clean = [s for i, s in enumerate(scores) if i not in found]
  assert result.metrics == {
    "mean_score": np.mean(scores),
    "mean_score_clean": np.mean(clean),
  }
  marked = [i for i, x in enumerate(result.records) if x["contaminated"]]
  assert marked == found
  plain = task.evaluate(1, Says(numbers=scores))
  assert plain.metrics == {"mean_score": np.mean(scores)}
  assert "contaminated" not in plain.records[0]


def test_averages_over_categories_are_of_clean_examples_too(find):
  categories = [f"{'ab'[i % 2]}" for i in range(12)]
  register("plain", exemplar_group=categories)
  task, found = find("plain")
  scores = [float(2**i) for i in range(12)]
  metrics = evaluate_clean(task, found, scores).metrics
  means = [
    np.mean([s for i, s in enumerate(scores) if i % 2 == j and i not in found])
    for j in range(2)
  ]
  assert metrics["macro_mean_score_clean"] == np.mean(means)


def test_eval_examples_limits_the_compared_examples(find):
  register("plain")
  task, found = find("plain", eval_examples=6)
  assert found == find_contaminated(EXAMPLES[:6], DOCUMENTS)
  assert len(task.texts) == 6


def test_options_of_a_question_stay_together(find):
  number = find_contaminated(EXAMPLES, DOCUMENTS)[0]
  record = ["a", "b", "c", "d", "e", "f"]
  register("named", record=[record[i // 2] for i in range(12)])
  _, named = find("named")
  register("indexed", idx=[[i // 2, i % 2] for i in range(12)])
  _, indexed = find("indexed")
  assert named == indexed
  assert {number, number ^ 1} <= {*named}
  assert all(each ^ 1 in named for each in named)


def test_an_option_without_its_question_is_not_compared(find):
  register("plain", unconditional=[True] * 12)
  assert find("plain")[1] == []


def test_exemplars_are_not_compared(find):
  # The training text contains all exemplars.
  train = [(text, "0") for text in DOCUMENTS]
  register("shots", train=train)
  _, found = find("shots", few_shot=FewShotConfig(num_shots=1))
  assert found == find_contaminated(EXAMPLES, DOCUMENTS)


@pytest.mark.parametrize("clean", [0, 12])
def test_of_none_there_is_no_clean_metric_and_of_all_it_is_the_metric(
  find, clean
):
  register(
    "seen", [(text if not clean else words(20), "0") for text in DOCUMENTS]
  )
  task, found = find("seen")
  assert len(found) == 12 - clean
  expected = {"mean_score": 1.0} | ({"mean_score_clean": 1.0} if clean else {})
  assert evaluate_clean(task, found, [1.0] * 12).metrics == expected


def test_what_was_found_is_kept_until_text_or_examples_change(
  find, monkeypatch
):
  searched = []
  search = evaluator._search

  def counted(sources, tasks):
    searched.append([task.name for task in tasks])
    return search(sources, tasks)

  monkeypatch.setattr(evaluator, "_search", counted)
  register("plain")
  first = find("plain")[1]
  assert find("plain")[1] == first
  assert searched == [["plain"]]
  find("plain", eval_examples=5)
  assert len(searched) == 2
  with open(find.folder / "a.jsonl", "a") as file:
    file.write(json.dumps({"text": " ".join(EXAMPLES[6])}) + "\n")
  assert find("plain")[1] == sorted({*first, 6})
  assert len(searched) == 3


seqio = pytest.importorskip("seqio", reason="SeqIO is not installed")

from palm_mtf._tf import tf  # noqa: E402
from palm_mtf.checkpoints.manifest import Checkpoint  # noqa: E402
from palm_mtf.checkpoints.variables import WeightsCopier  # noqa: E402
from palm_mtf.config import (  # noqa: E402
  Config,
  DecodeConfig,
  RunConfig,
)
from palm_mtf.evaluation.answers import INDEPENDENT  # noqa: E402
from palm_mtf.evaluation.evaluator import TaskEvaluation  # noqa: E402
from palm_mtf.programs.forward_program import build_forward_program  # noqa: E402
from palm_mtf.runtime.client.client import Client  # noqa: E402
from tests import checkpoint_files, oracle  # noqa: E402
from tests.mtf_testing import (  # noqa: E402
  PALM_OPTIMIZER,
  SINGLE,
  load_parameters,
)

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
  return open_vocabulary(path)


@pytest.fixture(scope="module")
def config(vocabulary):
  return small_config(sequence_length=48, vocab_size=vocabulary.size)


@pytest.fixture(scope="module")
def params(config):
  return oracle.random_parameters(config, seed=5)


def checkpoint_in(folder):
  return Checkpoint(
    str(folder), checkpoint_files.manifest(200), files={}, blake2b="f00d"
  )


@pytest.fixture(scope="module")
def written(config, params, tmp_path_factory):
  """The folder of a checkpoint, which tests copy."""
  folder = tmp_path_factory.mktemp("checkpoint")
  checkpoint = checkpoint_in(folder)
  with tf.Graph().as_default(), tf.Session() as session:
    program = build_forward_program(config, SINGLE, batch_size=1)
    load_parameters(session, program.slices, params)
    WeightsCopier(Client(session), [program.slices]).copy()(checkpoint.prefix)
  return folder


@pytest.fixture
def checkpoint(written, tmp_path):
  return checkpoint_in(shutil.copytree(written, tmp_path / "checkpoint"))


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
  names -= {"PODS", "POD_TIMEOUT_SECS"}  # these say which devices compute
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
