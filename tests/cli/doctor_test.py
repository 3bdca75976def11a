# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf doctor` reports what is here, and survives what crashes."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from palm_mtf.cli import doctor
from palm_mtf.cli.diagnosis import Problem

ROOT = Path(__file__).resolve().parent.parent.parent


def _run_doctor(*flags: str, **environment: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "palm_mtf", "doctor", *flags],
    capture_output=True,
    check=False,
    cwd=ROOT,
    env={**os.environ, **environment},
    text=True,
  )


def test_the_report_agrees_with_this_environment():
  result = _run_doctor("--json")
  report = json.loads(result.stdout)
  assert result.returncode == (2 if report["problems"] else 0)
  # SeqIO alone may be missing a part: editdistance has no wheel for 3.13. And
  # other tests may be running.
  for problem in report["problems"]:
    assert re.search(
      "No module named 'editdistance'|keep cores busy", problem["what"]
    )
  assert report["packages"]["tensorflow"] == metadata.version("tensorflow")
  assert report["python"].startswith(sys.version.split()[0])
  assert report["cores"] == len(os.sched_getaffinity(0))
  assert "CPU:0" in report["devices"]
  assert '"auto" is ' in report["bfloat16"]


def test_measured_rates_are_those_a_machine_can_have():
  result = subprocess.run(
    [sys.executable, "-m", "palm_mtf.rates.measure"],
    capture_output=True,
    check=True,
    cwd=ROOT,
  )
  rates = json.loads(result.stdout)
  assert sorted(rates) == [
    "bfloat16 products",
    "float32 products",
    "memory read",
  ]
  for text in rates.values():
    number, unit = text.replace(",", "").split()
    assert unit in ("GFLOP/s", "GB/s")
    assert 0.1 < float(number) < 1e6


def test_a_configuration_that_asks_for_bfloat16_is_read(tmp_path):
  (tmp_path / "mine.gin").write_text(
    "include 'models/palm_tiny.gin'\nACTIVATION_DTYPE = 'bfloat16'\n"
  )
  dtype, where = doctor._asked_dtype([str(tmp_path / "mine.gin")])
  assert (dtype, where.endswith("mine.gin:2")) == ("bfloat16", True)
  assert doctor._asked_dtype(["recipes/quickstart.gin"])[0] == "auto"
  # A TPU multiplies it, whatever this CPU does.
  files = ["recipes/palm_8b.gin", "layouts/tpu_v3_32.gin"]
  assert doctor._asked_dtype(files)[0] == "auto"


def test_a_library_that_crashes_is_reported_and_the_rest_is_shown(tmp_path):
  # Found before the real one, and dies as a wheel for another CPU does.
  (tmp_path / "tensorflow.py").write_text(
    "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
  )
  result = _run_doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
  assert result.returncode == 2
  assert (
    "PROBLEM 1: import of tensorflow fails: killed by SIGILL\n"
    "  fix: use a CPU with AVX2" in result.stdout
  )
  assert "devices:                unknown: TensorFlow was not imported" in (
    result.stdout
  )
  assert "Traceback" not in result.stdout + result.stderr


def test_the_module_that_was_being_imported_is_blamed_for_the_end():
  output = "\n".join(
    [
      '{"importing": "tensorflow"}',
      "a library's own noise",
      '{"imported": "tensorflow"}',
      '{"importing": "seqio"}',
    ]
  )
  assert doctor.read_imports(output, "killed by SIGSEGV") == (
    {"seqio": "killed by SIGSEGV"},
    [],
  )


@pytest.mark.parametrize(
  ("why", "line"),
  [
    (
      "TypeError: Descriptors cannot be created directly.\nIf this call came "
      "from a _pb2.py file, regenerate it.\nhttps://example.org\n",
      "TypeError: Descriptors cannot be created directly.",
    ),
    (
      "ImportError: Traceback (most recent call last):\n  File x\n"
      "ImportError: libx.so: undefined symbol: y\n\nFailed to load.\n",
      "ImportError: libx.so: undefined symbol: y",
    ),
    ("SystemExit: 3\n", "SystemExit: 3"),
  ],
  ids=["first", "nested", "exit"],
)
def test_the_line_that_names_the_cause_is_reported(why, line):
  output = "\n".join(
    json.dumps(said)
    for said in (
      {"importing": "seqio"},
      {"failed": "seqio", "why": why},
      {"devices": ["/physical_device:CPU:0"]},
    )
  )
  assert doctor.read_imports(output, "exit code 0") == (
    {"seqio": line},
    ["/physical_device:CPU:0"],
  )


def test_problems_are_printed_with_their_fixes():
  report = doctor._report(
    {"cores": 2, "packages": {"numpy": "2.4.6"}},
    [Problem("seqio is not installed.", "pip install seqio")],
  )
  assert report == (
    "cores:                  2\n"
    "packages:\n"
    "  numpy                 2.4.6\n"
    "\n"
    "PROBLEM 1: seqio is not installed.\n"
    "  fix: pip install seqio"
  )
