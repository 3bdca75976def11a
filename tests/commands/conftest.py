# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs commands in this process, and makes runs that the commands read."""

import pytest

from tests.export.huggingface.conftest import model_folder, pristine_model
from tests.report.conftest import write_run

__all__ = ["model_folder", "pristine_model", "write_run"]


@pytest.fixture
def palm_mtf(capsys):
  """Runs a command; returns its exit code, output and errors."""
  from palm_mtf.cli.main import main

  def run(*arguments):
    code = main([str(each) for each in arguments])
    return code, *capsys.readouterr()

  return run


@pytest.fixture
def on_corpus(tmp_path, palm_mtf):
  """Runs a command on texts, with MODEL_DIR = tmp_path/run."""
  from tests import runs

  def run(command, texts, *flags, **macros):
    model_dir = tmp_path / "run"
    return palm_mtf(
      *runs.arguments(command, texts, model_dir, **macros), *flags
    )

  return run


@pytest.fixture
def fails(palm_mtf):
  """Runs a command that fails; returns its error, which has one line."""

  def run(*arguments):
    code, out, err = palm_mtf(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    return line.removeprefix("palm_mtf: ")

  return run
