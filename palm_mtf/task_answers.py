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
import os
from collections.abc import Mapping, Sequence

from palm_mtf.checkpoints import Checkpoint
from palm_mtf.config import PalmConfig, RunConfig
from palm_mtf.data.vocabulary import Vocabulary
from palm_mtf.decode_config import DecodeConfig
from palm_mtf.disk import write_atomically, writing
from palm_mtf.eval_tasks import EvalTask
from palm_mtf.generation import Generator
from palm_mtf.layout import MeshLayout
from palm_mtf.loaded_decoder import LoadedDecoder
from palm_mtf.scoring import Example, Scorer


class CheckpointModel:
  """The model of a checkpoint, loaded when something is asked of it.

  Use it as a context manager: it may hold a session.
  """

  def __init__(
    self,
    checkpoint: Checkpoint,
    config: PalmConfig,
    mesh: MeshLayout,
    vocabulary: Vocabulary,
    decode: DecodeConfig,
    run: RunConfig,
  ):
    """Keeps what it will be loaded with; `run` gives sample_tokens and seed."""
    self.config, self.vocabulary, self.run = config, vocabulary, run
    self._decode = decode
    self._load = functools.partial(
      LoadedDecoder, checkpoint, config, mesh, decode.weight_dtype
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
      self._decode,
      sample_tokens=self.run.sample_tokens,
      seed=self.run.seed,
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
    room = self._model.config.sequence_length - self._model.run.sample_tokens
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
    length = self._model.config.sequence_length
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
      path: of the file.
      depends_on: whatever makes answers other ones; JSON.

    Raises:
      UserError: the file cannot be written.
    """
    self._path = path
    self._known: dict[str, dict[int, object]] = {}
    header = json.dumps(depends_on) + "\n"
    lines = [header, *self._read(header)]
    write_atomically(path, "".join(lines).encode())
    self._file = open(path, "a", encoding="utf-8")

  def _read(self, header: str) -> list[str]:
    """Returns the whole lines of answers, and knows them."""
    if not os.path.exists(self._path):
      return []
    kept = []
    with open(self._path, encoding="utf-8") as file:
      if file.readline() != header:
        return []
      for line in file:
        if not line.endswith("\n"):
          break  # the half line of a killed process
        kind, number, value = json.loads(line)
        self._known.setdefault(kind, {})[number] = value
        kept.append(line)
    return kept

  def __enter__(self) -> "AnswerJournal":
    return self

  def __exit__(self, *unused: object) -> None:
    self._file.close()

  def known(self, kind: str) -> Mapping[int, object]:
    """Returns the answers of a kind, by the number of their example."""
    return self._known.get(kind, {})

  def add(self, kind: str, number: int, value: object) -> None:
    """Writes an answer down.

    Raises:
      UserError: the disk is full.
    """
    self._known.setdefault(kind, {})[number] = value
    with writing(self._path, None):
      self._file.write(json.dumps([kind, number, value]) + "\n")
      self._file.flush()
