# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""On older CPUs everything works, with the results of this CPU.

The tests limit oneDNN's kernels (ONEDNN_MAX_CPU_ISA), the code that XLA
compiles (--xla_cpu_max_isa), and our own code, which reads ONEDNN_MAX_CPU_ISA.
They cannot limit Eigen's kernels and TensorFlow's own checks of the CPU.
"""

import json

import pytest

from palm_mtf.machine.compiled_code import compiled_code_folder
from tests import processes, runs
from tests.cases import slow
from tests.log_lines import without_stamps

# oneDNN and XLA read their limits only once, so one separate process runs all
# commands. It reads {name: command} and prints {name: [exit code, stdout]}.
_RUN_ALL = """
import contextlib, io, json, sys
from palm_mtf.cli.main import main
results = {}
for name, command in json.loads(sys.argv[1]).items():
  with contextlib.redirect_stdout(io.StringIO()) as stdout:
    code = main(command)
  results[name] = code, stdout.getvalue()
print(json.dumps(results))
"""
_SETTINGS = {"TRAIN_STEPS": 2, "EVAL_STEPS": 2, "PROMPTS": []}
_DECODING = {
  "generate": [],
  "generate int8": ["--gin.WEIGHT_DTYPE='int8'"],
  "generate int4": ["--gin.WEIGHT_DTYPE='int4'"],
  "generate q5_k": ["--gin.WEIGHT_DTYPE='q5_k'"],
  "generate beams": ["--gin.NUM_BEAMS=2"],
}


@pytest.fixture(scope="module")
def here(corpus, tmp_path_factory):
  """The results of `evaluate` after the same float32 steps on this CPU."""
  model_dir = tmp_path_factory.mktemp("here")
  assert runs.run("train", corpus, model_dir, **_SETTINGS) == 0
  return runs.read_metrics(model_dir)[-1]["validation_loss"]


# No older CPU multiplies bfloat16. activation_dtype_test.py also tests "auto".
@pytest.mark.parametrize(
  ("limit", "dtype"),
  [
    ("AVX2", "bfloat16"),
    slow("AVX2", "auto"),
    slow("SSE41", "bfloat16"),
    slow("SSE41", "auto"),
  ],
)
def test_a_lesser_cpu_trains_decodes_scores_and_evaluates(
  limit, dtype, corpus, here, tmp_path, monkeypatch
):
  monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
  # The folder depends on XLA_FLAGS, so it has only code for AVX2.
  folder = f"ram://ram://{compiled_code_folder()}"
  monkeypatch.setenv(
    "TF_XLA_FLAGS", f"--tf_xla_persistent_cache_directory={folder}"
  )
  of_run = ["--model_dir", str(tmp_path), "--json"]
  prompts = ["--prompt", "one two", "--prompt", "3"]
  settings = {**_SETTINGS, "ACTIVATION_DTYPE": dtype}
  commands = {
    "train": runs.arguments("train", corpus, tmp_path, **settings),
    **{x: ["generate", *of_run, *prompts, *y] for x, y in _DECODING.items()},
    "score": ["score", *of_run, "--text", "one two three"],
    "evaluate": ["evaluate", *of_run],
    "evaluate the file": [
      *("evaluate", f"--gin_file={tmp_path}/config.gin", "--json")
    ],
  }
  run = processes.python("-c", _RUN_ALL, json.dumps(commands))
  assert run.returncode == 0, run.stderr  # nothing aborted
  results = json.loads(run.stdout)
  assert {name for name, (code, _) in results.items() if code} == set(), (
    run.stderr
  )
  resolved = "float32" if dtype == "auto" else "bfloat16"
  lines = without_stamps(run.stderr).splitlines()
  said = [x for x in lines if x.startswith("palm_mtf: ")]
  assert said[0].startswith(
    f"palm_mtf: computing in {resolved} (no native bfloat16: "
  )
  warnings = [x for x in said if "times as long as float32 (measured" in x]
  assert len(warnings) == (len(commands) if dtype == "bfloat16" else 0)
  for file, kept in (("config", dtype), ("operative_config", resolved)):
    config = (tmp_path / f"{file}.gin").read_text()
    assert f'\nACTIVATION_DTYPE = "{kept}"  # ' in config
  assert len(results["generate beams"][1].splitlines()) == 2
  evaluated = json.loads(results["evaluate"][1])
  assert evaluated["activation_dtype"] == resolved
  assert json.loads(results["evaluate the file"][1]) == evaluated
  loss = evaluated["validation_loss"]
  assert loss == pytest.approx(here, rel=1e-4 if dtype == "auto" else 1e-2)
