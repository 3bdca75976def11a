# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes, trains and tabulates the runs of a sweep.

SWEEP_RUNS is a list of axes, {name: {macro: value}}. Each combination of a name
per axis is a run, with its own process:
  python -m palm_mtf.sweep.runs PID_OF_THE_SWEEP CORES GIN_FILE
"""

import collections
import csv
import dataclasses
import io
import itertools
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf.accounting.flops import train_flops_per_token
from palm_mtf.accounting.hardware import check_run
from palm_mtf.architecture.parameters import count_parameters
from palm_mtf.config import Config, SweepConfig
from palm_mtf.console import format_table
from palm_mtf.errors import StoppedError, UserError, did_you_mean
from palm_mtf.machine.process import (
  StopRequest,
  die_with,
  make_child_environment,
)
from palm_mtf.machine.processors import usable_cores, visible_cores
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.foreign_files import read_regular
from palm_mtf.model_dir.json_lines import read_json_lines
from palm_mtf.model_dir.paths import ModelDir, SweepDir

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)  # also the name of the run's folder
_MAX_RUNS = 1000
_MAX_GIN_BYTES = 10_000_000
# The sweep sets these macros in its runs. All but MODEL_DIR are shared by runs.
_OF_THE_SWEEP = ("MODEL_DIR", "VOCABULARY", "CACHE_DIR")
_EXAMPLE = '[{"small": {"D_MODEL": 64}, "large": {"D_MODEL": 128}}]'

# A function (where macros are set, for messages; {macro: value}) -> (a run's
# settings; text of a gin file with these settings).
LoadRun = Callable[[str, Mapping[str, object]], tuple[Config, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRun:
  """One run of a sweep."""

  name: str  # names in SWEEP_RUNS, one per axis, joined by "-"
  model_dir: str  # MODEL_DIR of the run
  config: Config  # every setting
  gin_text: str  # content of a gin file with the settings in `config`
  is_held_out: bool  # whether the law is checked on this run, not fitted to it

  @property
  def num_parameters(self) -> int:
    """Number of parameters; norm scales do not count."""
    return count_parameters(self.config.model)

  @property
  def num_tokens(self) -> int:
    """Number of training tokens in the whole run."""
    run = self.config.run
    rows = run.batch_sizes.rows_before(run.train_steps)
    return rows * self.config.model.sequence_length

  @property
  def flops_per_token(self) -> int:
    """FLOPs per training token, without those of rematerialization."""
    return train_flops_per_token(self.config.model, self.config.run.frozen)


def make_runs(
  sweep: SweepConfig, config: Config, where: SweepDir, load_run: LoadRun
) -> list[SweepRun]:
  """Returns the runs of a sweep; the name on the last axis changes fastest.

  A run's macros override `config`, the settings of the sweep.

  Raises UserError if there is no run, a run's settings do not fit together,
  runs read different data, or SWEEP_HELD_OUT has a name that SWEEP_RUNS lacks.
  """
  shared = {
    "VOCABULARY": config.data.vocabulary or where.vocabulary,
    "CACHE_DIR": config.data.cache_dir or where.tokens,
  }
  axes = _check_axes(sweep.sweep_runs)
  names = [name for axis in axes for name, _ in axis]
  for name in sweep.sweep_held_out:
    if name not in names:
      raise UserError(
        f"SWEEP_HELD_OUT = {list(sweep.sweep_held_out)!r}: no axis of "
        f'SWEEP_RUNS has "{name}"{did_you_mean(name, names)}; its names are '
        f"{', '.join(names)}."
      )
  runs = []
  for entries in itertools.product(*axes):
    name = "-".join(entry for entry, _ in entries)
    macros = _join_macros(entries)
    model_dir = where.run(name)
    run_config, text = load_run(
      f'SWEEP_RUNS "{name}"', {**shared, **macros, "MODEL_DIR": model_dir}
    )
    _check_fits(name, run_config)
    run = SweepRun(
      name=name,
      model_dir=model_dir,
      config=run_config,
      gin_text=text,
      is_held_out=any(x in sweep.sweep_held_out for x, _ in entries),
    )
    if runs:
      _check_same_data(runs[0], run)
    runs.append(run)
  return runs


def check_unchanged(runs: Sequence[SweepRun], where: SweepDir) -> None:
  """Raises UserError if a run's settings differ from its first start."""
  for run in runs:
    path = where.settings(run.name)
    if not os.path.exists(path):
      continue
    begin_again = (
      f"give the run another name, or remove {run.model_dir} to begin again"
    )
    try:
      text = read_regular(path, _MAX_GIN_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
      reason = getattr(error, "strerror", "is not UTF-8")
      raise UserError(f"{path}: {reason}; {begin_again}.") from None
    before, now = _values(text), _values(run.gin_text)
    for name in {**before, **now}:
      if before.get(name) != now.get(name):
        raise UserError(
          f'SWEEP_RUNS "{run.name}": {name} = {now.get(name)}, and the run '
          f"began with {before.get(name)}; {begin_again}."
        )


def _values(gin_text: str) -> dict[str, str]:
  pairs = (line.split(" = ", 1) for line in gin_text.splitlines())
  values = {x[0]: x[1] for x in pairs if len(x) == 2}
  # Ignore paths, because the user may move the sweep's folder.
  return {x: value for x, value in values.items() if x not in _OF_THE_SWEEP}


def _check_axes(axes: object) -> list[list[tuple[str, Mapping[str, object]]]]:
  """Validates SWEEP_RUNS; returns a list of (name, {macro: value}) per axis."""
  if not isinstance(axes, (list, tuple)) or not axes:
    raise UserError(
      f"SWEEP_RUNS = {axes!r}: give a list of axes, such as {_EXAMPLE}."
    )
  for axis in axes:
    if not isinstance(axis, Mapping) or not axis:
      raise UserError(
        f"SWEEP_RUNS: an axis is {axis!r}; give {{name: {{macro: value}}}}, as "
        f"in {_EXAMPLE}."
      )
    for name, macros in axis.items():
      if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
          f"SWEEP_RUNS: a run is named {name!r}, and its folder with it; use "
          "letters, digits, and _ . + - within."
        )
      if not isinstance(macros, Mapping) or not all(
        isinstance(x, str) for x in macros
      ):
        raise UserError(
          f'SWEEP_RUNS "{name}": is {macros!r}; give {{macro: value}}, as in '
          f"{_EXAMPLE}."
        )
  num_runs = math.prod(map(len, axes))
  if num_runs > _MAX_RUNS:
    raise UserError(
      f"SWEEP_RUNS: has {num_runs:,} runs, the product of its axes; give at "
      f"most {_MAX_RUNS:,}."
    )
  names = collections.Counter("-".join(x) for x in itertools.product(*axes))
  name, count = names.most_common(1)[0]
  if count > 1:
    raise UserError(f'SWEEP_RUNS: two runs are named "{name}"; rename one.')
  return [list(axis.items()) for axis in axes]


