# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of examples/two_slices run, and print the same numbers."""

import re
import runpy
import sys

import pytest

from tests import processes
from tests.source_files import ROOT

EXAMPLE = ROOT / "examples" / "two_slices" / "run.py"


def counts(text):
  return [
    [int(x) for x in re.findall(r"\d+", y)[1:]] for y in text.splitlines()
  ]


def test_the_command_runs_three_batches(monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["run.py"])
  runpy.run_path(str(EXAMPLE), run_name="__main__")
  found = counts(capsys.readouterr().out)
  assert [sum(x) for x in found] == [32] * 3  # rows of a batch


@pytest.mark.slow  # starts two servers
def test_slices_in_one_process_and_on_two_servers_give_the_same_numbers():
  here, servers = (
    processes.python(str(EXAMPLE), *flags)
    for flags in ([], ["--local_servers=2"])
  )
  assert len(counts(here.stdout)) == 3, here.stderr
  assert servers.stdout == here.stdout, servers.stderr
