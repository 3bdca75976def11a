# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""On older CPUs everything works, with the results of this CPU.

The tests limit oneDNN's kernels (ONEDNN_MAX_CPU_ISA), the code that XLA
compiles (--xla_cpu_max_isa), and our own code, which reads ONEDNN_MAX_CPU_ISA.
They cannot limit Eigen's kernels and TensorFlow's own checks of the CPU.
"""

import json

import pytest

from tests import processes, runs
from tests.log_lines import without_stamps


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
  """A separate cache for XLA's code, which is compiled for AVX2."""
  return tmp_path_factory.mktemp("compiled_for_avx2")


@pytest.fixture(scope="module")
def here(corpus, tmp_path_factory):
  """The results of `evaluate` after the same float32 steps on this CPU."""
  model_dir = tmp_path_factory.mktemp("here")
  settings = {"NUM_PODS": 2, "TRAIN_STEPS": 2, "EVAL_STEPS": 2, "PROMPTS": []}
  assert runs.run("train", corpus, model_dir, **settings) == 0
  return runs.read_metrics(model_dir)[-1]["validation_loss"]


# No older CPU multiplies bfloat16. activation_dtype_test.py also tests "auto".
@pytest.mark.parametrize(
  ("limit", "dtype"),
  [
    ("AVX2", "bfloat16"),
    pytest.param("AVX2", "auto", marks=pytest.mark.slow),
    pytest.param("SSE41", "bfloat16", marks=pytest.mark.slow),
    pytest.param("SSE41", "auto", marks=pytest.mark.slow),
  ],
)
def test_a_lesser_cpu_trains_decodes_scores_and_evaluates(
  limit, dtype, corpus, compiled, here, tmp_path
):
  run = processes.python(
    *("-m", "tests.lesser_cpu_commands", corpus, tmp_path, dtype),
    variables={
      "ONEDNN_MAX_CPU_ISA": limit,
      "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
      "TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={compiled}",
    },
  )
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
  # train, evaluate twice, score, and generate four times: one each.
  assert len(warnings) == (8 if dtype == "bfloat16" else 0)
  for file, kept in (("config", dtype), ("operative_config", resolved)):
    config = (tmp_path / f"{file}.gin").read_text()
    assert f'\nACTIVATION_DTYPE = "{kept}"  # ' in config
  assert len(results["generate beams"][1].splitlines()) == 2
  evaluated = json.loads(results["evaluate"][1])
  assert evaluated["activation_dtype"] == resolved
  assert json.loads(results["evaluate the file"][1]) == evaluated
  loss = evaluated["validation_loss"]
  assert loss == pytest.approx(here, rel=1e-4 if dtype == "auto" else 1e-2)
