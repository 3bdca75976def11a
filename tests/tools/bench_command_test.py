# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the flags of a tool is one line, before any work."""

import pytest

from tests import processes

NO_FLAG = "no such flag; macros are --gin.NAME=VALUE."
AT_LEAST_1 = "give a whole number of at least 1"


@pytest.mark.parametrize(
  ("tool", "flags", "message"),
  [
    (
      "bench_decode",
      "--peer=troch",
      "--peer = 'troch' (did you mean \"torch\"",
    ),
    ("bench_decode", "--bits=3", "choose one of '32', '16', '8', '4'"),
    ("bench_decode", "--size=5M", "--size = '5M'"),
    ("bench_decode", "--rounds=0", f"--rounds = 0: {AT_LEAST_1}"),
    ("bench_graph", "--layers=0", f"--layers = 0: {AT_LEAST_1}"),
    ("bench_graph", "--mesh=dat:2", 'no axis "dat" (did you mean "data"?)'),
    ("bench_graph", "--mesh=model:5", "heads=48 is not divisible by mesh axis"),
    ("bench_graph", "--mehs=data:2", f"--mehs=data:2: {NO_FLAG}"),
    ("bench_layouts", "--layout=boht", "'boht' (did you mean \"both\"?)"),
    ("bench_layouts", "--steps=0", f"--steps = 0: {AT_LEAST_1}"),
    ("bench_layouts", "--stps=3", f"--stps=3: {NO_FLAG}"),
    ("bench_layouts", "--gin.NUM_HEADS=6", "heads=6 is not divisible by mesh"),
    ("bench_optimizer", "--rounds=0", f"--rounds = 0: {AT_LEAST_1}"),
    ("bench_optimizer", "--steps=3", f"--steps=3: {NO_FLAG}"),
    ("bench_optimizer", "--gin.BETA3=1", "unknown macro BETA3"),
    ("bench_pods", "--rounds=0", f"--rounds = 0: {AT_LEAST_1}"),
    (
      "bench_pods",
      "--microbatches=many",
      "--microbatches = many: give numbers",
    ),
    ("bench_pods", "--microbatches=0", "--microbatches = 0: give a whole"),
    ("bench_pods", "--dcn_dtype=float16", "--dcn_dtype"),
    ("bench_start", "--model_dir=none --rounds=0", "--rounds = 0: give a"),
    ("bench_start", "--model_dir=none", "'none': has no vocabulary.model;"),
    ("bench_train", "--peer=troch", "--peer = 'troch' (did you mean \"torch\""),
    ("bench_train", "--dtype=float16", "choose one of 'bfloat16', 'float32'"),
    ("bench_train", "--sequence_length=300", "a divisor of that"),
    ("build_tpu", "--gin_file=recipes/quickstart.gin", "TPU is not set"),
    ("build_tpu", "--layers=3", f"--layers=3: {NO_FLAG}"),
    (
      "dcn_sweep",
      "--mbits=fast",
      '--mbits = "fast": give numbers as in 200,50',
    ),
    ("dcn_sweep", "--dtypes=int8", "--dtypes"),
    ("dcn_sweep", "--steps=0", f"--steps = 0: {AT_LEAST_1}"),
    ("quantized_loss", "--model_dir=nowhere", "there is no config.gin in it"),
    ("parity", "--d_kv=7", "D_KV = 7"),
  ],
)
def test_a_wrong_flag_is_one_line(tool, flags, message, run_tool):
  code, out, err = run_tool(tool, *flags.split())
  assert (code, out) == (2, "")
  (line,) = err.splitlines()
  assert line.startswith(f"{tool}: ")
  assert message in line


def test_a_tool_runs_as_a_script(tmp_path):
  """It finds the modules beside it, from any folder."""
  script = processes.ROOT / "tools" / "bench_decode.py"
  done = processes.python(script, "--rounds=0", cwd=tmp_path)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("bench_decode: --rounds = 0: ")
