# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Generates continuations of prompts, up to [eod] or STOP_STRINGS."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from palm_mtf.config import DecodeConfig
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.generation.decode.prompt_batch import PromptBatch
from palm_mtf.generation.inference.continuation import (
  Continuation,
  ContinuationReader,
  make_sampling_key,
)
from palm_mtf.retrieval.passages import Passages

if TYPE_CHECKING:  # at run time, this import would load TensorFlow
  from palm_mtf.generation.inference.kept_decoder import (
    KeptDecoder,
    KeptProgram,
  )
  from palm_mtf.generation.inference.sessions import LoadedDecoder
  from palm_mtf.runtime.program import Program

# The maximum number of rows per batch. With this many rows, reading the weights
# costs little compared with the arithmetic.
_MOST_ROWS = 64
# Number of steps after which new tokens are fetched from the devices. After a
# stop string, up to 16 steps are wasted, and a stream shows 4 tokens at a time,
# but fetching after each step would take longer.
_TOKENS_TO_STOP, _TOKENS_TO_SHOW = 16, 4
# The reader of a continuation's tokens, and the continuation so far.
_Row = tuple[ContinuationReader, Continuation]


class Generator:
  """Continues prompts with the weights of one checkpoint."""

  def __init__(
    self,
    loaded: "LoadedDecoder | KeptDecoder",
    vocabulary: Vocabulary,
    decode: DecodeConfig,
    *,
    sample_tokens: int,
    seed: int,
    start_id: int | None = 0,
    passages: Passages | None = None,
  ):
    """Takes the weights; a graph per shape of batch is built at its first use.

    Args:
      loaded: weights in `decode.weight_dtype`.
      sample_tokens: maximum number of tokens in a continuation.
      start_id: token before each prompt, from packing.prompt_start.
      passages: those that RETRIEVE asks to put before texts of prompts.
    """
    self._loaded, self._client = loaded, loaded.client
    self._vocabulary, self._decode = vocabulary, decode
    self._sample_tokens, self._seed = sample_tokens, seed
    self._start_id, self._passages = start_id, passages

  @property
  def activation_dtype(self) -> str:
    """The model's ACTIVATION_DTYPE, such as "float32"."""
    return self._loaded.config.activation_dtype

  def continuations(
    self, prompts: Sequence[str]
  ) -> Iterator[list[Continuation]]:
    """Yields a list of continuations per prompt, in the order of `prompts`.

    Each prompt must leave room for SAMPLE_TOKENS, as `check_prompts` checks.
    """
    prompts = [*map(self.put_passages, prompts)]
    return self.continue_tokens(self._vocabulary.encode_batch(prompts))

  def continue_tokens(
    self, prompts: Sequence[Sequence[int]], *, are_inputs: bool = False
  ) -> Iterator[list[Continuation]]:
    """Yields a list of continuations per prompt, in the order of `prompts`.

    Args:
      prompts: token ids without the start token; each leaves room for
        SAMPLE_TOKENS.
      are_inputs: whether each prompt is the inputs of an example, so that its
        continuation is a target. Training encodes targets as separate texts,
        with a space before each; the decoded continuation lacks this space.
    """
    slices = self._loaded.num_slices
    # Without stop strings, fetch the tokens only once, at the end.
    has_stops = bool(self._decode.stop_strings)
    step = _TOKENS_TO_STOP if has_stops else self._sample_tokens
    most = max(_MOST_ROWS // self._decode.rows_per_prompt, 1)
    size = -(-min(len(prompts), most) // slices) * slices
    for first in range(0, len(prompts), size):
      some = prompts[first : first + size]
      rows = []
      for rows in self._continue_batch(
        some, size, step, self._start_id, are_inputs=are_inputs
      ):
        if all(found.ended for row in rows for _, found in row):
          break
      yield from ([found for _, found in row] for row in rows)

  def put_passages(
    self, text: str, encode: Callable[[str], Sequence[int]] | None = None
  ) -> str:
    """Returns a text with the passages before it that RETRIEVE asks for.

    `encode` returns all tokens that the model would read for a text.
    """
    most = self._loaded.config.text_length - self._sample_tokens
    encode = encode or self._vocabulary.encode
    if not self._passages:
      return text
    return self._passages.put_before(text, lambda x: len(encode(x)) <= most)

  def stream(self, prompt: str) -> Iterator[str]:
    """Yields the text of a prompt's only continuation, piece by piece."""
    prompt = self.put_passages(prompt)
    return self._stream(self._start_id, self._vocabulary.encode(prompt))

  def stream_tokens(self, prompt: Sequence[int]) -> Iterator[str]:
    """Yields the text of the only continuation of a prompt, piece by piece.

    `prompt` has all tokens that the model reads, the start token included.
    """
    has_start = self._vocabulary.is_control(prompt[0])
    return self._stream(
      prompt[0] if has_start else None, prompt[int(has_start) :]
    )

  def _stream(self, start_id: int | None, ids: Sequence[int]) -> Iterator[str]:
    shown = 0
    for (((reader, found),),) in self._continue_batch(
      [ids], self._loaded.num_slices, _TOKENS_TO_SHOW, start_id
    ):
      text = found.text if found.ended else reader.sure_text()
      yield text[shown:]
      shown = max(shown, len(text))
      if found.ended:
        return

  def _continue_batch(
    self,
    prompts: Sequence[Sequence[int]],
    size: int,
    step: int,
    start_id: int | None,
    *,
    are_inputs: bool = False,
  ) -> Iterator[list[list[_Row]]]:
    # Yields each prompt's continuations after every `step` tokens and at the
    # end. Copies of the first prompt pad the batch to `size` prompts. A copy
    # ends at the same step as the first prompt, so that padding never makes
    # decoding longer.
    filled = [*prompts, *[prompts[0]] * (size - len(prompts))]
    first = [] if start_id is None else [start_id]
    virtual = [0] * self._loaded.num_virtual  # nothing reads these ids
    tokens = [
      [*virtual, *([*first, *ids] or [self._vocabulary.eod_id])]
      for ids in filled
    ]
    lengths = [len(each) for each in tokens]
    # The first run of a program compiles the program. Pad prompts to a power of
    # two, so that few programs serve all lengths.
    most = self._loaded.config.sequence_length - self._sample_tokens + 1
    programs = self._loaded.build_texts(
      self._decode,
      PromptBatch(
        num_prompts=size,
        prompt_tokens=min(1 << (max(lengths) - 1).bit_length(), most),
        max_tokens=self._sample_tokens,
        num_tokens=self._vocabulary.size,
        end_ids=self._vocabulary.end_ids,
        num_before=len(virtual) + len(first),
      ),
    )
    client = self._client
    inputs = np.zeros(programs.start.inputs["prompts"].shape, np.int32)
    for row, ids in enumerate(tokens):
      inputs[row, : len(ids)] = ids
    samples = range(self._decode.rows_per_prompt)
    keys = [
      [make_sampling_key(self._seed, i, text) for i in samples]
      for text in map(self._vocabulary.decode, filled)
    ]
    client.call(
      programs.start, {"prompts": inputs, "lengths": lengths, "keys": keys}
    )
    # Targets are encoded as separate texts, so decode them without the inputs.
    before = [()] * len(prompts) if are_inputs else prompts
    stops = self._decode.stop_strings
    readers: list[list[ContinuationReader]] = []
    for limit in range(step, self._sample_tokens + step, step):
      limit = min(limit, self._sample_tokens)
      client.call(programs.advance, {"limit": limit})
      if not readers or self._decode.num_beams > 1:
        # In a beam search another continuation may be the best now, so begin
        # with new readers.
        readers = [
          [
            ContinuationReader(self._vocabulary, stops, ids)
            for _ in range(self._decode.num_samples)
          ]
          for ids in before
        ]
      yield self._read(programs.read, readers)

  def _read(
    self,
    program: "Program | KeptProgram",
    readers: Sequence[Sequence[ContinuationReader]],
  ) -> list[list[_Row]]:
    values = self._client.call(program)
    tokens, scores = values["tokens"], values.get("scores")
    is_last = values["num_done"] == self._sample_tokens
    if scores is None:
      tokens = tokens[:, :, : values["num_done"]]
    rows = []
    for prompt, some in enumerate(readers):
      rows.append([])
      # A beam search has one reader, for its best continuation.
      for number, reader in enumerate(some):
        reader.add(tokens[prompt, number, len(reader.ids) :].tolist())
        found = reader.continuation(
          is_last or bool(values["is_over"][prompt, number]),
          None if scores is None else float(scores[prompt, number]),
        )
        rows[-1].append((reader, found))
    return rows
