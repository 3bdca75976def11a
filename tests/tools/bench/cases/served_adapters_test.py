# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of a base and of its adapters are measured on a server."""

import pytest

from tests import runs


@pytest.mark.slow
def test_the_base_and_the_adapters_make_tokens(
  corpus, tmp_path, measure, capsys
):
  pytest.importorskip("aiohttp", reason="aiohttp, which serve needs, is absent")
  base = tmp_path / "base"
  length = {"SEQUENCE_LENGTH": 256}
  assert runs.run("train", corpus, base, **length) == 0
  adapter = {
    "INIT_CHECKPOINT": str(base),
    "VOCABULARY": str(base / "vocabulary.model"),
    "ADAPTER": "lora",
    "ADAPTER_RANK": 2,
    "ADAPTER_ALPHA": 4.0,
  }
  assert (
    runs.run("train", corpus, tmp_path / "adapted", **length, **adapter) == 0
  )
  capsys.readouterr()
  flags = [f"--model_dir={tmp_path / 'adapted'}", "--adapters=2", "--texts=3"]
  (record,) = measure("served_adapters", *flags, "--rounds=1")
  assert (record["server"], record["bits"]) == ("palm_mtf", 16)
  assert record["base_per_sec"] > 0 and record["adapters_per_sec"] > 0
  share = record["adapters_per_sec"] / record["base_per_sec"]
  assert record["share"] == pytest.approx(share)


def test_a_run_without_an_adapter_is_one_line(finished, run_bench):
  flags = [f"--model_dir={finished}"]
  code, out, err = run_bench("served_adapters", *flags)
  assert (code, out) == (2, "")
  assert err.endswith("is no run with ADAPTER = 'lora'; give one.\n")
