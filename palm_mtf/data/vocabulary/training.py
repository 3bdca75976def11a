# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a SentencePiece vocabulary on a bounded sample of the documents.

The same documents, in any order, give the same model, byte for byte.
"""

import collections
import contextlib
import hashlib
import heapq
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sentencepiece

from palm_mtf.config import DataConfig
from palm_mtf.console import progress_bar
from palm_mtf.data.filters.filtered_source import open_filtered
from palm_mtf.data.sources.conversation import MESSAGES, PAIRS
from palm_mtf.data.sources.document import (
  TRAIN,
  Source,
  cut_text,
  read_with_progress,
)
from palm_mtf.data.vocabulary.chat import check_template
from palm_mtf.errors import UserError, check_count
from palm_mtf.model_dir.atomic_files import write_atomically

_logger = logging.getLogger(__name__)

MIN_VOCAB_SIZE = 270  # control pieces, bytes, digits, and one learned piece

_SAMPLE_CHARACTERS_PER_PIECE = 4096
_MIN_SAMPLE_CHARACTERS = 8 << 20
_MAX_SAMPLE_CHARACTERS = 64 << 20
# Limits the characters of the sample's distinct words, so that training needs
# less than 4 GB of host memory: up to 150 bytes per such character, and 1.2 GB
# for 256,000 pieces. In 64M characters of Python code, distinct words have 18M;
# in prose fewer, and in Chinese far more: a line without spaces is one word.
_MAX_WORD_CHARACTERS = 16 << 20
_CHUNK_CHARACTERS = 4096
# Splits chunks into sentences. Drops U+2581 and U+2585: SentencePiece would
# count U+2581 as a space, and skip a sentence with U+2585. Makes a sentence of
# each non-ASCII digit, because SentencePiece separates only ASCII digits.
_CUTS = re.compile("[\u2581\u2585]|([^\\D0-9])")
_SETTINGS = {
  # On source code, "bpe" has more bytes per token than "unigram", and trains in
  # about 1 s instead of 30 s. The PaLM paper does not say which type PaLM uses.
  "model_type": "bpe",
  # Lossless as in PaLM (section 2): no normalization, all white space kept,
  # bytes for rare characters, single digits.
  "normalization_rule_name": "identity",
  "add_dummy_prefix": False,
  "remove_extra_whitespaces": False,
  "allow_whitespace_only_pieces": True,
  "byte_fallback": True,
  "split_digits": True,
  "required_chars": "0123456789",  # become pieces even if they are rare
  "pad_id": 0,
  "eos_id": 1,
  "eos_piece": "[eod]",
  "unk_id": 2,
  "bos_id": -1,
  # In bytes, up to 4 per character. SentencePiece skips longer sentences.
  "max_sentence_length": 4 * _CHUNK_CHARACTERS,
  # Constant, so that the model file, which holds this number, is reproducible.
  "num_threads": 1,
}


def train_on_run(
  model_dir: str, data: DataConfig, vocab_size: int, *, path: str
) -> None:
  """Writes a vocabulary to `path`, learned from a run's training documents.

  The vocabulary has `vocab_size` pieces less the EXTRA_IDS of `data`. Raises
  UserError as `train_vocabulary` does, or if the documents need another one.
  """
  sources = open_filtered(model_dir, data)
  for source in sources:
    source.check_vocabulary(None)
    if source.form in (MESSAGES, PAIRS):
      check_template(os.path.dirname(path), source.name)
  _logger.info(f"training a vocabulary of {vocab_size:,} pieces: {path}")
  train_vocabulary(
    training_texts(sources), vocab_size - data.extra_ids, path=path
  )


def training_texts(sources: Iterable[Source]) -> Iterator[str]:
  """Yields texts and inputs of training documents, but skips token ids."""
  for source in sources:
    for split, document in read_with_progress(source, "Reading"):
      if split == TRAIN:
        for text in (document.inputs, document.text):
          if isinstance(text, str):
            yield text


def train_vocabulary(
  documents: Iterable[str], vocab_size: int, *, path: str
) -> None:
  """Writes a vocabulary of `vocab_size` pieces, learned from texts, to `path`.

  Raises UserError if `vocab_size` does not fit the text, the training was
  killed, or `path` cannot be written.
  """
  sample = training_sample(documents, vocab_size)
  # Do not replace an existing file, because another command may have trained
  # this vocabulary in the meantime and be using it.
  write_atomically(path, learn_model(sample, vocab_size), replaces=False)


def training_sample(
  documents: Iterable[str], vocab_size: int, num_characters: int | None = None
) -> list[str]:
  """Returns a sample of texts from which to learn `vocab_size` pieces.

  The sample has at most `num_characters` characters. If None, training on the
  sample takes a minute or two, and at most 4 GB of host memory.
  """
  if num_characters is not None:
    return sample_text(documents, num_characters)
  wanted = _SAMPLE_CHARACTERS_PER_PIECE * vocab_size
  most = min(max(_MIN_SAMPLE_CHARACTERS, wanted), _MAX_SAMPLE_CHARACTERS)
  return limit_words(sample_text(documents, most), _MAX_WORD_CHARACTERS)


def limit_words(sample: Sequence[str], max_characters: int) -> list[str]:
  """Returns the first chunks of `sample`, to limit SentencePiece's memory.

  Their distinct words have at most `max_characters` characters in all. The
  first chunk is returned even if its words have more.
  """
  words: set[str] = set()
  num_characters = 0
  for number, chunk in enumerate(sample):
    new = set(chunk.split(" ")) - words  # SentencePiece splits words at spaces
    num_characters += sum(map(len, new))
    if number and num_characters > max_characters:
      return list(sample[:number])
    words |= new
  return list(sample)


def learn_model(
  sample: Sequence[str], vocab_size: int, *, size_setting: str = "VOCAB_SIZE"
) -> bytes:
  """Returns a SentencePiece model of `vocab_size` pieces, as a file's bytes.

  `size_setting` is the setting that holds `vocab_size`, for messages.

  Raises UserError if there is no text, or `vocab_size` does not fit the text.
  """
  check_count(size_setting, vocab_size, MIN_VOCAB_SIZE)
  sentences = [part for chunk in sample for part in _CUTS.split(chunk) if part]
  if not sentences:
    raise UserError(
      "no training document to learn a vocabulary from; give more files, or "
      "hold out fewer (VALIDATION_SHARE)."
    )
  try:
    with progress_bar(
      "Learning pieces", vocab_size, counted="pieces"
    ) as advance:
      return train_sentencepiece(
        sentences, _SETTINGS | {"vocab_size": vocab_size}, on_progress=advance
      )
  except RefusedError as error:
    raise UserError(
      _explain_refusal(size_setting, vocab_size, str(error))
    ) from None


def list_pieces(model: bytes) -> str:
  """Returns a readable list of a model's pieces: lines of "piece<tab>score"."""
  # As in SentencePiece's .vocab file, but with Python's escapes for backslashes
  # and for characters that would break the line.
  processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  lines = ""
  for i in range(processor.GetPieceSize()):
    for c in processor.IdToPiece(i):
      is_shown = c.isprintable() and c != "\\"
      lines += c if is_shown else c.encode("unicode_escape").decode()
    lines += f"\t{processor.GetScore(i):g}\n"
  return lines


