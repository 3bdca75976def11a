# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of plans and steps: its cases, its misses, and a short run."""

import json

import pytest

from palm_mtf.machine.cache_folder import measured_hardware
from palm_mtf.rates.calibration import PROBES
from tests import processes, runs
from tools.validate_plan import (
  BEGIN,
  CASES,
  END,
  LAYOUTS,
  PAGE,
  TIMED,
  groups,
  make_config,
  predict,
  row,
  summary,
  write,
)

RATES = """CHIP_BFLOAT16_FLOPS = 2e11
CHIP_FLOAT32_FLOPS = 1e11
CHIP_EFFICIENCY = 1.0
CHIP_MEMORY_BYTES = 2e10
CHIP_MEMORY_BANDWIDTH = 2e10
CHIP_LINK_BANDWIDTH = 1e10
CHIP_DCN_BANDWIDTH = 1e10
CHIP_PROCESS_BYTES = 8e8
"""


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
  """A machine with invented rates."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  (tmp_path / "palm_mtf" / "hardware").mkdir(parents=True)
  with open(measured_hardware(), "w") as file:
    file.write(RATES)


def test_no_case_is_what_the_calibration_trained(calibrated):
  assert len(TIMED) >= 12 and len(LAYOUTS) >= 3
  shapes = {
    (x.d_model, x.vocab_size, x.sequence_length)
    for x in (probe.model for probe in PROBES.values())
  }
  for case in CASES:
    config = make_config(case)
    model = config.model
    assert model.num_layers > 1
    shape = model.d_model, model.vocab_size, model.sequence_length
    assert shape not in shapes, case


def test_a_pod_in_a_process_of_its_own_holds_one_process_and_its_share(
  calibrated,
):
  alone, together = (predict(f"26.6M f32{pods}") for pods in ("", ", two pods"))
  more = together["predicted_bytes"] - alone["predicted_bytes"]
  exchanged = 4 * 2 * 26_611_200  # the other's gradients, and the sum
  assert 0 < more <= exchanged
  numbers = 26_611_200 + 3
  assert together["predicted_moved"] == 2 * 4 * numbers


def test_cases_live_together_as_memory_allows(calibrated):
  found = list(groups(list(CASES)))
  assert [case for group in found for case in group] == list(CASES)
  assert all(1 <= len(group) <= 4 for group in found)


def record(**changes):
  return {
    "case": "4.8M f32",
    "predicted_secs": 0.9,
    "measured_secs": 1.0,
    "predicted_bytes": 1e9,
    "measured_bytes": 1e9,
    "predicted_moved": 0,
    "counted_moved": 0,
    "slowdown": 1.0,
    **changes,
  }


def test_a_row_names_what_is_off_by_more_than_15_percent():
  good = row(record())
  assert "| 0.900 s | 1.000 s | -10% |" in good and "miss" not in good
  assert "a miss: time" in row(record(predicted_secs=0.84))
  assert "a miss: memory" in row(record(measured_bytes=0.8e9))
  assert "bytes were predicted" in row(record(counted_moved=7))


def test_a_case_that_is_measured_again_replaces_its_row_alone():
  page = f"before\n{BEGIN}\n{END}\nafter"
  first = write([record(case="26.6M f32"), record(slowdown=1.5)], page)
  assert first.index("| 4.8M f32 |") < first.index("| 26.6M f32 |")
  again = write([record(slowdown=1.25)], first)
  assert "1.25" in again and "1.50" not in again
  assert again.count("\n| ") == first.count("\n| ")
  assert again.startswith("before\n") and again.endswith("\nafter")


def test_the_page_has_every_case_and_calls_every_miss_one():
  page = PAGE.read_text(encoding="utf-8")
  table = page.partition(BEGIN)[2].partition(END)[0]
  rows = [x for x in table.splitlines() if "MB" in x]
  assert [x.split(" | ")[0].removeprefix("| ") for x in rows] == list(CASES)
  for line in rows:
    off = [int(x[:-1]) for x in line.split(" | ") if x[-1:] == "%"]
    assert ("a miss" in line) == any(abs(x) > 15 for x in off), line


def test_the_page_sums_up_its_own_rows():
  page = PAGE.read_text(encoding="utf-8")
  assert write([], page) == page
  rows = [row(record(predicted_secs=x)) for x in (1.0, 0.94, 1.2)]
  assert list(summary(rows)) == [
    "Of 3 times, 1 within 5% and 2 within 10%; the largest difference is 20%.",
    "Of 3 sizes of memory, 3 within 5% and 3 within 10%; the largest "
    "difference is 0%.",
  ]


@pytest.mark.slow
def test_a_calibrated_machine_trains_about_as_planned(
  tmp_path, monkeypatch, run_tool
):
  """Within a factor of two in time, because tests share the machine."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  # In a separate process, because its memory is measured.
  runs.finish(processes.start("-m", "palm_mtf", "plan", "--calibrate"))
  cases = ["4.8M f32", "4.8M bf16", "26.6M bf16, fully sharded"]
  flags = [f"--case={case}" for case in cases]
  code, out, _ = run_tool("validate_plan", "--json", *flags)
  records = [json.loads(line) for line in out.splitlines()]
  assert code == 0 and [x["case"] for x in records] == cases
  for each in records:
    assert each["predicted_moved"] == each["counted_moved"]
    assert each["predicted_bytes"] == pytest.approx(
      each["measured_bytes"], rel=0.25
    )
    if each["measured_secs"]:
      assert 0.5 < each["predicted_secs"] / each["measured_secs"] < 2
