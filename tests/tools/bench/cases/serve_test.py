# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Real requests are measured."""

import argparse

import pytest

from tools.bench.cases import serve

NAMES = "palm_mtf", "before"


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


def test_a_text_that_comes_in_one_event_has_no_time_between_events(monkeypatch):
  def run_streams(port, streams, fields):
    for stream in streams:
      stream.times, stream.num_tokens = [0.5, 0.75][: 1 + port], 4
    return 1.0

  monkeypatch.setattr(serve, "run_streams", run_streams)
  chosen = argparse.Namespace(rounds=2, prompt_tokens=3, tokens=4, long=0)
  servers = {name: serve._Server(port, {}) for port, name in enumerate(NAMES)}
  ours, before = serve._measure_turns(chosen, servers, 2, size=9)
  assert ours["between_50_ms"] == 0 and before["between_50_ms"] == 250
  assert before["first_50_ms_ratio"] == 1 and before["between_50_ms_ratio"] == 0
  flipped = {
    name: servers[x] for name, x in zip(NAMES, NAMES[::-1], strict=True)
  }
  _, before = serve._measure_turns(chosen, flipped, 2, size=9)
  assert "between_50_ms_ratio" not in before
  assert "-" in serve.row(before).split()
