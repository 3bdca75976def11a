# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars by llguidance; a process that tries them out first.

A grammar is a stranger's: a short one may take hours to compile, or overflow
the stack. Nothing but the end of its process can stop the compilation. So a
process compiles each grammar first, within limits of time and memory.

  stdin   one JSON object per line: first {"tokens": [bytes of each token in
          hexadecimal], "ends": [ids]}, then {"grammar": TEXT}
  stdout  one JSON object per line: {}, or {"error": REASON}
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from palm_mtf.machine.helper_process import HelperError, answer_questions

# llguidance's limits. A grammar that needs more is refused, and a text that
# needs more ends. They bound a mask to 15 ms and a grammar to some 50 MB.
_LIMITS = {
  "max_items_in_row": 2000,
  "initial_lexer_fuel": 1_000_000,
  "step_lexer_fuel": 200_000,
  "step_max_items": 50_000,
  "max_lexer_states": 25_000,
  "max_grammar_size": 100_000,
  "verbose_errors": False,
}
_MOST_BYTES = 2**31  # of address space
_CPU_SECS = 3
_MOST_SHOWN = 200  # characters of an error of llguidance
_LISTING = re.compile(r"^at \d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)
# No UTF-8 has this byte, with which llguidance marks tokens without a text.
NO_TEXT = b"\xff"


def make_tokenizer(tokens: Sequence[bytes], ends: Sequence[int]) -> Any:
  """Returns an llguidance.LLTokenizer; `ends` are ids that end a text."""
  return llguidance.LLTokenizer(
    llguidance.TokenizerWrapper(_Tokens(tokens, ends)), eos_token=[*ends]
  )


class _Tokens:
  """A vocabulary in the form that llguidance reads."""

  bos_token_id = None

  def __init__(self, tokens: Sequence[bytes], ends: Sequence[int]):
    self.tokens, self.eos_token_id = tokens, ends[0]
    self.special_token_ids = [
      i for i, token in enumerate(tokens) if token.startswith(NO_TEXT)
    ]

  def __call__(self, text: bytes) -> list[int]:
    """Would encode a text; grammars without forced tokens need no result."""
    return []


def compile_grammar(tokenizer: Any, text: str) -> Any:
  """Returns an llguidance.LLMatcher before the first token.

  Raises HelperError if the grammar is wrong or exceeds a limit, or no
  text satisfies it.
  """
  limits = llguidance.LLParserLimits(**_LIMITS)
  matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
  matcher.compute_bitmask()
  if matcher.is_error():
    # Leave out the lines of the grammar that follow the reason.
    reason = _LISTING.sub("", matcher.get_error())
    if reason.startswith("NoExtension"):
      reason = "no text satisfies it"
    raise HelperError(" ".join(reason.split())[:_MOST_SHOWN])
  return matcher


def regex_rule(pattern: str) -> str:
  """Returns the right side of a rule for texts that a pattern matches."""
  return f"/{llguidance.regex_to_lark(pattern)}/"


class _Process:
  """Makes the tokenizer in the first request; later requests use it."""

  def __init__(self) -> None:
    self._tokenizer: Any = None

  def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
    if self._tokenizer is None:
      tokens = [*map(bytes.fromhex, asked["tokens"])]
      self._tokenizer = make_tokenizer(tokens, asked["ends"])
      return {}
    compile_grammar(self._tokenizer, asked["grammar"])
    return {}


def main() -> None:
  """Compiles the grammar of each line of stdin, until stdin is closed."""
  answer_questions(
    _Process().answer, most_bytes=_MOST_BYTES, cpu_secs=_CPU_SECS
  )


if __name__ == "__main__":
  main()
