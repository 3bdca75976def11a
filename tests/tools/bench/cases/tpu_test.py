# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The case builds whole TPU programs, and refuses settings without a TPU."""

import collections
import json

import numpy as np
import pytest

from palm_mtf.accounting.communication import step_bytes
from tests import processes
from tests.mesh.tpu.lowering_test import placed_types
from tools.bench.cases import tpu
from tools.traffic import traffic

SMALL = ["NUM_LAYERS=1", "VOCAB_SIZE=512", "D_FF=64", "SEQUENCE_LENGTH=16"]


def flags(*macros):
  return [f"--gin.{macro}" for macro in (*SMALL, *macros)]


@pytest.mark.slow
def test_it_counts_the_collectives_of_two_pods(run_bench):
  code, out, _ = run_bench(
    *("tpu", "--json"),
    "--gin_file=recipes/quickstart.gin",
    "--gin_file=layouts/tpu_v4_8.gin",
    *flags("NUM_PODS=2"),
  )
  assert code == 0
  found = json.loads(out)
  assert (found["tpu"], found["devices"], found["pods"]) == ("v4-8", 4, 2)
  # One per pod for each of 10 gradients, and one for the embedding's second
  # use. Gradients of norm scales are sliced for the exchange.
  assert found["XlaReduceScatter"] >= 2 * 10


QUICKSTART = ["recipes/quickstart.gin", "layouts/tpu_v3_8.gin"]


def of_8b(slice_):
  files = ["recipes/palm_8b.gin", f"layouts/tpu_{slice_}.gin"]
  return pytest.param(files, 0, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("files", "num_alone"),
  [
    pytest.param(QUICKSTART, 34, marks=pytest.mark.slow),
    of_8b("v3_32"),
    of_8b("v4_128"),
  ],
)
def test_a_real_program_is_placed_and_its_collectives_are_the_closed_form_s(
  files, num_alone
):
  """Layouts that split all weights alike fetch `num_alone` squares apart."""
  counts = []
  for macros in (["NUM_LAYERS=1"], ["NUM_LAYERS=2"], []):
    config = tpu.make_config(files, ["NUM_PODS=1", *macros])
    _, program = tpu.build_program(config)
    types = placed_types(program)
    counts.append(np.array([types[kind] for kind in tpu.KINDS]))
  one, two, all_layers = counts
  num_layers = config.model.num_layers
  np.testing.assert_equal(all_layers, one + (num_layers - 1) * (two - one))
  assert (all_layers > 0).any()
  mesh = config.mesh_layout
  expected = collections.Counter(
    step_bytes(
      config.model,
      mesh,
      config.optimizer,
      pod_batch_size=config.run.batch_sizes.sizes[0],
      num_pods=1,
    )
  )
  alone = 4 * (mesh.num_devices - 1) * 2
  expected["all_reduce", ("data",)] += num_alone * alone
  assert traffic([program.update, *program.metrics.values()]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["palm_8b", "palm_62b", "palm_540b"])
def test_recipes_of_two_pods_build_their_programs(name):
  """In a separate process, because the program of 540B takes 7 GiB."""
  recipe = f"--gin_file=recipes/{name}_two_pods.gin"
  bench = processes.ROOT / "tools" / "bench"
  done = processes.python(bench, "tpu", recipe, "--json")
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  chips = {"palm_8b": 64, "palm_62b": 512, "palm_540b": 3072}
  assert (found["pods"], found["devices"]) == (2, chips[name])
  # Each pod reduce-scatters each weight's gradient over the batch's axis.
  assert found["XlaReduceScatter"] >= 2 * 8 * found["layers"]
