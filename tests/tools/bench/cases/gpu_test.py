# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench of GPUs compares programs of the same model; on virtual devices."""

import dataclasses
import types

import numpy as np
import pytest

from palm_mtf.config import ModelConfig
from tests.tools.peers import jax_peer_test as parity
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
  from tools.bench.cases.gpu import open_step
  from tools.peers import jax_peer

  # The JAX program has no zero-centered norm scales.
  plain = dataclasses.replace(models.PALM_OPTIMIZER, norm_scale="plain")
  (batch,) = parity.batches(TINY, 4, 1, seed=0)
  with open_step(TINY, 4, plain) as (client, step):
    with client.graph.as_default():
      stacks = [parts[0] for parts in step.programs.slices.values()]
      values = {
        name: value
        for x in stacks
        for name, value in zip(x.names, x.rows(x.read()), strict=True)
      }
    weights = client.call(Program(outputs=values))
    metrics = step.run(batch, 0)
  theirs = jax_peer.compute_loss(
    jax.tree.map(jax.numpy.asarray, parity.jax_parameters(TINY, weights)),
    batch["inputs"],
    batch["targets"],
    types.SimpleNamespace(**dataclasses.asdict(TINY), dtype="float32"),
  )
  # Both sum float32 numbers, in different orders; measured: 1e-7.
  ours = metrics["loss"] + metrics["z_loss"]
  np.testing.assert_allclose(ours, float(theirs), rtol=1e-6)


@pytest.mark.slow  # two processes, half a minute
def test_mfu_is_a_share_of_the_chip_s_peak(measure):
  flags = [
    "--size=4.8M",
    "--sequence_length=64",
    "--batch_size=2",
    "--rounds=2",
  ]
  flags += ["--dtype=float32", "--chip=h100_sxm"]
  ours, theirs, *_ = measure("gpu", *flags)  # without PyTorch, it is left out
  assert (ours["program"], theirs["program"]) == ("ours", "jax")
  config = models.benchmark_config("float32", "4.8M")
  # 6 FLOPs per token and weight, and 12 per layer, head, key and value of each
  # position of a sequence (PaLM, appendix B), of 989.4 TFLOP/s.
  weights = models.num_parameters(config) - 256 * (config.num_layers + 1)
  flops = 6 * weights + 12 * config.num_layers * 256 * 64
  expected = ours["tokens_per_sec"] * flops / 989.4e12
  assert ours["mfu"] == pytest.approx(expected, rel=1e-6)
