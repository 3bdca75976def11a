# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that libtpu compiles for a v4-8, against the plan's closed forms."""

import dataclasses
import re

import pytest

from palm_mtf.accounting.plan import plan_of
from palm_mtf.config.tpu_slice import chip_of
from palm_mtf.errors import UserError
from tests.planning import plan_config

pytest.importorskip("libtpu")

pytestmark = pytest.mark.slow


def quickstart(**macros):
  macros = {"CHIP": "tpu_v4", "NUM_PODS": 1, **macros}
  return plan_config("recipes/quickstart.gin", "layouts/tpu_v4_8.gin", **macros)


@pytest.fixture(scope="module")
def compile_run():
  from palm_mtf.compilation.run import compile_run

  return compile_run


@pytest.fixture(scope="module")
def compiled(compile_run):
  return compile_run(quickstart())


def moved(record):
  return {
    (x["kind"], *x["axes"]): x["bytes"]
    for x in record["moved"]
    if x.get("link") != "dcn"
  }


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_weights_and_gradients_move_with_the_bytes_of_the_plan(compiled, kind):
  planned = moved(plan_of(quickstart()))[kind, "data"]
  # XLA makes an all-reduce of each gather of a norm's scale, [128] float32: in
  # the forward and in the backward pass of 4 layers, if REMAT is "layer"; here
  # it is "none", so once per layer, and once more for the last norm. So it does
  # of each reduce-scatter of a scale's gradient.
  of_scales = 5 * 3 / 4 * 128 * 4
  assert moved(compiled)[kind, "data"] == planned - of_scales


@pytest.mark.parametrize(("tpu", "chips"), [("v5p-8", 4), ("v6e-8", 8)])
def test_steps_compile_for_later_kinds_of_tpus(compile_run, tpu, chips):
  config = quickstart(TPU=tpu, MESH_SHAPE=f"data:{chips}", CHIP=chip_of(tpu))
  found = compile_run(config)
  planned = moved(plan_of(config))["all_gather", "data"]
  of_scales = 5 * (1 - 1 / chips) * 128 * 4  # all-reduced, as above
  assert moved(found)["all_gather", "data"] == planned - of_scales
  # The clock of v6e is not published.
  assert ("compute" in found["secs"]) == (tpu == "v5p-8")


def test_gradients_with_128_columns_per_device_are_reduce_scattered(
  compile_run,
):
  # As for PaLM 62B, a device's part of a gradient has as many columns as a tile
  # of the TPU's memory. With D_KV = 256 no other dimension is less than a tile.
  config = quickstart(D_MODEL=512, D_KV=256)
  found, planned = moved(compile_run(config)), moved(plan_of(config))
  of_scales = 5 * 3 / 4 * 512 * 4
  scatters = ("reduce_scatter", "data")
  assert found[scatters] == planned[scatters] - of_scales
  assert found["all_reduce", "data"] < 4 * of_scales


def test_sums_over_model_are_all_reduced_once(compile_run):
  config = quickstart(
    MESH_SHAPE="data:2,model:2",
    LAYOUT="batch:data,heads:model,d_ff:model,vocab:model,d_model_stored:data",
  )
  sums = ("all_reduce", "model")
  assert moved(compile_run(config))[sums] == moved(plan_of(config))[sums]


def test_every_collective_is_over_all_four_devices(compiled):
  assert {
    (*x["axes"], x["groups"], x["group_devices"]) for x in compiled["moved"]
  } == {("data", 1, 4)}


def test_the_peak_is_the_sum_of_its_parts_and_holds_the_state(compiled):
  (step,) = compiled["programs"]
  parts = [x for name, x in step.items() if name.endswith("_bytes")]
  assert 2 * step["peak_bytes"] == sum(parts)
  kept = plan_of(quickstart())["device_bytes"]
  assert step["argument_bytes"] >= kept["weights"] + kept["slots"]


