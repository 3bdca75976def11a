# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Real requests are measured."""

import json

import pytest


@pytest.mark.slow
def test_both_make_tokens_for_every_number_of_requests(finished, run_bench):
  pytest.importorskip("aiohttp", reason="aiohttp, which serve needs, is absent")
  flags = [f"--model_dir={finished}", "--json", "--requests", "1", "3"]
  code, out, _ = run_bench("serve", *flags)
  assert code == 0
  records = [json.loads(line) for line in out.splitlines()]
  assert [each["requests"] for each in records] == [1, 3]
  assert all(x["served"] > 0 and x["generated"] > 0 for x in records)


def test_a_folder_without_a_run_is_one_line(tmp_path, run_bench):
  code, out, err = run_bench("serve", f"--model_dir={tmp_path}")
  assert (code, out) == (2, "")
  (line,) = err.splitlines()
  assert line.startswith("bench serve: ")
