# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The page: results, pictures, samples and settings of runs, in one file.

It refers to nothing outside of itself, runs no script, and follows the reader's
choice of light or dark. The same runs give the same bytes.
"""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from palm_mtf import __version__
from palm_mtf.report import charts, figures
from palm_mtf.report.panels import Panel, events, sections, x_axis
from palm_mtf.report.runs import Run, is_number
from palm_mtf.report.style import STYLE

_EVENT_FIELDS_SHOWN_APART = {"event", "step", "tokens"}
_Cell = tuple[Any, str] | None  # what is meant exactly, and how it is written


def page(runs: Sequence[Run]) -> str:
  """Returns the whole page as HTML."""
  names = ", ".join(run.name for run in runs)
  parts = [
    "<header><h1>palm_mtf report</h1>",
    *(_legend(runs) if len(runs) > 1 else [f"<p>{_text(names)}</p>"]),
    "</header><main>",
    *_results(runs),
    *_evaluations(runs),
    *_happened(runs),
    *_pictures(runs),
    *_samples(runs),
    *_settings(runs),
    f"</main><footer>palm_mtf {__version__}</footer>",
  ]
  body = "\n".join(parts)
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{_text(names)}: palm_mtf report</title>\n"
    f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
  )


def _text(value: object) -> str:
  return html.escape(str(value))


def _swatch(run: int) -> str:
  """Returns a short piece of a run's line."""
  dash = charts.dashes(run)
  broken = "" if dash == "solid" else " ".join(str(2 * x) for x in dash[1])
  color = run % figures.NUM_RUN_COLORS
  return (
    '<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><line x1="1" '
    f'x2="23" y1="4" y2="4" style="stroke: var(--run-{color}); '
    f'stroke-width: 3; stroke-dasharray: {broken or "none"}"/></svg>'
  )


def _name(runs: Sequence[Run], run: int) -> str:
  """Returns a run's name, after its swatch where there are several."""
  swatch = f"{_swatch(run)} " if len(runs) > 1 else ""
  return f'<span class="run">{swatch}{_text(runs[run].name)}</span>'


def _legend(runs: Sequence[Run]) -> Iterator[str]:
  yield '<ul class="legend">'
  for i in range(len(runs)):
    yield f"<li>{_name(runs, i)}</li>"
  yield "</ul>"


def _last(field: str, form: str = "{:.4f}") -> Callable[[Run], _Cell]:
  def cell(run: Run) -> _Cell:
    values = run.values(field)
    return (values[-1], form.format(values[-1])) if values else None

  return cell


