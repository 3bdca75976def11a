# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Questions with options or with answers in words, as SeqIO examples."""

# A `Choice` has options. Each option becomes one example, which is scored by
# the log-likelihood of its text; the best option is the answer. A `Question`
# is answered in words: its one example carries all right answers.

import hashlib
import importlib.util
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from palm_mtf.errors import UserError, check_choice
from palm_mtf.tasks.documents import VOCABULARY
from palm_mtf.user_code import describe
from palm_mtf.user_text import check_text

# How the scores of options are made comparable (Brown et al. 2020, 2.4):
#   sum            log p(option | inputs)
#   tokens         log p(option | inputs) / number of the option's tokens
#   characters     log p(option | inputs) / number of the option's characters
#   unconditional  log p(option | inputs) - log p(option | context), where the
#                  context, such as "Answer:", does not depend on the question
NORMALIZATIONS = ("sum", "tokens", "characters", "unconditional")
FEATURES = {
  name: seqio.Feature(VOCABULARY, add_eos=False, required=True)
  for name in ("inputs", "targets")
}


class Choice(NamedTuple):
  """A question with options.

  Attributes:
    inputs: text before the option: one text for all options, or one per option.
    options: texts to choose from.
    correct: numbers of the right options, from 0.
    group: group that few-shot exemplars are taken from.
    context: text before the option when it is scored unconditionally.
    within_document: whether the inputs are cut out of the middle of a document,
      so that no [eod] precedes them.
  """

  inputs: str | Sequence[str]
  options: Sequence[str]
  correct: Collection[int]
  group: str = ""
  context: str = "Answer:"
  within_document: bool = False


class Question(NamedTuple):
  """A question to be answered in words.

  Attributes:
    inputs: text before the answer.
    targets: answer that a few-shot exemplar shows.
    answers: all right answers.
    group: group that few-shot exemplars are taken from.
  """

  inputs: str
  targets: str
  answers: Sequence[str]
  group: str = ""


class Option(NamedTuple):
  """One scored example, in the form that the metrics take."""

  question: int
  index: int
  is_correct: bool
  unconditional: bool
  num_tokens: int
  num_characters: int


Prompt = Callable[[dict], Iterable[Choice | Question]]

# few_shot.py reads `record`, `exemplar_group`, `is_correct` and
# `unconditional`; `idx` (question, option) and `is_correct` have the names of
# T5's rank classification.
_SIGNATURE = {
  "record": tf.TensorSpec((), tf.string),
  "exemplar_group": tf.TensorSpec((), tf.string),
  "inputs": tf.TensorSpec((), tf.string),
  "targets": tf.TensorSpec((), tf.string),
}
_OF_OPTIONS = {
  "idx": tf.TensorSpec((2,), tf.int32),
  "is_correct": tf.TensorSpec((), tf.bool),
  "unconditional": tf.TensorSpec((), tf.bool),
  "within_document": tf.TensorSpec((), tf.bool),
}
_OF_ANSWERS = {"answers": tf.TensorSpec((), tf.string)}


def add_choices(
  name: str,
  source: seqio.DataSource,
  prompt: Prompt,
  normalization: str | Callable[[], str],
  more_metrics: Sequence[Callable] = (),
) -> None:
  """Registers a task of `Choice`s.

  Args:
    name: name of the task.
    source: SeqIO source as RecordSource; "origin" may be missing.
    prompt: function that makes `Choice`s from a record.
    normalization: one of NORMALIZATIONS, or a function that returns it.
    more_metrics: functions of (targets, scores), besides the accuracy.
  """

  # Read at each use, not at registration, because gin may set it later.
  def chosen() -> str:
    value = normalization() if callable(normalization) else normalization
    check_choice(f"normalization of {name}", value, NORMALIZATIONS)
    return value

  def rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    twice = chosen() == "unconditional"
    return _rows(
      dataset,
      lambda key, number, made: _options(key, number, made, twice),
      prompt,
      {**_SIGNATURE, **_OF_OPTIONS},
    )

  def accuracy(targets, scores):
    return option_accuracy(targets, scores, chosen())

  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[rows, seqio.preprocessors.tokenize],
    output_features=FEATURES,
    postprocess_fn=_to_option,
    metric_fns=[accuracy, *more_metrics],
  )


def add_questions(
  name: str,
  source: seqio.DataSource,
  prompt: Prompt,
  metric_fns: Sequence[Callable],
  read_answer: Callable[[str], str] = str.strip,
  check: Callable[[str], None] = lambda name: None,
) -> None:
  """Registers a task of `Question`s.

  Args:
    name: name of the task.
    source: SeqIO source as RecordSource; "origin" may be missing.
    prompt: function that makes `Question`s from a record.
    metric_fns: functions of (lists of right answers, predictions).
    read_answer: function that finds the answer in the model's output.
    check: function of `name` that raises UserError if the task cannot be
      evaluated; it is called before any record is read.
  """

  def rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    check(name)
    return _rows(dataset, _answer, prompt, {**_SIGNATURE, **_OF_ANSWERS})

  def postprocess(output, example=None, is_target=False):
    if is_target:
      return json.loads(example["answers"])
    if isinstance(output, list):  # several samples of one example
      return [read_answer(each) for each in output]
    return read_answer(output)

  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[rows, seqio.preprocessors.tokenize],
    output_features=FEATURES,
    postprocess_fn=postprocess,
    metric_fns=metric_fns,
  )


