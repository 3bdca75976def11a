# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores and continues the texts of lm-evaluation-harness."""

import collections
import dataclasses
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.cli.gin_files import load_run
from palm_mtf.commands.adapter import add_adapter
from palm_mtf.config import DecodeConfig, mesh_layout
from palm_mtf.data.batches.packing import prompt_start
from palm_mtf.errors import UserError, check_count
from palm_mtf.machine.activation_dtype import log_dtype

if TYPE_CHECKING:  # the module imports TensorFlow, which takes seconds
  from palm_mtf.generation.inference.scorer import Score

_logger = logging.getLogger(__name__)

_DEFAULT_MAX_TOKENS = 256  # the harness's default
# Keywords for the maximum number of tokens. If a task gives several of these
# keywords, the first one in this order counts, as in the harness.
_MAX_TOKENS = (
  "max_gen_toks",
  "max_new_tokens",
  "max_tokens",
  "max_completion_tokens",
)
_KNOWN = {*_MAX_TOKENS, "until", "do_sample", "temperature", "top_k", "top_p"}


def split_pair(context: str, continuation: str) -> tuple[str, str]:
  """Moves spaces from a context's end to the continuation, as the harness does.

  As in training, the vocabulary can then encode " word" as one piece.
  """
  kept = context.rstrip()
  return kept, context[len(kept) :] + continuation


@dataclasses.dataclass(frozen=True)
class Generation:
  """Settings for continuing a prompt."""

  decode: DecodeConfig  # sampling settings, and strings that end a text
  max_tokens: int  # maximum number of tokens to sample
  asked_tokens: int  # the task's maximum; a warning if above `max_tokens`


def read_generation(
  gen_kwargs: Mapping[str, object], decode: DecodeConfig, length: int
) -> Generation:
  """Returns the settings that a task asks for.

  Args:
    decode: settings of the run, of which only WEIGHT_DTYPE is used.
    length: SEQUENCE_LENGTH. If a task asks for SEQUENCE_LENGTH tokens or more,
      `max_tokens` is half of SEQUENCE_LENGTH.

  Raises:
    UserError: if a keyword is unknown to palm_mtf, or its value is wrong.
  """
  given = {x: y for x, y in gen_kwargs.items() if y is not None}
  if given.get("num_beams") == 1:
    del given["num_beams"]
  if unknown := sorted(given.keys() - _KNOWN):
    raise UserError(
      f"generation_kwargs have {', '.join(unknown)}; palm_mtf knows "
      f"{', '.join(sorted(_KNOWN))}."
    )
  until = given.get("until", [])
  until = until if isinstance(until, list) else [until]
  numbers = {"temperature": 0.0}
  if given.get("do_sample", bool(given.get("temperature"))):
    numbers = {"temperature": given.get("temperature", 1.0)}
    numbers |= {x: given[x] for x in ("top_k", "top_p") if x in given}
  limits = {x: given[x] for x in _MAX_TOKENS if x in given}
  limits = limits or {_MAX_TOKENS[0]: _DEFAULT_MAX_TOKENS}
  name, asked = next(iter(limits.items()))
  check_count(f"generation_kwargs: {name}", asked)
  return Generation(
    DecodeConfig(
      weight_dtype=decode.weight_dtype,
      stop_strings=[each for each in until if each != ""],
      **numbers,
    ),
    max_tokens=asked if asked < length else math.ceil(length / 2),
    asked_tokens=asked,
  )


