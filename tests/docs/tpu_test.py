# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import pytest

from palm_mtf.accounting.plan import memory_parts, plan_of
from palm_mtf.accounting.step_time import device_rates
from palm_mtf.cli.main import main
from tests.doc_pages import Page
from tests.planning import plan_config

PAGE = Page("docs/tpu.md")
(GENERATE,) = (
  command[2:]
  for block in PAGE.blocks
  for command in block.commands
  if command[2:3] == ["generate"]
)


@pytest.mark.slow
@PAGE.shows("JAX_PLATFORMS=cpu .venv/bin/palm_mtf train")
def test_rehearsals_run_as_the_page_says(block, tmp_path, monkeypatch, capsys):
  ((variable, _, *arguments),) = block.commands
  monkeypatch.setenv(*variable.split("="))
  model_dir = f"--gin.MODEL_DIR={str(tmp_path / 'run')!r}"
  own = [model_dir if "MODEL_DIR" in x else x for x in arguments]
  assert main([*own, "--gin.TRAIN_STEPS=2"]) == 0
  capsys.readouterr()
  own = [x.replace("runs/rehearsal", str(tmp_path / "run")) for x in GENERATE]
  assert main(own) == 0
  assert "--- 'def main('" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("recipe", "layout", "settings", "macros"),
  [
    ("palm_8b", "tpu_v5p_128", "", {"CHIP": "tpu_v5p", "NUM_PODS": 1}),
    (
      *("palm_8b", "tpu_v5p_128", ", 2 microbatches"),
      {"CHIP": "tpu_v5p", "NUM_PODS": 1, "NUM_MICROBATCHES": 2},
    ),
    ("palm_8b", "tpu_v6e_256", "", {"CHIP": "tpu_v6e", "NUM_PODS": 1}),
    (
      *("palm_62b", "tpu_v6e_256", ", 8 microbatches"),
      {"CHIP": "tpu_v6e", "NUM_PODS": 1, "NUM_MICROBATCHES": 8},
    ),
    (
      *("palm_62b_two_pods", None, ", 1 microbatch"),
      {"TPU": "v5p-8x8x8", "CHIP": "tpu_v5p", "NUM_MICROBATCHES": 1},
    ),
    (
      *("palm_540b_two_pods", None, ""),
      {"TPU": "v5p-12x16x16", "CHIP": "tpu_v5p"},
    ),
  ],
)
def test_plans_for_later_tpus_are_those_of_the_page(
  recipe, layout, settings, macros
):
  files = [f"recipes/{recipe}.gin"]
  how = f'`TPU = "{macros.get("TPU")}"`, `CHIP = "{macros["CHIP"]}"`'
  if layout:
    files.append(f"layouts/{layout}.gin")
    how = f"`{files[-1]}`"
  config = plan_config(*files, **macros)
  plan = plan_of(config)
  size, memory = plan["batch_size"], device_rates(config).chip_memory_bytes
  needed = sum(memory_parts(config, size).values())
  assert plan["fits"]
  assert (
    f"| `{recipe}.gin` | {how}{settings} | {size:,} | {needed / 2**30:.2f} of "
    f"{memory / 2**30:.2f} GiB | {plan['step_secs']:.2f} | {plan['mfu']:.1%} |"
  ) in PAGE.text


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested(
    "make tpu",  # needs a TPU; flags: docs_test.py
    "JAX_PLATFORMS=cpu .venv/bin/palm_mtf generate",  # the rehearsals' test
  )
