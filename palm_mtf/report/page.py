# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The report: reads runs, plots their metrics, and writes one HTML page."""

import ast
import base64
import contextlib
import dataclasses
import glob
import html
import importlib.util
import io
import json
import math
import operator
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from palm_mtf import __version__
from palm_mtf.errors import UserError, suggest_name
from palm_mtf.model_dir.json_lines import read_json_lines
from palm_mtf.model_dir.paths import ModelDir

_MACRO = re.compile(r"^([A-Z][A-Z0-9_]*) = (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Run:
  """The contents of one MODEL_DIR; only metrics.jsonl must exist."""

  name: str  # the shortest end of the path that is unique in the report
  lines: Sequence[Mapping[str, Any]]  # objects in metrics.jsonl, with a "step"
  rewinds: Sequence[Mapping[str, Any]]  # each: back from "step" to "to_step"
  samples: Sequence[Mapping[str, Any]]  # each: step, prompt, continuation
  evaluations: Sequence[Mapping[str, Any]]  # results of tasks, sorted by step
  settings: Mapping[str, Any]  # values of the macros in config.gin
  defaults: Set[str]  # macros at their defaults, listed separately
  plan: Mapping[str, Any]  # numbers in plan.json; {} if there is no such file
  merges: Sequence[Any] = ()  # events in merges.jsonl, if a run has learners

  def points(self, field: str, x_field: str) -> list[tuple[float, float]]:
    """Returns (x, y) of each line in which both fields are finite numbers."""
    return [
      (line[x_field], line[field])
      for line in self.lines
      if is_number(line.get(field)) and is_number(line.get(x_field))
    ]

  def values(self, field: str) -> list[float]:
    """Returns the finite numbers of a field, in the order of lines."""
    return [y for _, y in self.points(field, "step")]


def is_number(value: object) -> bool:
  """Returns whether a JSON value is a finite number."""
  # Exclude True and False, which are ints in Python.
  is_real = isinstance(value, int | float) and not isinstance(value, bool)
  # math.isfinite would fail on an int that is larger than any float.
  return is_real and abs(value) <= sys.float_info.max


def read_runs(model_dirs: Sequence[str]) -> list[Run]:
  """Reads each MODEL_DIR once, in the order of `model_dirs`.

  Raises UserError if a folder does not exist, or has no readable metrics.jsonl.
  """
  # A folder that is given twice, perhaps through a link, is one run.
  paths = {os.path.realpath(x): x for x in map(os.path.expanduser, model_dirs)}
  parts = [os.path.abspath(path).split(os.sep) for path in paths.values()]
  # Find the shortest unique names: a/lm and b/lm for runs/a/lm and runs/b/lm.
  for count in range(1, max(map(len, parts)) + 1):
    names = ["/".join(each[-count:]) for each in parts]
    if len(set(names)) == len(names):
      break
  return list(map(_read_run, paths.values(), names))


def _read_run(path: str, name: str) -> Run:
  model_dir = ModelDir(path)
  if not os.path.isfile(model_dir.metrics):
    raise UserError(f"MODEL_DIR = {path!r}: {_explain_no_run(model_dir)}")
  lines = _read_lines(model_dir.metrics)
  if not any(sum(map(is_number, line.values())) > 1 for line in lines):
    raise UserError(
      f"{model_dir.metrics}: has no line with numbers yet; wait for the run's "
      "LOG_STEPS."
    )
  rewinds = _read_lines(model_dir.rewinds)
  return Run(
    name,
    lines,
    [x for x in rewinds if is_number(x.get("to_step"))],
    _read_lines(model_dir.samples),
    read_evaluations(model_dir.evaluations),
    *_read_settings(model_dir.config),
    {k: x for k, x in _read_json(model_dir.plan).items() if is_number(x)},
    [*read_json_lines(os.path.join(path, "merges.jsonl"))],
  )


def _read_lines(path: str) -> list[dict[str, Any]]:
  return [x for x in read_json_lines(path) if is_number(x.get("step"))]


def _explain_no_run(model_dir: ModelDir) -> str:
  path, metrics = model_dir.path, os.path.basename(model_dir.metrics)
  if not os.path.exists(path):
    guess = suggest_name(os.path.abspath(path))
    return f"there is no such folder{guess}; give the folder of a run."
  if not os.path.isdir(path):
    return "is a file; give the folder of a run."
  missing = f"holds no {metrics}"
  # The most common mistake is to give a folder of runs, such as runs/.
  for found in sorted(glob.glob(f"{glob.escape(path)}/*/{metrics}")):
    run = os.path.dirname(found)
    return f"{missing}, but folders of runs; give one, such as {run!r}."
  return f"{missing}; give the MODEL_DIR of a run that has logged a step."


def read_evaluations(folder: str) -> list[dict[str, Any]]:
  """Returns the results of tasks in the folder of evaluations, by step."""
  # Names sort in the order of steps, because steps in names have leading zeros.
  paths = sorted(glob.glob(f"{glob.escape(folder)}/step_*/*.json"))
  return [
    x
    for x in map(_read_json, paths)
    if is_number(x.get("step")) and isinstance(x.get("metrics"), dict)
  ]


def _read_json(path: str) -> dict[str, Any]:
  """Returns a JSON object; {} if the file is missing or damaged."""
  # A damaged file is no error: the command that writes the file replaces it.
  content = None
  with contextlib.suppress(OSError, ValueError, RecursionError):
    content = json.loads(Path(path).read_bytes())
  return content if isinstance(content, dict) else {}


def _read_settings(path: str) -> tuple[dict[str, Any], Set[str]]:
  """Returns {macro: value}, and the names of macros left at their defaults."""
  settings: dict[str, Any] = {}
  with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
    settings |= _MACRO.findall(file.read().decode())
  # cli/gin_files.py appends a comment that says where the value was set.
  defaults = {x for x, text in settings.items() if text.endswith("# default")}
  for name, text in settings.items():
    # literal_eval skips comments, as in "3  # recipes/quickstart.gin:10".
    # Non-literals, such as @optimizer, stay strings.
    with contextlib.suppress(ValueError, SyntaxError):
      settings[name] = ast.literal_eval(text)
  return settings, defaults


class Panel(NamedTuple):
  """One figure on the report's page."""

  title: str  # quantity, and its unit unless tick labels show the unit
  fields: tuple[str, ...]  # metrics; field i has the style _LINE_STYLES[i]
  unit: str = ""  # on tick labels ("%" for fractions); if set, y begins at 0


_PANELS = (
  Panel("Loss (nats/token)", ("loss", "validation_loss", "unigram_entropy")),
  Panel("Learning rate", ("learning_rate",)),
  Panel("Gradient norm before clipping", ("grad_norm",)),
  Panel("z-loss (nats/token)", ("z_loss",)),
  Panel("Load of the busiest expert (1: balanced)", ("expert_load",)),
  Panel("Speed (tokens/s)", ("tokens_per_sec",), "/s"),
  Panel("MFU (% of the chips' peak)", ("mfu",), "%"),
  Panel("HFU (% of the chips' peak)", ("hfu",), "%"),
  Panel("Step time", ("step_secs",), "s"),
  Panel("Data wait per step", ("data_wait_secs",), "s"),
  Panel("Checkpoint wait per line", ("checkpoint_wait_secs",), "s"),
  Panel("Memory of the process", ("host_memory_bytes",), "B"),
)
# {quantity in a field, as in "update_rms/mlp": start of the figure's title}
_QUANTITIES = {
  "parameter_rms": "RMS of parameters:",
  "update_rms": "RMS of updates:",
  "host_memory_bytes": "Memory of",
}
# (legend, Matplotlib style) of the first, second and third field of a panel.
_LINE_STYLES = (
  ("training", {"linewidth": 1.4}),
  ("validation", {"linewidth": 1.6, "marker": "o", "markersize": 4}),
  ("unigram entropy", {"linewidth": 1.2, "linestyle": (0, (1, 2))}),
)
# Okabe and Ito's palette for color-blind readers.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
# Color and dashes of each run, valid in CSS and in Matplotlib.
RUN_LINES = [
  (color, dashes)
  for dashes in ("solid", "dashed", "dotted")
  for color in _COLORS
]
_NUM_MEANS = 200  # points of a smoothed line, drawn if there are over 400
_LOG_RATIO = 15  # y is logarithmic if largest / smallest value is above this


def check_can_draw() -> None:
  """Raises UserError unless Matplotlib is installed."""
  if importlib.util.find_spec("matplotlib") is None:
    raise UserError(
      "pictures are drawn with Matplotlib, which is not installed: "
      f"{sys.executable} -m pip install 'matplotlib>=3.10,<4'"
    )


def choose_panels(runs: Sequence[Run]) -> list[Panel]:
  """Returns the panels that runs have values for: _PANELS, then others."""
  fields = dict.fromkeys(x for run in runs for line in run.lines for x in line)
  values = {x: {y for run in runs for y in run.values(x)} for x in fields}
  found = [p for p in _PANELS if any(values.get(x) for x in p.fields)]
  known = {"step", "tokens", *(x for panel in _PANELS for x in panel.fields)}
  for field, numbers in values.items():
    quantity, _, part = field.partition("/")  # as in host_memory_bytes/pod_0
    # Skip fields of traced steps, which trace files show, those of the table of
    # pods, and constants.
    is_shown = field[:7] == "traced_" or (part and quantity in _OF_PODS)
    if field not in known and not is_shown and len(numbers) > 1:
      unit = {"secs": "s", "bytes": "B"}.get(quantity.rpartition("_")[2], "")
      start = _QUANTITIES.get(quantity)
      found.append(Panel(f"{start} {part}" if start else field, (field,), unit))
  return found


def render_image(runs: Sequence[Run], panel: Panel) -> str:
  """Returns a panel as a PNG image in a data: URL."""
  file = io.BytesIO()
  # Transparent, because the page's background may be light or dark.
  draw(runs, panel).savefig(file, format="png", dpi=160, transparent=True)
  return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def draw(runs: Sequence[Run], panel: Panel) -> Any:
  """Returns a Matplotlib figure with the lines and the rewinds of all runs."""
  from matplotlib.figure import Figure

  is_wide = len(panel.fields) > 1
  figure = Figure(figsize=(8, 3) if is_wide else (4, 2.5), layout="constrained")
  axes = figure.add_subplot()
  styles = [style for _, style in _LINE_STYLES]
  if len(runs) == 1 and is_wide:
    colors = (*_COLORS[:2], "0.5")
    styles = [{"color": x} | y for x, y in zip(colors, styles, strict=True)]
  # If every line of metrics.jsonl has a token count, x is in tokens, because
  # batch sizes may differ between runs.
  tokens = [line.get("tokens") for run in runs for line in run.lines]
  x_field = "tokens" if all(map(is_number, tokens)) else "step"
  for i, run in enumerate(runs):
    color, dashes = RUN_LINES[i % len(RUN_LINES)]
    for j, (field, kind) in enumerate(zip(panel.fields, styles, strict=False)):
      points = run.points(field, x_field)
      if field == "unigram_entropy" and points:
        points.insert(0, (0, points[0][1]))  # constant, so draw it from 0
      line = {"color": color, "linestyle": dashes} | kind
      if is_wide and len(runs) > 1 and j == 0:
        line["alpha"] = 0.5
      _draw_points(axes, points, line)
    for rewind in run.rewinds:
      x = _find_x(run, rewind["step"], x_field)
      back_to = _find_x(run, rewind["to_step"], x_field)
      axes.axvline(x, color=color, linewidth=0.8, linestyle="dotted")
      # Shade the steps that the rewind undid.
      axes.axvspan(back_to, x, color=color, alpha=0.1, linewidth=0)
  if is_wide:
    # With several runs, legend lines are gray, because runs differ in color.
    for (label, _), style in zip(_LINE_STYLES, styles, strict=True):
      axes.plot([], [], label=label, **{"color": "0.4"} | style)
    axes.legend(frameon=False)
  _set_axes(axes, panel, x_field)
  return figure


def _draw_points(
  axes: Any, points: Sequence[tuple[float, float]], style: dict[str, Any]
) -> None:
  if len(points) == 1:
    style = {"marker": "o", "markersize": 4, **style}
  elif len(points) > 2 * _NUM_MEANS:
    # Draw a faint line with every point, so that spikes show, and a line with
    # means of neighbors.
    axes.plot(*zip(*points, strict=True), **{**style, "alpha": 0.25})
    bins = np.array_split(np.array(points), _NUM_MEANS)
    points = [each.mean(axis=0) for each in bins]
  if points:
    axes.plot(*zip(*points, strict=True), **style)


def _find_x(run: Run, step: float, x_field: str) -> float:
  steps, xs = zip((0, 0), *run.points(x_field, "step"), strict=True)
  if step > steps[-1] > 0:
    # Extrapolate, because no line has this step: the run was rewound from the
    # step, and ended before reaching the step again.
    return xs[-1] * step / steps[-1]
  return float(np.interp(step, steps, xs))


def format_bytes(count: float, digits: int = 1) -> str:
  """Returns a number of bytes as MiB or GiB, or as KiB below one MiB."""
  for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
    if count >= size:
      return f"{count / size:,.{digits}f} {unit}"
  return f"{count / 2**10:,.{digits}f} KiB" if count else "0"


def _set_axes(axes: Any, panel: Panel, x_field: str) -> None:
  from matplotlib import ticker

  axes.spines[:].set_visible(False)
  axes.grid(axis="y", alpha=0.3)
  axes.set_xlabel("tokens" if x_field == "tokens" else "steps")
  axes.set_xlim(left=0)
  # Write 780e9 tokens as 780B; EngFormatter writes 780G.
  short = ticker.EngFormatter(sep="")
  axes.xaxis.set_major_formatter(lambda x, _: short(x).replace("G", "B"))
  low, high = axes.dataLim.intervaly
  if panel.unit:
    axes.set_ylim(0, 1.1 * high or 1)
    formatter = ticker.EngFormatter(panel.unit)
    if panel.unit == "%":
      formatter = ticker.PercentFormatter(1.0)
    elif panel.unit == "B":
      formatter = ticker.FuncFormatter(lambda x, _: format_bytes(x, digits=0))
      power = math.floor(math.log2(max(high, 4) / 3))
      axes.yaxis.set_major_locator(ticker.MultipleLocator(2.0**power))
    axes.yaxis.set_major_formatter(formatter)
  elif 0 < low * _LOG_RATIO < high:
    axes.set_yscale("log", subs=(2, 5))
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")


_STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")

# Rows of the table of results: (title, field of metrics.jsonl, function that
# makes one number of the field's values, format). Speed is a median, because
# checkpoints slow some steps down.
_last = operator.itemgetter(-1)
_BYTES = ""  # as a format in _RESULTS, stands for format_bytes
_RESULTS = (
  ("Validation loss (nats/token, last)", "validation_loss", _last, "{:.4f}"),
  ("Training loss (nats/token, last)", "loss", _last, "{:.4f}"),
  ("Unigram entropy (nats/token)", "unigram_entropy", _last, "{:.4f}"),
  ("Steps", "step", _last, "{:,}"),
  ("Tokens", "tokens", _last, "{:,}"),
  ("Batch size (tokens, last)", "global_batch_tokens", _last, "{:,}"),
  ("Speed (tokens/s, median)", "tokens_per_sec", median, "{:,.0f}"),
  ("Step time (s, median)", "step_secs", median, "{:.4g}"),
  ("MFU (median)", "mfu", median, "{:.1%}"),
  ("Memory of the process (peak)", "host_memory_bytes", max, _BYTES),
)
_POD_MEMORY = "host_memory_bytes/"
# Fields of _RESULTS that plan.json predicts; the table has a row for each
# prediction, below the measured value.
_PREDICTED = ("tokens_per_sec", "step_secs", "mfu")
# {quantity in a field, as in "lag/pod_0": text in the row of the pod}.
_OF_PODS = {
  "last_sync": "last sync: number {:,}",
  "lag": "{:,} syncs late",
  "tokens": "{:,} tokens",
  "audits": "{:,} audits passed",  # as merges.jsonl says
  "banned": "banned for a lie",
}
# A run's column: {title of a row: (exact value for the tooltip, text to show)}.
_Column = Mapping[str, tuple[object, str]]


def render_page(runs: Sequence[Run], pictures: Sequence[str] = ()) -> str:
  """Returns the page of all runs as HTML; `pictures` follow the figures."""
  title = _escape("palm_mtf report: " + ", ".join(run.name for run in runs))
  lines = (
    '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8"/>',
    '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
    f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n<h1>{title}</h1>",
    "<main>\n<section>",
    *_render_figures(runs),
    *pictures,
    "</section>\n<section>",
    *_render_table("Results", runs, [*map(_list_results, runs)]),
    *_render_table("Pods", runs, [*map(_list_pods, runs)], "settings"),
    *_render_table("Tasks", runs, [*map(_list_tasks, runs)]),
    *_render_table(
      "Loss spikes and rewinds", runs, [*map(_list_rewinds, runs)], "settings"
    ),
    *_render_samples(runs),
    *_render_settings(runs),
    "</section>\n</main>",
    f"<footer>palm_mtf {__version__}</footer>\n</html>\n",
  )
  return "\n".join(lines)


def _escape(value: object) -> str:
  return html.escape(str(value))


def _render_name(runs: Sequence[Run], index: int) -> str:
  """Returns HTML of a run's name and line style; "" if there is one run."""
  if len(runs) == 1:
    return ""
  color, dashes = RUN_LINES[index % len(RUN_LINES)]
  line = f'<i style="border-top: 3px {dashes} {color}"></i>'
  return f"{line} <b>{_escape(runs[index].name)}</b> "


def _render_table(
  title: str,
  runs: Sequence[Run],
  columns: Sequence[_Column],
  kind: str = "numbers",
) -> Iterator[str]:
  """Yields an HTML table with one column per run; nothing if it has no rows."""
  rows = dict.fromkeys(row for column in columns for row in column)
  if not rows:
    return
  heading = f"<h2>{title}</h2>\n" if title else ""
  kind += " only" if len(runs) == 1 else ""
  yield f'{heading}<div class="table"><table class="{kind}">'
  if len(runs) > 1:
    yield "<thead><tr><th></th>"
    yield from (f"<th>{_render_name(runs, i)}</th>" for i in range(len(runs)))
    yield "</tr></thead>"
  yield "<tbody>"
  for row in rows:
    yield f"<tr><th>{_escape(row)}</th>"
    for column in columns:
      exact, text = map(_escape, column.get(row, ("", "-")))
      yield f'<td title="{exact}">{text}</td>'
    yield "</tr>"
  yield "</tbody></table></div>"


def _list_results(run: Run) -> _Column:
  column = {}
  fields = dict.fromkeys(x for line in run.lines for x in line)
  of_pods = [
    (f"Memory of {x[len(_POD_MEMORY) :]} (peak)", x, max, _BYTES)
    for x in fields
    if x.startswith(_POD_MEMORY)
  ]
  for row, field, statistic, form in (*_RESULTS, *of_pods):
    if values := run.values(field):
      exact = statistic(values)
      text = form.format(exact) if form else format_bytes(exact)
      column[row] = exact, text
    if field in _PREDICTED and field in run.plan:
      predicted = run.plan[field]
      quantity = row.partition(" (")[0]
      column[f"{quantity} (predicted)"] = predicted, form.format(predicted)
  return column


def _list_pods(run: Run) -> _Column:
  """Returns a row per pod or learner that exchanges parameters seldom."""
  found: dict[str, dict[str, float]] = {}
  for field in dict.fromkeys(x for line in run.lines for x in line):
    quantity, _, name = field.partition("/")
    if name and quantity in _OF_PODS and (values := run.values(field)):
      found.setdefault(name, {})[quantity] = values[-1]
  for each in run.merges:
    name = each.get("member")
    if each.get("event") in ("audit", "liar") and isinstance(name, str):
      row = found.setdefault(name, {})
      row["audits"] = row.get("audits", 0) + (each["event"] == "audit")
      row |= {"banned": 1} if each["event"] == "liar" else {}
  # A value that config.gin computes, such as %TRAIN_STEPS, is a text here.
  names = ("NUM_PODS", "OUTER_STEPS", "FRAGMENTS")
  given = [x for x in map(run.settings.get, names) if isinstance(x, int)]
  is_diloco = run.settings.get("EXCHANGE") == "diloco"
  if not found and is_diloco and len(given) == len(names) and all(given):
    num_pods, steps, fragments = given
    number = run.values("step")[-1] // (steps / fragments)
    for pod in range(num_pods):
      found[f"pod_{pod}"] = {"last_sync": int(number), "lag": 0}
  column = {}
  for name, values in sorted(found.items()):
    texts = (x.format(values[y]) for y, x in _OF_PODS.items() if y in values)
    text = ", ".join(texts)
    column[name] = text, text
  return column


def _list_tasks(run: Run) -> _Column:
  column = {}
  # Evaluations are sorted by step, so a row keeps the newest value.
  for each in run.evaluations:
    for metric, value in each["metrics"].items():
      if is_number(value):
        row = f"{each.get('task')} {metric} ({each.get('split')})"
        text = f"{value:,.2f}" if abs(value) >= 10 else f"{value:.4g}"
        # The no-break spaces let a narrow cell break the line only before "at".
        at_step = f"at\N{NO-BREAK SPACE}step\N{NO-BREAK SPACE}{each['step']:,}"
        column[row] = value, f"{text} {at_step}"
  return column


def _list_rewinds(run: Run) -> _Column:
  texts = [
    ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in rewind.items())
    for rewind in run.rewinds
  ]
  return {f"Rewind {i}": (text, text) for i, text in enumerate(texts, start=1)}


