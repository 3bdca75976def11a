# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks `text_files` and `tfds_text`: documents to learn as a whole.

  from palm_mtf.tasks import documents
  documents.text_files.files = "/data/books/*.jsonl.gz"
  TASK = "text_files"

Both have the splits train and validation, which a hash of each document's text
decides. SeqIO has no weights: a document of weight 3 comes three times. Users of
seqio.get_dataset set `documents.vocabulary.path` too; palm_mtf has no need of
it, since it encodes with the VOCABULARY of the run.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import gin
import seqio
import tensorflow as tf

from palm_mtf.data.documents import TextFiles
from palm_mtf.data.file_digests import FileDigests, describe_shards
from palm_mtf.data.reading import Settings
from palm_mtf.data.sources import (
  SPLITS,
  TRAIN,
  VALIDATION,
  Document,
  num_repeats,
)
from palm_mtf.errors import UserError, did_you_mean

VALIDATION_SHARE = 0.02


@gin.configurable
def vocabulary(path: str | None = None) -> str:
  """Returns the path of the SentencePiece model of all tasks here.

  Raises:
    UserError: gin sets none.
  """
  if path is None:
    raise UserError(
      "documents.vocabulary.path is not set: give the path of a SentencePiece "
      "model."
    )
  return path


class _Vocabulary(seqio.SentencePieceVocabulary):
  """Asks gin for its file when it is first used."""

  def __init__(self):
    super().__init__("")

  def _model_context(self):
    self._sentencepiece_model_file = vocabulary()
    return super()._model_context()


VOCABULARY = _Vocabulary()


@gin.configurable
def text_files(
  files: str | Sequence[str] | None = None,
  text_field: str = "text",
  weight_field: str | None = None,
  validation_share: float = VALIDATION_SHARE,
) -> TextFiles:
  """Returns the documents of task `text_files`.

  Args:
    files: globs of text and .jsonl files, perhaps compressed.
    text_field: the field of a JSON line that is the document.
    weight_field: the field with its weight, or None for a weight of 1.
    validation_share: share of the documents that is held out.

  Raises:
    UserError: `files` is not set, or matches nothing that can be read.
  """
  return open_files(
    "documents.text_files", files, text_field, weight_field, validation_share
  )


class TfdsText(NamedTuple):
  """The texts of a TFDS split, and the share of them that is held out."""

  source: seqio.TfdsDataSource
  split: str
  text_feature: str
  validation_share: float


@gin.configurable
def tfds_text(
  name: str | None = None,
  split: str = "train",
  text_feature: str = "text",
  data_dir: str | None = None,
  validation_share: float = VALIDATION_SHARE,
) -> TfdsText:
  """Returns the documents of task `tfds_text`.

  Args:
    name: of a TFDS dataset that is prepared; nothing is downloaded.
    split: of it, or a slice such as "train[:10%]".
    text_feature: the feature that is the document.
    data_dir: TFDS's folder, or None for its own default.
    validation_share: share of the documents that is held out.

  Raises:
    UserError: `name` is not set.
  """
  if name is None:
    raise UserError(
      "documents.tfds_text.name is not set: give the name of a TFDS dataset, "
      "such as --gin.documents.tfds_text.name='\"wiki40b/en\"'."
    )
  source = seqio.TfdsDataSource(
    name, data_dir, splits={TRAIN: split}, read_only=True
  )
  return TfdsText(source, split, text_feature, validation_share)


class TextFilesSource(seqio.FunctionDataSource):
  """A SeqIO source of feature "text": a document as often as it weighs."""

  def __init__(self, open_files: Callable[[], TextFiles]):
    """`open_files` is called whenever the source is read."""
    super().__init__(self._read, splits=SPLITS)
    self._open = open_files

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of the files' bytes and the settings."""
    return self._open().fingerprint(digests)

  def _read(self, split: str, shuffle_files: bool) -> tf.data.Dataset:
    del shuffle_files  # SeqIO shuffles the documents too
    return tf.data.Dataset.from_generator(
      functools.partial(_texts, self._open(), split),
      output_signature={"text": tf.TensorSpec((), tf.string)},
    )


class TfdsTextSource(seqio.FunctionDataSource):
  """A SeqIO source of feature "text" from one split of a TFDS dataset."""

  def __init__(self, open_tfds: Callable[[], TfdsText]):
    """`open_tfds` is called whenever the source is read."""
    super().__init__(self._read, splits=SPLITS)
    self._open = open_tfds

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of the dataset's files and the settings."""
    source, *settings = self._open()
    shards = describe_shards(source.list_shards(TRAIN), digests)
    parts = repr((source.tfds_dataset.name, settings, shards)).encode()
    return hashlib.blake2b(parts, digest_size=16).hexdigest()

  def _read(self, split: str, shuffle_files: bool) -> tf.data.Dataset:
    opened = self._open()
    feature = opened.text_feature
    dataset = opened.source.get_dataset(TRAIN, shuffle=shuffle_files)
    if feature not in dataset.element_spec:
      raise UserError(
        f"documents.tfds_text.text_feature = {feature!r}: no such feature"
        f"{did_you_mean(feature, dataset.element_spec)}; give one of "
        f"{', '.join(map(repr, dataset.element_spec))}."
      )

    def is_in_split(content: bytes) -> bool:
      document = Document(content.decode("utf-8", "replace"))
      return (document.rank < opened.validation_share) == (split == VALIDATION)

    return dataset.map(lambda example: {"text": example[feature]}).filter(
      lambda example: tf.numpy_function(is_in_split, [example["text"]], tf.bool)
    )


def open_files(
  selector: str,
  files: str | Sequence[str] | None,
  text_field: str,
  weight_field: str | None,
  validation_share: float,
) -> TextFiles:
  """Opens what gin gives to the function `selector`, such as "a_module.books".

  Raises:
    UserError: `files` is None; names the selector.
  """
  names = ("files", "text_field", "weight_field")
  settings = Settings(*(f"{selector}.{name}" for name in names))
  if files is None:
    raise UserError(
      f"{settings.files} is not set: give a glob or a list of globs, such as "
      f"--gin.{settings.files}='\"/data/*.jsonl\"'."
    )
  return TextFiles(
    files,
    text_field=text_field,
    weight_field=weight_field,
    validation_share=validation_share,
    name=selector,
    settings=settings,
  )


def add_task(name: str, source: seqio.DataSource) -> None:
  """Registers a task that learns feature "text" of `source`."""
  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos,
    ],
    output_features={"targets": seqio.Feature(VOCABULARY)},
  )


def _texts(files: TextFiles, split: str) -> Iterator[dict[str, str]]:
  for split_of_document, document in files.documents():
    if split_of_document == split:
      for _ in range(num_repeats(document)):
        yield {"text": document.text}
  if split == TRAIN:
    files.report_skipped()


add_task("text_files", TextFilesSource(text_files))
add_task("tfds_text", TfdsTextSource(tfds_text))
