# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A traced step as it is drawn, alone and on the page."""

import html
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from palm_mtf.report.page import page
from palm_mtf.report.runs import read_runs
from palm_mtf.report.style import LIGHT
from palm_mtf.report.timeline import headline, png, svg
from palm_mtf.report.traces import read_timeline
from palm_mtf.trace.chrome import chrome_trace
from palm_mtf.trace.records import PHASES, Operation, Trace, Transfer
from tests.report.conftest import log_line

OPERATIONS = [
  Operation(pod, 0, "x", phase, 0.1 * i, 0.1 * i + 0.05)
  for pod in (0, 1)
  for i, phase in enumerate(PHASES)
]
TWO_PODS = Trace(
  num_pods=2,
  last_call=0.2,
  operations=OPERATIONS,
  transfers=[
    Transfer("embedding", 0, 1, 10**7, 0.1, 0.12, 0.2),
    Transfer("embedding", 1, 0, 10**7, 0.1, 0.1, 0.14),
  ],
  end=0.4,
)
ONE_POD = Trace(1, 0.0, OPERATIONS[:4], [], 0.4)


def timeline(trace, step=20):
  return read_timeline(json.loads(json.dumps(chrome_trace(trace, step))))


def texts(element):
  root = ElementTree.fromstring(element)
  return [html.unescape(x.text.strip()) for x in root.iter("text") if x.text]


def test_the_headline_has_the_numbers_with_their_units():
  assert headline(timeline(TWO_PODS)) == (
    "step 20 took 400 ms; 20.0 MB crossed between pods at 1.14 Gb/s, 45 ms of "
    "it hidden behind computation, 25 ms exposed"
  )
  assert headline(timeline(ONE_POD)) == "step 20 took 400 ms"


def test_transfers_that_take_no_time_are_said_to_be_in_memory():
  handed = [Transfer("x", 0, 1, 10**6, 0.1, 0.1, 0.1)]
  found = timeline(Trace(2, 0.0, OPERATIONS, handed, 0.4))
  assert headline(found).endswith("1.0 MB crossed between pods, in memory")
  ElementTree.fromstring(svg(found, "t"))


def test_lanes_and_meanings_are_written_beside_the_bars():
  found = {*texts(svg(timeline(TWO_PODS), "t"))}
  assert {"pod 0", "pod 1", "pod 0 \u2192 pod 1", "pod 1 \u2192 pod 0"} <= found
  assert {"10.0 MB, 50 ms exposed", "10.0 MB, 0 ms exposed"} <= found
  assert {"A: forward", "A: backward", "B: update", "transfer"} <= found
  assert any("last microbatches" in each for each in found)
  assert "transfer" not in texts(svg(timeline(ONE_POD), "t"))


def test_all_colors_are_the_page_s():
  element = svg(timeline(TWO_PODS), "t")
  assert not re.findall(r"#[0-9a-f]{6}\b(?!\")", element)
  used = {*re.findall(r"var\(--([\w-]+)\)", element)}
  assert {"ink", "muted", "run-0", "run-1", "run-4"} <= used <= {*LIGHT}


def test_short_gaps_are_closed_and_long_ones_stay():
  operations = [
    Operation(0, 0, "x", "forward", start, start + 1e-5)
    for start in (0.0, 2e-5, 0.5)
  ]
  found = timeline(Trace(1, 0.0, operations, [], 1.0))
  ((first, second),) = found.pods[0].values()
  assert first == (0, pytest.approx(30))
  assert second == (5e5, pytest.approx(5e5 + 10))


def test_the_picture_of_a_file_is_a_png():
  assert png(timeline(TWO_PODS)).startswith(b"\x89PNG\r\n")


def test_the_page_has_every_traced_step_that_can_be_read(write_run):
  folder = write_run("a", [log_line(10)])
  (folder / "traces").mkdir()
  for step, content in (
    (20, json.dumps(chrome_trace(TWO_PODS, 20))),
    (21, json.dumps(chrome_trace(TWO_PODS, 21))),
    (22, '{"traceEvents"'),
    (23, "{}"),
  ):
    (folder / "traces" / f"step_{step:08d}.json").write_text(content)
  text = page(read_runs([str(folder)]))
  section = text[text.index("Traced steps") :]
  captions = re.findall(r"step (\d+) took [^<]*exposed</span>", section)
  assert captions == ["20", "21"]
  ids = re.findall(r'\bid="([^"]*)"', text)
  assert len(ids) == len({*ids})
  assert "Traced steps" not in page(
    read_runs([str(write_run("b", [log_line(1)]))])
  )
