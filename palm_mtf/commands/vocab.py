# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf vocab` trains a vocabulary, `palm_mtf vocab inspect` shows one."""

# A run for which VOCABULARY is not set trains a vocabulary on its own training
# documents. This command trains a vocabulary for many runs, on --input files.

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palm_mtf.console import progress_bar
from palm_mtf.data.sources.text_files import Fields, Settings, TextFiles
from palm_mtf.data.tokens.vocabulary_report import (
  Fit,
  count_pieces,
  measure_fit,
)
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import (
  MIN_VOCAB_SIZE,
  learn_model,
  list_pieces,
  training_sample,
)
from palm_mtf.errors import UserError, check_count
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically

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
  _print(results, as_json)


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
  _print(results, as_json)


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


def _print(results: Mapping[str, Any], as_json: bool) -> None:
  if as_json:
    print(json_text(results))
    return
  width = max(map(len, results)) + 2
  for name, value in results.items():
    print(f"{name.replace('_', ' '):{width}}{_format_value(value)}")


def _format_value(value: object) -> str:
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, float):
    return f"{value:.4f}"
  if isinstance(value, list):
    return ", ".join(map(repr, value)) or "none"
  return f"{value:,}" if isinstance(value, int) else str(value) or "none"
