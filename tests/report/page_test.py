# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The page has all tables, figures and samples, and refers to nothing else."""

import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest

from palm_mtf.report.page import (
  RUN_LINES,
  Panel,
  Run,
  choose_panels,
  draw,
  read_runs,
  render_image,
  render_page,
)
from tests.refusals import message_of
from tests.report.conftest import log_line, write_model_dir

EVIL = "<script>alert('&lt;')</script> # \" onload=\"x"
NONE = ("", "-")  # an empty cell


def read(*folders) -> ElementTree.Element:
  # In XML, an unclosed tag or an unescaped text is an error.
  return ElementTree.fromstring(render_page(read_runs(list(map(str, folders)))))


def texts(root, tag: str) -> list[str]:
  return ["".join(x.itertext()).strip() for x in root.iter(tag)]


def rows(root) -> dict[str, list[tuple[str, str]]]:
  """Returns the exact value and the text of each cell, by row."""
  return {
    texts(row, "th")[0]: [(x.get("title"), x.text) for x in row.iter("td")]
    for row in root.iter("tr")
  }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Two runs: one with all files, one with almost nothing."""
  lines = [
    log_line(10, validation_loss=7.5, host_memory_bytes=9000),
    log_line(20, validation_loss=6.54321, host_memory_bytes=9)
    | {"host_memory_bytes/pod_1": 7000},
  ]
  files = {
    "config.gin": f"SEED = 3  # x.gin:3\nLEARNING_RATE = 0.01\n"
    f"TEXT = {EVIL!r}  # x\nmodule.f = 1\nBETA1 = 0.9  # default\n",
    "samples.jsonl": [
      {"step": x, "prompt": "a < b", "continuation": EVIL} for x in (2000, 10)
    ],
    "plan.json": '{"mfu": 0.625, "step_secs": "soon", "run": {"secs": 9}}',
    "rewinds.jsonl": [{"step": 15, "to_step": 5, "skipped": [5, 2004]}],
  }
  config = {
    "config.gin": "SEED = 4  # default\nLEARNING_RATE = 0.01\n"
    "BETA1 = 0.9  # default\n"
  }
  bare = [{"step": 7, "loss": 5.0}, {"step": 8, EVIL: 1}, {"step": 9, EVIL: 2}]
  folder = tmp_path_factory.mktemp("runs")
  return [
    write_model_dir(folder / "<i>", lines, files),
    write_model_dir(folder / "bare", bare, config),
  ]


@pytest.fixture(scope="module")
def page(folders) -> ElementTree.Element:
  """The page of both runs."""
  return read(*folders)


def test_tables_have_the_exact_values_of_the_files(page):
  found = rows(page)
  rewind = "step 15, to step 5, skipped [5, 2004]"
  expected = {
    "Validation loss (nats/token, last)": [("6.54321", "6.5432"), NONE],
    "Training loss (nats/token, last)": [("7.8", "7.8000"), ("5.0", "5.0000")],
    "Steps": [("20", "20"), ("9", "9")],
    "Tokens": [("1280", "1,280"), NONE],
    "Batch size (tokens, last)": [("64", "64"), NONE],
    "Speed (tokens/s, median)": [("8015.25", "8,015"), NONE],
    "Step time (s, median)": [("0.008", "0.008"), NONE],
    "MFU (median)": [("0.5", "50.0%"), NONE],
    "MFU (predicted)": [("0.625", "62.5%"), NONE],
    "Memory of the process (peak)": [("9000", "8.8 KiB"), NONE],
    "Memory of pod_1 (peak)": [("7000", "6.8 KiB"), NONE],
    "Rewind 1": [(rewind, rewind), NONE],
  }
  assert {row: found[row] for row in expected} == expected
  assert "Unigram entropy (nats/token)" not in found


def test_each_pod_that_exchanges_seldom_has_a_row(write_run):
  """Learners write what they did; other pods sync after the same steps."""
  learners = [
    {"step": x, "loss": 3.0, "last_sync/b": x, "lag/b": 9 - x}
    | {"last_sync/a": 9, "lag/a": 0, "tokens/a": 4096}
    for x in (5, 7)
  ]
  events = [
    *2 * [{"event": "audit", "member": "b", "round": 3}],
    {"event": "merge", "merge": 7},
    {"event": "liar", "member": "c", "round": 4},
  ]
  seldom = (
    'EXCHANGE = "diloco"\nNUM_PODS = 2\nOUTER_STEPS = 20\nFRAGMENTS = 2\n'
  )
  pods = [{"step": x, "loss": 3.0} for x in (30, 49)]
  found = rows(
    read(
      write_run("learners", learners, {"merges.jsonl": events}),
      write_run("pods", pods, {"config.gin": seldom}),
    )
  )
  texts = {
    "a": "last sync: number 9, 0 syncs late, 4,096 tokens",
    "b": "last sync: number 7, 2 syncs late, 2 audits passed",
    "c": "0 audits passed, banned for a lie",
  }
  assert {x: found[x] for x in texts} == {
    x: [(text, text), NONE] for x, text in texts.items()
  }
  text = "last sync: number 4, 0 syncs late"  # after step 40
  for pod in ("pod_0", "pod_1"):
    assert found[pod] == [NONE, (text, text)]


@pytest.mark.parametrize("steps", ["%TRAIN_STEPS", "0", "None"])
def test_a_run_whose_syncs_are_not_known_has_no_rows_of_pods(steps, write_run):
  """Its config.gin may be written by hand."""
  seldom = f"NUM_PODS = 2\nOUTER_STEPS = {steps}\nFRAGMENTS = 1\n"
  seldom += 'EXCHANGE = "diloco"\n'
  lines = [{"step": 30, "loss": 3.0}]
  found = rows(read(write_run("pods", lines, {"config.gin": seldom})))
  assert "pod_0" not in found


def test_tasks_have_what_the_last_evaluated_checkpoint_measured(write_run):
  def outcome(step, accuracy):
    metrics = {"accuracy": accuracy, "best": "a text"}
    result = {"step": step, "task": "quiz", "split": EVIL, "metrics": metrics}
    return {f"eval/step_{step:08d}/quiz-test.json": json.dumps(result)}

  lines = [{"step": 1, "loss": 2.0}]  # one figure, because drawing takes long
  first = write_run("a", lines, outcome(100, 25.0))
  files = outcome(200, 78.6667) | outcome(50, 1.0)
  found = rows(read(first, write_run("b", lines, files)))
  assert found[f"quiz accuracy ({EVIL})"] == [
    ("25.0", "25.00 at\xa0step\xa0100"),
    ("78.6667", "78.67 at\xa0step\xa0200"),
  ]
  assert not any("best" in row for row in found)


def test_every_run_and_every_figure_is_there(page, folders):
  assert texts(page, "h1") == ["palm_mtf report: <i>, bare"]
  assert texts(page, "th")[1:3] == ["<i>", "bare"]
  titles = [x.title for x in choose_panels(read_runs(list(map(str, folders))))]
  assert texts(page, "figcaption") == titles and titles[-1] == EVIL
  images = list(page.iter("img"))
  assert [x.get("alt") for x in images] == titles
  assert len({x.get("src") for x in images}) == len(titles) > 5


def test_the_page_refers_to_nothing_outside_and_runs_nothing(page):
  (style,) = texts(page, "style")
  assert "url(" not in style and "@import" not in style
  tags = {x.tag for x in page.iter()}
  assert not tags & {"script", "link", "iframe", "object", "base", "a"}
  names = {name for x in page.iter() for name in x.keys()}
  plain = {"alt", "charset", "class", "content", "lang", "name"}
  assert names == plain | {"open", "src", "style", "title"}
  for x in page.iter("img"):
    assert x.get("src").startswith("data:image/png;base64,")


def test_samples_are_text_in_the_order_of_steps(page):
  assert texts(page, "p") == ["<i> step 10", "<i> step 2,000"]
  assert texts(page, "pre") == [f"a < b{EVIL}"] * 2


def test_settings_that_differ_have_a_separate_table(page):
  tables = [texts(table, "th")[3:] for table in page.iter("table")]
  assert tables[-3:] == [
    ["SEED", "TEXT"],
    ["SEED", "LEARNING_RATE", "TEXT"],
    ["BETA1"],
  ]
  assert [x.get("open") for x in page.iter("details")] == ["", None]
  assert rows(page)["SEED"] == [("3", "3"), ("4", "4")]
  assert rows(page)["TEXT"] == [(repr(EVIL), repr(EVIL)), NONE]


def test_the_page_of_one_run_names_it_once(write_run):
  samples = [{"step": x, "prompt": "", "continuation": ""} for x in (2000, 10)]
  lines = [{"step": 1, "loss": 2.0}]
  root = read(write_run("<i>", lines, {"samples.jsonl": samples}))
  assert "".join(root.itertext()).count("<i>") == 2  # title and heading
  assert texts(root, "p") == ["step 10", "step 2,000"]
  assert "Settings that differ" not in texts(root, "h2")


LOSS = Panel("Loss", ("loss", "validation_loss", "unigram_entropy"))


def a_run(*lines, rewinds=()) -> Run:
  return Run("a", lines, rewinds, (), (), {}, set(), {})


def axes_of(runs, panel):
  figure = draw(runs, panel)
  figure.draw_without_rendering()  # makes the tick labels
  return figure.axes[0]


def labels(axis) -> set[str]:
  return {x.get_text() for x in axis.get_ticklabels(which="both")}


def test_each_field_with_numbers_has_a_panel():
  lines = [log_line(1), log_line(2, validation_loss=7.0)]
  assert [panel.title for panel in choose_panels([a_run(*lines)])] == [
    *("Loss (nats/token)", "Learning rate", "Gradient norm before clipping"),
    *("Speed (tokens/s)", "MFU (% of the chips' peak)", "Step time"),
  ]
  # A new field has a panel if it changes, unless it is a field of traces.
  lines = [
    {"step": x, "same": 1, "rms/mlp": x, "new_secs": x, "traced_secs": x}
    | {"update_rms/mlp": x, "host_memory_bytes/pod_0": x}
    for x in (1, 2)
  ]
  assert choose_panels(
    [a_run(*lines), a_run({"step": 1, "loss": math.nan})]
  ) == [
    Panel("rms/mlp", ("rms/mlp",)),
    Panel("new_secs", ("new_secs",), "s"),
    Panel("RMS of updates: mlp", ("update_rms/mlp",)),
    Panel("Memory of pod_0", ("host_memory_bytes/pod_0",), "B"),
  ]


def test_lines_have_the_points_of_each_run_in_its_color():
  first = a_run(
    log_line(1, unigram_entropy=9.0),
    log_line(2, loss=math.nan),
    log_line(3, validation_loss=7.5),
  )
  axes = axes_of([first, a_run(log_line(1), log_line(4, loss=2.5))], LOSS)
  blue, red = (color for color, _ in RUN_LINES[:2])
  assert [
    (x.get_color(), x.get_xydata().tolist())
    for x in axes.lines
    if len(x.get_xydata())
  ] == [
    (blue, [[64, 7.99], [192, 7.97]]),
    (blue, [[192, 7.5]]),
    (blue, [[0, 9], [64, 9]]),
    (red, [[64, 7.99], [256, 2.5]]),
  ]
  legend = [x.get_text() for x in axes.get_legend().get_texts()]
  assert legend == ["training", "validation", "unigram entropy"]


def test_x_is_tokens_if_all_runs_have_them():
  with_tokens = a_run(log_line(1), log_line(2, tokens=6e9))
  without = a_run(log_line(1, tokens=None), {"step": 2000, "loss": 2.0})
  axes = axes_of([with_tokens], LOSS)
  assert axes.get_xlabel() == "tokens" and "6B" in labels(axes.xaxis)
  axes = axes_of([with_tokens, without], LOSS)
  assert axes.get_xlabel() == "steps" and "2k" in labels(axes.xaxis)


@pytest.mark.parametrize(
  ("unit", "high", "label"),
  [
    ("%", 0.5, "40%"),
    ("s", 0.0042, "4 ms"),
    ("s", 0, "0 s"),
    ("B", 4.2e9, "3 GiB"),
    ("/s", 8100, "8 k/s"),
    ("", 10, "8"),
    ("", 200, "50"),  # logarithmic
  ],
)
def test_tick_labels_have_units(unit, high, label):
  run = a_run({"step": 1, "y": min(1, high)}, {"step": 2, "y": high})
  axes = axes_of([run], Panel("y", ("y",), unit))
  assert label in labels(axes.yaxis)
  assert axes.get_yscale() == ("log" if high == 200 else "linear")


@pytest.mark.parametrize("last_step", [20, 12])  # 12: the run has not caught up
def test_a_rewind_is_marked_from_its_step_back(last_step):
  rewind = {"step": 15, "to_step": 5}
  run = a_run(log_line(10), log_line(last_step), rewinds=[rewind])
  axes = axes_of([a_run(log_line(1)), run], Panel("MFU", ("mfu",)))
  assert axes.lines[-1].get_color() == RUN_LINES[1][0]
  assert list(axes.lines[-1].get_xdata()) == [15 * 64] * 2
  (span,) = axes.patches
  assert (span.get_x(), span.get_width()) == (5 * 64, 10 * 64)


def test_a_long_run_has_its_points_and_means_of_neighbors():
  run = a_run(*({"step": i, "y": i % 10} for i in range(100_000)))
  points, means = axes_of([run], Panel("y", ("y",))).lines
  assert len(points.get_xydata()) == 100_000
  np.testing.assert_allclose(means.get_ydata(), [4.5] * 200)
  assert means.get_alpha() is None and points.get_alpha() < 0.5


@pytest.mark.parametrize(
  ("unit", "y"),
  [
    ("", [2.0]),
    ("s", [0]),
    ("", [-1, 3]),
    ("s", [0, 900]),
    ("", [1e-9, 1e9]),
    ("s", [1e-9, 1e9]),
  ],
)
def test_any_numbers_make_the_same_image_each_time(y, unit):
  run = a_run(*({"step": i, "y": each} for i, each in enumerate(y)))
  panel = Panel("y", ("y",), unit)
  url = render_image([run], panel)
  assert url.startswith("data:image/png;base64,iVBORw0KGgo")
  assert url == render_image([run], panel)


def read_of(*folders):
  return read_runs([str(folder) for folder in folders])


def test_metrics_are_enough_and_damaged_files_are_skipped(write_run):
  results = enumerate(["{", "[]", "{}", '{"step": 1, "metrics": 2}'])
  files = {f"eval/step_00000001/{i}.json": text for i, text in results}
  damaged = write_run("b", [log_line(1)], files)
  (damaged / "config.gin").write_bytes(b"SEED = 1 # \xff")
  (damaged / "plan.json").write_bytes(b"[" * 100_000)
  for run in read_of(write_run("a", [log_line(1)]), damaged):
    assert run == Run(run.name, [log_line(1)], [], [], [], {}, set(), {}, [])


def test_a_missing_or_infinite_number_makes_no_point(write_run):
  lines = [log_line(1), log_line(2, loss=math.nan), {"step": 3, "mfu": None}]
  (run,) = read_of(write_run("a", [*lines, log_line(4, loss=math.inf)]))
  assert run.points("loss", "step") == [(1, 7.99)]
  assert run.values("no such field") == []


def test_half_a_line_is_skipped_only_at_the_end(write_run):
  folder = write_run("a", [log_line(10)])
  path = folder / "metrics.jsonl"
  path.write_text(path.read_text() + '{"step": 20, "los')
  (run,) = read_of(folder)
  assert run.lines == [log_line(10)]
  path.write_text(path.read_text() + "\n" + json.dumps(log_line(20)))
  said = f"{path}, line 2: is no JSON object; remove the line."
  assert message_of(read_of, folder) == said


def test_runs_are_named_by_the_last_parts_that_differ_and_read_once(write_run):
  folders = [
    write_run(name, [log_line(1)]) for name in ("x/a/run", "x/b/run", "y/a/run")
  ]
  assert [run.name for run in read_of(*folders[:2])] == ["a/run", "b/run"]
  names = [run.name for run in read_of(*folders, f"{folders[0]}/")]
  assert names == ["x/a/run", "x/b/run", "y/a/run"]


@pytest.mark.parametrize(
  ("path", "message"),
  [
    (
      "rum",
      'there is no such folder (did you mean "run"?); give the folder of a '
      "run.",
    ),
    ("run/metrics.jsonl", "is a file; give the folder of a run."),
    (
      ".",
      "holds no metrics.jsonl, but folders of runs; give one, such as './run'.",
    ),
    (
      "run/eval",
      "holds no metrics.jsonl; give the MODEL_DIR of a run that has logged a "
      "step.",
    ),
  ],
)
def test_what_is_not_a_run_is_an_error_with_a_fix(
  write_run, tmp_path, monkeypatch, path, message
):
  write_run("run", [log_line(1)], {"eval/empty": ""})
  monkeypatch.chdir(tmp_path)
  assert message_of(read_of, path) == f"MODEL_DIR = {path!r}: {message}"


def test_a_run_that_has_logged_no_number_yet_is_an_error(write_run):
  said = message_of(read_of, write_run("a", [{"step": 0}]))
  assert "has no line with numbers yet; wait" in said
