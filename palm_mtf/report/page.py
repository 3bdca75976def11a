# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""HTML page of the report: one file without scripts and without links."""

import html
import operator
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from palm_mtf import __version__
from palm_mtf.report.figures import RUN_LINES, image, panels
from palm_mtf.report.runs import Run, is_number

# In the dark, figures are inverted: black ink turns white, and hues stay.
_STYLE = """
:root { color-scheme: light dark; }
body { font-family: sans-serif; max-width: 76rem; margin: 1rem auto; }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); }
.wide { grid-column: 1 / -1; }
figure { margin: 0; } img { width: 100%; }
th, td { padding-right: 2rem; text-align: left; vertical-align: top; }
tbody th { font-weight: normal; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .5rem;
  border: 1px solid #8884; }
i { display: inline-block; width: 2em; vertical-align: middle; }
@media (prefers-color-scheme: dark) {
  img, i { filter: invert(1) hue-rotate(180deg); }
}
"""

# Row, field of metrics.jsonl, statistic over the lines, and format.
# Speed is a median, as steps beside a checkpoint are slower.
_last = operator.itemgetter(-1)
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
  ("Memory of the process (bytes, peak)", "host_memory_bytes", max, "{:,}"),
)
_POD_MEMORY = "host_memory_bytes/"
# Of these plan.json has the prediction, a row below.
_PREDICTED = ("tokens_per_sec", "step_secs", "mfu")
# By row, the exact value, which shows on hover, and its text.
_Column = Mapping[str, tuple[object, str]]


def page(runs: Sequence[Run]) -> str:
  """Returns the page of all runs as HTML."""
  title = _text("palm_mtf report: " + ", ".join(run.name for run in runs))
  lines = (
    '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8"/>',
    '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
    f"<title>{title}</title>\n<style>{_STYLE}</style>\n<h1>{title}</h1>",
    *_table("<h2>Results</h2>", runs, [*map(_results, runs)]),
    *_table("<h2>Tasks</h2>", runs, [*map(_tasks, runs)]),
    *_figures(runs),
    *_table("<h2>Loss spikes and rewinds</h2>", runs, [*map(_rewinds, runs)]),
    *_samples(runs),
    *_settings(runs),
    f"<footer>palm_mtf {__version__}</footer>\n</html>\n",
  )
  return "\n".join(lines)


def _text(value: object) -> str:
  # Names, prompts, continuations and settings may hold any text.
  return html.escape(str(value))


def _name(runs: Sequence[Run], index: int) -> str:
  """Returns a run's name, after a piece of its line if there are several."""
  color, dashes = RUN_LINES[index % len(RUN_LINES)]
  line = f'<i style="border-top: 3px {dashes} {color}"></i> '
  return (line if len(runs) > 1 else "") + f"<b>{_text(runs[index].name)}</b>"


def _table(
  heading: str, runs: Sequence[Run], columns: Sequence[_Column]
) -> Iterator[str]:
  """Yields a table with a column for each run, unless it has no rows."""
  rows = dict.fromkeys(row for column in columns for row in column)
  if not rows:
    return
  yield f"{heading}\n<table><thead><tr><th></th>"
  yield from (f"<th>{_name(runs, i)}</th>" for i in range(len(runs)))
  yield "</tr></thead><tbody>"
  for row in rows:
    yield f"<tr><th>{_text(row)}</th>"
    for column in columns:
      exact, text = map(_text, column.get(row, ("", "-")))
      yield f'<td title="{exact}">{text}</td>'
    yield "</tr>"
  yield "</tbody></table>"


def _results(run: Run) -> _Column:
  column = {}
  fields = dict.fromkeys(x for line in run.lines for x in line)
  of_pods = [
    (f"Memory of {x[len(_POD_MEMORY) :]} (bytes, peak)", x, max, "{:,}")
    for x in fields
    if x.startswith(_POD_MEMORY)
  ]
  for row, field, statistic, form in (*_RESULTS, *of_pods):
    if values := run.values(field):
      exact = statistic(values)
      column[row] = exact, form.format(exact)
    if field in _PREDICTED and field in run.plan:
      predicted = run.plan[field]
      column[f"- predicted {field}"] = predicted, form.format(predicted)
  return column


def _tasks(run: Run) -> _Column:
  column = {}
  # Evaluations ascend by step: the last evaluated checkpoint stays.
  for each in run.evaluations:
    for metric, value in each["metrics"].items():
      if is_number(value):
        row = f"{each.get('task')} {metric} ({each.get('split')})"
        column[row] = value, f"{value:,.4g} at step {each['step']:,}"
  return column


def _rewinds(run: Run) -> _Column:
  column = {}
  for i, rewind in enumerate(run.rewinds, start=1):
    text = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in rewind.items())
    column[f"Rewind {i}"] = text, text
  return column


def _figures(runs: Sequence[Run]) -> Iterator[str]:
  yield '<h2>Figures</h2>\n<div class="figures">'
  for panel in panels(runs):
    wide = ' class="wide"' if len(panel.fields) > 1 else ""
    title = _text(panel.title)
    yield f"<figure{wide}><figcaption>{title}</figcaption>"
    yield f'<img alt="{title}" src="{image(runs, panel)}"/></figure>'
  yield "</div>"


def _samples(runs: Sequence[Run]) -> Iterator[str]:
  samples = [
    (str(x.get("prompt")), x["step"], i, str(x.get("continuation")))
    for i, run in enumerate(runs)
    for x in run.samples
  ]
  if samples:
    yield "<h2>Samples</h2>"
  for prompt, step, i, continuation in sorted(samples):
    yield f"<p>{_name(runs, i)} step {step:,}</p>"
    yield f"<pre><b>{_text(prompt)}</b>{_text(continuation)}</pre>"


def _settings(runs: Sequence[Run]) -> Iterator[str]:
  columns = [{k: (repr(v),) * 2 for k, v in x.settings.items()} for x in runs]
  shared = set.intersection(*({*column.items()} for column in columns))
  # A setting that a run lacks, as a run of an earlier version, differs too.
  differ = [dict(x for x in y.items() if x not in shared) for y in columns]
  yield from _table("<h2>Settings that differ</h2>", runs, differ)
  yield "<details><summary>All settings</summary>"
  yield from _table("", runs, columns)
  yield "</details>"
