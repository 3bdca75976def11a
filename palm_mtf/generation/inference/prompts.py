# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads, checks and continues prompts."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.config import Config, ModelConfig, RunConfig
from palm_mtf.data.batches.packing import prompt_start
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.retrieval.passages import Passages
from palm_mtf.user_text import (
  check_text,
  format_of,
  read_json_lines,
  read_lines,
)

if TYPE_CHECKING:  # at run time, these imports would load TensorFlow
  from palm_mtf.generation.inference.constraint import Grammar
  from palm_mtf.generation.inference.generator import Generator
  from palm_mtf.generation.inference.kept_decoder import KeptDecoder

_logger = logging.getLogger(__name__)

_FIELD = "prompt"
_NEEDED = "write one prompt per line"
_FORM = f'write {{"{_FIELD}": "..."}}'


def check_prompts(
  prompts: Sequence[str],
  vocabulary: Vocabulary,
  model: ModelConfig,
  run: RunConfig,
  origin: str = "PROMPTS",
) -> None:
  """Raises UserError if a prompt leaves no room for SAMPLE_TOKENS tokens."""
  tokens = vocabulary.encode_batch(prompts)
  for prompt, ids in zip(prompts, tokens, strict=True):
    if len(ids) + run.sample_tokens > model.text_length:
      raise UserError(
        f"{origin}: {prompt[:40]!r} is {len(ids):,} tokens and SAMPLE_TOKENS "
        f"= {run.sample_tokens:,}, together more than {model.text_room}: "
        "shorten one of them."
      )


def warn_of_spaces(
  prompts: Sequence[str], vocabulary: Vocabulary, origin: str = "PROMPTS"
) -> None:
  """Warns if a prompt ends in a space that belongs to the next word's token."""
  for prompt in prompts:
    # If a vocabulary has tokens such as " word", training has never shown a
    # word after a token that ends in a space.
    if prompt.endswith(" ") and vocabulary.joins_spaces():
      _logger.warning(
        f"{origin}: {prompt[-40:]!r} ends in a space, which this vocabulary "
        "keeps at the start of the next word: leave it out, because otherwise "
        "no word may follow"
      )


def check_room(model: ModelConfig, run: RunConfig) -> None:
  """Raises UserError unless SAMPLE_TOKENS leaves room for a prompt."""
  if run.sample_tokens >= model.text_length:
    raise UserError(
      f"SAMPLE_TOKENS = {run.sample_tokens}: leaves no room for a prompt in "
      f"{model.text_room}; give a number below that."
    )


def add_start(
  ids: Sequence[int], start_id: int | None, eod_id: int
) -> list[int]:
  """Returns the tokens that the model reads for a prompt; at least one.

  Ids from an exported tokenizer already begin with the start token `start_id`,
  from packing.prompt_start. Ids of a text never contain this token, because
  even the text "[eod]" has other ids. If there is no start token, [eod] stands
  for a prompt without tokens.
  """
  if start_id is None:
    return [*ids] or [eod_id]
  return [*ids] if [*ids[:1]] == [start_id] else [start_id, *ids]


def read_prompts(path: str) -> list[str]:
  """Returns the prompts of a file, one per line.

  The path is of a text file, or of a .jsonl file, in which each line is an
  object with the field "prompt"; "-" is stdin.

  Raises UserError if the file cannot be read, is empty, or a line is no prompt.
  """
  prompts, what = [], f"--input = {path!r}"
  if format_of(path) == ".jsonl":  # each prompt may have line breaks
    found = _read_json_prompts(path, what)
  else:
    found = read_lines(path, what, _NEEDED)
  for _, where, prompt in found:
    if not prompt:
      raise UserError(f"{where} is empty; there has to be a text to continue.")
    prompts.append(prompt)
  return prompts


def _read_json_prompts(path: str, what: str) -> Iterator[tuple[int, str, str]]:
  lines = read_json_lines(path, what, _FORM, needed=_NEEDED)
  for number, where, fields in lines:
    if _FIELD not in fields:
      raise UserError(
        f"{where}: no field {_FIELD!r}{did_you_mean(_FIELD, fields)}; {_FORM}."
      )
    where = f"{where}: {_FIELD!r}"
    yield number, where, check_text(fields[_FIELD], where, _FORM)


def continue_prompts(
  checkpoint: Checkpoint, config: Config, vocabulary: Vocabulary
) -> list[str]:
  """Returns one continuation for each of PROMPTS."""
  prompts = config.run.prompts
  # Without prompts, do not even import TensorFlow.
  if not prompts:
    return []
  with open_generator(checkpoint, config, vocabulary) as loaded:
    return [each.text for (each,) in loaded.continuations(prompts)]


@contextlib.contextmanager
def open_generator(
  checkpoint: Checkpoint,
  config: Config,
  vocabulary: Vocabulary,
  grammar: "Grammar | None" = None,
  kept: "KeptDecoder | None" = None,
) -> Iterator["Generator"]:
  """Loads a checkpoint for decoding, and frees it after the `with` body.

  `grammar` is the form of the continuations; None for any text. `kept` is a
  decoder that the caller has opened, and closes.

  The caller has resolved ACTIVATION_DTYPE = "auto", and has checked that the
  checkpoint has the weights of `config.model`.
  """
  from palm_mtf.generation.inference.generator import Generator

  passages = Passages(config.decode) if config.decode.retrieve else None
  make: Callable[..., Generator] = Generator
  with contextlib.ExitStack() as stack:
    loaded: Any = kept
    if not kept:
      from palm_mtf.generation.inference.sessions import LoadedDecoder

      loaded = stack.enter_context(
        LoadedDecoder.of_run(checkpoint, config, for_steps=True)
      )
    if grammar:
      from palm_mtf.generation.inference.constrained import ConstrainedGenerator

      make = functools.partial(ConstrainedGenerator, grammar=grammar)
    yield make(
      loaded,
      vocabulary,
      config.decode,
      sample_tokens=config.run.sample_tokens,
      seed=config.run.seed,
      start_id=prompt_start(config.data, vocabulary),
      passages=passages,
    )
