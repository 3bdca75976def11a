# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench of GPUs compares programs of the same model; on virtual devices."""

import dataclasses
import json
import types

import numpy as np
import pytest

from palm_mtf.config import ModelConfig
from tools import parity
from tools.bench import models

TINY = ModelConfig(
  num_layers=2,
  d_model=64,
  num_heads=4,
  d_kv=16,
  d_ff=256,
  vocab_size=512,
  sequence_length=64,
  activation_dtype="float32",
)


@pytest.fixture(autouse=True)
def rehearsal(monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.mark.slow
def test_plain_jax_has_the_loss_of_our_program_from_the_same_weights():
  import jax

  from palm_mtf.runtime.program import Program
  from tools.bench.cases.accelerators import open_step
  from tools.peers import jax_palm

  # The JAX program has no zero-centered norm scales.
  plain = dataclasses.replace(models.PALM_OPTIMIZER, norm_scale="plain")
  (batch,) = parity.batches(TINY, 4, 1, seed=0)
  with open_step("xla", TINY, 4, plain) as (client, step):
    with client.graph.as_default():
      stacks = [parts[0] for parts in step.program.slices.values()]
      values = {
        name: value
        for x in stacks
        for name, value in zip(x.names, x.rows(x.read()), strict=True)
      }
    weights = client.call(Program(outputs=values))
    metrics = step.run(batch, 0)
  sizes = types.SimpleNamespace(
    dtype="float32", d_kv=TINY.d_kv, d_model=TINY.d_model
  )
  theirs = jax_palm.compute_loss(
    jax.tree.map(jax.numpy.asarray, parity.jax_parameters(TINY, weights)),
    batch["inputs"],
    batch["targets"],
    sizes,
  )
  # Both sum float32 numbers, in different orders; measured: 1e-7.
  ours = metrics["loss"] + metrics["z_loss"]
  np.testing.assert_allclose(ours, float(theirs), rtol=1e-6)


@pytest.mark.slow  # two processes, half a minute
def test_it_gives_speeds_and_leaves_out_a_peer_that_is_not_there(run_bench):
  sizes = ["--size=4.8M", "--sequence_length=64", "--batch_size=2"]
  code, out, said = run_bench(
    *("gpu", "--rounds=2", "--dtype=float32", "--chip=h100_sxm", "--json"),
    *sizes,
  )
  assert code == 0, said
  ours, theirs, *_ = map(json.loads, out.splitlines())
  assert (ours["program"], theirs["program"]) == ("ours", "jax")
  assert theirs["low"] <= theirs["ratio"] <= theirs["high"]
  config = models.benchmark_config("float32", "4.8M")
  config = dataclasses.replace(config, sequence_length=64)
  # 6 FLOPs per token and weight, and 12 per layer, head, key and value of each
  # position of a sequence (PaLM, appendix B), of 989.4 TFLOP/s.
  weights = models.num_parameters(config) - 256 * (config.num_layers + 1)
  flops = 6 * weights + 12 * config.num_layers * 256 * 64
  expected = ours["tokens_per_sec"] * flops / 989.4e12
  assert ours["mfu"] == pytest.approx(expected, rel=1e-6)
  if "torch is warm" not in said:
    assert "torch is left out: " in said


def test_a_chip_that_is_not_there_is_one_line(run_bench):
  code, _, said = run_bench("gpu", "--chip=h1000")
  assert code == 2
  assert said.startswith("bench gpu: --chip = 'h1000'")
