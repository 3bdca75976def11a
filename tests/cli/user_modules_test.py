# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from tests import processes

MODULE = """
import sys

import tensorflow as tf


def layers():
  # As any program finds it, and as our own modules import it.
  assert tf is sys.modules["tensorflow"]
  assert tf.__spec__.loader.__class__.__name__ == "SourceFileLoader"
  assert "keras" not in sys.modules
  return int(tf.constant(3))
"""


def test_a_module_of_the_user_imports_tensorflow_without_its_notices(
  tmp_path, monkeypatch
):
  monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.py").write_text(MODULE)
  (tmp_path / "mine.gin").write_text(
    "include 'recipes/quickstart.gin'\nimport mine\nNUM_LAYERS = @mine.layers()"
  )
  done = processes.python(
    *("-m", "palm_mtf", "train", "--gin_file=mine.gin"),
    *("--gin.MODEL_DIR='run'", "--print_config"),
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert "\nNUM_LAYERS = @mine.layers()" in done.stdout


@pytest.mark.parametrize(
  "statement",
  [
    "from palm_mtf.tasks import corpus",
    "import palm_mtf.unitransformer",
    pytest.param("import mesh_tensorflow", marks=pytest.mark.slow),
    pytest.param("import seqio", marks=pytest.mark.slow),
  ],
)
def test_modules_that_import_tensorflow_are_the_first_to_do_so(
  statement, tmp_path, monkeypatch
):
  """In a process that has not imported TensorFlow, as each command begins."""
  monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.py").write_text(
    f"import sys\nassert 'tensorflow' not in sys.modules\n{statement}\n"
    "def layers():\n  return 3\n"
  )
  (tmp_path / "mine.gin").write_text(
    "include 'recipes/quickstart.gin'\nimport mine\nNUM_LAYERS = @mine.layers()"
  )
  done = processes.python(
    *("-m", "palm_mtf", "train", "--gin_file=mine.gin"),
    *("--gin.MODEL_DIR='run'", "--print_config"),
  )
  assert done.returncode == 0, done.stderr
  assert "oneDNN" not in done.stderr
