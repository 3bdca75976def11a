# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts: read from a file, and checked for room in SEQUENCE_LENGTH."""

import json
import logging
import os
from collections.abc import Sequence

from palm_mtf.config.model import PalmConfig
from palm_mtf.config.run import RunConfig
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)

_FIELD = "prompt"


def check_prompts(
  prompts: Sequence[str],
  vocabulary: Vocabulary,
  model: PalmConfig,
  run: RunConfig,
  origin: str = "PROMPTS",
) -> None:
  """Raises UserError unless each prompt leaves room for its continuation.

  Args:
    prompts: texts to continue.
    vocabulary: vocabulary of the model.
    model: the architecture, of which sequence_length is read.
    run: settings of the run, of which sample_tokens is read.
    origin: name of the prompts in the message.
  """
  tokens = vocabulary.encode_batch(prompts)
  for prompt, ids in zip(prompts, tokens, strict=True):
    if len(ids) + run.sample_tokens > model.sequence_length:
      raise UserError(
        f"{origin}: {prompt[:40]!r} is {len(ids):,} tokens and SAMPLE_TOKENS "
        f"= {run.sample_tokens:,}, together more than SEQUENCE_LENGTH = "
        f"{model.sequence_length:,}: shorten one of them."
      )


def warn_of_spaces(
  prompts: Sequence[str], vocabulary: Vocabulary, origin: str = "PROMPTS"
) -> None:
  """Warns of prompts that end in the space before a word.

  Args:
    prompts: texts to continue.
    vocabulary: vocabulary of the model.
    origin: name of the prompts in the message.
  """
  for prompt in prompts:
    # Such a vocabulary has " word" as one token: training has never seen the
    # space alone.
    if prompt.endswith(" ") and vocabulary.joins_spaces():
      _logger.warning(
        f"{origin}: {prompt[-40:]!r} ends in a space, with which this "
        "vocabulary begins a word: leave it out, or a word may not follow"
      )


def check_room(model: PalmConfig, run: RunConfig) -> None:
  """Raises UserError unless there may be prompts at all."""
  if run.sample_tokens >= model.sequence_length:
    raise UserError(
      f"SAMPLE_TOKENS = {run.sample_tokens}: leaves no room for a prompt in "
      f"SEQUENCE_LENGTH = {model.sequence_length}; give a number below that."
    )


def with_start(ids: Sequence[int], start_id: int) -> list[int]:
  """Returns the tokens that the model reads of a prompt that is given as ids.

  These begin with the start token, once: ids of a tokenizer that adds the start
  token, as an exported one does, have it already. A text never has it: a text
  that says "[eod]" has the ids of its characters.

  Args:
    ids: token ids of a prompt.
    start_id: token that stood before each document in training
      (packing.document_start).
  """
  return [*ids] if [*ids[:1]] == [start_id] else [start_id, *ids]


def read_prompts(path: str) -> list[str]:
  """Returns the prompts of a file, one a line.

  Args:
    path: path of a text file, or of JSON lines, .jsonl, each an object with
      the field "prompt".

  Raises:
    UserError: the file cannot be read, is empty, or a line is no prompt.
  """
  # In JSON a prompt may have several lines.
  what = f"--input = {path!r}"
  lines = split_lines(read_input(path, "write one prompt a line"))
  is_json = path.endswith(".jsonl")
  prompts = []
  for number, line in enumerate(lines, 1):
    prompt = _json_prompt(line, what, number) if is_json else line
    if not prompt:
      raise UserError(
        f"{what}: line {number} is empty; there has to be a text to continue."
      )
    prompts.append(prompt)
  return prompts


def _json_prompt(line: str, what: str, number: int) -> str:
  try:
    prompt = json.loads(line)[_FIELD]
  except (ValueError, RecursionError, TypeError, KeyError):
    prompt = None
  if not isinstance(prompt, str):
    raise UserError(
      f"{what}: line {number} is no JSON object with a text under "
      f'"{_FIELD}"; write {{"{_FIELD}": "..."}}.'
    )
  return prompt


def split_lines(content: str) -> list[str]:
  """Returns the lines of a file's text, without their ends."""
  # Lines end in a newline alone, not in what Unicode calls a line separator: a
  # text may hold those.
  lines = content.removesuffix("\n").split("\n")
  return [line.removesuffix("\r") for line in lines]


def read_input(path: str, what_is_needed: str, setting: str = "--input") -> str:
  """Returns a file's text, line ends as they are.

  Args:
    path: path of a UTF-8 file.
    what_is_needed: advice for an empty file, "write one prompt a line".
    setting: setting that names the file, for messages.

  Raises:
    UserError: the file cannot be read, or is empty.
  """
  what = f"{setting} = {path!r}"
  # newline="" keeps line ends: they are part of a document that is scored.
  try:
    with open(os.path.expanduser(path), encoding="utf-8", newline="") as file:
      content = file.read()
  except UnicodeDecodeError:
    raise UserError(f"{what}: is no UTF-8 text; convert it.") from None
  except OSError as error:
    raise UserError(f"{what}: {error.strerror}; give a text file.") from None
  if not content:
    raise UserError(f"{what}: is empty; {what_is_needed}.")
  return content
