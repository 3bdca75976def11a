# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs and MFU are the published ones (PaLM Appendix B and Table 3)."""

import dataclasses
import math

import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.flops import (
  SCORES,
  device_flops,
  forward_flops,
  recomputed_flops,
  train_flops,
  train_flops_per_token,
  utilization,
)
from palm_mtf.accounting.hardware import peak_of_devices
from palm_mtf.architecture.parameters import count_parameters
from palm_mtf.config import MeshLayout
from palm_mtf.programs.train_program import build_train_program
from tests.accounting.published_sizes import (
  PALM_8B,
  PALM_62B,
  PALM_540B,
  preset,
)
from tests.cases import slow
from tests.mtf_testing import SINGLE, small_config, without_compiler
from tests.settings import hardware_of, step_config, work

PALM_PEAK = 6144 * hardware_of("tpu_v4").chip_bfloat16_flops


# FLOPs per token, share of the forward products that the paper computes again
# (Table 22), tokens of the run, and what Tables 21 and 22 print.
TRAINED = [
  (PALM_8B, 55_012_491_264, 0, 780, "37.4 0.055 0.0561 4.29e+22", 497),
  (PALM_62B, 387_855_679_488, 0, 795, "295.7 0.388 0.392 3.08e+23", 3570),
  (PALM_540B, 3_277_760_495_616, 0.75, 780, "2527.2 3.28 4.1 2.56e+24", 29600),
]
_PF_DAY = 1e15 * 24 * 3600


@pytest.mark.parametrize(
  ("config", "of_token", "share", "billions", "printed", "pf_days"),
  TRAINED,
  ids=["8B", "62B", "540B"],
)
def test_flops_of_runs_are_those_of_tables_21_and_22(
  config, of_token, share, billions, printed, pf_days
):
  zetta, once, again, flops = printed.split()
  assert train_flops_per_token(config) == of_token
  assert f"{of_token / 1e12:.3g}" == once
  # Table 21 counts 6 FLOPs per parameter of the rounded size, no attention.
  rounded, tokens = int(count_parameters(config) / 1e9) * 1e9, billions * 1e9
  assert f"{6 * rounded * tokens / 1e21:.1f}" == zetta
  # All sizes compute the forward pass of attention again.
  repeated = share * 2 * count_parameters(config)
  repeated += train_flops(config)[SCORES] / 3
  assert f"{(of_token + repeated) / 1e12:.3g}" == again
  of_run = tokens * of_token
  assert f"{of_run:.3g}" == flops
  assert float(f"{of_run / _PF_DAY:.3g}") == pf_days


def test_palm_540b_at_the_peak_would_train_515_5_thousand_tokens_per_second():
  """R of PaLM Appendix B, the denominator of MFU."""
  secs = train_flops_per_token(PALM_540B) / PALM_PEAK
  assert f"{1 / secs / 1e3:.1f}" == "515.5"


# PaLM's Table 3 and 4.1: {model: (file of gin/models, chip, chips, tokens/s)}.
TABLE_3 = {
  "Gopher": ("gopher_280b", "tpu_v3", 4096, 0.0152 * 3072 * 2048),
  "Megatron-Turing NLG": ("mt_nlg_530b", "a100", 2240, 1920 * 2048 / 60.1),
  "PaLM": ("palm_540b", "tpu_v4", 6144, 238_300),
}


def mfu_of_table_3(model):
  """Returns a run's MFU with and without attention, from its tokens/s.

  The FLOPs per token are those of PaLM's Appendix B, for any block.
  """
  name, chip, num_chips, rate = TABLE_3[model]
  c, hardware = preset(name), hardware_of(chip)
  peak = peak_of_devices(chip, hardware, num_chips * hardware.chip_devices)
  of_parameters = 6 * count_parameters(c)
  of_attention = 12 * c.num_layers * c.num_heads * c.d_kv * c.sequence_length
  rate /= peak
  return rate * (of_parameters + of_attention), rate * of_parameters


@pytest.mark.parametrize(
  ("model", "published", "without_attention"),
  [
    ("Gopher", 0.325, None),
    ("Megatron-Turing NLG", 0.302, 0.297),
    ("PaLM", 0.462, 0.457),
  ],
)
def test_mfu_is_the_published_one(model, published, without_attention):
  found, without = mfu_of_table_3(model)
  assert round(found, 3) == published
  if without_attention:
    assert round(without, 3) == without_attention
  if model == "PaLM":
    ours = utilization(238_300, PALM_540B, PALM_PEAK)["mfu"]
    assert ours == pytest.approx(found)


def test_the_speed_in_gpt3_s_paper_does_not_give_its_row():
  """docs/predictions.md says so; the row's MFU is 21.3%."""
  assert f"{24.6e12 / hardware_of('v100').chip_bfloat16_flops:.1%}" == "19.7%"


def test_hfu_of_palm_is_57_8_percent_with_the_papers_policy():
  # The paper repeats 75% of the forward products, and all of its attention.
  found, without = mfu_of_table_3("PaLM")
  again = 0.75 * without / 3 + (found - without) / 3
  assert round(found + again, 3) == 0.578
  # Lower by the 10.5% of a forward pass that REMAT = "layer" does not repeat.
  ours = utilization(238_300, with_remat(PALM_540B, "layer"), PALM_PEAK)["hfu"]
  assert ours == pytest.approx(0.578 - 0.105 * 0.457 / 3, abs=0.001)


def with_remat(config, remat, **changes):
  return dataclasses.replace(config, remat=remat, **changes)


