# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of tasks follow from the oracle's likelihoods and texts."""

import collections
import dataclasses
import json
import shutil
import sys

import flax
import numpy as np
import pytest
import seqio

from palm_mtf._tf import tf
from palm_mtf.assertions.assertions import Assertions
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import (
  Config,
  CorpusConfig,
  DataConfig,
  DecodeConfig,
  FewShotConfig,
  TaskEvalConfig,
)
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.evaluation import evaluator
from palm_mtf.evaluation.answers import INDEPENDENT
from palm_mtf.evaluation.evaluator import TaskEvaluation, find_clean_examples
from palm_mtf.evaluation.seqio_tasks import open_eval_tasks
from tests import checkpoint_files, oracle
from tests.config import checked_test
from tests.decode_testing import save_checkpoint
from tests.mtf_testing import PALM_OPTIMIZER, SINGLE, small_config
from tests.seqio_testing import (
  Says,
  add_examples,
  mean_score,
  registries_restored,
)
from tests.settings import PALM_LOSS

pytestmark = pytest.mark.usefixtures("registries")

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


def columns(examples) -> dict[str, list[str]]:
  inputs, targets = zip(*examples, strict=True)
  return {"inputs": list(inputs), "targets": list(targets)}


@flax.struct.dataclass
class MeanScore(seqio.metrics.CollectingMetric):
  """The function `mean_score` as SeqIO's newer form, a class."""

  model_output_type = seqio.metrics.ModelOutputType.SCORE

  def actual_compute(self, examples, *unused_arguments):
    scores, targets = [*self.values["model_output"]], [*examples]
    assert len(scores) == len(targets)
    found = {"targets": targets, "score": scores}
    return {"mean_score": np.mean(scores)}, found


def register(
  name,
  examples=None,
  train=None,
  functions=(mean_score,),
  objects=(),
  **features,
) -> None:
  splits = {"validation": columns(examples or EXAMPLES) | features}
  if train:
    splits["train"] = columns(train)
  metrics = {"metric_fns": [*functions], "metric_objs": [*objects]}
  add_examples(name, splits, STEPS, features=BOTH, **metrics)


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


@pytest.mark.parametrize(
  "objects", [[], [MeanScore]], ids=["function", "class"]
)
def test_clean_examples_are_those_of_sets_of_8_grams_and_have_metrics(
  find, objects
):
  functions = [] if objects else [mean_score]
  register(
    "plain", None, None, functions, objects, exemplar_group=["a", "b"] * 6
  )
  task, found = find("plain")
  assert found == find_contaminated(EXAMPLES, DOCUMENTS)
  assert 0 < len(found) < 12
  scores = [float(2**i) for i in range(12)]
  result = evaluate_clean(task, found, scores)
  clean = {i: s for i, s in enumerate(scores) if i not in found}
  of_each = [
    np.mean([s for i, s in clean.items() if i % 2 == j]) for j in (0, 1)
  ]
  expected = {
    "mean_score": np.mean(scores),
    "macro_mean_score": np.mean([np.mean(scores[::2]), np.mean(scores[1::2])]),
  }
  assert result.metrics == {
    **expected,
    "mean_score_clean": np.mean(list(clean.values())),
    "macro_mean_score_clean": np.mean(of_each),
  }
  marked = [i for i, x in enumerate(result.records) if x["contaminated"]]
  assert marked == found
  plain = task.evaluate(1, Says(numbers=scores))
  assert plain.metrics == expected
  assert "contaminated" not in plain.records[0]


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
  task, found = find("plain", eval_examples=6)
  assert (len(task.texts), len(searched)) == (6, 2)
  assert found == find_contaminated(EXAMPLES[:6], DOCUMENTS)
  with open(find.folder / "a.jsonl", "a") as file:
    file.write(json.dumps({"text": " ".join(EXAMPLES[6])}) + "\n")
  assert find("plain")[1] == sorted({*first, 6})
  assert len(searched) == 3


