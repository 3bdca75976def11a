# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Training gives the same bits as before the last redesign."""

import subprocess
import sys

import pytest

from tests import processes, runs

pytestmark = pytest.mark.slow  # two runs for each case, in processes

# A commit that changes the numbers of training on purpose also sets this to a
# later commit: the last such commit.
BEFORE = "8e4e5be9c804"

LAYOUT = {
  "MESH_SHAPE": "data:2,model:2",
  "LAYOUT": "batch:data,d_model_stored:data,heads:model,d_ff:model,vocab:model",
}
CASES = {
  "float32": {},
  "bfloat16": {"ACTIVATION_DTYPE": "bfloat16"},
  "serial, multi-head, rms_norm": {
    "BLOCK": "serial",
    "ATTENTION": "multi_head",
    "NORM": "rms_norm",
  },
  "dropout": {"DROPOUT": 0.1},
  "factored": {
    "SECOND_MOMENT": "factored",
    "PARAMETER_SCALE": "stacked",
    "MOMENTUM_DTYPE": "bfloat16",
  },
  "packed, prefix_lm": {"PACKING": "packed", "OBJECTIVE": "prefix_lm"},
  "span corruption": {
    "PACKING": "packed",
    "OBJECTIVE": "span_corruption",
    "EXTRA_IDS": 20,
  },
  "layers recomputed": {"REMAT": "layer", "NUM_LAYERS": 2},
  "attention recomputed": {
    "REMAT": "attention",
    "ACTIVATION_DTYPE": "bfloat16",
  },
  "microbatches": {"NUM_MICROBATCHES": 2},
  "microbatches summed in float32": {
    "NUM_MICROBATCHES": 2,
    "ACTIVATION_DTYPE": "bfloat16",
    "GRADIENT_DTYPE": "float32",
  },
  "batch split": {"MESH_SHAPE": "data:2", "LAYOUT": "batch:data"},
  "model split": {
    "MESH_SHAPE": "model:2",
    "LAYOUT": "heads:model,d_ff:model,vocab:model,d_model_residual:model",
  },
  "all split, layers recomputed, bfloat16": {
    **LAYOUT,
    "REMAT": "layer",
    "ACTIVATION_DTYPE": "bfloat16",
    "NUM_MICROBATCHES": 2,
  },
  "two pods": {"NUM_PODS": 2},
  "two pods, split, bfloat16": {
    **LAYOUT,
    "NUM_PODS": 2,
    "ACTIVATION_DTYPE": "bfloat16",
    "DCN_DTYPE": "bfloat16",
    "NUM_MICROBATCHES": 2,
    "GLOBAL_BATCH_SIZE": 8,
  },
  "four pods": {"NUM_PODS": 4},
  "two pods in servers": {"NUM_PODS": 2, "PODS": "local_servers"},
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
  """A folder with the package as of commit BEFORE."""
  folder = tmp_path_factory.mktemp("before")
  archive = subprocess.run(
    ["git", "archive", BEFORE, "palm_mtf", "gin", "tasks"],
    cwd=processes.ROOT,
    capture_output=True,
    check=False,
  )
  if archive.returncode:
    pytest.skip(f"this clone lacks {BEFORE}: {archive.stderr.decode()}")
  subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
  (folder / "palm_mtf" / "tasks").symlink_to(folder / "tasks")
  return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return runs.write_corpus(tmp_path_factory.mktemp("text") / "corpus")


def train(package, corpus, model_dir, macros):
  """Returns the last checkpoint's tensors, the metrics and the samples."""
  changes = {"TRAIN_STEPS": 6, "SAMPLE_STEPS": 6, **macros}
  command = runs.arguments("train", corpus, model_dir, **changes)
  # Python imports from the working folder first.
  env = processes.environment(PYTHONPATH=str(package))
  # The package before does not know the flag that this process has set.
  env.pop("TF_XLA_FLAGS", None)
  result = subprocess.run(
    [sys.executable, "-m", "palm_mtf", *command],
    cwd=package,
    env=env,
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  metrics = list(map(runs.without_times, runs.read_metrics(model_dir)))
  samples = (model_dir / "samples.jsonl").read_text()
  return runs.read_tensors(model_dir, 6), metrics, samples


@pytest.mark.parametrize("name", CASES)
def test_training_has_the_bits_of_the_code_before(
  name, before, corpus, tmp_path
):
  old, *old_records = train(before, corpus, tmp_path / "old", CASES[name])
  root = processes.ROOT
  new, *new_records = train(root, corpus, tmp_path / "new", CASES[name])
  assert old and old["embedding"].dtype == new["embedding"].dtype
  runs.assert_same(old, new)
  assert old_records == new_records
