# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Text folders and small vocabularies for the tests of palm_mtf.data."""

import io
import pathlib
import sysconfig

import pytest
import sentencepiece

from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def code() -> list[str]:
  """Returns the beginnings of forty files of real source code, 0.2 MB."""
  stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
  paths = [p for name in ("json", "email") for p in stdlib.glob(f"{name}/*.py")]
  paths += [stdlib / "argparse.py", stdlib / "typing.py"]
  return [path.read_text(encoding="utf-8")[:6000] for path in sorted(paths)]


@pytest.fixture(scope="session")
def vocabulary(code, tmp_path_factory) -> Vocabulary:
  path = str(tmp_path_factory.mktemp("vocabulary") / "vocabulary.model")
  train_vocabulary(code, 1000, path=path)
  return open_vocabulary(path)


@pytest.fixture(scope="session")
def foreign(code, tmp_path_factory):
  """Trains a model with SentencePiece's defaults except for `settings`."""

  def train(**settings) -> str:
    model = io.BytesIO()
    numbers = [str(i) for i in range(1000, 3000)]
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter([*code[0].splitlines(), *numbers]),
      model_writer=model,
      minloglevel=2,
      **({"vocab_size": 400, "byte_fallback": True} | settings),
    )
    path = tmp_path_factory.mktemp("foreign") / "foreign.model"
    path.write_bytes(model.getvalue())
    return str(path)

  return train


@pytest.fixture
def folder(code, tmp_path) -> pathlib.Path:
  """A folder with every text of `code` as a file."""
  folder = tmp_path / "text"
  folder.mkdir()
  for i, text in enumerate(code):
    (folder / f"{i:03d}.txt").write_text(text, encoding="utf-8")
  return folder
