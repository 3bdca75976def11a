# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs tools in this process as their command lines do."""

import functools
import importlib
import json
import sys

import pytest


@pytest.fixture
def run_tool(monkeypatch, capsys):
  """Runs a tool with flags; returns its exit code, output and errors."""

  def run(tool, *flags):
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", *flags])
    code = importlib.import_module(f"tools.{tool}").main()
    return code, *capsys.readouterr()

  return run


@pytest.fixture
def run_bench(run_tool):
  """Runs a case of the bench as `run_tool` runs a tool."""
  return functools.partial(run_tool, "bench.command")


@pytest.fixture
def measure(run_bench):
  """Runs a case of the bench with success; returns its records."""

  def run(case, *flags):
    code, out, err = run_bench(case, *flags, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]

  return run