def t5_metric(name: str) -> Callable:
  """Returns a metric of t5.evaluation.metrics."""

  # t5 is an optional package, so it is imported when the metric is used.
  def metric(targets, predictions):
    from t5.evaluation import metrics

    return getattr(metrics, name)(targets, predictions)

  metric.__name__ = name
  return metric


def check_t5(name: str) -> None:
  """Raises UserError unless t5 is installed, which scores task `name`."""
  if importlib.util.find_spec("t5") is None:
    raise UserError(
      f"task {name}: its metric is T5's, which is not installed: pip install "
      "'palm_mtf[t5]' && pip install --no-deps 't5>=0.9.4,<0.10'."
    )


def option_accuracy(
  targets: Sequence[Option], scores: Sequence[float], normalization: str
) -> dict[str, float]:
  """Returns accuracy, accuracy by chance, and their difference, in percent.

  Args:
    targets: [examples] options of all questions.
    scores: [examples] log-likelihoods, nats.
    normalization: one of NORMALIZATIONS.
  """
  hits, chances = [], []
  for options in choices(targets, scores, normalization):
    hits.append(options[0].is_correct)
    chances.append(np.mean([option.is_correct for option in options]))
  accuracy, chance = 100 * float(np.mean(hits)), 100 * float(np.mean(chances))
  return {"accuracy": accuracy, "chance": chance, "margin": accuracy - chance}


def choices(
  targets: Sequence[Option], scores: Sequence[float], normalization: str
) -> list[list[Option]]:
  """Returns the options of each question, the best first."""
  # `by_context` has log p(option | context), by question and option.
  by_context, questions = {}, {}
  for option, score in zip(targets, scores, strict=True):
    if option.unconditional:
      by_context[option.question, option.index] = float(score)
    else:
      questions.setdefault(option.question, []).append((option, float(score)))
  divisors = {
    "tokens": lambda option: max(1, option.num_tokens),
    "characters": lambda option: max(1, option.num_characters),
  }
  divide_by = divisors.get(normalization, lambda option: 1)

  def value(scored: tuple[Option, float]) -> float:
    option, score = scored
    if normalization == "unconditional":
      score -= by_context[option.question, option.index]
    return score / divide_by(option)

  # sorted is stable, so the first of several equal options is the answer.
  return [
    [option for option, _ in sorted(each, key=value, reverse=True)]
    for each in questions.values()
  ]


def _rows(
  dataset: tf.data.Dataset,
  to_rows: Callable[[str, int, Any], Iterator[dict]],
  prompt: Prompt,
  signature: dict,
) -> tf.data.Dataset:
  def generate() -> Iterator[dict]:
    number = 0
    for count, example in enumerate(dataset):
      record = example["record"].numpy()
      # The key of a question is its record's hash, so that few_shot.py draws
      # the same exemplars for every option and in any order of records.
      digest = hashlib.blake2b(record, digest_size=8).hexdigest()
      origin = f"record {count:,}"
      if "origin" in example:
        origin = example["origin"].numpy().decode()
      for i, made in enumerate(_ask(prompt, json.loads(record), origin)):
        yield from to_rows(f"{digest}/{i}", number, made)
        number += 1

  return tf.data.Dataset.from_generator(generate, output_signature=signature)


def _ask(prompt: Prompt, record: Any, origin: str) -> list[Choice | Question]:
  """Returns a prompt's questions for a record; errors name the origin."""
  try:
    questions = list(prompt(record))
    for question in questions:
      _check(question)
    return questions
  except UserError as error:
    raise UserError(f"{origin}: {error}") from error
  except Exception as error:  # raised by the prompt, which may be the user's
    raise UserError(f"{origin}: {describe(error)}; mend the record.") from error


def _check(question: Choice | Question) -> None:
  """Raises UserError if a text is invalid, or a right option is missing."""
  fix = "mend the record"
  if isinstance(question, Question):
    texts = [question.inputs, question.targets, *question.answers]
  else:
    inputs = question.inputs
    texts = [inputs] if isinstance(inputs, str) else [*inputs]
    texts += [question.context, *question.options]
    if any(not 0 <= i < len(question.options) for i in question.correct):
      raise UserError(
        f"the right option is {max(question.correct)}, and there are "
        f"{len(question.options)} from 0 on; {fix}."
      )
  for text in [*texts, question.group]:
    check_text(text, "a text of its question", fix)


def _options(
  key: str, number: int, choice: Choice, twice: bool
) -> Iterator[dict]:
  for i, option in enumerate(choice.options):
    inputs = choice.inputs
    inputs = inputs if isinstance(inputs, str) else inputs[i]
    for unconditional in (False, True) if twice else (False,):
      yield {
        "record": key,
        "exemplar_group": choice.group,
        "inputs": choice.context if unconditional else inputs,
        "targets": option,
        "idx": (number, i),
        "is_correct": i in choice.correct,
        "unconditional": unconditional,
        "within_document": choice.within_document,
      }


def _answer(key: str, number: int, question: Question) -> Iterator[dict]:
  del number
  yield {
    "record": key,
    "exemplar_group": question.group,
    "inputs": question.inputs,
    "targets": question.targets,
    "answers": json.dumps(list(question.answers)),
  }


def _to_option(output, example=None, is_target=False):
  if not is_target:
    return output
  text = example["targets_pretokenized"]
  text = text.decode() if isinstance(text, bytes) else text
  question, index = (int(i) for i in example["idx"])
  return Option(
    question,
    index,
    bool(example["is_correct"]),
    bool(example["unconditional"]),
    len(example["targets"]),
    len(text),
  )
