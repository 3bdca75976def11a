# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Commands compute in the dtype that a run names, and say so."""

import json
import os

import pytest

from palm_mtf.cli.gin_files import load, load_run
from tests import cpus, runs
from tests.log_lines import without_stamps


def of_file(model_dir) -> list[str]:
  """Returns the flags that name a run by its config.gin."""
  return [
    f"--gin_file={model_dir}/config.gin",
    f"--gin.MODEL_DIR={str(model_dir)!r}",
  ]


@pytest.fixture
def results(finished, palm_mtf):
  """Runs a command; returns its first line on stderr, and its JSON objects."""

  def run(command, *flags, form=("--model_dir", finished)):
    code, out, err = palm_mtf(command, *form, *flags, "--json")
    assert code == 0, err
    assert "warning" not in err
    first = without_stamps(err).splitlines()[0].removeprefix("palm_mtf: ")
    return first, [json.loads(line) for line in out.splitlines()]

  return run


@pytest.mark.parametrize(
  ("command", "flags", "count"),
  [
    ("evaluate", [], 1),
    # An object for each text, and one for all texts together.
    ("score", ["--text", "one two", "--text", "3"], 3),
    ("generate", ["--prompt", "one", "--gin.NUM_SAMPLES=2"], 2),
  ],
)
def test_a_run_computes_in_the_dtype_that_its_user_named(
  command, flags, count, results, finished, tmp_path, monkeypatch
):
  assert runs.SETTINGS["ACTIVATION_DTYPE"] == "float32"
  cpus.pretend_cpu(cpus.ZEN_4, tmp_path, monkeypatch)  # "auto": bfloat16
  first, records = results(command, *flags)
  assert first == "computing in float32 (native bfloat16: avx512_bf16)"
  assert [x["activation_dtype"] for x in records] == ["float32"] * count
  if command == "evaluate":
    found = results(command, *flags, form=of_file(finished))
    assert found == (first, records)


def test_a_dtype_on_the_command_line_replaces_that_of_the_run(
  results, finished
):
  first, (record,) = results("evaluate", "--gin.ACTIVATION_DTYPE='bfloat16'")
  assert first.startswith("computing in bfloat16 (")
  assert record["activation_dtype"] == "bfloat16"
  bindings = [f"MODEL_DIR={str(finished)!r}", "ACTIVATION_DTYPE='bfloat16'"]
  _, config = load("score", [f"{finished}/config.gin"], bindings).build()
  assert config.model.activation_dtype == "bfloat16"


@pytest.mark.parametrize(
  ("flags", "dtype"), [(cpus.ZEN_3, "float32"), (cpus.ZEN_4, "bfloat16")]
)
def test_a_run_that_left_its_dtype_open_computes_in_what_is_fast_here(
  flags, dtype, finished, tmp_path, monkeypatch
):
  text = (finished / "config.gin").read_text()
  named = 'ACTIVATION_DTYPE = "float32"'
  assert named in text
  left_open = text.replace(named, 'ACTIVATION_DTYPE = "auto"')
  (tmp_path / "config.gin").write_text(left_open)
  cpus.pretend_cpu(flags, tmp_path, monkeypatch)
  _, config = load_run("evaluate", str(tmp_path), {})
  assert config.model.activation_dtype == dtype
  _, config = load_run("evaluate", os.fspath(finished), {})
  assert config.model.activation_dtype == "float32"
