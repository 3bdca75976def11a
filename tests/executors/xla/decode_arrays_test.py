# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""XLA's programs score and continue texts as the host path and the paper do.

XLA runs the very programs that TPUs would run, with its own collectives, on
virtual CPU devices.
"""

import functools
import re

import jax
import numpy as np
import pytest

from palm_mtf.config import DecodeConfig, MeshLayout
from palm_mtf.errors import UserError
from palm_mtf.executors.xla.host_calls import POD_FUNCTIONS
from palm_mtf.generation.decode import weight_maker as decode_weights
from palm_mtf.generation.decode.generate_program import (
  PromptBatch,
  build_decode_programs,
)
from palm_mtf.generation.inference.scorer import Example, Scorer
from palm_mtf.generation.inference.sessions import (
  LoadedDecoder,
  compute_mean_loss,
)
from palm_mtf.generation.inference.slot_decoder import SlotDecoder, SlotText
from palm_mtf.machine import processors
from tests import oracle
from tests.blocks import ALL_HEADS, SETTINGS, block_config
from tests.cases import slow
from tests.decode_testing import EOD, save_checkpoint
from tests.mtf_testing import (
  MOVED,
  SINGLE,
  random_documents,
  random_tokens,
  small_config,
)

CONFIG = small_config()
MAKE_LAYER = "decode_arrays.make_layer"
BOTH = small_config(
  block="serial", attention="multi_head", norm="rms_norm", objective="prefix_lm"
)
# Two groups of layers: with a period of three layers, and of one.
UNLIKE = block_config(
  "Cohere 2", num_layers=8, layers="2*(2*window, global), 2*window"
)
SPLIT = "d_model_stored:data,heads:model,d_ff:model,vocab:model"
LAYOUTS = {
  "whole heads": ("data:2,model:2", "batch:data,d_ff:model,vocab:model"),
  "2D": ("data:2,model:2", f"batch:data,{SPLIT}"),
  "fully sharded": ("data:4", "batch:data,d_model_stored:data"),
  "model": ("model:4", "heads:model,d_ff:model,vocab:model"),
  "experts over data": (MOVED.mesh_shape, MOVED.layout),
}


def layout(name):
  """Returns a layout of a v4-8, which has four devices."""
  mesh_shape, rules = LAYOUTS[name]
  return MeshLayout(mesh_shape=mesh_shape, layout=rules, tpu="v4-8")


@functools.cache
def parameters(config):
  return oracle.random_parameters(config, seed=1)


@pytest.fixture
def load(tmp_path):
  """Returns a function that loads a decoder with `parameters`."""

  @functools.cache
  def saved(config):
    return save_checkpoint(config, parameters(config), tmp_path)

  def load(config, mesh=SINGLE, weight_dtype="activation"):
    return LoadedDecoder(saved(config), config, mesh, weight_dtype)

  return load


@pytest.mark.parametrize(
  ("config", "name"),
  [
    (UNLIKE, "2D"),
    slow(CONFIG, "2D"),
    slow(BOTH, "fully sharded"),
    slow(BOTH, "2D"),
    slow(CONFIG, "model"),
    slow(block_config("DeepSeek-V3"), "experts over data"),
    *(
      slow(block_config(name), where)
      for name in SETTINGS
      for where in ("2D", "fully sharded")
    ),
    *(slow(block_config(name), "whole heads") for name in ALL_HEADS),
  ],
)
def test_log_p_of_texts_is_the_oracles(load, config, name):
  tokens = random_tokens(config, 4, seed=3)["targets"].tolist()
  examples = [Example(x[: 2 + i], x[2 + i :]) for i, x in enumerate(tokens)]
  with load(config, layout(name)) as loaded:
    found = dict(Scorer(loaded).log_likelihoods(examples))
  for i, x in enumerate(examples):
    expected = oracle.log_likelihood(config, parameters(config), *x)
    assert found[i] == pytest.approx(expected, rel=1e-5)


def test_the_likeliest_tokens_are_the_oracles_if_the_vocabulary_is_split(load):
  ids = [0, 5, 9, 31, 2]
  with load(CONFIG, layout("model")) as loaded:
    found = Scorer(loaded).score_prompt(ids)
  logits = oracle.forward(CONFIG, parameters(CONFIG), np.array([ids[:-1]]))[0]
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  for chosen, expected in zip(found, log_p, strict=True):
    likeliest = np.argsort(-expected)[:5]
    assert list(chosen.likeliest) == likeliest.tolist()
    log_ps = list(chosen.likeliest.values())
    np.testing.assert_allclose(log_ps, expected[likeliest], 1e-4, 1e-5)


GREEDY = DecodeConfig(temperature=0.0)
DRAWN = DecodeConfig(
  temperature=1.5, num_samples=2, top_k=9, top_p=0.9, repetition_penalty=1.3
)
BEAMS = DecodeConfig(num_beams=3)


def continue_texts(loaded, settings):
  """Continues four prompts of different lengths, in two calls."""
  prompts = random_tokens(loaded.config, 4, seed=3)["inputs"][:, :5]
  given = {"num_tokens": loaded.config.vocab_size, "end_ids": (EOD, 5, 29)}
  sizes = PromptBatch(num_prompts=4, prompt_tokens=5, max_tokens=4, **given)
  programs = build_decode_programs(loaded.build, settings, sizes)
  rows = range(settings.rows_per_prompt)
  inputs = {"prompts": prompts, "lengths": [5, 4, 3, 5]}
  inputs["keys"] = [[[key, row] for row in rows] for key in range(4)]
  loaded.client.call(programs.start, inputs)
  for limit in (2, 4):
    loaded.client.call(programs.advance, {"limit": limit})
  return loaded.client.call(programs.read)


@pytest.mark.parametrize(
  ("config", "name", "settings", "weight_dtype"),
  [
    slow(CONFIG, "2D", GREEDY, "activation"),
    (BOTH, "fully sharded", DRAWN, "activation"),
    slow(CONFIG, "2D", BEAMS, "int8"),
    slow(CONFIG, "model", DRAWN, "activation"),
    slow(CONFIG, "fully sharded", BEAMS, "int4"),
    slow(BOTH, "2D", DRAWN, "int8"),
    slow(BOTH, "model", BEAMS, "activation"),
    slow(UNLIKE, "fully sharded", DRAWN, "int8"),
    *(
      slow(block_config(name), "2D", GREEDY, "activation") for name in SETTINGS
    ),
    *(slow(block_config(name), "2D", BEAMS, "int8") for name in SETTINGS),
  ],
)
def test_texts_are_those_of_the_host_path(
  load, config, name, settings, weight_dtype, monkeypatch
):
  if weight_dtype != "activation":
    # The C++ operations would round activations to int8 too.
    monkeypatch.setattr(decode_weights, "operations", lambda: None)
  with load(config, SINGLE, weight_dtype) as loaded:
    expected = continue_texts(loaded, settings)
  with load(config, layout(name), weight_dtype) as loaded:
    found = continue_texts(loaded, settings)
  np.testing.assert_array_equal(found["tokens"], expected["tokens"])
  assert found["num_done"] == expected["num_done"]
  np.testing.assert_array_equal(found["is_over"], expected["is_over"])
  if settings is BEAMS:
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-5)


@pytest.mark.slow
def test_texts_in_slots_are_those_of_the_host_path(load):
  """The second text begins when the first has two tokens.

  Its first and last tokens have masks, which allow every third token.
  """
  prompts = [[0, 7, 3], [0, 12, 4, 9, 1]]
  settings = [(0.0, None, 1.0), (1.2, 9, 0.9)]
  # For each call, the slots' texts, the number of tokens, and new texts.
  calls = [([0], 2, [0]), ([0, 1], 1, [1]), ([0, 1], 2, []), ([0, 1], 0, [])]
  bits = np.arange(32 * -(-CONFIG.vocab_size // 32)) % 3 == 0
  mask = np.packbits(bits, bitorder="little").view(np.int32)

  def run(mesh):
    chosen = [[], []]
    with load(CONFIG, mesh) as loaded:
      slots = SlotDecoder(loaded, CONFIG.vocab_size, 4)
      for texts, count, new in calls:
        for i in new:
          slots.insert(3 * i, prompts[i])
        states = {}
        for i in texts:
          ids = [*prompts[i], *(x.token for x in chosen[i])]
          key = np.array([i, 0], np.int32)
          states[3 * i] = SlotText(
            *(ids[-1], len(ids) - 1, len(chosen[i]), key, *settings[i]),
            limit=max(count, 1),
            masks=[mask] if i == 1 and count < 2 else (),
          )
        found = slots.steps(states, count, wants_log_probs=count == 1)
        for i in texts:
          chosen[i] += found[3 * i]
    return chosen

  expected, found = run(SINGLE), run(layout("fully sharded"))
  assert expected[1][0].token % 3 == expected[1][3].token % 3 == 0
  for texts in zip(expected, found, strict=True):
    for one, other in zip(*texts, strict=True):
      assert other.token == one.token
      assert other.likeliest == pytest.approx(one.likeliest, rel=1e-4)
      if one.likeliest:  # log p was asked for
        assert other.log_prob == pytest.approx(one.log_prob, rel=1e-4)


def test_weights_for_which_a_device_has_no_memory_are_one_line(
  load, monkeypatch
):
  def exhaust_memory(*unused):
    return jax.numpy.zeros(2**55).block_until_ready()

  monkeypatch.setitem(POD_FUNCTIONS, MAKE_LAYER, exhaust_memory)
  with pytest.raises(UserError) as error:
    load(CONFIG, layout("2D"))
  assert re.fullmatch(
    "this machine: JAX failed in make_layer, while it ran the model: "
    "RESOURCE_EXHAUSTED: .+; take a larger mesh or, if the command continues "
    r"texts, continue fewer at once \(NUM_SAMPLES, NUM_BEAMS, --slots\); "
    r"`palm_mtf plan --compile` shows the memory\.",
    str(error.value),
  )


def test_without_tpus_the_cpus_compute_and_a_line_says_so(
  load, monkeypatch, caplog
):
  monkeypatch.delenv("JAX_PLATFORMS")
  monkeypatch.setattr(processors, "has_tpus", lambda: False)
  monkeypatch.setitem(POD_FUNCTIONS, MAKE_LAYER, None)  # JAX would call it
  caplog.set_level("INFO")
  with load(CONFIG, layout("model")) as loaded:
    found = dict(Scorer(loaded).log_likelihoods([Example([3], [5, 9])]))
  expected = oracle.log_likelihood(CONFIG, parameters(CONFIG), [3], [5, 9])
  assert found[0] == pytest.approx(expected, rel=1e-5)
  assert 'TPU = "v4-8": absent here, so the CPUs compute' in caplog.messages


@pytest.mark.slow
def test_the_mean_loss_of_documents_is_the_oracles(load, tmp_path):
  checkpoint = save_checkpoint(CONFIG, parameters(CONFIG), tmp_path)
  batch = random_documents(CONFIG, batch_size=4, seed=2)
  mean = compute_mean_loss(checkpoint, CONFIG, layout("2D"), [batch])
  exact, _ = oracle.loss(CONFIG, parameters(CONFIG), **batch, z_loss=0.0)
  assert mean == pytest.approx(exact, rel=1e-6)
