# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan has the paper's numbers, and names the nearest setting that fits."""

import pytest

from palm_mtf.accounting.plan import (
  changes_between,
  fits,
  memory_parts,
  nearest_fit,
  plan_of,
)
from palm_mtf.accounting.step_time import predict_step
from tests.planning import palm_540b, plan_config


@pytest.mark.parametrize("size", ["8b", "62b", "540b"])
def test_the_recipes_of_two_pods_fit(size):
  plan = plan_of(plan_config(f"recipes/palm_{size}_two_pods.gin"))
  assert plan["fits"]
  assert sum(plan["device_bytes"].values()) < 0.8 * 32 * 2**30


@pytest.mark.parametrize(
  ("macros", "steps"),
  [
    ({}, {512: 50_000, 1024: 65_000, 2048: 140_000}),
    ({"TRAIN_STEPS": 60_000}, {512: 50_000, 1024: 10_000}),  # ends before
  ],
)
def test_each_phase_of_the_ramp_has_its_own_step_time(macros, steps):
  config = palm_540b(**macros)
  expected = sum(n * predict_step(config, b).total for b, n in steps.items())
  assert plan_of(config)["run"]["secs"] == pytest.approx(expected)


def test_energy_and_cost_are_of_all_chips():
  run = plan_of(palm_540b(CHIP_HOUR_COST=2.0))["run"]
  hours = run["secs"] / 3600 * 6144
  assert run["chip_hours"] == pytest.approx(hours)
  assert run["cost"] == pytest.approx(2 * hours)
  assert run["kwh"] == pytest.approx(hours * 378.5 / 1000)
  assert plan_of(palm_540b(CHIP_WATTS=None))["run"]["kwh"] is None


def test_two_cores_of_a_chip_are_one_chip_hour():
  macros = {"CHIP": "tpu_v3", "GLOBAL_BATCH_SIZE": 8, "TRAIN_STEPS": 100}
  config = plan_config("recipes/palm_8b.gin", "layouts/tpu_v3_8.gin", **macros)
  run = plan_of(config)["run"]
  assert run["chip_hours"] == pytest.approx(4 * run["secs"] / 3600)


def on_16(**macros):
  """PaLM 8B on 16 TPU v4, its batch over all of them."""
  defaults = {
    "MESH_SHAPE": "data:16",
    "LAYOUT": "batch:data,d_model_stored:data",
    "GLOBAL_BATCH_SIZE": 256,
    "REMAT": "none",
  }
  return plan_config("recipes/palm_8b.gin", **{**defaults, **macros})


