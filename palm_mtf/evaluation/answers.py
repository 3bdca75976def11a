# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers of a checkpoint's model to the examples of a task.

AnswerJournal writes each answer to a file as soon as the model gives it, so
that an interrupted evaluation resumes where it stopped.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import (
  OPTIMIZERS,
  Config,
  ExchangeConfig,
  FilterConfig,
  HardwareConfig,
  LearnersConfig,
  WatchConfig,
)
from palm_mtf.config.macros import macros_of, values_of
from palm_mtf.data.batches.packing import prompt_start, row_start
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.generator import Generator
from palm_mtf.generation.inference.scorer import Example, make_scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.json_lines import (
  JsonLinesWriter,
  read_json_lines,
  write_json_lines,
)


class CheckpointModel(contextlib.ExitStack):
  """A context manager for a checkpoint's model, which loads at first use."""

  def __init__(
    self, checkpoint: Checkpoint, config: Config, vocabulary: Vocabulary
  ):
    super().__init__()
    self.config, self.vocabulary = config, vocabulary
    self._checkpoint = checkpoint
    # Inputs from the middle of documents begin with the token that stands there
    # in training (row_start), other inputs with the start token of prompts.
    self.get_generator = functools.cache(
      lambda within_document: Generator(
        self._loaded,
        vocabulary,
        config.decode,
        sample_tokens=config.run.sample_tokens,
        seed=config.run.seed,
        start_id=row_start(config.data, vocabulary)
        if within_document and config.data.add_start
        else prompt_start(config.data, vocabulary),
      )
    )
    self.get_scorer = functools.cache(
      lambda within_document: make_scorer(
        self._loaded, config, vocabulary, within_document=within_document
      )
    )

  # Load the weights only when an answer is not in a journal.
  @functools.cached_property
  def _loaded(self) -> LoadedDecoder:
    return self.enter_context(
      LoadedDecoder.of_run(self._checkpoint, self.config)
    )


class TaskAnswers:
  """A model's answers to a task's examples, in the examples' order.

  Each method computes only the answers that `journal` lacks. `inputs` and
  `targets` are token ids, [examples]. If they are from the middle of documents
  (`within_document`), the start token before inputs differs, as in training.
  """

  def __init__(
    self,
    inputs: Sequence[list[int]],
    targets: Sequence[list[int]],
    model: CheckpointModel,
    journal: "AnswerJournal",
    within_document: bool,
  ):
    self._inputs, self._targets = inputs, targets
    self._within_document = within_document
    self._model, self._journal = model, journal
    self._cut: set[int] = set()  # indices of examples with truncated inputs

  @property
  def num_cut(self) -> int:
    """Number of examples, so far, whose inputs were truncated."""
    return len(self._cut)

  def _cut_prompts(self) -> list[list[int]]:
    # As in training, truncate inputs that are too long at their beginning.
    config = self._model.config
    room = config.model.text_length - config.run.sample_tokens
    self._cut |= {n for n, ids in enumerate(self._inputs) if len(ids) > room}
    return [ids[-room:] for ids in self._inputs]

  def predictions(self) -> list[list[str]]:
    """Returns continuations of each example's inputs, [examples][samples]."""
    prompts = self._cut_prompts()
    known = self._journal.known("prediction")
    # Sort prompts by length, so that batches need little padding.
    missing = [n for n in range(len(prompts)) if n not in known]
    missing.sort(key=lambda n: len(prompts[n]))
    if missing:
      generator = self._model.get_generator(self._within_document)
      results = generator.continue_tokens(
        [prompts[n] for n in missing], are_inputs=True
      )
      for number, each in zip(missing, results, strict=True):
        self._journal.add("prediction", number, [x.text for x in each])
    return self._list_answers("prediction")

  def scores(self) -> list[float]:
    """Returns log p of each example's targets given its inputs, in nats."""
    examples = [*map(Example, self._inputs, self._targets)]
    # Count the examples whose inputs the scorer truncates.
    length = self._model.config.model.text_length
    self._cut |= {
      number
      for number, (inputs, targets) in enumerate(examples)
      if len(inputs) and len(inputs) + len(targets) > length
    }
    self._score("score", examples)
    return self._list_answers("score")

  def prediction_scores(self) -> list[list[float]]:
    """Returns log p of each prediction given its example's inputs, in nats."""
    predictions = self.predictions()
    encode = self._model.vocabulary.encode
    examples = [
      Example(inputs, encode(text))
      for inputs, texts in zip(self._cut_prompts(), predictions, strict=True)
      for text in texts
    ]
    self._score("prediction_score", examples)
    flat = self._list_answers("prediction_score")
    each = len(predictions[0])  # samples per example, the same for all examples
    return [flat[i : i + each] for i in range(0, len(flat), each)]

  def _score(self, kind: str, examples: Sequence[Example]) -> None:
    known = self._journal.known(kind)
    missing = [n for n in range(len(examples)) if n not in known]
    if missing:
      for place, value in self._model.get_scorer(
        self._within_document
      ).log_likelihoods([examples[n] for n in missing]):
        self._journal.add(kind, missing[place], value)

  def _list_answers(self, kind: str) -> list:
    known = self._journal.known(kind)
    return [known[number] for number in range(len(known))]


