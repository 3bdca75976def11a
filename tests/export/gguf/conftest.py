# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of the GGUF files of tests."""

import pytest

from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import learn_model
from tests import tokenizer_files


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
  """A vocabulary of ours, with 400 pieces."""
  path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.model"
  path.write_bytes(learn_model(tokenizer_files.CORPUS[:20], 400))
  return open_vocabulary(str(path))
