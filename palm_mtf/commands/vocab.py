# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf vocab` trains a vocabulary, `palm_mtf vocab inspect` shows one."""

# A run for which VOCABULARY is not set trains a vocabulary on its own training
# documents. This command trains a vocabulary for many runs, on --input files.

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from palm_mtf.console import print_results, progress_bar
from palm_mtf.data.sources.document import TRAIN, Document
from palm_mtf.data.sources.text_files import Fields, Settings, TextFiles
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import (
  MIN_VOCAB_SIZE,
  learn_model,
  list_pieces,
  training_sample,
)
from palm_mtf.data.vocabulary.vocabulary import EACH_BYTE, Vocabulary
from palm_mtf.errors import UserError, check_count
from palm_mtf.model_dir.atomic_files import write_atomically

_NUM_LONGEST = 5
_CONTEXT = 10  # characters shown before and after the first difference


@dataclasses.dataclass(frozen=True)
class Pieces:
  """How many pieces of each kind a vocabulary has."""

  control: int  # never part of a text: padding, end of document, unknown
  byte: int  # byte pieces, and pieces that end within a character
  digit: int  # one decimal digit of any script
  joined_digits: int  # longer pieces that hold a digit; PaLM has none
  white_space: int  # runs of two or more spaces, tabs and line ends
  other: int  # all other learned pieces
  longest: list[str]  # the longest pieces of `other`, longest first
  first_joined_digits: str  # the first such piece; "" if there is none


def count_pieces(vocabulary: Vocabulary) -> Pieces:
  """Counts a vocabulary's pieces by kind."""
  kinds = {"control": [], "byte": [], "digit": [], "joined_digits": []}
  kinds |= {"white_space": [], "other": []}
  for i in range(vocabulary.size):
    text = vocabulary.token_bytes(i).decode(errors=EACH_BYTE)
    kinds[_kind_of(vocabulary, i, text)].append(text)
  longest = sorted(kinds["other"], key=lambda x: (-len(x), x))[:_NUM_LONGEST]
  joined = kinds["joined_digits"]
  return Pieces(
    **{kind: len(pieces) for kind, pieces in kinds.items()},
    longest=longest,
    first_joined_digits=joined[0] if joined else "",
  )


class Fit:
  """Statistics of how a vocabulary encodes texts."""

  def __init__(self, vocabulary: Vocabulary):
    self._vocabulary = vocabulary
    self.num_documents = 0
    self.num_bytes = 0  # size of the texts in UTF-8
    self.counts = np.zeros(vocabulary.size, np.int64)  # number of tokens per id
    self.num_changed = 0  # texts that decode(encode(text)) changes
    self.first_change = ""  # where and how the first of these texts changes

  @property
  def num_tokens(self) -> int:
    """Number of tokens in all texts, without [eod]."""
    return int(self.counts.sum())

  @property
  def num_used(self) -> int:
    """Number of pieces that occur in the encoded texts."""
    return int((self.counts > 0).sum())

  @property
  def byte_share(self) -> float:
    """Share of the tokens that are byte pieces or parts of characters."""
    made = int(self.counts[self._vocabulary.is_byte].sum())
    return made / max(1, self.num_tokens)

  @property
  def tokens_per_byte(self) -> float:
    """Tokens per byte of text."""
    return self.num_tokens / max(1, self.num_bytes)

  @property
  def bytes_per_token(self) -> float:
    """Bytes of text per token."""
    return self.num_bytes / max(1, self.num_tokens)

  def add(self, text: str, ids: np.ndarray) -> None:
    """Counts a text's tokens `ids`; compares the text with the decoded ids."""
    self.num_documents += 1
    self.num_bytes += len(text.encode())
    np.add.at(self.counts, ids, 1)
    again = self._vocabulary.decode(ids)
    if again != text:
      self.num_changed += 1
      self.first_change = self.first_change or (
        f"document {self.num_documents:,}: {_show_difference(text, again)}"
      )


def measure_fit(vocabulary: Vocabulary, texts: Iterable[str]) -> Fit:
  """Measures how a vocabulary encodes texts."""
  fit = Fit(vocabulary)
  with Encoder(vocabulary) as encoder:
    for each in encoder.encode((TRAIN, Document(text)) for text in texts):
      fit.add(each.document.text, each.text)
  return fit


def _kind_of(vocabulary: Vocabulary, i: int, text: str) -> str:
  if vocabulary.is_control(i):
    return "control"
  if vocabulary.is_byte[i]:
    return "byte"
  if any(map(str.isdecimal, text)):
    return "digit" if len(text) == 1 else "joined_digits"
  if len(text) > 1 and not text.strip():
    return "white_space"
  return "other"


def _show_difference(before: str, after: str) -> str:
  pairs = enumerate(itertools.zip_longest(before, after))
  same = next(i for i, (x, y) in pairs if x != y)
  shown = slice(max(0, same - _CONTEXT), same + _CONTEXT)
  return f"{before[shown]!r} becomes {after[shown]!r}"