def test_the_nearest_setting_that_fits_changes_least():
  config = on_16()
  assert not fits(config, 256)
  nearest = nearest_fit(config, 256)
  assert fits(nearest, 256)
  changes = changes_between(config, nearest)
  assert list(changes) == ["NUM_MICROBATCHES"]
  assert plan_of(config)["nearest"] == changes
  # Fewer microbatches would not do.
  less = on_16(NUM_MICROBATCHES=changes["NUM_MICROBATCHES"] // 2)
  assert not fits(less, 256)


def test_weights_that_every_device_keeps_are_stored_split_instead():
  nearest = nearest_fit(on_16(LAYOUT="batch:data"), 256)
  assert "d_model_stored:data" in nearest.mesh_layout.layout
  assert fits(nearest, 256)


def test_no_setting_makes_540b_fit_into_sixteen_chips():
  config = palm_540b(TPU="v4-32", MESH_SHAPE="data:4,model:4", NUM_PODS=1)
  assert nearest_fit(config, 2048) is None


def test_a_device_keeps_what_its_parts_need():
  parts = memory_parts(on_16(), 256)
  names = "weights", "slots", "gradients", "activations", "weight copies"
  assert set(parts) == {*names, "buffers"}
  numbers = 8_632_012_800 // 16  # with norm scales
  assert parts["weights"] == pytest.approx(4 * numbers, rel=1e-3)
  assert parts["slots"] == 2 * parts["weights"]


def test_a_chip_with_fused_attention_keeps_no_weights_whatever_remat_says():
  parts = {
    (remat, is_fused): memory_parts(
      plan_config(
        "recipes/quickstart.gin",
        ACTIVATION_DTYPE="float32",
        REMAT=remat,
        CHIP_FUSED_ATTENTION=is_fused,
      ),
      16,
    )
    for remat in ("none", "attention", "layer")
    for is_fused in (False, True)
  }
  assert parts["none", True] == parts["attention", True]
  assert parts["attention", True] == parts["attention", False]
  assert parts["layer", True] == parts["layer", False]
  kept = parts["none", False]["activations"]
  assert kept > parts["none", True]["activations"]


@pytest.mark.parametrize(
  ("pods", "share"), [("in_process", 4), ("local_servers", 2)]
)
def test_devices_share_the_memory_of_their_process_outside_tensors(pods, share):
  """A server holds its pod's devices; one process holds all pods' devices."""
  config = plan_config(
    "recipes/quickstart.gin",
    MESH_SHAPE="data:2",
    LAYOUT="batch:data",
    NUM_PODS=2,
    PODS=pods,
    ACTIVATION_DTYPE="float32",
    CHIP_PROCESS_BYTES=800e6,
  )
  assert memory_parts(config, 16)["process"] == 800e6 / share


def staged(stages, **macros):
  """PaLM 8B on H100s; a pod has one device per stage."""
  return plan_config(
    "recipes/palm_8b.gin",
    "layouts/single.gin",
    CHIP="h100_sxm",
    GLOBAL_BATCH_SIZE=64,
    NUM_MICROBATCHES=16,
    STAGES=stages,
    **{"REMAT": "layer", **macros},
  )


def test_stages_divide_what_a_device_keeps():
  whole = memory_parts(staged(1), 64)
  stages = [memory_parts(staged(4), 64, stage) for stage in range(4)]
  for name in ("weights", "slots", "gradients"):
    assert sum(x[name] for x in stages) == whole[name]
  embedding = 4 * 256_000 * 4096
  assert stages[0]["weights"] > stages[1]["weights"] + embedding
  assert stages[1]["weights"] == stages[3]["weights"]
  needed = [sum(x.values()) for x in stages]
  assert needed == sorted(needed, reverse=True)


@pytest.mark.parametrize(
  ("order", "kept"), [("1f1b", [5, 4, 3, 2]), ("gpipe", [16] * 4)]
)
def test_a_stage_keeps_the_activations_that_its_order_keeps(order, kept):
  whole, config = memory_parts(staged(1), 64), staged(4, STAGE_ORDER=order)
  stages = [memory_parts(config, 64, stage) for stage in range(4)]
  of_microbatch = whole["activations"] / 4
  assert [x["activations"] / of_microbatch for x in stages] == kept


def test_stages_wait_for_each_other_and_for_what_they_send():
  config = staged(4)
  one, four = predict_step(staged(1), 64), predict_step(config, 64)
  # Stage 0 is the slowest, because it has the logits too.
  assert one.products / 4 < four.products < one.products / 3
  slowest = four.products + four.passes + sum(four.collectives.values())
  assert 3 / 16 * 0.6 < four.bubble / slowest < 3 / 16
  plan = plan_of(config)
  assert plan["parts"]["bubble"] == four.bubble
  assert sum(plan["parts"].values()) == pytest.approx(plan["step_secs"])
  (send,) = [x for x in plan["moved"] if x["kind"] == "send"]
  # 16 microbatches of 4 rows, activations and gradients, in bfloat16.
  assert send["bytes"] == 2 * 16 * 4 * 2048 * 4096 * 2
  assert plan["stage_bytes"][0] == sum(plan["device_bytes"].values())
  hours = plan["run"]["secs"] / 3600
  assert plan["run"]["chip_hours"] == pytest.approx(4 * hours)


def test_a_stage_before_all_that_is_trained_keeps_only_what_it_sends():
  """It has no backward pass to wait for, so it may be ahead of the next."""
  config = staged(
    2, FROZEN=["embedding", *(f"layers/{i}/*" for i in range(16))]
  )
  first, second = (memory_parts(config, 64, stage) for stage in (0, 1))
  stream = 4 * 2048 * 4096 * 2  # 4 rows of a microbatch, in bfloat16
  assert first["activations"] == 0 < second["activations"]
  assert first["waiting"] == (1 + 16) * stream
  assert second["waiting"] == 2 * stream


def unlike(layers, window, **macros):
  """PaLM 8B in two stages, with windows in some layers."""
  variants = {"window": {"ATTENTION_WINDOW": window}, "global": {}}
  return staged(2, LAYERS=layers, VARIANTS=variants, **macros)


def test_the_plan_of_unlike_stages_is_that_of_the_largest():
  """Stage 1, without windows, keeps more attention weights than stage 0."""
  macros = {"CHIP_FUSED_ATTENTION": False, "STAGE_ORDER": "gpipe"}
  macros["REMAT"] = "none"
  config = unlike("16*window, 16*global", 128, **macros)
  plan = plan_of(config)
  assert plan["stage_bytes"][0] < plan["stage_bytes"][1]
  assert sum(plan["device_bytes"].values()) == plan["stage_bytes"][1]
  # Both orders have the same layers, so equal layers keep equal bytes.
  swapped = unlike("16*global, 16*window", 128, **macros)
  stages = [memory_parts(x, 64, s) for x, s in ((config, 1), (swapped, 0))]
  assert stages[0]["activations"] == stages[1]["activations"]
  assert predict_step(config, 64).bubble > predict_step(swapped, 64).bubble


def test_windows_as_long_as_the_sequence_change_no_stage():
  like, same = staged(2), unlike("window, 3*global", 2048)
  one, other = (predict_step(x, 64).total for x in (same, like))
  assert one == pytest.approx(other)
  assert plan_of(same)["stage_bytes"] == plan_of(like)["stage_bytes"]


def test_the_plan_counts_the_published_parameters_of_gemma_3_1b():
  """999,885,952 numbers, 302M of them in the embedding (Gemma team 2025)."""
  plan = plan_of(
    plan_config(
      "recipes/palm_8b.gin",
      "layouts/single.gin",
      CHIP="h100_sxm",
      GLOBAL_BATCH_SIZE=8,
      NUM_LAYERS=26,
      LAYERS="4*(5*window, global), 2*window",
      VARIANTS={
        "window": {"ATTENTION_WINDOW": 512, "ROTARY_BASE": 1e4},
        "global": {"ROTARY_BASE": 1e6},
      },
      D_MODEL=1152,
      NUM_HEADS=4,
      D_KV=256,
      D_FF=6912,
      VOCAB_SIZE=262_144,
      BLOCK="serial",
      BRANCH_NORM=True,
      NORM="rms_norm_1p",
      QK_NORM="rms_norm_1p",
    )
  )
  counts = plan["parameters"]
  assert sum(counts.values()) == 999_885_952
  assert f"{counts['embedding'] / 1e6:.0f}" == "302"
  assert plan["device_bytes"]["weights"] == 4 * 999_885_952
