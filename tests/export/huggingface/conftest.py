# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes a small model of transformers in a folder that a test may change."""

import shutil

import pytest


@pytest.fixture(scope="session")
def pristine_model(tmp_path_factory):
  from tests import transformers_folder  # imports TensorFlow

  return transformers_folder.write(
    tmp_path_factory.mktemp("model"), transformers_folder.MODEL
  )


@pytest.fixture
def model_folder(pristine_model, tmp_path):
  """A copy of the model, for a test to change."""
  return shutil.copytree(pristine_model, tmp_path / "model")
