# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The step time of PaLM's own run, and of steps worked out by hand."""

import pytest

from palm_mtf.accounting.memory import Activations, device_bytes, update_traffic
from palm_mtf.accounting.plan import rates_of
from palm_mtf.accounting.step_time import device_rates, predict_step
from tests.planning import palm_540b, plan_config
from tests.refusals import message_of
from tests.settings import work

PUBLISHED_SECS = 2048 * 2048 / 238_300  # 17.60 (PaLM 4.1)


def test_a_step_of_palm_540b_on_two_pods_is_within_10_percent_of_the_papers():
  """Only published rates of TPU v4 are used; nothing is fitted to the run."""
  config = palm_540b()
  secs = predict_step(config, 2048).total
  assert secs == pytest.approx(PUBLISHED_SECS, rel=0.1)
  rates = rates_of(config, 2048, secs)
  assert rates["mfu"] == pytest.approx(0.462, rel=0.1)
  assert rates["hfu"] == pytest.approx(0.578, rel=0.1)


def test_two_pods_do_1_95_times_the_work_of_one_within_2_percent():
  """97% of perfect weak scaling (PaLM 4), from published rates only."""
  two = predict_step(palm_540b(), 2048).total
  one = predict_step(palm_540b(NUM_PODS=1), 1024).total
  assert 2 * one / two == pytest.approx(1.95, rel=0.02)


def one_chip(**macros):
  files = ("recipes/palm_8b.gin", "layouts/single.gin")
  return plan_config(*files, GLOBAL_BATCH_SIZE=2, **macros)


def test_products_take_their_flops_at_the_efficiency_of_the_peak():
  """6 N and attention of 8B are 55.0 GFLOP per token (PaLM Table 22).

  Blocks omit 15/32 of attention (12 num_layers heads d_kv length).
  """
  step = predict_step(one_chip(REMAT="none"), 2)
  hidden = 15 / 32 * 12 * 32 * 16 * 256 * 2048
  flops = 2 * 2048 * (55_012_491_264 - hidden)
  assert step.products == pytest.approx(flops / (0.76 * 275e12))
  assert (step.collectives, step.exchange) == ({}, 0.0)
  faster = predict_step(one_chip(REMAT="none", CHIP_EFFICIENCY=1.0), 2)
  assert faster.products == pytest.approx(0.76 * step.products)


BURST_SECS = 1.31 * 2**30 * 8 * 1536 / 81e12


def test_on_tpus_nothing_hides_the_exchange_of_gradients():
  """The exchange takes 0.2 s at 81 Tbit/s: 1.31 GiB of each of 1,536 hosts.

  PaLM (4) explains the gap to perfect scaling by the exchange, which does not
  overlap the backward pass. Ours does not either on TPUs.
  """
  step = predict_step(palm_540b(), 2048)
  assert step.exchange == pytest.approx(BURST_SECS, rel=0.01)
  assert step.hidden_exchange == 0


def test_elsewhere_nearly_all_gradients_hide_behind_the_backward_pass():
  macros = {"CHIP_LINK_DIMS": 0, "TPU": "", "CHIP_LINK_CHIPS": None}
  step = predict_step(palm_540b(**macros), 2048)
  together = step.exchange + step.hidden_exchange
  assert together == pytest.approx(BURST_SECS, rel=0.01)
  assert step.exchange < 0.02 * together


ON_A_CPU = {
  "CHIP_FLOAT32_FLOPS": 8e10,
  "CHIP_BFLOAT16_FLOPS": 8e10,
  "CHIP_MEMORY_BANDWIDTH": 2e10,
  "CHIP_MEMORY_BYTES": 8e9,
  "CHIP_LINK_BANDWIDTH": 1e10,
  "CHIP_DCN_BANDWIDTH": 1e10,
  "CHIP_FUSED_ATTENTION": False,
}
SLOW_PASSES = {"blocks": 1e9, "attention": 2e9, "loss": 3e9, "weights": 4e9}


def on_a_cpu(**macros):
  """The quickstart's model as one pod of one device."""
  given = {**ON_A_CPU, "NUM_PODS": 1, "ACTIVATION_DTYPE": "float32", **macros}
  return plan_config("recipes/quickstart.gin", **given)


def test_devices_of_this_machine_share_it():
  config = plan_config(
    "recipes/quickstart.gin",
    **ON_A_CPU,
    MESH_SHAPE="data:2",
    LAYOUT="batch:data",
  )
  rates = device_rates(config)  # two pods of two devices
  assert rates.chip_memory_bytes == 2e9
  assert rates.chip_float32_flops == 2e10


def test_passes_go_over_memory_at_the_bandwidths_measured_for_their_kind():
  config = on_a_cpu(CHIP_PASS_BANDWIDTHS={"float32": SLOW_PASSES})
  step = predict_step(config, 16)
  given = work(config.model, config.mesh_layout, 16, optimizer=config.optimizer)
  traffic = Activations(given).traffic()
  expected = sum(traffic[x] / SLOW_PASSES[x] for x in traffic)
  assert step.passes == pytest.approx(expected)  # float32: nothing is cast
  kept = device_bytes(given)
  assert step.update == pytest.approx(update_traffic(kept) / 4e9)


def test_passes_of_what_was_not_measured_have_the_bandwidth_of_memory():
  all_alike = {"float32": dict.fromkeys(SLOW_PASSES, 2e10)}
  other = {"bfloat16": SLOW_PASSES}
  steps = [
    predict_step(on_a_cpu(CHIP_PASS_BANDWIDTHS=each), 16)
    for each in (None, all_alike, other)
  ]
  assert steps[0] == steps[1] == steps[2]


def test_two_pods_of_one_machine_pass_at_half_the_speed_each():
  passes = {"float32": SLOW_PASSES}
  one = predict_step(on_a_cpu(CHIP_PASS_BANDWIDTHS=passes), 16)
  two = on_a_cpu(CHIP_PASS_BANDWIDTHS=passes, NUM_PODS=2)
  assert predict_step(two, 32).passes == pytest.approx(2 * one.passes)


@pytest.mark.parametrize(
  ("macros", "message"),
  [
    (
      {"CHIP": "tpu_v3", "TPU": "", "CHIP_DCN_BANDWIDTH": None},
      "CHIP_DCN_BANDWIDTH = None: not known for CHIP = 'tpu_v3'; set it to "
      "plan.",
    ),
    (
      {"ACTIVATION_DTYPE": "float32"},
      "CHIP_FLOAT32_FLOPS = None: not known for CHIP = 'tpu_v4'; set it to "
      'plan, or ACTIVATION_DTYPE = "bfloat16".',
    ),
    (
      {"CHIP": "a100", "TPU": "", "NUM_PODS": 1, "CHIP_DCN_BANDWIDTH": None},
      "CHIP_DCN_BANDWIDTH = None: not known for CHIP = 'a100'; set it to plan.",
    ),
    (
      {"CHIP": "tpu_v5e", "TPU": ""},
      'MESH_SHAPE = "data:256,model:12": a pod has 3,072 chips, but links of '
      "CHIP = 'tpu_v5e' join 256; use more NUM_PODS.",
    ),
    (
      {"CHIP": "measured", "CHIP_MEMORY_BANDWIDTH": None},
      'CHIP = "measured": the rates of this machine are not known yet, or are '
      "another version's; run `palm_mtf plan --calibrate`, or name a chip.",
    ),
  ],
)
def test_a_rate_that_is_not_known_is_named(macros, message):
  assert message_of(predict_step, palm_540b(**macros), 2048) == message
