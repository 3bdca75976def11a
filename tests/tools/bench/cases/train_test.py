# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Speeds are of the models that flags name; checkouts take turns."""

import json
import shutil

import pytest

from tests import processes


@pytest.mark.slow
def test_another_checkout_takes_turns_with_its_own_code(tmp_path):
  for name in ("palm_mtf", "tools", "gin"):
    shutil.copytree(processes.ROOT / name, tmp_path / name)
  with (tmp_path / "tools/bench/cases/train.py").open("a") as case:
    case.write("\nimport sys\n\nprint('the copy works', file=sys.stderr)\n")
  bench = processes.ROOT / "tools" / "bench"
  flags = ["--size=4.8M", "--rounds=1", "--base", tmp_path]
  done = processes.python(bench, "train", "--json", *flags)
  assert done.returncode == 0, done.stderr
  _, base = map(json.loads, done.stdout.splitlines())
  assert base["program"] == "base" and base["ratio"] > 0
  assert done.stderr.count("the copy works") == 1
