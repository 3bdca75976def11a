# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench compares both blocks on the same batches, and the products."""

import json

import pytest

TINY = {
  "NUM_LAYERS": 1,
  "D_MODEL": 32,
  "NUM_HEADS": 2,
  "D_KV": 16,
  "D_FF": 64,
  "VOCAB_SIZE": 320,
  "SEQUENCE_LENGTH": 32,
  "GLOBAL_BATCH_SIZE": 4,
}


@pytest.mark.slow  # four processes, half a minute
def test_it_gives_ratios_and_the_losses_of_both_blocks(run_bench, tmp_path):
  for i in range(20):
    (tmp_path / f"{i}.txt").write_text(
      f"{i} one two three four five six\n" * 40
    )
  flags = [f"--gin.{name}={value}" for name, value in TINY.items()]
  flags += [f"--gin.TEXT_FILES='{tmp_path}/*.txt'", "--gin.CHIP='a100'"]
  flags += ["--gin.VALIDATION_SHARE=0.5", "--gin.PROMPTS=[]"]
  code, out, _ = run_bench("blocks", "--steps=4", "--json", *flags)
  assert code == 0
  blocks, products = map(json.loads, out.splitlines())
  assert (blocks["program"], blocks["to"]) == ("serial", "parallel")
  assert products["program"] == "five products"
  for record in (blocks, products):
    assert 0 < record["low"] <= record["median"] <= record["high"]
  # Not the same model: from the same seed, on the same batches.
  losses = [blocks["loss_parallel"], blocks["loss_serial"]]
  assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.5


def test_a_wrong_number_of_steps_is_one_line(run_bench):
  code, _, said = run_bench("blocks", "--steps=0")
  assert code == 2
  assert said.startswith("bench blocks: --steps = 0: ")
