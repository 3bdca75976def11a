# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks `text_files` and `tfds_text`: whole documents to train on.

from palm_mtf.tasks import documents
documents.text_files.files = "/data/books/*.jsonl.gz"
TASK = "text_files"
"""

# palm_mtf takes the text of these tasks and encodes it with the VOCABULARY of
# the run. A program that calls seqio.get_dataset gets ids of the tasks' own
# vocabulary, so the program must set documents.vocabulary.path.

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import gin
import seqio
import tensorflow as tf

from palm_mtf.data.sources.conversation import TEXTS
from palm_mtf.data.sources.document import (
  SPLITS,
  TRAIN,
  VALIDATION,
  Document,
  num_repeats,
)
from palm_mtf.data.sources.files import FileDigests, describe_shards
from palm_mtf.data.sources.text_files import Fields, Settings, TextFiles
from palm_mtf.errors import UserError, did_you_mean

VALIDATION_SHARE = 0.02
_BATCH = 32


@gin.configurable
def vocabulary(path: str | None = None) -> str | None:
  """Returns the path of the tasks' SentencePiece model, as gin sets it."""
  return path


class LateVocabulary(seqio.SentencePieceVocabulary):
  """A SentencePiece vocabulary whose path is read at its first use."""

  # A task is registered with its vocabulary when a gin file imports the
  # module, which is before gin has bound the path.

  def __init__(self, path: Callable[[], str | None], setting: str):
    """Keeps the arguments for the first use.

    Args:
      path: function that returns the path of a SentencePiece model, or None.
      setting: name of the gin parameter that sets the path.
    """
    super().__init__("")
    self._path, self._setting = path, setting

  def _model_context(self):
    # SeqIO reads the attribute here, once, and keeps the model it loads.
    self._sentencepiece_model_file = self.sentencepiece_model_file
    return super()._model_context()

  @property
  def sentencepiece_model_file(self) -> str:
    """The path that gin sets."""
    path = self._path()
    if path is None:
      raise UserError(
        f"{self._setting} is not set: give the path of a SentencePiece model."
      )
    return path


VOCABULARY = LateVocabulary(vocabulary, "documents.vocabulary.path")


class Files(NamedTuple):
  """Text files of a task.

  Attributes:
    files: globs of text and .jsonl files, perhaps compressed; None if not set.
    text_field: field of a JSON line that holds the document.
    weight_field: field that holds the document's weight; None for weight 1.
    validation_share: share of the documents that is held out.
  """

  files: str | Sequence[str] | None
  text_field: str
  weight_field: str | None
  validation_share: float


# The functions that gin binds to only return their arguments, because gin would
# add lines to the message of an error that such a function raises.
@gin.configurable
def text_files(
  files: str | Sequence[str] | None = None,
  text_field: str = "text",
  weight_field: str | None = None,
  validation_share: float = VALIDATION_SHARE,
) -> Files:
  """Returns the files of task `text_files`."""
  return Files(files, text_field, weight_field, validation_share)


class Tfds(NamedTuple):
  """Texts of a TFDS dataset.

  Attributes:
    name: name and version of a prepared dataset; None if not set.
    split: split of the dataset, or a slice such as "train[:10%]".
    text_feature: feature that is the document.
    data_dir: folder of TFDS; None is its default.
    validation_share: share of the documents that is held out.
  """

  name: str | None
  split: str
  text_feature: str
  data_dir: str | None
  validation_share: float


@gin.configurable
def tfds_text(
  name: str | None = None,
  split: str = "train",
  text_feature: str = "text",
  data_dir: str | None = None,
  validation_share: float = VALIDATION_SHARE,
) -> Tfds:
  """Returns the texts of task `tfds_text`."""
  return Tfds(name, split, text_feature, data_dir, validation_share)


class _TextSource(seqio.FunctionDataSource):
  """A SeqIO source with feature "text", which gin configures."""

  def __init__(self, selector: str, settings: Callable[[], Files | Tfds]):
    """Keeps the arguments; each read calls `settings`.

    Args:
      selector: gin's name of the settings, such as "palm_mixture.books".
      settings: function that gin binds to.
    """
    super().__init__(self._read, splits=SPLITS)
    self._selector = selector
    self._settings = settings


