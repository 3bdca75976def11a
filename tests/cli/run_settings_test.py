# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run gives the same numbers by --model_dir and by its config.gin."""

import json
import os

import pytest

from palm_mtf.cli.main import main
from palm_mtf.cli.run_settings import load_run
from tests import cpus, runs
from tests.log_lines import without_stamps

# Number of JSON objects, which all name the dtype, per command.
COMMANDS = {
  "evaluate": ([], 1),
  "score": (["--text", "one two", "--text", "3"], 3),  # and all texts together
  "generate": (["--prompt", "one", "--gin.NUM_SAMPLES=2"], 2),
}


def forms(model_dir) -> list[list[str]]:
  """Returns the flags that name a run, in every form."""
  of_file = f"--gin_file={model_dir}/config.gin"
  moved = f"--gin.MODEL_DIR={str(model_dir)!r}"
  return [["--model_dir", str(model_dir)], [of_file, moved]]


def printed(capsys, *arguments) -> tuple[str, list[dict]]:
  """Returns the first line of stderr, and the objects on stdout."""
  capsys.readouterr()
  assert main([*arguments, "--json"]) == 0
  out, err = capsys.readouterr()
  first = without_stamps(err).splitlines()[0].removeprefix("palm_mtf: ")
  return first, [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_computes_in_the_dtype_that_its_user_named(
  command, finished, tmp_path, monkeypatch, capsys
):
  assert runs.SETTINGS["ACTIVATION_DTYPE"] == "float32"
  cpus.pretend_cpu(cpus.ZEN_4, tmp_path, monkeypatch)  # "auto": bfloat16
  flags, count = COMMANDS[command]
  found = [printed(capsys, command, *form, *flags) for form in forms(finished)]
  for first, records in found:
    assert first == "computing in float32 (native bfloat16: avx512_bf16)"
    assert [x["activation_dtype"] for x in records] == ["float32"] * count
  assert found[0] == found[1]


def test_a_dtype_on_the_command_line_replaces_that_of_the_run(finished, capsys):
  for form in forms(finished):
    first, (record,) = printed(
      capsys, "evaluate", *form, "--gin.ACTIVATION_DTYPE='bfloat16'"
    )
    assert first.startswith("computing in bfloat16 (")
    assert record["activation_dtype"] == "bfloat16"


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
