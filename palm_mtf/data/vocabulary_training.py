# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a SentencePiece vocabulary on a bounded sample of the documents.

SentencePiece needs its training text in memory, and soon gains nothing from
more of it. So the documents are cut into chunks, and those with the smallest
hashes are kept, as many as fit: a sample that is spread over all documents,
needs bounded memory and one pass, and does not depend on their order. The same
documents give the same model, byte for byte.

The pieces are merged pairs ("bpe"), because on source code they beat
SentencePiece's other kind, "unigram": more bytes per token, and training in a
second instead of half a minute. PaLM does not say which kind it used. The ids
are listed in vocabulary.py.
"""

import hashlib
import heapq
import io
import re
from collections.abc import Iterable, Iterator

import sentencepiece

from palm_mtf.disk import write_atomically
from palm_mtf.errors import UserError

_SAMPLE_CHARACTERS_PER_PIECE = 4096
_MIN_SAMPLE_CHARACTERS = 8 << 20
_MAX_SAMPLE_CHARACTERS = 64 << 20  # SentencePiece then needs about 1 GB
_CHUNK_CHARACTERS = 4096
# SentencePiece's own marks for a space and for an unknown character: it leaves
# out every chunk with the second, and would count the first as a space.
_RESERVED_CHARACTERS = re.compile("[\u2581\u2585]")


def train_vocabulary(
  documents: Iterable[str], vocab_size: int, *, path: str
) -> None:
  """Writes to `path` a vocabulary of `vocab_size` pieces learnt from texts.

  Raises:
    UserError: the documents have no text, or are too little or too varied for
      `vocab_size`, or `path` cannot be written.
  """
  sample = sample_text(
    documents,
    min(
      max(_MIN_SAMPLE_CHARACTERS, _SAMPLE_CHARACTERS_PER_PIECE * vocab_size),
      _MAX_SAMPLE_CHARACTERS,
    ),
  )
  sentences = [
    part
    for chunk in sample
    for part in _RESERVED_CHARACTERS.split(chunk)
    if part
  ]
  if not sentences:
    raise UserError(
      "TEXT_FILES: no training document to learn a vocabulary from; give more "
      "files, or lower VALIDATION_SHARE."
    )
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(sentences),
      model_writer=model,
      model_type="bpe",
      vocab_size=vocab_size,
      # Lossless (PaLM 2): no normalization, all white space, bytes for rare
      # characters, single digits.
      normalization_rule_name="identity",
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      allow_whitespace_only_pieces=True,
      byte_fallback=True,
      split_digits=True,
      pad_id=0,
      eos_id=1,
      eos_piece="[eod]",
      unk_id=2,
      bos_id=-1,
      max_sentence_length=4 * _CHUNK_CHARACTERS,  # a character has 4 bytes
      num_threads=1,  # the model file names it, so it may not follow the cores
      minloglevel=2,
    )
  except RuntimeError as error:
    raise UserError(_explain_failure(vocab_size, str(error))) from None
  write_atomically(path, model.getvalue())


def sample_text(documents: Iterable[str], max_characters: int) -> list[str]:
  """Returns chunks of the documents that hold `max_characters` at most.

  The chunks are those of smallest hash, in the order of their hashes: they are
  the same in whichever order the documents come.
  """
  kept = []  # a heap of (-hash, chunk): the largest hash comes first
  num_characters = 0
  limit = 1 << 64  # chunks from this hash on do not fit
  for document in documents:
    for chunk in cut_text(document, _CHUNK_CHARACTERS):
      digest = hashlib.blake2b(chunk.encode(), digest_size=8).digest()
      key = int.from_bytes(digest, "little")
      if key >= limit:
        continue
      heapq.heappush(kept, (-key, chunk))
      num_characters += len(chunk)
      while num_characters > max_characters:
        key, chunk = heapq.heappop(kept)
        num_characters -= len(chunk)
        limit = min(limit, -key)
  return [chunk for _, chunk in sorted(kept, reverse=True)]


def cut_text(text: str, max_characters: int) -> Iterator[str]:
  """Yields `text` in parts of at most `max_characters`, whole lines if it can.

  A text that fits is one part; the parts joined are the text.
  """
  start = 0
  while start < len(text):
    end = start + max_characters
    if end < len(text):
      end = text.rfind("\n", start, end) + 1 or end
    yield text[start:end]
    start = end


def _explain_failure(vocab_size: int, message: str) -> str:
  """Returns the one line that says what SentencePiece's failure asks for."""
  what = f"VOCAB_SIZE = {vocab_size}"
  if at_most := re.search(r"set it to a value <= (\d+)", message):
    return (
      f"{what}: too high, the training text supports at most "
      f"{at_most[1]} pieces; set VOCAB_SIZE = {at_most[1]} or less, or give "
      "more text."
    )
  if at_least := re.search(r"required_chars\. \d+ vs (\d+)", message):
    return (
      f"{what}: too low, the control and byte pieces and the text's frequent "
      f"characters alone are {at_least[1]}; set VOCAB_SIZE = {at_least[1]} or "
      "more."
    )
  return f"{what}: SentencePiece cannot train a vocabulary: {message.strip()}"
