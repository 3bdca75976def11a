# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json
import shutil
import tempfile

import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from palm_mtf.data.sources.document import num_repeats
from palm_mtf.data.sources.seqio_task import open_task
from palm_mtf.data.sources.text_files import Fields, TextFiles
from palm_mtf.errors import UserError
from palm_mtf.tasks import documents  # noqa: F401
from tests.seqio_testing import bind

TEXTS = [f"document {i}" for i in range(100)]


def configure(**values: object) -> None:
  bind(**{f"documents__{name}": value for name, value in values.items()})


@pytest.fixture
def weighted(tmp_path):
  path = tmp_path / "weighted.jsonl"
  path.write_text(
    "".join(
      json.dumps({"body": text, "times": i % 5 / 2}) + "\n"
      for i, text in enumerate(TEXTS)
    )
  )
  return path


class MyTexts(tfds.core.GeneratorBasedBuilder):
  """A small dataset."""

  VERSION = tfds.core.Version("1.0.0")
  # TFDS would look for the code with importlib_resources, which TFDS does not
  # depend on.
  code_path = None

  def _info(self):
    features = {"id": tf.int64, "body": tf.string}
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict(features), disable_shuffling=True
    )

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples()}

  def _generate_examples(self):
    for i, text in enumerate(TEXTS):
      yield i, {"id": i, "body": text}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> str:
  """The folder of TFDS in which `my_texts` is prepared."""
  folder = tmp_path_factory.mktemp("datasets")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tempfile, "tempdir", str(folder))  # as in temporary_folder
    MyTexts(data_dir=str(folder / "tfds")).download_and_prepare()
  return str(folder / "tfds")


def splits_of(source) -> dict[str, list[str]]:
  splits = {"train": [], "validation": []}
  for split, document in source.documents():
    splits[split].append(document.text)
  return splits


def test_text_files_gives_the_documents_of_files_as_often_as_they_weigh(
  weighted,
):
  configure(
    text_files__files=str(weighted),
    text_files__text_field="body",
    text_files__weight_field="times",
    text_files__validation_share=0.3,
  )
  (source,) = open_task("text_files", 0.1)
  files = TextFiles(
    str(weighted), Fields("body", "times"), validation_share=0.3
  )
  expected = {"train": [], "validation": []}
  for split, document in files.documents():
    expected[split] += [document.text] * num_repeats(document)
  assert splits_of(source) == expected
  assert len(expected["train"]) > len(expected["validation"]) > 10


def test_tfds_text_holds_out_the_same_documents_as_text_files(
  weighted, dataset
):
  configure(
    tfds_text__name="my_texts:1.0.0",
    tfds_text__text_feature="body",
    tfds_text__data_dir=dataset,
    tfds_text__validation_share=0.3,
    text_files__files=str(weighted),
    text_files__text_field="body",
    text_files__validation_share=0.3,
  )
  (tfds_source,) = open_task("tfds_text", 0.1)
  (files_source,) = open_task("text_files", 0.1)
  splits = splits_of(tfds_source)
  assert {name: sorted(each) for name, each in splits.items()} == {
    name: sorted(each) for name, each in splits_of(files_source).items()
  }
  assert splits_of(tfds_source) == splits, "in the same order again"


def test_tfds_text_reads_a_part_of_a_split_and_leaves_nothing_behind(
  dataset, temporary_folder
):
  before = list(temporary_folder.iterdir())
  configure(
    tfds_text__name="my_texts:1.0.0",
    tfds_text__split="train[:20]",
    tfds_text__text_feature="body",
    tfds_text__data_dir=dataset,
  )
  (source,) = open_task("tfds_text", 0.1)
  splits = splits_of(source)
  assert sorted(splits["train"] + splits["validation"]) == sorted(TEXTS[:20])
  assert list(temporary_folder.iterdir()) == before


def test_a_tfds_task_of_the_user_is_a_source(dataset, tmp_path):
  dataset = shutil.copytree(dataset, str(tmp_path / "tfds"))
  seqio.TaskRegistry.add(
    "my_tfds_task",
    source=seqio.TfdsDataSource("my_texts:1.0.0", dataset, splits=["train"]),
    preprocessors=[
      seqio.preprocessors.rekey,
      lambda ds: ds.map(lambda e: {"targets": e["body"]}),
    ],
    output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(0))},
  )
  (source,) = open_task("my_tfds_task", 0.2)
  splits = splits_of(source)
  assert sorted(splits["train"] + splits["validation"]) == sorted(TEXTS)
  assert splits["validation"]
  first = source.fingerprint()
  assert open_task("my_tfds_task", 0.2)[0].fingerprint() == first
  (shard, *_) = source._task.source.list_shards("train")
  with open(shard, "ab") as file:
    file.write(b"x")
  assert open_task("my_tfds_task", 0.2)[0].fingerprint() != first


NAME, FEATURE = "tfds_text__name", "tfds_text__text_feature"
PREPARED = {NAME: "my_texts:1.0.0"}


@pytest.mark.parametrize(
  ("task", "settings", "message"),
  [
    (
      "text_files",
      {},
      "documents.text_files.files is not set: give a glob or a list of globs, "
      "such as --gin.documents.text_files.files='\"/data/*.jsonl\"'.",
    ),
    (
      "tfds_text",
      {},
      "documents.tfds_text.name is not set: give the name of a TFDS dataset, "
      "such as --gin.documents.tfds_text.name='\"wiki40b/en:1.3.0\"'.",
    ),
    (
      "tfds_text",
      {**PREPARED, FEATURE: "bodi"},
      "documents.tfds_text.text_feature = 'bodi': no such feature (did you "
      "mean \"body\"?); give one of 'body', 'id'.",
    ),
    ("tfds_text", {NAME: "no_such"}, "TFDS name must contain a version number"),
    ("tfds_text", {NAME: "no_such:1.0.0"}, "Dataset no_such not found"),
    (
      "tfds_text",
      {**PREPARED, "tfds_text__data_dir": "/nowhere"},
      "the dataset has not been generated yet",
    ),
  ],
)
def test_a_task_whose_text_is_not_there_says_why_in_one_line(
  task, settings, message, dataset
):
  configure(**{"tfds_text__data_dir": dataset, **settings})
  with pytest.raises(UserError) as info:
    open_task(task, 0.1)[0].fingerprint()
  assert message in str(info.value)
  assert "\n" not in str(info.value)


def test_a_bad_line_is_named_through_tensorflow(tmp_path):
  path = tmp_path / "bad.jsonl"
  path.write_text('{"text": "one"}\n{"txt": "two"}\n')
  configure(text_files__files=str(path))
  with pytest.raises(UserError) as info:
    open_task("text_files", 0.1)[0].fingerprint()
  assert str(info.value) == (
    f"documents.text_files.files: {path}, line 2: no field 'text' (did you "
    "mean \"txt\"?); it has 'txt'; set documents.text_files.text_field, or "
    "mend the line."
  )


def test_seqio_itself_reads_the_tasks_with_the_vocabulary_of_gin(
  weighted, vocabulary
):
  configure(
    text_files__files=str(weighted),
    text_files__text_field="body",
    vocabulary__path=vocabulary.path,
  )
  dataset = seqio.get_mixture_or_task("text_files").get_dataset(
    {"targets": 64}, split="train", shuffle=False
  )
  examples = list(dataset.as_numpy_iterator())
  assert len(examples) > 80
  for example in examples:
    ids = example["targets"].tolist()
    assert ids[-1] == vocabulary.eod_id
    assert vocabulary.decode(ids[:-1]) in TEXTS