def _median(field: str, form: str) -> Callable[[Run], _Cell]:
  def cell(run: Run) -> _Cell:
    values = sorted(run.values(field))
    if not values:
      return None
    middle = values[len(values) // 2]
    return middle, form.format(middle)

  return cell


def _learnt(run: Run) -> _Cell:
  losses, entropies = map(run.values, ("validation_loss", "unigram_entropy"))
  if not losses or not entropies:
    return None
  value = entropies[-1] - losses[-1]
  return value, f"{value:.4f}"


def _model(run: Run) -> _Cell:
  names = ("NUM_LAYERS", "D_MODEL", "NUM_HEADS", "D_FF", "VOCAB_SIZE")
  sizes = [run.settings.get(name) for name in names]
  if not all(isinstance(size, int) for size in sizes):
    return None
  layers, d_model, heads, d_ff, pieces = sizes
  text = (
    f"{layers} layers, d_model {d_model:,}, {heads} heads, d_ff {d_ff:,}, "
    f"{pieces:,} pieces"
  )
  return text, text


def _parameters(run: Run) -> _Cell:
  count = run.num_parameters
  return None if count is None else (count, f"{count:,}")


def _steps(run: Run) -> _Cell:
  step, total = run.lines[-1]["step"], run.settings.get("TRAIN_STEPS")
  of = f" of {total:,}" if isinstance(total, int) else ""
  return step, f"{step:,}{of}"


def _tokens(run: Run) -> _Cell:
  tokens = run.lines[-1].get("tokens")
  return None if tokens is None else (tokens, f"{tokens:,}")


def _setting(name: str) -> Callable[[Run], _Cell]:
  def cell(run: Run) -> _Cell:
    value = run.settings.get(name)
    return None if value is None else (value, str(value))

  return cell


def _version(run: Run) -> _Cell:
  versions = run.manifest.get("versions", run.manifest.get("version"))
  if isinstance(versions, dict):
    versions = ", ".join(f"{k} {v}" for k, v in versions.items())
  return (versions, str(versions)) if versions else None


def _count(event: str) -> Callable[[Run], _Cell]:
  def cell(run: Run) -> _Cell:
    count = sum(event in str(each["event"]) for each in run.events)
    return (count, f"{count:,}") if count else None

  return cell


_RESULTS: Mapping[str, tuple[str, Callable[[Run], _Cell]]] = {
  "Validation loss": ("nats/token, last", _last("validation_loss")),
  "Training loss": ("nats/token, last", _last("loss")),
  "Unigram entropy": ("nats/token", _last("unigram_entropy")),
  "Learnt from context": ("nats/token", _learnt),
  "Steps": ("", _steps),
  "Tokens": ("", _tokens),
  "Batch": ("tokens, last", _last("global_batch_tokens", "{:,}")),
  "Speed": ("tokens/s, median", _median("tokens_per_sec", "{:,.0f}")),
  "MFU": ("median", _median("mfu", "{:.1%}")),
  "Memory": ("peak", lambda run: _peak_memory(run)),
  "Spikes": ("", _count("spike")),
  "Rewinds": ("", _count("rewind")),
  "Parameters": ("", _parameters),
  "Model": ("", _model),
  "Seed": ("", _setting("SEED")),
  "Version": ("", _version),
}


def _peak_memory(run: Run) -> _Cell:
  values = [
    x
    for field in run.fields
    if "memory" in field and field.endswith("_bytes")
    for x in run.values(field)
  ]
  return (max(values), charts.short_bytes(max(values))) if values else None


def _results(runs: Sequence[Run]) -> Iterator[str]:
  """Yields the table of results, without rows that no run can fill."""
  rows = {
    (title, unit): [cell(run) for run in runs]
    for title, (unit, cell) in _RESULTS.items()
  }
  yield '<section><h2>Results</h2><div class="scroll"><table class="results">'
  if len(runs) > 1:
    yield _head(runs)
  for (title, unit), cells in rows.items():
    if any(cells):
      unit = f' <span class="unit">{unit}</span>' if unit else ""
      yield f'<tr><th scope="row">{title}{unit}</th>'
      yield from (_cell(cell) for cell in cells)
      yield "</tr>"
  yield "</table></div></section>"


def _evaluations(runs: Sequence[Run]) -> Iterator[str]:
  """Yields what tasks measured last, of each run."""
  rows: dict[tuple[str, str, str], list[_Cell]] = {}
  for i, run in enumerate(runs):
    for each in run.evaluations:  # of a later step comes later
      for metric, value in each["metrics"].items():
        if is_number(value):
          row = (str(each.get("task")), str(each.get("split")), metric)
          written = f"{value:,.4g} at step {each['step']:,}"
          rows.setdefault(row, [None] * len(runs))[i] = (value, written)
  if not rows:
    return
  yield '<section><h2>Tasks</h2><div class="scroll"><table class="results">'
  if len(runs) > 1:
    yield _head(runs)
  for (task, split, metric), cells in rows.items():
    unit = f'<span class="unit">{_text(split)}</span>'
    yield f'<tr><th scope="row">{_text(task)} {_text(metric)} {unit}</th>'
    yield from (_cell(cell) for cell in cells)
    yield "</tr>"
  yield "</table></div></section>"


def _head(runs: Sequence[Run]) -> str:
  cells = [f'<th scope="col">{_name(runs, i)}</th>' for i in range(len(runs))]
  return f"<thead><tr><td></td>{''.join(cells)}</tr></thead>"


def _cell(cell: _Cell) -> str:
  if cell is None:
    return '<td class="none">&ndash;</td>'
  exact, written = cell
  return f'<td><data value="{_text(exact)}">{_text(written)}</data></td>'


def _pictures(runs: Sequence[Run]) -> Iterator[str]:
  number, x_field = 0, x_axis(runs)
  for section in sections(runs):
    yield f'<section><h2>{_text(section.title)}</h2><div class="panels">'
    for panel in section.panels:
      yield _picture(panel, number, x_field)
      number += 1
    yield "</div></section>"


def _picture(panel: Panel, number: int, x_field: str) -> str:
  wide = ' class="wide"' if panel.is_wide else ""
  unit = f' <span class="unit">{_text(panel.unit)}</span>' if panel.unit else ""
  styles = {curve.style for curve in panel.curves}
  keys = [
    f'<span class="key {style}">{text}</span>'
    for style, text in (
      ("line", "training"),
      ("dots", "validation"),
      ("level", "unigram entropy"),
    )
    if style in styles and len(styles) > 1
  ]
  return (
    f"<figure{wide}><figcaption>{_text(panel.title)}{unit}{''.join(keys)}"
    f"</figcaption>{charts.draw(panel, number, x_field)}</figure>"
  )


def _happened(runs: Sequence[Run]) -> Iterator[str]:
  """Yields a list of what the vertical lines of the pictures mark."""
  if not any(run.events for run in runs):
    return
  yield (
    "<section><h2>What happened</h2><p class=unit>Dotted lines in the "
    "pictures; shaded are the steps that were done again.</p><ul class=events>"
  )
  for i, run in enumerate(runs):
    for *_, event in events(run, x_axis(runs)):
      rest = ", ".join(
        f"{name.replace('_', ' ')} {_short(value)}"
        for name, value in event.items()
        if name not in _EVENT_FIELDS_SHOWN_APART
      )
      yield (
        f"<li>{_name(runs, i)} step {event['step']:,}: "
        f"<b>{_text(event['event'])}</b> {_text(rest)}</li>"
      )
  yield "</ul></section>"


def _short(value: object) -> str:
  if isinstance(value, float):
    return f"{value:.4g}"
  if isinstance(value, list):
    return " to ".join(map(_short, value))
  is_count = isinstance(value, int) and not isinstance(value, bool)
  return f"{value:,}" if is_count else str(value)


def _samples(runs: Sequence[Run]) -> Iterator[str]:
  """Yields what each prompt was continued with, in the order of time."""
  prompts = dict.fromkeys(
    str(x.get("prompt", "")) for run in runs for x in run.samples
  )
  if not prompts:
    return
  yield "<section><h2>Samples</h2>"
  for prompt in prompts:
    yield f'<h3>{_text(repr(prompt))} goes on</h3><div class="samples">'
    found = [
      (sample.get("step", 0), i, sample["continuation"])
      for i, run in enumerate(runs)
      for sample in run.samples
      if str(sample.get("prompt", "")) == prompt
    ]
    for step, i, text in sorted(found, key=lambda each: each[:2]):
      yield (
        f'<div class="sample"><p>{_name(runs, i)} step {step:,}</p><pre><b>'
        f"{_text(prompt)}</b>{_text(text)}</pre></div>"
      )
    yield "</div>"
  yield "</section>"


def _settings(runs: Sequence[Run]) -> Iterator[str]:
  """Yields every macro; those that differ between the runs first."""
  names = dict.fromkeys(name for run in runs for name in run.settings)
  differ = [
    name
    for name in names
    if len({repr(run.settings.get(name)) for run in runs}) > 1
  ]
  if differ:
    yield "<section><h2>Settings that differ</h2>"
    yield from _setting_table(runs, differ)
    yield "</section>"
  if names:
    yield "<section><details><summary>All settings</summary>"
    yield from _setting_table(runs, names)
    yield "</details></section>"


def _setting_table(
  runs: Sequence[Run], names: Sequence[str] | Mapping[str, None]
) -> Iterator[str]:
  yield '<div class="scroll"><table class="settings">'
  if len(runs) > 1:
    yield _head(runs)
  for name in names:
    yield f'<tr><th scope="row">{_text(name)}</th>'
    for run in runs:
      known = name in run.settings
      yield _cell((x := repr(run.settings[name]), x) if known else None)
    yield "</tr>"
  yield "</table></div>"