def _join_macros(
  entries: Sequence[tuple[str, Mapping[str, object]]],
) -> dict[str, object]:
  """Joins the macros of one run, given (name, {macro: value}) per axis."""
  found: dict[str, object] = {}
  for entry, macros in entries:
    for name, value in macros.items():
      if name in found:
        raise UserError(
          f'SWEEP_RUNS "{entry}": sets {name}, which another axis sets too; '
          "leave one of them out."
        )
      if name == "MODEL_DIR" or name.startswith("SWEEP_"):
        raise UserError(
          f'SWEEP_RUNS "{entry}": sets {name}, which is of the whole sweep; '
          "leave it out."
        )
      found[name] = value
  return found


def _check_fits(name: str, config: Config) -> None:
  try:
    check_run(config)
  except UserError as error:
    raise UserError(f'SWEEP_RUNS "{name}": {error}') from None


def _check_same_data(first: SweepRun, run: SweepRun) -> None:
  one, other = (
    {
      **dataclasses.asdict(x.config.data),
      "vocab_size": x.config.model.vocab_size,
      "sequence_length": x.config.model.sequence_length,
    }
    for x in (first, run)
  )
  for name, value in one.items():
    if other[name] != value:
      raise UserError(
        f'SWEEP_RUNS "{run.name}": {name.upper()} = {other[name]!r}, and '
        f'"{first.name}" has {value!r}: losses of other tokens do not compare; '
        "make it another sweep."
      )
  rows = [x.config.run.num_validation_rows for x in (first, run)]
  if rows[0] != rows[1]:
    raise UserError(
      f'SWEEP_RUNS "{run.name}": validates on {rows[1]} rows, and '
      f'"{first.name}" on {rows[0]}: losses of other rows do not compare; set '
      "EVAL_BATCHES so that EVAL_BATCHES * GLOBAL_BATCH_SIZE is the same."
    )


