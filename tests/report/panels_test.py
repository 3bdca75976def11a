# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which pictures a page has, and where on them things happened."""

from palm_mtf.report.panels import events, sections, x_axis
from palm_mtf.report.runs import Run, read_runs
from tests.report.conftest import log_line


def a_run(lines, happened=()) -> Run:
  return Run(name="a", path="a", lines=lines, events=happened)


def titles(*runs) -> list[str]:
  return [panel.title for x in sections(runs) for panel in x.panels]


def test_each_field_that_some_run_has_is_drawn_for_those_that_have_it():
  lines = [log_line(step, tokens=step * 64) for step in (1, 2)]
  with_memory = [{**line, "memory_bytes": line["step"]} for line in lines]
  runs = [a_run(lines), a_run(with_memory)]
  panels = {p.title: p for x in sections(runs) for p in x.panels}
  assert list(panels) == [
    *("Loss", "Learning rate", "Gradient norm", "Speed", "MFU"),
    *("Waiting for data", "Memory"),
  ]
  assert [curve.run for curve in panels["Loss"].curves] == [0, 1]
  assert [curve.run for curve in panels["Memory"].curves] == [1]
  assert panels["Memory"].curves[0].points == [(64, 1), (128, 2)]
  assert panels["Memory"].form == "bytes"


def test_a_field_without_a_name_is_drawn_if_it_changes():
  lines = [{"step": step, "new_secs": step, "same": 1} for step in (1, 2)]
  assert titles(a_run(lines)) == ["New"]


def test_each_kind_of_layer_has_a_picture():
  line = {"step": 1, "update_rms/mlp": 1.0, "parameter_rms/mlp": 0.1}
  found = sections([a_run([line])])
  assert [panel.title for x in found for panel in x.panels] == ["mlp", "mlp"]
  assert found[0].title == "Root mean square of updates, before clipping"
  assert found[1].title == "Root mean square of parameters"


def test_all_is_drawn_against_tokens_if_all_runs_know_theirs():
  known = a_run([log_line(1, tokens=64)])
  unknown = a_run([log_line(1)])
  assert x_axis([known, known]) == "tokens"
  assert x_axis([known, unknown]) == "step"


def test_what_happened_is_marked_at_its_tokens_on_every_picture():
  lines = [log_line(step, tokens=step * 64) for step in (10, 20)]
  happened = [{"event": "spike", "step": step} for step in (5, 15, 20, 30)]
  run = a_run(lines, [*happened, {"event": "without a step"}])
  places = [320, 960, 1280, 1920]
  assert [x for x, _, _ in events(run, "tokens")] == places
  for section in sections([a_run(lines), run]):
    for panel in section.panels:
      assert [(mark.run, mark.x) for mark in panel.marks] == [
        (1, x) for x in places
      ]


def test_a_rewind_is_marked_back_to_where_training_went_on_from():
  lines = [log_line(step, tokens=step * 64) for step in (10, 20)]
  run = a_run(lines, [{"event": "rewind", "step": 20, "to_step": 5}])
  assert [x[:2] for x in events(run, "tokens")] == [(1280, 320)]
  assert sections([run])[0].panels[0].marks[0].back_to == 320


def test_a_real_line_loses_no_number(write_run):
  folder = write_run("a", [log_line(1), log_line(2, loss=7.0)])
  (run,) = read_runs([str(folder)])
  (loss, *_) = (p for x in sections([run]) for p in x.panels)
  assert loss.curves[0].points == [(64, 7.99), (128, 7.0)]