SAMPLE_TOKENS = 6
DATA = DataConfig(text_files="none.txt", vocabulary=None, validation_share=0.1)
RUN = dataclasses.replace(checked_test.RUN, sample_tokens=SAMPLE_TOKENS)
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
    splits, features = {"validation": columns}, {"features": BOTH}
    add_examples(
      name, splits, STEPS, metric_fns=[metric], **features, **changes
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


# The evaluator reads CLEAN_SUBSET only for metrics, and the others only to find
# the devices that compute.
UNREAD = {x for names in INDEPENDENT.values() for x in names.split()} - {
  "CLEAN_SUBSET",
  "PODS",
  "POD_TIMEOUT_SECS",
}


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


class Run:
  """A folder with a checkpoint and with what was evaluated."""

  def __init__(self, folder, config, vocabulary):
    self.folder, self.config, self.vocabulary = folder, config, vocabulary
    self.num_answered = 0
    self.checkpoint = Checkpoint(
      str(folder / "checkpoint"),
      checkpoint_files.manifest(200),
      files={},
      blake2b="f00d",
    )

  def evaluate(
    self,
    *names,
    decode=GREEDY,
    model=None,
    prepared=lambda settings: settings,
    **settings,
  ):
    """Returns {name of a task: outcome}, and counts the answers."""
    asked = TaskEvalConfig(eval_tasks=names, **settings)
    whole = Config(
      model=model or self.config,
      mesh_layout=SINGLE,
      optimizer=PALM_OPTIMIZER,
      loss=PALM_LOSS,
      data=DATA,
      run=RUN,
      decode=decode,
      evaluation=asked,
    )
    tasks = open_eval_tasks(asked, self.vocabulary, self.config.sequence_length)
    folder = str(self.folder)
    evaluation = TaskEvaluation(
      *(folder, prepared(whole), self.vocabulary, tasks),
      Assertions(folder, whole, "test"),
    )
    self.num_answered = 0
    outcomes = evaluation.evaluate(self.checkpoint, self._count)
    return {x.task: x for x in outcomes}

  def _count(self):
    self.num_answered += 1

  def remove_checkpoint(self):
    """Only stored answers can be used after this."""
    for path in (self.folder / "checkpoint").iterdir():
      path.unlink()

  def path(self, name):
    return self.folder / "eval" / "step_00000200" / name

  def records(self, task):
    lines = self.path(f"{task}-validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

  def journal(self, task):
    return self.path(f"{task}-validation.answers.jsonl")


@pytest.fixture(scope="module")
def evaluated(config, params, vocabulary, tmp_path_factory):
  """A run after its first evaluation, and the outcomes; tests only read it.

  The evaluation fails if an answer reads a setting that answers are kept
  without.
  """
  run = Run(tmp_path_factory.mktemp("evaluated"), config, vocabulary)
  save_checkpoint(config, params, run.folder / "checkpoint")
  outcomes = run.evaluate(
    "options", "cut_out", "open", prepared=lambda x: guard(x, UNREAD)
  )
  assert run.num_answered == 2 * len(OPTIONS) + len(QUESTIONS)
  return run, outcomes


@pytest.fixture
def run(evaluated, config, vocabulary, tmp_path):
  """A copy of the evaluated run."""
  shutil.copytree(evaluated[0].folder, tmp_path / "run")
  return Run(tmp_path / "run", config, vocabulary)


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
  evaluated, config, params, vocabulary
):
  run, outcomes = evaluated
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
  metrics = outcomes["options"].metrics
  assert metrics == {"accuracy": np.mean(best == np.arange(8) % 4)}
  assert 0 < metrics["accuracy"] < 1, "the task tells nothing"
  kept = run.records("options")
  np.testing.assert_allclose([x["score"] for x in kept], likelihoods, rtol=1e-5)
  assert [x["targets"] for x in kept] == [x[2] for x in OPTIONS]


def test_inputs_that_are_cut_out_of_a_document_follow_no_eod(
  evaluated, config, params, vocabulary
):
  kept = evaluated[0].records("cut_out")
  for (_, question, option, _), found in zip(OPTIONS, kept, strict=True):
    texts = map(vocabulary.encode, (question, option))
    expected = oracle.log_likelihood(config, params, *texts, start=0)
    assert found["score"] == pytest.approx(expected, rel=1e-5)


def test_predictions_are_the_oracles_likeliest_and_long_inputs_lose_the_front(
  evaluated, run, config, params, vocabulary, capsys
):
  outcome = evaluated[1]["open"]
  expected = [greedy(config, params, vocabulary, x) for x in QUESTIONS]
  assert [x["prediction"] for x in run.records("open")] == expected
  share = np.mean([x[:1] == "a" for x in expected])
  assert outcome.metrics == {"begins_with_a": share}
  assert outcome.num_cut == 1
  assert run.evaluate("open")["open"] == _moved(outcome, run)
  assert (
    "open: the inputs of 1 of 4 examples were too long and lost their "
    "beginning" in capsys.readouterr().err
  )


def _moved(outcome, run):
  return dataclasses.replace(outcome, checkpoint=run.checkpoint.path)


def test_what_was_answered_is_not_asked_again(evaluated, run):
  """Also, each answer is counted, so that a watchdog sees it."""
  outcomes = {name: _moved(x, run) for name, x in evaluated[1].items()}
  result = json.loads(run.path("open-validation.json").read_text())
  assert result["metrics"] == outcomes["open"].metrics
  # After an interruption, the file has half of the answers, and half a line.
  answers = run.journal("open")
  lines = answers.read_text().splitlines(keepends=True)
  answers.write_text("".join(lines[:3]) + lines[3][:9])
  assert run.evaluate("options", "cut_out", "open") == outcomes
  assert run.num_answered == 2
  again = answers.read_text().splitlines(keepends=True)
  assert again[:3] == lines[:3] and sorted(again) == sorted(lines)
  # All answers are stored, so the model is not needed.
  run.remove_checkpoint()
  assert run.evaluate("options", "cut_out", "open") == outcomes
  assert run.num_answered == 0


def test_a_value_that_is_refused_loses_no_answer(run):
  def metric(targets, predictions):
    del targets
    return {"spread": value(list(map(len, predictions)))}

  value = list
  splits = {"validation": {"inputs": QUESTIONS[:2], "targets": ["a"] * 2}}
  add_examples("spread", splits, STEPS, features=BOTH, metric_fns=[metric])
  with pytest.raises(UserError, match=r"metric function .*'spread' is a list"):
    run.evaluate("spread")
  assert run.num_answered == 2
  run.remove_checkpoint()
  value = seqio.metrics.Histogram
  outcome = run.evaluate("spread")["spread"]
  assert outcome.metrics["spread"].startswith("Histogram of 2 values from ")
  assert (run.num_answered, outcome.numbers) == (0, {})


def test_answers_of_another_model_function_are_asked_again(run, config):
  other = dataclasses.replace(config, logits_dtype="activation")
  run.evaluate("options", model=other)
  assert run.num_answered == len(OPTIONS)
  run.evaluate("options", model=other)
  assert run.num_answered == 0


def test_no_answer_reads_a_setting_that_answers_are_kept_without(evaluated):
  with pytest.raises(AssertionError, match="reads TRAIN_STEPS"):
    _ = guard(RUN, UNREAD).train_steps
  assert evaluated[1].keys() == {"options", "cut_out", "open"}


@pytest.mark.slow
def test_another_prompt_needs_new_answers_another_pattern_does_not(
  run, tmp_path
):
  cot = tmp_path / "cot.txt"
  journals = []
  for text, header in (("abc\n\n", "a"), ("abc\n\n", "b"), ("ab\n\n", "b")):
    cot.write_text(text)
    few_shot = FewShotConfig(
      exemplar_files={"open": str(cot)}, prompt_headers={"open": header}
    )
    run.evaluate("open", few_shot=few_shot)
    journals.append(run.journal("open_custom").read_text())
  causes = [text.partition("\n")[0] for text in journals]
  assert len(set(causes)) == 3
  run.remove_checkpoint()
  patterns = {"open": "^.(.*)"}
  run.evaluate("open", few_shot=few_shot, answer_patterns=patterns)
  assert run.journal("open_custom").read_text() == journals[-1]
  for record in run.records("open_custom"):
    assert record["prediction"] == record["output"].partition("\n")[0][1:]


def test_tensorboard_has_the_metrics_once(evaluated):
  run, outcomes = evaluated
  assert run.evaluate("open")["open"] == outcomes["open"]
  found = [
    (event.step, value.tag, value.simple_value)
    for path in (run.folder / "eval").glob("events*")
    for event in tf.train.summary_iterator(str(path))
    for value in event.summary.value
  ]
  assert sorted(found) == [
    (200, "cut_out/accuracy", outcomes["cut_out"].metrics["accuracy"]),
    (200, "open/begins_with_a", outcomes["open"].metrics["begins_with_a"]),
    (200, "options/accuracy", outcomes["options"].metrics["accuracy"]),
  ]