def test_two_pods_run_gradients_and_an_update(compile_run):
  found = compile_run(quickstart(NUM_PODS=2))
  gradients, update = found["programs"]
  assert (gradients["program"], update["program"]) == ("gradients", "update")
  # The slots stay in memory while gradients are found.
  slots = plan_of(quickstart(NUM_PODS=2))["device_bytes"]["slots"]
  assert (gradients["kept_bytes"], update["kept_bytes"]) == (slots, 0)
  assert found["peak_bytes"] == max(x["peak_bytes"] for x in found["programs"])


@pytest.mark.parametrize("num_pods", [1, 2])
def test_stages_gather_the_weights_of_the_plan_and_keep_its_state(
  compile_run, num_pods
):
  """Each stage also has activations of other microbatches in memory."""
  config = quickstart(NUM_PODS=num_pods, STAGES=2, NUM_MICROBATCHES=2)
  found, plan = compile_run(config), plan_of(config)
  last = ["parts", "join"] if num_pods == 2 else ["total"]
  expected = [
    f"stage {stage}, {name}"
    for stage in range(2)
    for name in ("forward", "head", "backward", *last, "measure", "update")
    if (stage, name) != (1, "head")
  ]
  assert [x["program"] for x in found["programs"]] == expected
  planned = moved(plan)["all_gather", "data"]
  gathered = moved(found)["all_gather", "data"]
  assert gathered == pytest.approx(planned, rel=0.01)
  held = sum(plan["device_bytes"][x] for x in ("weights", "slots"))
  for each in found["programs"][:5]:
    assert each["peak_bytes"] >= held


def test_settings_that_fit_are_found_by_compiling_them(compile_run, compiled):
  config = quickstart(GLOBAL_BATCH_SIZE=128)
  # A step of 16 sequences needs half of this, and a step of 128 more than this.
  memory = 2 * compiled["peak_bytes"]
  hardware = dataclasses.replace(config.hardware, chip_memory_bytes=memory)
  with pytest.raises(UserError) as caught:
    compile_run(dataclasses.replace(config, hardware=hardware))
  line = str(caught.value)
  found = re.search(
    r"it needs [\d.]+ of [\d.]+ GiB per device; with (.+) it needs [\d.]+ GiB "
    r"and fits\.$",
    line,
  )
  assert found and ("NUM_MICROBATCHES" in found[1] or "REMAT" in found[1]), line


def test_decoding_keeps_the_weights_and_the_cache_of_the_plan():
  from palm_mtf.compilation.run import compile_decoding

  config = plan_config(
    "recipes/palm_8b_two_pods.gin",
    NUM_LAYERS=2,
    SEQUENCE_LENGTH=512,
    VOCAB_SIZE=32000,
  )
  plan = plan_of(config)
  # The plan's weights are float32; decoding keeps bfloat16.
  weights = plan["device_bytes"]["weights"] / 2
  # Each of the 16 slices of the batch has one text.
  cache = plan["cache_bytes_per_token"] * config.model.sequence_length
  decoding = compile_decoding(config)
  assert decoding["texts"] == 16
  prefill, steps = decoding["programs"]
  assert prefill["argument_bytes"] == pytest.approx(weights, rel=0.02)
  assert steps["argument_bytes"] == pytest.approx(weights + cache, rel=0.02)
  # A step moves activations: it has no room for one gathered kernel.
  gathered = config.model.d_model * config.model.d_ff // 4 * 2
  assert steps["temporary_bytes"] < gathered / 10


def test_unlike_layers_move_the_bytes_of_the_plan(compile_run):
  config = quickstart(
    NUM_LAYERS=5,
    LAYERS="2*(window, global), window",
    VARIANTS={"window": {"ATTENTION_WINDOW": 64}, "global": {}},
  )
  found, planned = moved(compile_run(config)), moved(plan_of(config))
  of_scales = 6 * 3 / 4 * 128 * 4  # all-reduced, as of like layers
  for kind in ("all_gather", "reduce_scatter"):
    assert found[kind, "data"] == planned[kind, "data"] - of_scales