def _render_figures(runs: Sequence[Run]) -> Iterator[str]:
  yield '<h2>Figures</h2>\n<div class="figures">'
  for panel in choose_panels(runs):
    wide = ' class="wide"' if len(panel.fields) > 1 else ""
    title = _escape(panel.title)
    yield f"<figure{wide}><figcaption>{title}</figcaption>"
    yield f'<img alt="{title}" src="{render_image(runs, panel)}"/></figure>'
  yield "</div>"


def _render_samples(runs: Sequence[Run]) -> Iterator[str]:
  samples = [
    (str(x.get("prompt")), x["step"], i, str(x.get("continuation")))
    for i, run in enumerate(runs)
    for x in run.samples
  ]
  if samples:
    yield "<h2>Samples</h2>"
  for prompt, step, i, continuation in sorted(samples):
    yield f"<p>{_render_name(runs, i)}step {step:,}</p>"
    yield f"<pre><b>{_escape(prompt)}</b>{_escape(continuation)}</pre>"


def _render_settings(runs: Sequence[Run]) -> Iterator[str]:
  columns = [{k: (repr(v),) * 2 for k, v in x.settings.items()} for x in runs]
  shared = set.intersection(*({*column.items()} for column in columns))
  # A setting that a run of an earlier version lacks counts as different.
  differ = [dict(x for x in y.items() if x not in shared) for y in columns]
  yield from _render_table("Settings that differ", runs, differ, "settings")
  chosen = {x for run in runs for x in {*run.settings} - run.defaults}
  defaults = {x for column in columns for x in column} - chosen
  for title, attributes, names in (
    ("Settings", ' open=""', chosen),
    ("Settings left at their defaults", "", defaults),
  ):
    if names:
      yield f"<details{attributes}><summary>{title}</summary>"
      yield from _render_table(
        "",
        runs,
        [{k: v for k, v in x.items() if k in names} for x in columns],
        "settings",
      )
      yield "</details>"
