# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Grammars that say which tokens a text may have next."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.generation.decode.slot_program import num_mask_words
from palm_mtf.machine.helper_process import HelperError, HelperProcess

_PROCESS = "palm_mtf.generation.inference.grammar_process"
# To start the process, and to compile a grammar. This is long, because a busy
# machine must not refuse a good grammar. The process's limit of processor time
# stops a bad one.
_MOST_SECS = 60
_MOST_FORCED = 32  # bytes of a draft, because a step reads few tokens
_MOST_KEPT = 16  # compiled grammars, because clients repeat a schema


class Grammar(NamedTuple):
  """The form of an answer."""

  field: str  # the field of the request that asks for the form, for messages
  text: str  # the grammar in llguidance's variant of Lark


class ConstraintError(Exception):
  """A text cannot continue, because its grammar has become too complex."""


class _Compiled:
  """A grammar, compiled for texts without tokens.

  Copies of a matcher share a lexer. It keeps the states that texts needed, and
  refuses more when it has as many as llguidance allows. So from the second text
  on, there is a spare matcher, for texts whose lexer other texts have filled.
  """

  def __init__(self, compile_anew: Callable[[], Any]):
    self._compile_anew, self._most = compile_anew, 1
    self.matchers = [compile_anew()]  # the last one's lexer is the newest

  def take(self) -> Any:
    """Returns the matcher to copy for a new text. Raises HelperError."""
    found = [x for x in self.matchers if not _is_full(x.deep_copy())]
    found += [self._compile_anew() for _ in range(self._most - len(found))]
    self.matchers, self._most = found, 2
    return found[0]


def _is_full(matcher: Any) -> bool:
  matcher.compute_bitmask()
  return bool(matcher.is_error())


class Constraint:
  """The state of a text's grammar after some tokens: it allows the next."""

  def __init__(self, compiled: _Compiled, vocabulary: Vocabulary):
    self._compiled, self._vocabulary = compiled, vocabulary
    self._num_words = num_mask_words(vocabulary.size)
    self._tokens: list[int] = []
    self._copy(compiled.take())

  def _copy(self, source: Any) -> None:
    self._source, self._matcher = source, source.deep_copy()

  def mask(self) -> np.ndarray:
    """Returns a bit per token: whether the text may have it next.

    Bit i % 32 of word i // 32 is that of token i, [words] int32. The ends of a
    text are allowed exactly if the text so far is whole.

    Raises ConstraintError if the grammar's limits are exceeded.
    """
    found, newest = self._read(self._matcher), self._compiled.matchers[-1]
    if found is None and newest is not self._source:
      self._copy(newest)
      self._matcher.consume_tokens(self._tokens)
      found = self._read(self._matcher)
    if found is None:
      raise ConstraintError
    return found

  def _read(self, matcher: Any) -> np.ndarray | None:
    # Returns None if the grammar's limits are exceeded.
    found = np.frombuffer(matcher.compute_bitmask(), np.int32)
    found = found[: self._num_words]  # llguidance may add a word
    return None if matcher.is_error() or not found.any() else found

  def look_ahead(
    self, draft: Sequence[int] | None
  ) -> tuple[Sequence[int], list[np.ndarray]]:
    """Returns a draft's first tokens, the masks before each, and the last mask.

    Leaves out what follows a token that is not allowed or ends the text. Where
    the draft is empty, but not None, drafts the text that must come next.

    Raises ConstraintError as `mask` does.
    """
    found, ahead = [self.mask()], self._matcher.deep_copy()
    if draft is not None and not draft:
      forced = ahead.compute_ff_bytes()[:_MOST_FORCED].decode(errors="ignore")
      draft = self._vocabulary.encode(forced) if forced else ()
    draft = draft or ()
    for token in draft:
      is_allowed = found[-1][token // 32] >> token % 32 & 1
      ahead.consume_token(token)
      mask = self._read(ahead)
      if not is_allowed or token in self._vocabulary.end_ids or mask is None:
        break
      found.append(mask)
    return draft[: len(found) - 1], found

  def accept(self, token: int) -> None:
    """Adds a token, which the mask allows, to the text."""
    self._matcher.consume_token(token)
    self._tokens.append(token)


class Grammars:
  """Compiles grammars for the tokens of a vocabulary."""

  def __init__(self, vocabulary: Vocabulary):
    self._vocabulary = vocabulary
    self._compile = functools.lru_cache(_MOST_KEPT)(self._compile_new)

  def start(self, grammar: Grammar) -> Constraint:
    """Returns the constraint of a text without tokens.

    Raises UserError if the grammar is wrong or too complex, or no text
    satisfies it.
    """
    try:
      return Constraint(self._compile(grammar.text), self._vocabulary)
    except HelperError as error:
      raise UserError(
        f"{grammar.field}: cannot be used: {error}; correct or simplify it."
      ) from None

  def _compile_new(self, text: str) -> _Compiled:
    from palm_mtf.generation.inference.grammar_process import compile_grammar

    tokenizer, process = self._tokenizer
    process.ask({"grammar": text}, _MOST_SECS)
    return _Compiled(lambda: compile_grammar(tokenizer, text))

  @functools.cached_property
  def _tokenizer(self) -> tuple[Any, HelperProcess]:
    from palm_mtf.generation.inference.grammar_process import make_tokenizer

    ends = self._vocabulary.end_ids
    tokens = [*map(self._read_token, range(self._vocabulary.size))]
    first = {"tokens": [x.hex() for x in tokens], "ends": ends}
    process = HelperProcess(_PROCESS, first, _MOST_SECS)
    return make_tokenizer(tokens, ends), process

  def _read_token(self, i: int) -> bytes:
    from palm_mtf.generation.inference.grammar_process import NO_TEXT

    found = b""
    if not self._vocabulary.is_control(i) and i not in self._vocabulary.end_ids:
      found = self._vocabulary.token_bytes(i)
    return found or NO_TEXT + b"<%d>" % i