FINISHED = "finished"

Row = dict[str, Any]


def has_finished(where: SweepDir, name: str) -> bool:
  """Returns whether a run has ended without an error."""
  try:
    with open(where.outcome(name), encoding="utf-8", errors="replace") as file:
      return file.read().strip() == FINISHED
  except FileNotFoundError:
    return False


def tabulate(runs: Sequence[SweepRun], where: SweepDir) -> list[Row]:
  """Returns a row {column: value} for each run.

  `loss` is the last validation loss, in nats per token, or None if not finite;
  `best_loss` is the lowest finite one. `tokens`, `flops` (model FLOPs) and
  `secs` (of training steps) count until the evaluation of `loss`.
  """
  rows = []
  for run in runs:
    losses, tokens, secs, now, last_step = [], 0, 0.0, 0.0, 0
    for line in read_json_lines(ModelDir(run.model_dir).metrics, number="step"):
      # step_secs is a mean over the steps since the previous line.
      now += line.get("step_secs", 0.0) * (line["step"] - last_step)
      last_step = line["step"]
      if "validation_loss" in line:
        # The file has null for a loss that is not finite, or NaN if it is old.
        loss = line["validation_loss"]
        is_finite = loss is not None and math.isfinite(loss)
        losses.append(loss if is_finite else None)
        tokens, secs = line["tokens"], now
    outcome = FINISHED if has_finished(where, run.name) else "not finished"
    rows.append(
      {
        "run": run.name,
        "parameters": run.num_parameters,
        "tokens": tokens,
        "flops": tokens * run.flops_per_token,
        "flops_per_token": run.flops_per_token,
        "secs": secs,
        "loss": losses[-1] if losses else None,
        "best_loss": min((x for x in losses if x is not None), default=None),
        "outcome": outcome,
        "held_out": run.is_held_out,
      }
    )
  return rows


def table_text(rows: Sequence[Row]) -> str:
  """Returns the results of runs, from `tabulate`, as a text table."""
  lines = [("run", "parameters", "tokens", "FLOPs", "secs", "loss", "best", "")]
  for row in rows:
    losses = (row["loss"], row["best_loss"])
    loss, best = ("-" if x is None else f"{x:.4f}" for x in losses)
    notes = [] if row["outcome"] == FINISHED else [row["outcome"]]
    notes += ["held out"] * row["held_out"]
    cost = f"{row['flops']:.3g}", f"{row['secs']:,.1f}"
    size = f"{row['parameters']:,}", f"{row['tokens']:,}"
    lines.append((row["run"], *size, *cost, loss, best, ", ".join(notes)))
  return format_table(lines, "<>>>>>><")


def table_csv(rows: Sequence[Row]) -> bytes:
  """Returns the results of runs, from `tabulate`, as a CSV file."""
  file = io.StringIO()
  writer = csv.DictWriter(file, fieldnames=list(rows[0]))
  writer.writeheader()
  writer.writerows(rows)
  return file.getvalue().encode()


_POLL_SECS = 0.5
_LAST_BYTES = 4096  # at the end of a failed run's log, to quote its last line


class _Process(NamedTuple):
  run: SweepRun
  cores: Sequence[int]
  process: subprocess.Popen


def cores_of_runs(num_at_once: int) -> list[list[int]]:
  """Returns each run's core indices; raises UserError if there are too few."""
  if num_at_once > usable_cores():
    raise UserError(
      f"SWEEP_AT_ONCE = {num_at_once}: more runs than the {usable_cores()} "
      "cores that this process may use; give at most as many."
    )
  cores = visible_cores()
  share = len(cores) // num_at_once
  # All runs get equally many cores, so that their times are comparable.
  return [cores[i * share : (i + 1) * share] for i in range(num_at_once)]