class AnswerJournal(contextlib.AbstractContextManager):
  """A JSON lines file of a model's answers; a context manager.

  The first line holds everything that the answers depend on. Every other line
  is [kind, index, answer]. If the kind is "prediction" or "score", the index
  is that of an example; if it is "prediction_score", that of a prediction.
  """

  def __init__(
    self,
    path: str,
    depends_on: Mapping[str, object],
    answered: Callable[[], None] = lambda: None,
  ):
    """Reads the file; drops all answers unless line 1 equals `depends_on`.

    Args:
      path: path of the file, which need not exist.
      depends_on: JSON values of the checkpoint, examples and settings that the
        answers depend on.
      answered: function to call after each added answer, such as one that tells
        a watchdog of progress.

    Raises:
      UserError: if the file cannot be written, or a line is not an answer.
    """
    # {kind: {index: answer}}
    self._known: dict[str, dict[int, object]] = {}
    self._answered = answered
    header, *answers = list(read_json_lines(path, object)) or [None]
    if header != json.loads(json_text(depends_on)):
      answers = []
    for answer in answers:
      match answer:
        case [str(kind), int(number), value]:
          if value is not None:  # null is a NaN or infinite score: recompute
            self._known.setdefault(kind, {})[number] = value
        case _:
          raise UserError(
            f"{path}: {json_text(answer)[:40]} is not an answer; remove the "
            "line."
          )
    write_json_lines(path, [depends_on, *answers])  # drops a truncated line
    self._lines = JsonLinesWriter(path)

  def __exit__(self, *unused: object) -> None:
    self._lines.close()

  def known(self, kind: str) -> Mapping[int, object]:
    """Returns {index: answer} for all answers of one kind."""
    return self._known.get(kind, {})

  def add(self, kind: str, number: int, value: object) -> None:
    """Appends [kind, index, answer]; raises UserError if the disk is full."""
    self._known.setdefault(kind, {})[number] = value
    self._lines.write([kind, number, value])
    self._answered()


def _macros(*parts: type) -> str:
  return " ".join({name: None for part in parts for name in macros_of(part)})


# {reason: macros of settings that change no answer}. An evaluation with other
# values of these settings uses the answers in a journal again.
INDEPENDENT = {
  "the hash of the checkpoint stands for what training made": f"""
    {_macros(*OPTIMIZERS.values(), ExchangeConfig, LearnersConfig, WatchConfig)}
    {_macros(FilterConfig)}
    OUTPUT_FAN_IN
    TEXT_FILES TASK TEXT_FIELD WEIGHT_FIELD VALIDATION_SHARE CACHE_DIR
    NOISE_DENSITY MEAN_SPAN_LENGTH LICENSES
    Z_LOSS DROPOUT
    TRAIN_STEPS GLOBAL_BATCH_SIZE NUM_MICROBATCHES GRADIENT_DTYPE STEPS_PER_LOOP
    INIT_CHECKPOINT INIT_STATE INIT_EXPERTS FROZEN PRUNE SPARSITY
    CONTEXT_LENGTH
    NUM_PODS MANAGER MANAGER_TLS DEVICE_BYTES SHARE
    DCN_DTYPE FINGERPRINT_STEPS ON_POD_FAILURE POD_WAIT_SECS""",
  "the hash of the vocabulary stands for its file": "VOCABULARY",
  "the fingerprint of the examples stands for their ids": """
    EVAL_TASKS EVAL_SPLIT EVAL_EXAMPLES NUM_SHOTS EXEMPLARS EXEMPLAR_FILES
    PROMPT_HEADERS""",
  "answers do not depend on when they are computed": """
    EVAL_CHECKPOINTS EVAL_WAIT_SECS TASK_EVAL_STEPS""",
  "metrics are computed from answers": """
    ANSWER_PATTERNS CATEGORY_GROUPS CLEAN_SUBSET
    ASSERTIONS OUTPUT_LENGTH REFUSE_SEVERITY""",
  "any pod computes the same": "PODS ISLANDS CLIENT_ADDRESS POD_TIMEOUT_SECS",
  "other commands read it, or it decides on files other than checkpoints": """
    LOG_STEPS EVAL_STEPS EVAL_BATCHES CHECKPOINT_STEPS KEEP_CHECKPOINTS
    KEEP_EVERY_STEPS SAMPLE_STEPS TRACE_STEPS PROMPTS
    INSPECT_STEPS INSPECT_ROWS""",
  "plans and MFU are computed from the rates of devices": f"""
    CHIP {_macros(HardwareConfig)}""",
}


def select_settings(config: Config) -> dict[str, object]:
  """Returns {macro: value} for the settings that answers depend on."""
  independent = set(" ".join(INDEPENDENT.values()).split())
  return {
    name: value
    for name, value in values_of(config).items()
    if name not in independent
  }
