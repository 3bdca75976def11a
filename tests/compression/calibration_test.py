# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf export` with statistics of a text: imatrix files, and rounding."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.cli.main import main
from palm_mtf.config import ModelConfig
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.export.gguf.files import GgufFile
from palm_mtf.export.gguf.imatrix import read_imatrix
from palm_mtf.generation.decode.kernels import round_to_int4
from tests import runs

FIELDS = ("num_layers", "d_model", "num_heads", "d_kv", "d_ff", "vocab_size")
MODEL = ModelConfig(
  **{name: runs.SETTINGS[name.upper()] for name in FIELDS}, sequence_length=32
)


@pytest.fixture
def export(finished, capsys):
  def run(*flags):
    capsys.readouterr()
    given = "export", "--model_dir", finished, *flags
    return main([str(x) for x in given]), capsys.readouterr().err

  return run


@pytest.fixture
def text(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text(" ".join(runs.WORDS * 20))
  return path


def test_statistics_count_the_whole_rows_of_a_text(
  export, finished, text, tmp_path
):
  output = tmp_path / "imatrix.gguf"
  flags = "--format=imatrix", "--output", output, "--calibration", text
  code, err = export(*flags)
  assert code == 0, err
  # As in other exports, paths are relative: they tell nobody the user's name.
  assert GgufFile(str(output)).metadata["imatrix.datasets"] == ["text.txt"]
  vocabulary = open_vocabulary(str(finished / "vocabulary.model"))
  num_tokens = len(vocabulary.encode(text.read_text()))
  found = read_imatrix(str(output), MODEL)
  kernels = [
    name
    for name in parameter_shapes(MODEL)
    if "/attention/" in name or "/mlp/" in name
  ]
  assert found.keys() == {*kernels, "embedding"}
  for each in found.values():
    assert each.tokens == num_tokens // 32 * 32
    assert (each.sums > 0).all()


def test_rounded_weights_are_those_that_decoding_keeps(export, text, tmp_path):
  for name, more in (("plain", []), ("rounded", ["--round=int4"])):
    flags = "--format=npz", "--output", tmp_path / name, *more
    if more:
      flags = *flags, "--calibration", text
    code, err = export(*flags)
    assert code == 0, err
  plain, rounded = (
    np.load(next((tmp_path / x).glob("*.npz"))) for x in ("plain", "rounded")
  )
  for name in plain:
    if "/attention/" not in name and "/mlp/" not in name:
      np.testing.assert_array_equal(rounded[name], plain[name])
      continue
    assert (rounded[name] != plain[name]).any()
    inputs = 32 if name[-1] != "o" else rounded[name].size // 32
    w = rounded[name].reshape(inputs, -1)
    with tf.Graph().as_default(), tf.Session() as session:
      np.testing.assert_array_equal(session.run(round_to_int4(w)), w)


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--format=imatrix"], "tokens fill no row of SEQUENCE_LENGTH = 32; give"),
    (["--format=gguf", "--dtype=q8_0", "--round=int8"], "--round = 'int8': "),
    (["--format=npz"], "give --round or --format=imatrix, which need statis"),
  ],
)
def test_what_cannot_be_calibrated_is_one_error_line(
  export, tmp_path, flags, message
):
  short, output = tmp_path / "short.txt", tmp_path / "out"
  short.write_text("one two")
  flags = *flags, "--output", output, "--calibration", short
  code, err = export(*flags)
  assert code == 2
  assert message in err.splitlines()[-1]
  assert not output.exists()
