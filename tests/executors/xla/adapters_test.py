# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps train only the adapter, with the same numbers wherever they run."""

import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.communication import step_bytes
from palm_mtf.accounting.flops import device_flops
from palm_mtf.accounting.memory import device_bytes
from palm_mtf.compilation.hlo_text import CompiledText
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.executors.xla.executor import EXECUTOR
from palm_mtf.generation.inference.scorer import Example, Scorer
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.model import weights
from palm_mtf.ops.variables import SlicedVariable
from tests import oracle
from tests.adapter_oracle import make_case, merge
from tests.cases import slow
from tests.decode_testing import save_checkpoint
from tests.executors.xla.frozen_test import MESHES, TPU, check_bytes, step_flops
from tests.executors.xla.program_run import lower_gradients, pod_step, train_on
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  random_documents,
  random_tokens,
  relative_error,
)
from tests.settings import work
from tests.virtual_oracle import KINDS, virtual_documents
from tests.virtual_oracle import make_case as make_virtual_case

EVERY = ("q", "k", "v", "o", "wi_gate", "wi", "wo")
BLOCKS = {
  "PaLM": "layer_norm parallel multi_query",
  "LLaMA 3": "LLaMA 3",
  "Cohere 2": "Cohere 2",
}


@functools.cache
def case_of(block, adapter, remat="none"):
  settings = {"adapter": adapter, "remat": remat, "num_layers": 2}
  if block == "Cohere 2":
    settings |= {"layers": "window, global", "num_layers": 4}
  if adapter in KINDS:
    del settings["adapter"]
    return make_virtual_case(BLOCKS[block], adapter, **settings)
  return make_case(BLOCKS[block], EVERY, **settings)


def run_steps(
  block, adapter, mesh, num_pods=1, remat="none", dtype="float32", seed=0
):
  """Returns every variable after some steps, and the metrics."""
  case = case_of(block, adapter, remat)
  return train_on(
    *(MESHES[mesh], num_pods),
    dataclasses.replace(case.config, activation_dtype=dtype),
    dataclasses.replace(PALM_OPTIMIZER, parameter_scale_floor=0.1),
    rows=virtual_documents if adapter in KINDS else random_documents,
    params={x: np.float32(y) for x, y in case.params.items()},
    seed=seed,
  )


on_one_host = functools.cache(functools.partial(run_steps, mesh="hosts"))


@pytest.mark.parametrize(
  ("block", "adapter", "mesh", "num_pods", "remat"),
  [
    ("PaLM", "lora", "accelerators", 1, "none"),
    slow("PaLM", "prefix", "accelerators", 2, "none"),
    slow("PaLM", "lora", "hosts, stages", 2, "layer"),
    *(
      slow(block, adapter, mesh, num_pods, remat)
      for block, remat in (("LLaMA 3", "layer"), ("Cohere 2", "none"))
      for adapter in ("lora", "dora", *KINDS)
      for mesh in MESHES
      for num_pods in (1, 2)
    ),
  ],
)
def test_layouts_pods_and_stages_train_the_same(
  block, adapter, mesh, num_pods, remat
):
  """The base keeps every bit, and has no slots."""
  case = case_of(block, adapter, remat)
  expected, numbers = on_one_host(block, adapter)
  found, metrics = run_steps(block, adapter, mesh, num_pods, remat)
  assert found.keys() == expected.keys()
  for name, value in found.items():
    if name in case.params and name not in case.slopes:
      np.testing.assert_array_equal(value, np.float32(case.params[name]))
    else:
      assert name in case.slopes or name.rpartition("/")[0] in case.slopes
      assert relative_error(value, expected[name]) < 1e-3, name
  for name in case.slopes:
    assert relative_error(found[name], case.params[name]) > 1e-3
  for one, other in zip(numbers, metrics, strict=True):
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
  ("block", "adapter", "mesh", "num_pods", "remat"),
  [
    ("PaLM", "lora", "hosts", 1, "none"),
    slow("PaLM", "lora", "hosts, stages", 2, "none"),
    slow("PaLM", "lora", "accelerators", 1, "none"),
    *(
      slow(block, adapter, mesh, 1, remat)
      for block, remat in (("LLaMA 3", "layer"), ("Cohere 2", "none"))
      for adapter in ("lora", "dora", *KINDS)
      for mesh in MESHES
    ),
  ],
)
def test_a_base_in_bfloat16_trains_the_bits_of_one_in_float32(
  block, adapter, mesh, num_pods, remat, monkeypatch
):
  """A step reads the base only in the activation dtype."""
  case, kept = case_of(block, adapter, remat), {}

  def in_float32(mesh, name, *given, stored_dtype, **keywords):
    kept[name] = stored_dtype
    return SlicedVariable(mesh, name, *given, **keywords)

  def run(seed):
    return run_steps(block, adapter, mesh, num_pods, remat, "bfloat16", seed)

  variables, metrics = run(seed=0)
  with monkeypatch.context() as patch:
    patch.setattr(weights, "SlicedVariable", in_float32)
    # Nothing depends on the seed, by which accelerators cache programs.
    expected, numbers = run(seed=1)
  assert metrics == numbers
  # Adapter and norms keep float32. Layers of a loop are one variable.
  halved = {x for x in case.params if x not in case.slopes and "norm" not in x}
  dtypes = {x: y for x, y in kept.items() if x in case.params}
  assert len(dtypes) > 9
  for name, dtype in dtypes.items():
    assert dtype == (tf.bfloat16 if name in halved else tf.float32), name
  for name, value in expected.items():
    if name in halved:
      value = value.astype(ml_dtypes.bfloat16).astype(value.dtype)
    np.testing.assert_array_equal(variables[name], value, name)


