# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import pathlib
import sysconfig

import pytest

from palm_mtf.config import DataConfig, PalmConfig
from palm_mtf.errors import UserError
from palm_mtf.vocab import vocab


@pytest.fixture
def run(tmp_path):
  """Runs `palm_mtf vocab` on the json package with a VOCAB_SIZE."""
  stdlib = pathlib.Path(sysconfig.get_path("stdlib"))

  def run(vocab_size, share=0.5):
    vocab(
      model_dir=str(tmp_path / "run"),
      model=PalmConfig(
        num_layers=1,
        d_model=8,
        num_heads=1,
        d_kv=8,
        d_ff=8,
        vocab_size=vocab_size,
        sequence_length=8,
      ),
      data=DataConfig(
        text_files=[f"{stdlib}/json/*.py", f"{stdlib}/email/*.py"],
        vocabulary=None,
        validation_share=share,
      ),
    )

  return run


def test_results_are_on_stdout_and_the_vocabulary_in_model_dir(
  run, tmp_path, capsys
):
  run(500)
  first = capsys.readouterr()
  path = tmp_path / "run" / "vocabulary.model"
  lines = dict(line.split(maxsplit=1) for line in first.out.splitlines()[:3])
  assert lines == {
    "vocabulary": str(path),
    "pieces": "500",
    "VOCAB_SIZE": "500",
  }
  assert first.err == (
    f"palm_mtf: training a vocabulary of 500 pieces: {path}\n"
  )
  assert [p.name for p in path.parent.iterdir()] == ["vocabulary.model"]
  run(500)
  assert capsys.readouterr() == (first.out, "")


def test_the_fit_is_measured_on_held_out_text(run, capsys):
  run(500)
  values = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
  per_byte, per_token = float(values[4]), float(values[5])
  assert 1 < per_token < 5
  assert per_byte * per_token == pytest.approx(1, rel=1e-2)


def test_nothing_held_out_to_measure_on_is_said(run, capsys):
  run(500, share=1e-4)
  assert "no document is held out" in capsys.readouterr().out


def test_a_vocabulary_that_no_longer_fits_is_an_error(run):
  run(500)
  with pytest.raises(UserError, match=r"has 500 pieces, VOCAB_SIZE = 400 rows"):
    run(400)
