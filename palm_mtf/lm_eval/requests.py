# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests of the harness in our terms."""

import dataclasses
import math
from collections.abc import Mapping

from palm_mtf.config import DecodeConfig
from palm_mtf.errors import UserError

_DEFAULT_MAX_TOKENS = 256  # of the harness
# The first that is given counts, as in the harness.
_MAX_TOKENS = (
  "max_gen_toks",
  "max_new_tokens",
  "max_tokens",
  "max_completion_tokens",
)
_KNOWN = {*_MAX_TOKENS, "until", "do_sample", "temperature", "top_k", "top_p"}


def split_pair(context: str, continuation: str) -> tuple[str, str]:
  """Moves spaces that end a context into the continuation, as the harness does.

  A vocabulary may have " word" as one piece, which training saw.
  """
  kept = context.rstrip()
  return kept, context[len(kept) :] + continuation


@dataclasses.dataclass(frozen=True)
class Generation:
  """How a prompt is continued.

  Attributes:
    decode: settings of sampling, with the strings that end a text.
    max_tokens: tokens at most.
    asked_tokens: tokens that the task asks for.
  """

  decode: DecodeConfig
  max_tokens: int
  asked_tokens: int


def generation(
  gen_kwargs: Mapping[str, object], decode: DecodeConfig, length: int
) -> Generation:
  """Returns the settings that a task asks for.

  Args:
    gen_kwargs: generation_kwargs of a task.
    decode: settings of the run, of which WEIGHT_DTYPE is kept.
    length: SEQUENCE_LENGTH: half of it is the most where a task asks for all.

  Raises:
    UserError: a keyword is unknown here.
  """
  given = {x: y for x, y in gen_kwargs.items() if y is not None}
  if given.get("num_beams", 1) == 1:
    given.pop("num_beams", None)
  if unknown := sorted(given.keys() - _KNOWN):
    raise UserError(
      f"generation_kwargs have {', '.join(unknown)}; palm_mtf knows "
      f"{', '.join(sorted(_KNOWN))}."
    )
  until = given.get("until", [])
  until = [until] if isinstance(until, str) else until
  # Without do_sample a temperature asks for it, and 0 is greedy.
  samples = given.get("do_sample", bool(given.get("temperature")))
  numbers = {
    "temperature": float(given.get("temperature", 1.0)) if samples else 0.0
  }
  if samples:
    numbers |= {x: given[x] for x in ("top_k", "top_p") if x in given}
  asked, *_ = [
    *(given[x] for x in _MAX_TOKENS if x in given),
    _DEFAULT_MAX_TOKENS,
  ]
  return Generation(
    DecodeConfig(
      weight_dtype=decode.weight_dtype,
      stop_strings=[each for each in until if each],
      **numbers,
    ),
    max_tokens=int(asked) if asked < length else math.ceil(length / 2),
    asked_tokens=int(asked),
  )
