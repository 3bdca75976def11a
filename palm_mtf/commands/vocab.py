# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf vocab` trains a vocabulary, `palm_mtf vocab inspect` shows one."""

# A run for which VOCABULARY is not set trains a vocabulary on its own training
# documents. This command trains a vocabulary for many runs, on --input files.

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from palm_mtf.console import print_results, progress_bar
from palm_mtf.data.sources.document import TRAIN, Document
from palm_mtf.data.sources.text_files import Fields, Settings, TextFiles
from palm_mtf.data.tokens.encoder import Encoder
from palm_mtf.data.vocabulary import training
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, check_count
from palm_mtf.model_dir.atomic_files import write_atomically

_CONTEXT = 10  # characters shown before and after the start of a difference


def _measure_fit(
  vocabulary: Vocabulary, texts: Iterable[str]
) -> dict[str, int | float | str]:
  """Encodes texts; returns their sizes, and how decoding changes them."""
  num_documents = num_bytes = num_changed = 0
  first_change = ""
  counts = np.zeros(vocabulary.size, np.int64)  # tokens per id, [eod] omitted
  with Encoder(vocabulary) as encoder:
    for each in encoder.encode((TRAIN, Document(text)) for text in texts):
      text, again = each.document.text, vocabulary.decode(each.text)
      num_documents += 1
      num_bytes += len(text.encode())
      np.add.at(counts, each.text, 1)
      if again != text:
        num_changed += 1
        first_change = first_change or (
          f"document {num_documents:,}: {_show_difference(text, again)}"
        )
  num_tokens = int(counts.sum())
  return {
    "documents": num_documents,
    "documents_changed": num_changed,
    "first_change": first_change,
    "measured_bytes": num_bytes,
    "measured_tokens": num_tokens,
    "tokens_per_byte": num_tokens / max(1, num_bytes),
    "bytes_per_token": num_bytes / max(1, num_tokens),
    "byte_share": int(counts[vocabulary.is_byte].sum()) / max(1, num_tokens),
    "pieces_used": int((counts > 0).sum()),
  }


def _show_difference(before: str, after: str) -> str:
  pairs = enumerate(itertools.zip_longest(before, after))
  same = next(i for i, (x, y) in pairs if x != y)
  shown = slice(max(0, same - _CONTEXT), same + _CONTEXT)
  return f"{before[shown]!r} becomes {after[shown]!r}"


# Names for error messages: this command has flags instead of macros, and no
# flag for the field with a document's weight.
_SETTINGS = Settings("--input", "--text_field", weight_field="")
_MEASURED_CHUNKS = 1024  # at most 4,096 characters each; a random sample


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

  Raises UserError if PREFIX.model exists or cannot be written, or there is too
  little text for `size` pieces.
  """
  check_count("--size", size, training.MIN_VOCAB_SIZE)
  if sample_characters is not None:
    check_count("--sample_characters", sample_characters)
  path = f"{os.path.expanduser(prefix)}.model"
  _check_output(prefix, path)
  sample = training.training_sample(
    _read(globs, text_field), size, sample_characters
  )
  model = training.learn_model(sample, size, size_setting="--size")
  pieces = training.list_pieces(model).encode()
  write_atomically(f"{path.removesuffix('.model')}.vocab", pieces)
  # Write the model last, so that PREFIX.vocab exists if PREFIX.model exists.
  write_atomically(path, model)
  vocabulary = open_vocabulary(path, setting="--output")
  # The sample's chunks are in the order of their hashes, not of the files, so
  # the first chunks are a random sample of all files.
  fit = _measure_fit(vocabulary, sample[:_MEASURED_CHUNKS])
  # Do not print numbers of documents, because the chunks are no documents.
  for name in ("documents", "documents_changed", "first_change", "pieces_used"):
    del fit[name]
  results = {
    "vocabulary": path,
    "pieces": vocabulary.size,
    "sample_characters": sum(map(len, sample)),
    **fit,
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
  """Prints how well a vocabulary fits text files, and what it changes."""
  path = os.path.expanduser(vocabulary)
  loaded = open_vocabulary(path, setting="--vocabulary")
  # decode(encode(text)) may differ from the text. `losses` checks this on short
  # probe texts, `_measure_fit` on every document.
  losses = loaded.losses()
  fit = _measure_fit(loaded, _read(globs, text_field))
  results = {
    "vocabulary": path,
    "pieces": loaded.size,
    "byte_pieces": int(loaded.is_byte.sum()),
    "end_of_document": loaded.piece(loaded.eod_id),
    "lossless": not losses and not fit["documents_changed"],
    "losses": losses,
    **fit,
    "sha256": loaded.sha256,
  }
  print_results(results, as_json, " ")


def _read(globs: Sequence[str], text_field: str) -> Iterator[str]:
  source = TextFiles(
    globs,
    Fields(text_field),
    validation_share=1.0,  # without effect, because both splits are read
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
  # Missing folders will be made, so their nearest parent must be writable.
  folder = os.path.dirname(os.path.abspath(path))
  while not os.path.lexists(folder):
    folder = os.path.dirname(folder)
  if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
    raise UserError(
      f"{what}: {folder} is not a writable folder; give another --output."
    )