# Names for error messages: this command has flags instead of macros, and no
# flag for the field with a document's weight.
_SETTINGS = Settings("--input", "--text_field", weight_field="")
_MEASURED_CHUNKS = 1024  # texts of at most 4,096 characters


def vocab(
  *,
  globs: Sequence[str],
  size: int,
  prefix: str,
  text_field: str,
  sample_characters: int | None,
  as_json: bool,
) -> None:
  """Trains a vocabulary; prints its path, hash and how well it fits the text.

  Raises:
    UserError: if PREFIX.model exists or cannot be written, or there is too
      little text for `size` pieces.
  """
  check_count("--size", size, MIN_VOCAB_SIZE)
  if sample_characters is not None:
    check_count("--sample_characters", sample_characters)
  path = f"{os.path.expanduser(prefix)}.model"
  _check_output(prefix, path)
  sample = training_sample(_read(globs, text_field), size, sample_characters)
  model = learn_model(sample, size, size_setting="--size")
  pieces = list_pieces(model).encode()
  write_atomically(f"{path.removesuffix('.model')}.vocab", pieces)
  # Write the model last, so that PREFIX.vocab exists if PREFIX.model exists.
  write_atomically(path, model)
  vocabulary = open_vocabulary(path, setting="--output")
  # The sample's chunks are in the order of their hashes, not of the files, so
  # the first chunks are a random sample of all files.
  fit = measure_fit(vocabulary, sample[:_MEASURED_CHUNKS])
  results = {
    "vocabulary": path,
    "pieces": vocabulary.size,
    "sample_characters": sum(map(len, sample)),
    **_make_fit_results(fit),
    "sha256": vocabulary.sha256,
  }
  print_results(results, as_json, " ")


def inspect(
  *,
  vocabulary: str,
  globs: Sequence[str],
  text_field: str,
  as_json: bool,
) -> None:
  """Prints which pieces a vocabulary has, and how well it fits text files.

  Also prints the kinds of text that decode(encode(text)) changes.
  """
  path = os.path.expanduser(vocabulary)
  loaded = open_vocabulary(path, setting="--vocabulary")
  # decode(encode(text)) may differ from the text. `losses` checks this on short
  # probe texts, `measure_fit` on every document.
  pieces = count_pieces(loaded)
  losses = loaded.losses()
  fit = measure_fit(loaded, _read(globs, text_field))
  results = {
    "vocabulary": path,
    "pieces": loaded.size,
    "control_pieces": pieces.control,
    "byte_pieces": pieces.byte,
    "digit_pieces": pieces.digit,
    "white_space_runs": pieces.white_space,
    "other_pieces": pieces.other,
    "longest_pieces": pieces.longest,
    "end_of_document": loaded.piece(loaded.eod_id),
    "digits_stand_alone": not pieces.joined_digits,
    "joined_digits": pieces.joined_digits,
    "first_joined_digits": pieces.first_joined_digits,
    "lossless": not losses and not fit.num_changed,
    "losses": losses,
    "documents": fit.num_documents,
    "documents_changed": fit.num_changed,
    "first_change": fit.first_change,
    **_make_fit_results(fit),
    "pieces_used": fit.num_used,
    "sha256": loaded.sha256,
  }
  print_results(results, as_json, " ")


def _read(globs: Sequence[str], text_field: str) -> Iterator[str]:
  source = TextFiles(
    globs,
    Fields(text_field),
    validation_share=1.0,  # unused: both splits are read
    settings=_SETTINGS,
  )
  with progress_bar("Reading text", source.num_bytes) as advance:
    for _, document in source.documents():
      yield document.text
      advance(document.num_bytes)
  source.report_skipped()


def _check_output(prefix: str, path: str) -> None:
  what = f"--output = {prefix!r}"
  if not os.path.basename(prefix) or os.path.isdir(prefix):
    raise UserError(
      f"{what}: a folder; name a file in it, such as "
      f"{os.path.join(prefix, 'words')!r}."
    )
  if os.path.lexists(path):
    raise UserError(
      f"{what}: {path} exists, and checkpoints may depend on it; "
      "give another --output, or remove the file."
    )
  # Missing folders will be made, so check the nearest parent that exists.
  folder = os.path.dirname(os.path.abspath(path))
  while not os.path.lexists(folder):
    folder = os.path.dirname(folder)
  if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
    raise UserError(
      f"{what}: {folder} is not a writable folder; give another --output."
    )


def _make_fit_results(fit: Fit) -> dict[str, int | float]:
  return {
    "measured_bytes": fit.num_bytes,
    "measured_tokens": fit.num_tokens,
    "tokens_per_byte": fit.tokens_per_byte,
    "bytes_per_token": fit.bytes_per_token,
    "byte_share": fit.byte_share,
  }
