# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Both splits of a corpus as flat arrays of token ids on disk.

A store is a folder with train.bin, validation.bin and manifest.json. A .bin
file is the tokens of its split's documents in order, [eod] after each, as
little-endian uint16, or uint32 for more than 65,536 pieces, and nothing else.
The manifest holds the counts and a hash of each array; a store that does not
agree with its manifest is damaged. Reading maps the arrays, so that memory does
not grow with them. tokens.py decides which store a run uses.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np

from palm_mtf.data.documents import Corpus, Document
from palm_mtf.data.progress import progress_bar
from palm_mtf.data.vocabulary import Vocabulary
from palm_mtf.data.vocabulary_training import cut_text
from palm_mtf.disk import new_folder

FORMAT = 1  # of the folder and of the ids in it; a part of a store's name
SPLITS = ("train", "validation")

# A longer document is encoded in parts of whole lines: SentencePiece needs some
# hundred bytes a character, and both cores get their share of a long one.
_PART_CHARACTERS = 1 << 16
_BATCH_CHARACTERS = 1 << 21
_READ_BYTES = 1 << 20


class DamagedStoreError(Exception):
  """A store does not agree with its manifest; the message says where."""


@dataclasses.dataclass(frozen=True)
class Split:
  """The documents of one split, joined.

  Attributes:
    tokens: [num_tokens], uint16 or uint32, mapped from disk, read-only.
    num_documents: documents in it; each ends with one [eod].
    num_bytes: size of their text in UTF-8.
    longest_document_tokens: length of the longest, with its [eod].
    blake2b: hash of `tokens`, in hexadecimal.
  """

  tokens: np.ndarray
  num_documents: int
  num_bytes: int
  longest_document_tokens: int
  blake2b: str

  @property
  def num_tokens(self) -> int:
    """Tokens in the split, [eod] among them."""
    return len(self.tokens)

  @property
  def bytes_per_token(self) -> float:
    """Bytes of text for one token; nats / (this * log 2) = bits per byte."""
    return self.num_bytes / max(1, self.num_tokens)


@dataclasses.dataclass(frozen=True)
class TokenStore:
  """The splits of one corpus in one vocabulary.

  Attributes:
    train: what the model learns.
    validation: what is held out.
    lowest_rank: of any document: a VALIDATION_SHARE above it holds one out.
  """

  train: Split
  validation: Split
  lowest_rank: float

  @property
  def fingerprint(self) -> str:
    """A hash of every token: the same for the same batches."""
    both = self.train.blake2b + self.validation.blake2b
    return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()


class _SplitWriter:
  """Writes documents to one .bin file and counts what goes into it."""

  def __init__(self, file: BinaryIO, dtype: str, eod_id: int):
    self._file = file
    self._digest = hashlib.blake2b(digest_size=16)
    self._dtype = dtype
    self._eod_id = eod_id
    self.counts = {
      "num_tokens": 0,
      "num_documents": 0,
      "num_bytes": 0,
      "longest_document_tokens": 0,
    }

  def add(self, ids: list[int], num_bytes: int) -> None:
    """Appends one document and its [eod]."""
    content = np.array([*ids, self._eod_id], self._dtype).tobytes()
    self._file.write(content)
    self._digest.update(content)
    counts = self.counts
    counts["num_tokens"] += len(ids) + 1
    counts["num_documents"] += 1
    counts["num_bytes"] += num_bytes
    counts["longest_document_tokens"] = max(
      counts["longest_document_tokens"], len(ids) + 1
    )

  def summary(self) -> dict[str, object]:
    """Returns the counts and the hash, for the manifest."""
    return self.counts | {"blake2b": self._digest.hexdigest()}


def write_store(folder: str, corpus: Corpus, vocabulary: Vocabulary) -> None:
  """Encodes every document into a new store at `folder`.

  Raises:
    UserError: the corpus has no text, or the disk is full; nothing is left.
  """
  dtype = "<u2" if vocabulary.size <= 1 << 16 else "<u4"
  lowest_rank = 1.0
  # A token has at least one byte of text, but for one [eod] per document.
  needed_bytes = int(dtype[2]) * (corpus.num_bytes + len(corpus.files))
  with new_folder(folder, needed_bytes) as temporary:
    with contextlib.ExitStack() as stack:
      writers = {}
      for split in SPLITS:
        path = os.path.join(temporary, f"{split}.bin")
        file = stack.enter_context(open(path, "wb"))
        writers[split] = _SplitWriter(file, dtype, vocabulary.eod_id)
      advance = stack.enter_context(
        progress_bar("Encoding text", corpus.num_bytes)
      )
      for document, ids in _encode(corpus, vocabulary):
        split = SPLITS[corpus.is_validation(document)]
        writers[split].add(ids, document.num_bytes)
        lowest_rank = min(lowest_rank, document.rank)
        advance(document.num_bytes)
    manifest = {split: writers[split].summary() for split in SPLITS}
    manifest |= {"dtype": dtype, "lowest_rank": lowest_rank}
    path = os.path.join(temporary, "manifest.json")
    with open(path, "w", encoding="utf-8") as file:
      json.dump(manifest, file, indent=2)


def read_store(folder: str) -> TokenStore:
  """Maps a store after comparing every byte with the manifest's hashes.

  Raises:
    DamagedStoreError: a file is missing, cut short or changed.
  """
  try:
    path = os.path.join(folder, "manifest.json")
    with open(path, encoding="utf-8") as file:
      manifest = json.load(file)
    splits = {
      split: _read_split(
        os.path.join(folder, f"{split}.bin"),
        manifest["dtype"],
        **manifest[split],
      )
      for split in SPLITS
    }
    return TokenStore(**splits, lowest_rank=manifest["lowest_rank"])
  except OSError as error:
    raise DamagedStoreError(f"{error.filename}: {error.strerror}") from None
  except (ValueError, KeyError, TypeError):
    raise DamagedStoreError(f"{path} is no manifest") from None


def _read_split(
  path: str, dtype: str, *, num_tokens: int, blake2b: str, **counts: int
) -> Split:
  digest = hashlib.blake2b(digest_size=16)
  with open(path, "rb") as file:
    while block := file.read(_READ_BYTES):
      digest.update(block)
    size = file.tell()
  expected = num_tokens * np.dtype(dtype).itemsize
  if size != expected:
    raise DamagedStoreError(f"{path} has {size:,} bytes, not {expected:,}")
  if digest.hexdigest() != blake2b:
    raise DamagedStoreError(f"{path} has other content")
  # An empty file cannot be mapped.
  tokens = np.memmap(path, dtype, "r") if num_tokens else np.empty(0, dtype)
  return Split(tokens=tokens, blake2b=blake2b, **counts)


def _encode(
  corpus: Corpus, vocabulary: Vocabulary
) -> Iterator[tuple[Document, list[int]]]:
  """Yields every document with its ids, encoded many at a time."""
  batch, num_characters = [], 0
  for document in corpus:
    batch.append(document)
    num_characters += len(document.text)
    if num_characters >= _BATCH_CHARACTERS:
      yield from _encode_batch(batch, vocabulary)
      batch, num_characters = [], 0
  yield from _encode_batch(batch, vocabulary)


def _encode_batch(
  documents: Iterable[Document], vocabulary: Vocabulary
) -> Iterator[tuple[Document, list[int]]]:
  parts = [list(cut_text(d.text, _PART_CHARACTERS)) for d in documents]
  encoded = iter(
    vocabulary.encode_batch([part for split in parts for part in split])
  )
  for document, split in zip(documents, parts, strict=True):
    yield document, [i for _ in split for i in next(encoded)]