class TextFilesSource(_TextSource):
  """A SeqIO source of files; a document of weight 3 is read three times."""

  # Documents are repeated because SeqIO has no weights.

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of the files' bytes and the settings, 32 hex digits."""
    # palm_mtf names the token store of a source by its fingerprint.
    return self._open().fingerprint(digests)

  def _open(self) -> TextFiles:
    settings = self._settings()
    names = ("files", "text_field", "weight_field")
    names = Settings(*(f"{self._selector}.{name}" for name in names))
    if settings.files is None:
      raise UserError(
        f"{names.files} is not set: give a glob or a list of globs, such as "
        f"--gin.{names.files}='\"/data/*.jsonl\"'."
      )
    files = TextFiles(
      settings.files,
      Fields(settings.text_field, settings.weight_field),
      validation_share=settings.validation_share,
      name=self._selector,
      settings=names,
    )
    if files.form != TEXTS:
      raise UserError(
        f"{names.files} = {settings.files!r}: has conversations, of which this "
        "task would learn every message; give them as TEXT_FILES, or write a "
        "task with the feature 'messages'."
      )
    return files

  def _read(
    self, split: str, shuffle_files: bool, seed: int | None = None
  ) -> tf.data.Dataset:
    del shuffle_files, seed  # SeqIO shuffles the documents too
    return tf.data.Dataset.from_generator(
      functools.partial(_batches, self._open(), split),
      output_signature={"text": tf.TensorSpec((None,), tf.string)},
    ).unbatch()


class TfdsTextSource(_TextSource):
  """A SeqIO source that cuts a TFDS split into train and validation."""

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of the dataset's files and the settings, 32 hex digits."""
    settings = self._settings()
    shards = self._open(settings).list_shards(TRAIN)
    # Leave out the folder, because moving a dataset does not change it.
    parts = (settings._replace(data_dir=None), describe_shards(shards, digests))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

  def _open(self, settings: Tfds) -> seqio.TfdsDataSource:
    if settings.name is None:
      raise UserError(
        f"{self._selector}.name is not set: give the name of a TFDS dataset, "
        f"such as --gin.{self._selector}.name='\"wiki40b/en:1.3.0\"'."
      )
    try:
      return seqio.TfdsDataSource(
        settings.name,
        settings.data_dir,
        splits={TRAIN: settings.split},
        read_only=True,
      )
    except ValueError as error:
      raise UserError(
        f"{self._selector}.name = {settings.name!r}: {error}."
      ) from error

  def _read(
    self, split: str, shuffle_files: bool, seed: int | None = None
  ) -> tf.data.Dataset:
    settings = self._settings()
    dataset = self._open(settings).get_dataset(
      TRAIN, shuffle=shuffle_files, seed=seed
    )
    feature, known = settings.text_feature, dataset.element_spec
    if feature not in known:
      raise UserError(
        f"{self._selector}.text_feature = {feature!r}: no such feature"
        f"{did_you_mean(feature, known)}; give one of "
        f"{', '.join(map(repr, known))}."
      )

    # As for files, a hash of the text decides, so that the same texts are held
    # out, and equal texts are never in different splits.
    def is_in_split(content: bytes) -> bool:
      document = Document(content.decode("utf-8", "replace"))
      held_out = document.rank < settings.validation_share
      return held_out == (split == VALIDATION)

    return dataset.map(lambda example: {"text": example[feature]}).filter(
      lambda example: tf.numpy_function(is_in_split, [example["text"]], tf.bool)
    )


def add_task(name: str, source: seqio.DataSource) -> None:
  """Registers a task whose targets are feature "text" of `source`."""
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


def _batches(files: TextFiles, split: str) -> Iterator[dict[str, list[str]]]:
  # Yield batches, because a call from TensorFlow into Python takes 0.1 ms.
  texts = _texts(files, split)
  while batch := list(itertools.islice(texts, _BATCH)):
    yield {"text": batch}


def _texts(files: TextFiles, split: str) -> Iterator[str]:
  for split_of_document, document in files.documents():
    if split_of_document == split:
      yield from itertools.repeat(document.text, num_repeats(document))
  if split == TRAIN:  # both splits read all files; report only once
    files.report_skipped()


add_task("text_files", TextFilesSource("documents.text_files", text_files))
add_task("tfds_text", TfdsTextSource("documents.tfds_text", tfds_text))