def sample_text(documents: Iterable[str], max_characters: int) -> list[str]:
  """Returns chunks of the documents with at most `max_characters` in all."""
  # Keep the chunks with the smallest hashes, so that the sample does not depend
  # on the order of the documents, and only the sample is in host memory.
  kept = []  # a heap of (-hash, chunk): the largest hash is first
  num_characters = 0
  limit = 1 << 64  # chunks with this hash or a larger hash do not fit
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


def _explain_refusal(setting: str, vocab_size: int, message: str) -> str:
  what = f"{setting} = {vocab_size}"
  if at_most := re.search(r"set it to a value <= (\d+)", message):
    return (
      f"{what}: too high, the training text supports at most "
      f"{at_most[1]} pieces; set {setting} = {at_most[1]} or less, or give "
      "more text."
    )
  if at_least := re.search(r"required_chars\. \d+ vs (\d+)", message):
    return (
      f"{what}: too low, because the control, byte and digit pieces and the "
      f"text's frequent characters are {at_least[1]}; set {setting} = "
      f"{at_least[1]} or more."
    )
  return f"{what}: SentencePiece cannot train a vocabulary: {message}"


# This program cannot import palm_mtf: the new process may not find the package.
_PROGRAM = """
import ctypes, io, os, pickle, signal, sys
# The kernel ends this process when the caller dies, even killed; 1 is
# PR_SET_PDEATHSIG.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
  os._exit(1)
import sentencepiece
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends this process
sentences, settings = pickle.load(sys.stdin.buffer)
model = io.BytesIO()
try:
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(sentences), model_writer=model, **settings
  )
  result = model.getvalue()
except RuntimeError as error:
  result = str(error)
os.close(2)  # the caller reads the log to its end, then the result
pickle.dump(result, sys.stdout.buffer)
"""
_LAST_LINES = 5
# Finds the number of merges in SentencePiece's log (up to 0.2.3), for progress.
_MERGES = re.compile(rb"(?:Merged|Added): .*?\b(?:merges|size)=(\d+)")


class RefusedError(Exception):
  """SentencePiece refused the text or the settings; the message says why."""


def train_sentencepiece(
  sentences: Sequence[str],
  settings: Mapping[str, Any],
  *,
  on_progress: Callable[[int], None],
) -> bytes:
  """Returns the serialized model that SentencePiece learns from `sentences`.

  The trainer runs in a separate process. A native abort or a lack of memory
  then ends only that process, the log can be read during training, and an
  interrupt does not wait for native code.

  Args:
    settings: parameters of SentencePieceTrainer.Train.
    on_progress: function that takes the number of merges since its last call.

  Raises:
    RefusedError: the text does not fit the settings.
    UserError: the process was killed, most often for lack of memory.
  """
  with subprocess.Popen(
    [sys.executable, "-c", _PROGRAM, str(os.getpid())],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:
    try:
      # No deadlock can occur, because only one pipe is in use at a time: the
      # process reads all input, then writes its log, then its result.
      with contextlib.suppress(BrokenPipeError), process.stdin:
        pickle.dump((sentences, dict(settings)), process.stdin)
      last_lines, merges = collections.deque(maxlen=_LAST_LINES), 0
      for line in process.stderr:
        last_lines.append(line)
        if count := _MERGES.search(line):
          on_progress(int(count[1]) - merges)
          merges = int(count[1])
      output = process.stdout.read()
      process.wait()
    finally:
      process.kill()  # has ended, unless an exception stopped the reads
      process.wait()
  if process.returncode < 0:
    raise UserError(
      "the training of the vocabulary was killed (signal "
      f"{-process.returncode}), as it is where memory is short; free some, or "
      "give less text (palm_mtf vocab: --sample_characters)."
    )
  if process.returncode:
    lines = b"".join(last_lines).decode(errors="replace")
    raise RuntimeError(f"SentencePiece's process failed: {lines}")
  result = pickle.loads(output)
  if isinstance(result, str):
    raise RefusedError(result.strip())
  return result
