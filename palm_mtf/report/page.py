# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""HTML page of the report: one file without scripts or links."""

import html
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from palm_mtf import __version__
from palm_mtf.report.figures import (
  RUN_LINES,
  choose_panels,
  format_bytes,
  render_image,
)
from palm_mtf.report.runs import Run, is_number

_STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")

# Rows of the table of results: (title, field of metrics.jsonl, statistic over
# the lines, format). Speed is a median, because steps are slower while a
# checkpoint is written.
_last = operator.itemgetter(-1)
_BYTES = ""  # in place of a format string: format_bytes formats the value
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
# Fields that plan.json predicts; a prediction is shown below the field's row.
_PREDICTED = ("tokens_per_sec", "step_secs", "mfu")
# {title of a row: (exact value, for the cell's tooltip; text of the cell)}
_Column = Mapping[str, tuple[object, str]]


def render_page(runs: Sequence[Run]) -> str:
  """Returns the page of all runs as HTML."""
  title = _escape("palm_mtf report: " + ", ".join(run.name for run in runs))
  lines = (
    '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8"/>',
    '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
    f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n<h1>{title}</h1>",
    "<main>\n<section>",
    *_render_figures(runs),
    "</section>\n<section>",
    *_render_table("Results", runs, [*map(_list_results, runs)]),
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
  # If a run of an earlier version lacks a setting, this setting differs too.
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