def make_step(config, mesh):
  EXECUTOR.open_here(mesh, num_pods=1)
  return pod_step(config, mesh, dcn_dtype="bfloat16")


@pytest.mark.parametrize(
  ("adapter", "even"),
  [
    ("lora", {"adapter_rank": 4}),
    ("prefix", {"adapter_length": 4}),
    slow("prompt", {"adapter_length": 4}),
  ],
)
def test_accelerators_keep_and_send_the_bytes_of_the_plan(adapter, even):
  # With even sizes, no part of a gradient is padded.
  even = {**even, "activation_dtype": "bfloat16"}
  config = dataclasses.replace(case_of("PaLM", adapter).config, **even)
  layout = MESHES["accelerators"]
  made = make_step(config, layout)
  given = work(config, layout, pods=PodsConfig(dcn_dtype="bfloat16"))
  check_bytes(made, given)
  planned = device_bytes(given)
  assert planned.weights < 1.2 * planned.frozen_weights


@pytest.mark.parametrize(
  ("block", "adapter", "remat"),
  [
    slow("PaLM", "lora", "none"),
    slow("LLaMA 3", "lora", "layer"),
    slow("Cohere 2", "lora", "none"),
    slow("PaLM", "prefix", "none"),
    slow("LLaMA 3", "prefix", "layer"),
    slow("LLaMA 3", "prompt", "none"),
  ],
)
def test_a_compiled_step_multiplies_as_often_as_planned(block, adapter, remat):
  """The backward pass has no gradients of the base's kernels."""
  layout = MeshLayout(tpu="v4-8", mesh_shape="data:4", layout="batch:data")
  config = case_of(block, adapter, remat).config
  planned = device_flops(work(config, layout, 4))
  assert step_flops(make_step(config, layout)) == planned


@pytest.mark.slow
@pytest.mark.parametrize("adapter", KINDS)
def test_a_step_moves_the_planned_bytes_between_heads(adapter):
  """Devices sum the gradients of keys and values that all heads share."""
  layout = MeshLayout(**TPU, layout="batch:data,heads:model")
  config = case_of("PaLM", adapter).config
  made = make_step(config, layout)
  mesh = made.model.placement.make_mesh(jax.devices()[:4])
  compiled = lower_gradients(made, mesh).compile()
  found = CompiledText(compiled.as_text()).collectives
  found = [x for x in found if x.groups == ((0, 1), (2, 3))]
  sent = sum(x.times * x.sent_bytes for x in found)
  planned = step_bytes(work(config, layout, 4))
  assert planned["all_reduce", ("model",)] == layout.num_devices * sent


@pytest.mark.parametrize("settings", [slow({}), slow({"adapter": "dora"})])
def test_accelerators_merge(settings, tmp_path):
  case = make_case("Cohere 2", EVERY, num_layers=6, **settings)
  merged = merge(case.config, case.params)
  checkpoint = save_checkpoint(case.config, case.params, tmp_path)
  tokens = random_tokens(case.config, 4, seed=3)["targets"].tolist()
  examples = [Example(x[: 2 + i], x[2 + i :]) for i, x in enumerate(tokens)]
  with LoadedDecoder(checkpoint, case.config, MESHES["accelerators"]) as loaded:
    found = dict(Scorer(loaded).log_likelihoods(examples))
  for i, x in enumerate(examples):
    expected = oracle.log_likelihood(case.config.base, merged, *x)
    assert found[i] == pytest.approx(expected, rel=1e-5)
