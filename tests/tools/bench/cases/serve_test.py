# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Real requests are measured."""

import pytest


@pytest.mark.slow
def test_all_tokens_are_streamed_for_every_number_of_requests(
  finished, measure
):
  pytest.importorskip("aiohttp", reason="aiohttp, which serve needs, is absent")
  flags = [f"--model_dir={finished}", "--requests", "1", "3", "--rounds=1"]
  flags += ["--prompt_tokens=3", "--tokens=4"]
  records = measure("serve", *flags)
  assert [each["requests"] for each in records] == [1, 3]
  assert all(x["tokens_per_sec"] > 0 and x["events"] > 0 for x in records)
