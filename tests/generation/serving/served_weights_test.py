# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights are replaced by another checkpoint's, or stay."""

import dataclasses

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import find_checkpoints
from palm_mtf.cli.gin_files import load_run
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.slot_decoder import SlotText
from palm_mtf.generation.serving.served_weights import ServedWeights


@pytest.fixture(scope="module")
def weights(finished):
  _, config = load_run("generate", str(finished), {})
  with ServedWeights(
    config.model,
    config.mesh_layout,
    config.decode.weight_dtype,
    num_tokens=300,
    num_slots=2,
  ) as weights:
    yield weights


def log_probs(weights):
  """Returns log p of a prompt's tokens and of the next token."""
  prompt = [0, 260, 270, 280]
  weights.decoder.insert(0, prompt)
  text = SlotText(280, 3, 0, np.zeros([2], np.int32), 0.0, None, 1.0)
  (chosen,) = weights.decoder.steps({0: text}, 1, wants_log_probs=True)[0]
  return [x.log_prob for x in (*weights.score(prompt), chosen)]


def test_replaced_weights_are_the_newer_checkpoints(
  weights, finished, tmp_path, caplog
):
  first, *_, last = find_checkpoints(str(finished))
  weights.load(last)
  expected = log_probs(weights)
  weights.load(first)
  before = log_probs(weights)
  assert before != expected
  with caplog.at_level("INFO"):
    weights.replace(last)
  assert log_probs(weights) == expected
  assert weights.step == last.manifest.step and weights.created > 0
  assert caplog.messages[-1] == f"serving step {last.manifest.step}"
  # A checkpoint that cannot be read leaves the weights as they are.
  gone = dataclasses.replace(first, path=str(tmp_path / "gone"))
  weights.replace(gone)
  assert log_probs(weights) == expected
  assert weights.step == last.manifest.step
  assert f"{gone.path} cannot be loaded: " in caplog.text
  assert "Traceback" not in caplog.text


@pytest.mark.slow  # TensorFlow tries for 20 seconds
def test_a_cache_without_memory_is_one_error_line(
  weights, finished, monkeypatch
):
  checkpoint = find_checkpoints(str(finished))[-1]
  monkeypatch.setattr(weights, "_num_slots", 10**11)
  with pytest.raises(UserError, match="too little memory for their cache"):
    weights.load(checkpoint)
