# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the model of a checkpoint says to the examples of a task.

An answer is written down as soon as it is there (AnswerJournal), so that an
evaluation that was interrupted goes on where it was. Inputs that leave no room
for what follows them in SEQUENCE_LENGTH lose their beginning, as in training.
"""

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import Config
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.evaluation.seqio_tasks import EvalTask
from palm_mtf.inference.decoder_session import LoadedDecoder
from palm_mtf.inference.generator import Generator
from palm_mtf.inference.scorer import Example, Scorer
from palm_mtf.model_dir.json_lines import (
  JsonLinesWriter,
  read_json_lines,
  write_json_lines,
)


class CheckpointModel:
  """The model of a checkpoint, loaded when something is asked of it.

  Use it as a context manager: it may hold a session.
  """

  def __init__(
    self, checkpoint: Checkpoint, config: Config, vocabulary: Vocabulary
  ):
    """Keeps what it will be loaded with."""
    self.config, self.vocabulary = config, vocabulary
    self._load = functools.partial(
      LoadedDecoder,
      checkpoint,
      config.model,
      config.mesh_layout,
      config.decode.weight_dtype,
    )
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> "CheckpointModel":
    return self

  def __exit__(self, *unused: object) -> None:
    self._stack.close()

  @functools.cached_property
  def _loaded(self) -> LoadedDecoder:
    return self._stack.enter_context(self._load())

  @functools.cached_property
  def generator(self) -> Generator:
    """Continues prompts."""
    return Generator(
      self._loaded,
      self.vocabulary,
      self.config.decode,
      sample_tokens=self.config.run.sample_tokens,
      seed=self.config.run.seed,
    )

  @functools.cached_property
  def scorer(self) -> Scorer:
    """Scores examples."""
    return Scorer(self._loaded)


class TaskAnswers:
  """The answers of one model to one task; see eval_tasks.Answers."""

  def __init__(
    self, task: EvalTask, model: CheckpointModel, journal: "AnswerJournal"
  ):
    """Answers nothing yet; what is in `journal` needs no model."""
    self._task, self._model, self._journal = task, model, journal
    self._cut: set[int] = set()

  @property
  def num_cut(self) -> int:
    """How many examples lost the beginning of their inputs so far."""
    return len(self._cut)

  def _prompts(self) -> list[list[int]]:
    """Returns the inputs as far as there is room for a continuation."""
    config = self._model.config
    room = config.model.sequence_length - config.run.sample_tokens
    inputs = self._task.inputs
    self._cut |= {n for n, ids in enumerate(inputs) if len(ids) > room}
    return [ids[-room:] for ids in inputs]

  def predictions(self) -> list[list[str]]:
    """Returns the continuations of each example's inputs."""
    prompts = self._prompts()
    known = self._journal.known("prediction")
    # Prompts of like lengths share a batch.
    missing = [n for n in range(len(prompts)) if n not in known]
    missing.sort(key=lambda n: len(prompts[n]))
    if missing:
      results = self._model.generator.continue_tokens(
        [prompts[n] for n in missing]
      )
      for number, each in zip(missing, results, strict=True):
        self._journal.add("prediction", number, [x.text for x in each])
    return self._in_order("prediction")

  def scores(self) -> list[float]:
    """Returns log p of each example's targets given its inputs, in nats."""
    pairs = zip(self._task.inputs, self._task.targets, strict=True)
    examples = [Example(*pair) for pair in pairs]
    length = self._model.config.model.sequence_length
    self._cut |= {
      number
      for number, (inputs, targets) in enumerate(examples)
      if len(inputs) and len(inputs) + len(targets) > length
    }
    self._score("score", examples)
    return self._in_order("score")

  def prediction_scores(self) -> list[list[float]]:
    """Returns log p of each of `predictions` given the inputs, in nats."""
    predictions = self.predictions()
    encode = self._model.vocabulary.encode
    examples = [
      Example(inputs, encode(text))
      for inputs, texts in zip(self._prompts(), predictions, strict=True)
      for text in texts
    ]
    self._score("prediction_score", examples)
    flat = self._in_order("prediction_score")
    each = len(predictions[0])
    return [flat[i : i + each] for i in range(0, len(flat), each)]

  def _score(self, kind: str, examples: Sequence[Example]) -> None:
    known = self._journal.known(kind)
    missing = [n for n in range(len(examples)) if n not in known]
    if missing:
      for place, value in self._model.scorer.log_likelihoods(
        [examples[n] for n in missing]
      ):
        self._journal.add(kind, missing[place], value)

  def _in_order(self, kind: str) -> list:
    known = self._journal.known(kind)
    return [known[number] for number in range(len(known))]


class AnswerJournal:
  """A file of answers: what they depend on, then one a line.

  Use it as a context manager.
  """

  def __init__(self, path: str, depends_on: Mapping[str, object]):
    """Reads what is there, if it depends on the same; else begins anew.

    Args:
      path: path of the file.
      depends_on: whatever makes answers other ones; JSON.

    Raises:
      UserError: the file cannot be written.
    """
    self._known: dict[str, dict[int, object]] = {}
    header, *answers = list(read_json_lines(path, object)) or [None]
    if header != json.loads(json.dumps(depends_on)):
      answers = []
    for kind, number, value in answers:
      self._known.setdefault(kind, {})[number] = value
    write_json_lines(path, [depends_on, *answers])
    self._lines = JsonLinesWriter(path)

  def __enter__(self) -> "AnswerJournal":
    return self

  def __exit__(self, *unused: object) -> None:
    self._lines.close()

  def known(self, kind: str) -> Mapping[int, object]:
    """Returns the answers of a kind, by the number of their example."""
    return self._known.get(kind, {})

  def add(self, kind: str, number: int, value: object) -> None:
    """Writes an answer down.

    Raises:
      UserError: the disk is full.
    """
    self._known.setdefault(kind, {})[number] = value
    self._lines.write([kind, number, value])