class Run:
  """The newest checkpoint of a run, loaded to score and continue texts."""

  def __init__(
    self,
    model_dir: str,
    macros: Mapping[str, object],
    trust_config: bool,
    adapter: str | None = None,
  ):
    """Loads the weights; `macros` override the run's values.

    `adapter` is the path of an adapter to add, as --adapter of `generate` does.

    Raises UserError if MODEL_DIR holds no run, or settings or the adapter do
    not fit.
    """
    model_dir, config = load_run("score", model_dir, macros, trust_config)
    mesh_layout.check_layout(config.mesh_layout, config.model)
    checkpoint, self._vocabulary = open_newest(model_dir, config)
    self._config, checkpoint = add_adapter(adapter, config, checkpoint)
    config = self._config
    log_dtype(config.model, config.mesh_layout)
    from palm_mtf.generation.inference.scorer import make_scorer
    from palm_mtf.generation.inference.sessions import LoadedDecoder

    self.name = f"{checkpoint.path} {checkpoint.blake2b}"
    self.activation_dtype = config.model.activation_dtype
    self._loaded = LoadedDecoder.of_run(checkpoint, config)
    self._scorer = make_scorer(self._loaded, config, self._vocabulary)

  def scores(
    self, pairs: Sequence[tuple[str, str]]
  ) -> Iterator[tuple[int, "Score"]]:
    """Yields each pair's index and the score of its continuation, in any order.

    A pair is (context, continuation); a context may be "".
    """
    from palm_mtf.generation.inference.scorer import Example, Score

    split = [split_pair(*pair) for pair in pairs]
    contexts = [context for context, _ in split]
    others = [continuation for _, continuation in split]
    # After a context, encode the continuation without the space that some
    # vocabularies put before the beginning of a text.
    inputs = self._vocabulary.encode_batch(contexts)
    targets = self._vocabulary.encode_batch(others, [*map(bool, contexts)])
    examples = [*map(Example, inputs, targets)]
    scored = [i for i, example in enumerate(examples) if example.targets]
    for place, score in self._scorer.scores([examples[i] for i in scored]):
      yield scored[place], score
    # An empty continuation has probability 1.
    for index in {*range(len(examples))} - {*scored}:
      yield index, Score(0.0, is_greedy=True)

  def continuations(
    self, prompts: Sequence[tuple[str, Mapping[str, object]]]
  ) -> Iterator[tuple[int, str]]:
    """Yields each prompt's index and continuation, in any order.

    `prompts` are (text, generation_kwargs) pairs. If equal pairs ask for
    sampling, each gets a separate sample. Too long texts lose their start.
    """
    by_settings = collections.defaultdict(lambda: collections.defaultdict(list))
    length = self._config.model.text_length
    for index, (text, gen_kwargs) in enumerate(prompts):
      asked = read_generation(gen_kwargs, self._config.decode, length)
      by_settings[asked][text].append(index)
    for asked, places in by_settings.items():
      if asked.max_tokens < asked.asked_tokens:
        _logger.warning(
          f"a task asks for {asked.asked_tokens} tokens, as many as "
          f"{self._config.model.text_room} or more; texts end after "
          f"{asked.max_tokens}"
        )
      yield from self._continue(asked, places)

  def _continue(
    self, asked: Generation, places: Mapping[str, Sequence[int]]
  ) -> Iterator[tuple[int, str]]:
    from palm_mtf.generation.inference.generator import Generator

    decode = asked.decode
    if not decode.is_greedy:
      most = max(map(len, places.values()))
      decode = dataclasses.replace(decode, num_samples=most)
    generator = Generator(
      self._loaded,
      self._vocabulary,
      decode,
      sample_tokens=asked.max_tokens,
      seed=self._config.run.seed,
      start_id=prompt_start(self._config.data, self._vocabulary),
    )
    room = self._config.model.text_length - asked.max_tokens
    ids = self._vocabulary.encode_batch(list(places))
    # Sort prompts by length, so that batches have little padding.
    ordered = sorted(
      zip(ids, places.values(), strict=True), key=lambda pair: len(pair[0])
    )
    found = generator.continue_tokens([x[-room:] for x, _ in ordered])
    for (_, wanted), samples in zip(ordered, found, strict=True):
      for index, sample in zip(wanted, itertools.cycle(samples)):
        yield index, sample.text
