# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf vocab` trains a vocabulary, `palm_mtf vocab inspect` shows one."""

# A run without VOCABULARY trains its own, of its training split. This one is
# for many runs, and learns from every document of --input, held out or not.

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palm_mtf.console import progress_bar
from palm_mtf.data.sources.text_files import Settings, TextFiles
from palm_mtf.data.vocabulary.report import (
  Fit,
  count_pieces,
  measure_fit,
)
from palm_mtf.data.vocabulary.training import (
  MIN_VOCAB_SIZE,
  learn_model,
  list_pieces,
  training_sample,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, check_count
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically

# Flags in place of the macros that messages name elsewhere. No weights.
_SETTINGS = Settings("--input", "--text_field", weight_field="")
_MEASURED_CHUNKS = 1024  # of the training sample, some 4,096 characters each


def vocab(
  *,
  globs: Sequence[str],
  size: int,
  prefix: str,
  text_field: str,
  sample_characters: int | None,
  as_json: bool,
) -> None:
  """Trains a vocabulary; prints its path, its hash and how well it fits.

  Args:
    globs: globs of the files to learn from.
    size: number of pieces.
    prefix: path of PREFIX.model and PREFIX.vocab, which are written.
    text_field: field of a JSON line that is the text.
    sample_characters: characters of the text to learn from; None for as many
      as `training_sample` chooses.
    as_json: print one JSON object.

  Raises:
    UserError: PREFIX.model exists or cannot be written, or the text is too
      little for `size` pieces.
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
  # The model last: a run that finds it finds the whole vocabulary.
  write_atomically(path, model)
  vocabulary = Vocabulary(path, setting="--output")
  # The sample is ordered by hash, so that its first chunks are of all files.
  fit = measure_fit(vocabulary, sample[:_MEASURED_CHUNKS])
  results = {
    "vocabulary": path,
    "pieces": vocabulary.size,
    "sample_characters": sum(map(len, sample)),
    **_fit_results(fit),
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
  """Prints the pieces of a vocabulary, what it loses, and how well it fits.

  Args:
    vocabulary: path of a SentencePiece model.
    globs: globs of the files to measure it on.
    text_field: field of a JSON line that is the text.
    as_json: print one JSON object.
  """
  path = os.path.expanduser(vocabulary)
  loaded = Vocabulary(path, setting="--vocabulary")
  # Losses show in decode(encode(text)), so that a foreign model has them found
  # as ours has: of probes, and of every document that is read.
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
    **_fit_results(fit),
    "pieces_used": fit.num_used,
    "sha256": loaded.sha256,
  }
  _print(results, as_json)


def _read(globs: Sequence[str], text_field: str) -> Iterator[str]:
  """Yields every text of the input."""
  source = TextFiles(
    globs,
    text_field=text_field,
    validation_share=1.0,  # unused: both splits are read
    settings=_SETTINGS,
  )
  with progress_bar("Reading text", source.num_bytes) as advance:
    for _, document in source.documents():
      yield document.text
      advance(document.num_bytes)
  source.report_skipped()


def _check_output(prefix: str, path: str) -> None:
  """Raises UserError unless `path` can be written and is not there yet."""
  what = f"--output = {prefix!r}"
  if not os.path.basename(prefix) or os.path.isdir(prefix):
    raise UserError(
      f"{what}: a folder; name a file in it, such as "
      f"{os.path.join(prefix, 'words')!r}."
    )
  if os.path.lexists(path):
    raise UserError(
      f"{what}: {path} is there already, and checkpoints may depend on it; "
      "give another --output, or remove the file."
    )
  # Before any work: the nearest folder that exists must be writable.
  folder = os.path.dirname(os.path.abspath(path))
  while not os.path.lexists(folder):
    folder = os.path.dirname(folder)
  if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
    raise UserError(
      f"{what}: {folder} is no folder that may be written; give another "
      "--output."
    )


def _fit_results(fit: Fit) -> dict[str, int | float]:
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
    print(f"{name.replace('_', ' '):{width}}{_shown(value)}")


def _shown(value: object) -> str:
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, float):
    return f"{value:.4f}"
  if isinstance(value, list):
    return ", ".join(map(repr, value)) or "none"
  return f"{value:,}" if isinstance(value, int) else str(value) or "none"