def test_remat_attention_repeats_q_k_and_no_product_with_a_parameter():
  """Table 22 counts twice as much for 8B and 62B, which repeat the result too.

  Table 22's number is 4 num_layers heads d_kv length.
  """
  for config in (PALM_8B, PALM_62B):
    flops = sum(recomputed_flops(with_remat(config, "attention")).values())
    heads = config.num_layers * config.num_heads
    assert flops == 2 * heads * 256 * config.sequence_length


@pytest.mark.parametrize(
  ("block", "share"), [("parallel", 0.645), ("serial", 0.695)]
)
def test_a_layer_repeats_all_but_the_last_products(block, share):
  """`share` is of 540B's forward products with the embedding; Table 22: 75%."""
  config = with_remat(PALM_540B, "layer", block=block)
  attention = forward_flops(config)["attention/scores"]
  products = sum(recomputed_flops(config).values()) - attention
  forward = 2 * count_parameters(PALM_540B)
  assert products / forward == pytest.approx(share, abs=0.002)


# PaLM Appendix B: 2 N of products and 4 L H Q T of attention, forward.
def test_terms_of_a_token_add_up_to_the_formula():
  c = PALM_540B
  terms = forward_flops(c)
  assert sum(terms.values()) == (
    2 * count_parameters(c)
    + 4 * c.num_layers * c.num_heads * c.d_kv * c.sequence_length
  )
  assert terms["mlp/wi"] == 2 * c.num_layers * c.d_model * c.d_ff
  assert terms["embedding"] == 2 * c.vocab_size * c.d_model


def test_devices_share_all_flops_but_those_of_the_one_key_and_value_head():
  """2.2% of 540B's arithmetic over 12 devices (docs/layouts.md)."""
  mesh = MeshLayout(
    mesh_shape="data:256,model:12",
    layout="batch:data,heads:model,d_ff:model,vocab:model",
  )
  tokens = 1024 * 2048
  share = tokens * train_flops_per_token(PALM_540B) / mesh.num_devices
  alike = 3 * 2 * 2 * PALM_540B.num_layers * PALM_540B.d_model * 256
  # Blocks of 128 leave out 15/32 of attention, 1.1% of the arithmetic.
  hidden = tokens / mesh.num_devices * train_flops(PALM_540B)[SCORES]
  own = device_flops(work(PALM_540B, mesh, 1024)) + hidden * 15 / 32
  assert own == pytest.approx(share + tokens / 256 * alike * 11 / 12)
  assert own / share == pytest.approx(1.022, abs=5e-4)


def test_each_layer_skips_what_its_own_window_hides():
  """With windows in half of its layers, a model takes the mean of two."""
  unlike = dataclasses.replace(
    PALM_8B,
    layers="window, global",
    variants={"window": {"ATTENTION_WINDOW": 256}, "global": {}},
  )
  window = dataclasses.replace(PALM_8B, attention_window=256)
  half, full, none = (device_flops(work(x)) for x in (unlike, window, PALM_8B))
  assert full < none
  assert half == pytest.approx((full + none) / 2)
  # MFU counts what windows hide, as it counts what the causal mask hides.
  assert train_flops_per_token(unlike) == train_flops_per_token(PALM_8B)


def test_a_device_computes_the_logits_of_padding_too():
  """12 does not divide 256,000: 8 rows of zeros pad the embedding."""
  tokens, mesh = 2048, MeshLayout(mesh_shape="model:12", layout="vocab:model")
  whole = device_flops(work(PALM_540B))
  logits = 3 * tokens * 2 * PALM_540B.d_model
  found = device_flops(work(PALM_540B, mesh))
  assert whole - found == pytest.approx(logits * (256_000 - 21_334))


def graph_flops(config, frozen):
  """Returns the FLOPs of all matrix products in a step's graph."""
  with tf.Graph().as_default():
    last = build_train_program(
      step_config(config, SINGLE), batch_size=2, seed=0, frozen=frozen
    ).update
    todo = [*last.operations, *(x.op for x in last.outputs.values())]
    seen, flops = set(todo), 0
    while todo:
      op = todo.pop()
      before = {*(x.op for x in op.inputs), *op.control_inputs} - seen
      todo += before
      seen |= before
      if op.type in ("MatMul", "BatchMatMulV2"):
        is_turned = (
          op.node_def.attr["transpose_a"].b or op.node_def.attr["adj_x"].b
        )
        inner = op.inputs[0].shape.as_list()[-2 if is_turned else -1]
        flops += 2 * math.prod(op.outputs[0].shape.as_list()) * inner
  return flops


_PARTS = ("embedding", "layers/0/*", "layers/1/attention/q")


@pytest.mark.parametrize(
  ("remat", "frozen"),
  [
    ("none", ()),
    ("layer", _PARTS),
    slow("layer", ()),
    slow("none", _PARTS),
    *(
      slow(remat, frozen)
      for remat in ("none", "layer")
      for frozen in (_PARTS[:1], ("layers/*/mlp/*",), ("embedding", "layers/*"))
    ),
  ],
)
def test_a_step_s_graph_multiplies_as_often_as_planned(
  remat, frozen, monkeypatch
):
  """No product for the gradient of a frozen kernel, or before all trained.

  Without attention's own products, which are in the body of a function.
  """
  without_compiler(monkeypatch)
  config = small_config(num_layers=3, remat=remat)
  tokens = 2 * config.sequence_length
  planned = device_flops(work(config, rows=2, frozen=frozen))
  for terms in (train_flops(config, frozen), recomputed_flops(config, frozen)):
    planned -= tokens * terms.get("attention/scores", 0)
  assert graph_flops(config, frozen) == planned