def train_runs(
  runs: Sequence[SweepRun], sweep: SweepConfig, where: SweepDir
) -> dict[str, str]:
  """Trains those of `runs` that have not finished, in this order.

  Returns {name of a failed run: exit code and last line of its log}. Raises
  StoppedError if a signal arrived; the runs have saved their last steps.
  """
  waiting = [x for x in runs if not has_finished(where, x.name)]
  free = cores_of_runs(sweep.sweep_at_once)
  if len(waiting) < len(runs):
    _logger.info(f"{len(runs) - len(waiting)} of {len(runs)} runs have ended")
  training: list[_Process] = []
  failed: dict[str, str] = {}
  with StopRequest() as stop:
    try:
      while (waiting or training) and not stop.signal_name:
        while waiting and free:
          training.append(_start(waiting.pop(0), free.pop(0), where))
        time.sleep(_POLL_SECS)
        for each in list(training):
          if each.process.poll() is not None:
            training.remove(each)
            free.append(each.cores)
            _end(each, where, failed)
      for each in training:  # after a signal: each run saves its step and ends
        each.process.terminate()
      for each in training:
        each.process.wait()
    finally:
      # A second SIGINT or an error ends the loops above while runs still train.
      # Kill these runs; the same command resumes them.
      for each in training:
        each.process.kill()
        each.process.wait()
  if stop.signal_name:
    _logger.info(
      f"stopped by {stop.signal_name}; run the same command to resume"
    )
    raise StoppedError(stop.signal_name)
  return failed


def _start(run: SweepRun, cores: list[int], where: SweepDir) -> _Process:
  settings = where.settings(run.name)
  write_atomically(settings, run.gin_text.encode())
  numbers = ",".join(map(str, cores))
  with open(where.log(run.name), "ab") as log:
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "palm_mtf.sweep.runs"),
        *(str(os.getpid()), numbers, settings),
      ],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=log,
      env=make_child_environment(),
      # In a new session, a run gets no Ctrl-C from the terminal; the sweep gets
      # Ctrl-C and stops each run.
      start_new_session=True,
    )
  _logger.info(
    f"{run.name}: {run.num_parameters:,} parameters, {run.num_tokens:,} "
    f"tokens, on cores {numbers}, process {process.pid}"
  )
  return _Process(run, cores, process)


def _end(each: _Process, where: SweepDir, failed: dict[str, str]) -> None:
  code, name = each.process.returncode, each.run.name
  if code:
    failed[name] = f"exit code {code}, {_last_line(where.log(name))}"
    _logger.warning(f"{name}: failed: {failed[name]}")
    return
  write_atomically(where.outcome(name), f"{FINISHED}\n".encode())
  (row,) = tabulate([each.run], where)
  if row["loss"] is not None:
    _logger.info(f"{name}: finished, validation loss {row['loss']:.4f}")


def _last_line(log: str) -> str:
  with open(log, "rb") as file:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _LAST_BYTES))
    lines = file.read().decode(errors="replace").splitlines()
  return lines[-1] if lines else "nothing printed"


def check_none_failed(failed: Mapping[str, str], where: SweepDir) -> None:
  """Raises UserError if runs failed; the message has each failure."""
  if failed:
    each = "; ".join(f"{name}: {how}" for name, how in failed.items())
    raise UserError(
      f"{len(failed)} of the runs failed ({each}); "
      f"{where.log('NAME')} has what they printed; the same command tries "
      "them again."
    )


def main() -> None:
  """Turns a run's process into `palm_mtf train`, limited to CORES ("0,1")."""
  sweep, cores, gin_file = sys.argv[1:]
  # Limit cores before TensorFlow is imported: it makes a thread per core.
  os.sched_setaffinity(0, map(int, cores.split(",")))
  # If the sweep dies, the kernel kills this process, so that the same command
  # can resume the run. This setting and the limit of cores survive execv.
  die_with(int(sweep))
  command = [sys.executable, "-m", "palm_mtf", "train"]
  os.execv(sys.executable, [*command, f"--gin_file={gin_file}"])


if __name__ == "__main__":
  main()
