# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Wrong flags and impossible figures are one line; each case gives records."""

import functools
import importlib
import sys
import types

import pytest

from tests import processes
from tools.bench.command import CASES, find_impossible

NO_FLAG = "no such flag; macros are --gin.NAME=VALUE."
AT_LEAST_1 = "give a whole number of at least 1"


@pytest.mark.parametrize(
  ("tool", "flags", "message"),
  [
    ("bench", "trian", "CASE = 'trian' (did you mean \"train\"?): "),
    ("bench decode", "--bits=3", "choose one of '32', '16', '8', '4'"),
    ("bench decode", "--size=5M", "--size = '5M'"),
    ("bench decode", "--rounds=0", f"--rounds = 0: {AT_LEAST_1}"),
    ("bench dispatch", "--figures=8", "--figures = '8'"),
    ("bench gpu", "--chip=h1000", "--chip = 'h1000'"),
    ("bench slow_links", "--stepps=1", f"--stepps=1: {NO_FLAG}"),
    ("bench manager", "--servers=9,few", f"--servers = few: {AT_LEAST_1}"),
    ("bench memory", "--times=9", "--times = 9: give a whole number of at le"),
    ("bench pods", "--microbatches=0", "--microbatches = 0: give a whole"),
    ("bench serve", "--model_dir=nowhere", "nowhere"),
    ("bench train", "--peer=troch", "--peer = 'troch' (did you mean \"torch\""),
    ("bench train", "--dtype=float16", "choose one of 'bfloat16', 'float32'"),
    ("bench train", "--sequence_length=300", "a divisor of that"),
    ("bench train", "--mesh_shape=data:3 --layout=batch:data", "8 is not divi"),
    ("bench train", "--base=no/where", "--base = no/where: there is no tools"),
    ("bench dcn_sweep", "--mbits=fast", "give numbers, as in 200,50"),
    ("bench dcn_sweep", "--dtypes=int8", "--dtypes"),
    ("bench goodput", "--chips=many", "give numbers, as in 6144,12288"),
    ("bench slow_links", "--forms=dilco", 'did you mean "diloco"?'),
    ("bench quantized_loss", "--model_dir=nowhere", "there is no config.gin"),
    ("chaos", "--minutes=-1", "--minutes = -1.0: give a number of minutes abo"),
  ],
)
def test_a_wrong_flag_is_one_line(tool, flags, message, run_bench, run_tool):
  bench, *case = tool.split()
  run = run_bench if bench == "bench" else functools.partial(run_tool, bench)
  code, out, err = run(*case, *flags.split())
  assert (code, out) == (2, "")
  (line,) = err.splitlines()
  assert line.startswith(f"{tool}: ")
  assert message in line


def test_the_bench_runs_by_its_path_from_any_folder(tmp_path):
  bench = processes.ROOT / "tools" / "bench"
  done = processes.python(bench, "decode", "--rounds=0", cwd=tmp_path)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("bench decode: --rounds = 0: ")


def test_the_bench_lists_its_cases_with_a_line_each(run_bench):
  code, out, _ = run_bench()
  assert code == 0 and out == run_bench("--help")[1]
  _, _, *lines = out.splitlines()
  assert [line.split()[0] for line in lines] == CASES
  assert all(line.endswith(".") for line in lines)


# Cases without a separate test, with their smallest sizes.
_SMALL = ("--size=4.8M", "--rounds=1")
SMALL = {
  "decode": (*_SMALL, "--bits=8", "--sequence_length=16"),
  "prompt": (*_SMALL, "--tokens=8"),
  "dispatch": ("--servers=1", "--rounds=1", "--length=8"),
  "train": (*_SMALL, "--dtype=float32"),
}


def test_every_case_has_a_test_and_bounds():
  folder = processes.ROOT / "tests" / "tools" / "bench" / "cases"
  own = {x.name.removesuffix("_test.py") for x in folder.glob("*_test.py")}
  assert own | {*SMALL} == {*CASES}
  for name in CASES:
    assert importlib.import_module(f"tools.bench.cases.{name}").BOUNDS


@pytest.mark.slow  # each starts processes
@pytest.mark.parametrize("case", SMALL)
def test_a_case_gives_records_and_rows(case, measure):
  records = measure(case, *SMALL[case])
  own = importlib.import_module(f"tools.bench.cases.{case}")
  assert records and all(map(own.row, records))
  for record in (x for x in records if "program" in x):
    assert record["tokens_per_sec"] > 0
    assert 1e8 < record["peak_bytes"] < 2e9


BOUNDS = {"*secs": (0, 9), "ratio": (0, 1)}


@pytest.mark.parametrize(
  ("record", "impossible"),
  [
    ({"run_secs": 9, "ratio": 1.0, "other": -1, "kind": "x"}, ""),
    ({"run_secs": -0.5}, "run_secs = -0.5 is not from 0 to 9"),
    ({"run_secs": float("nan")}, "run_secs = nan is not from 0 to 9"),
    ({"turns": [{"secs": 1}, {"secs": 10}]}, "secs = 10 is not from 0 to 9"),
    ({"ratio": 1.1}, "ratio = 1.1 is not from 0 to 1"),
    # An interval that reaches 1 is noise, and so is any of a few rounds.
    ({"ratio": 1.1, "low": 0.9, "high": 1.2, "rounds": 6}, ""),
    ({"ratio": 1.1, "low": 1.05, "high": 1.2, "rounds": 5}, ""),
    (
      {"ratio": 1.1, "low": 1.05, "high": 1.2, "rounds": 6},
      "ratio = 1.1 is not from 0 to 1",
    ),
  ],
)
def test_a_figure_that_its_definition_excludes_is_an_error(
  record, impossible, monkeypatch, run_bench
):
  case = types.SimpleNamespace(
    __doc__="", FLAGS={}, BOUNDS=BOUNDS, measure=lambda chosen: [record]
  )
  monkeypatch.setitem(sys.modules, "tools.bench.cases.train", case)
  code, out, err = run_bench("train")
  assert [*find_impossible(record, BOUNDS)] == [x for x in [impossible] if x]
  assert code == int(bool(impossible))
  assert err == (f"bench train: impossible: {impossible}\n" if code else "")
  assert out.startswith("{")
