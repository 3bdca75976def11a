# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads what the report shows from the files of a run."""

import ast
import contextlib
import dataclasses
import glob
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

from palm_mtf.errors import UserError, suggest_name
from palm_mtf.model_dir.json_lines import read_json_lines
from palm_mtf.model_dir.paths import ModelDir

_MACRO = re.compile(r"^([A-Z][A-Z0-9_]*) = (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Run:
  """The contents of one MODEL_DIR; only metrics.jsonl must exist."""

  name: str  # the shortest end of the path that is unique in the report
  lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl; each has a "step"
  rewinds: Sequence[Mapping[str, Any]]  # each goes from "step" to "to_step"
  samples: Sequence[Mapping[str, Any]]  # step, prompt and continuation
  evaluations: Sequence[Mapping[str, Any]]  # in ascending order of steps
  settings: Mapping[str, Any]  # values of the macros in config.gin
  defaults: Set[str]  # names of macros that no gin file or flag has set
  plan: Mapping[str, Any]  # numbers in plan.json; {} if there is no such file

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

  Raises:
    UserError: a folder does not exist, or has no readable metrics.jsonl.
  """
  # A folder that is given twice, maybe by a link, is one run.
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
    _read_evaluations(model_dir.evaluations),
    *_read_settings(model_dir.config),
    _read_plan(model_dir.plan),
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


def _read_evaluations(folder: str) -> list[dict[str, Any]]:
  results = []
  # Sorting by name sorts by step, because steps have leading zeros.
  for path in sorted(glob.glob(f"{glob.escape(folder)}/step_*/*.json")):
    # Skip damaged results, which `evaluate` writes again.
    damaged = (OSError, ValueError, RecursionError, TypeError, KeyError)
    with contextlib.suppress(*damaged), open(path, "rb") as file:
      result = json.load(file)
      if is_number(result["step"]) and isinstance(result["metrics"], dict):
        results.append(result)
  return results


def _read_plan(path: str) -> dict[str, Any]:
  with contextlib.suppress(OSError, ValueError, RecursionError):
    with open(path, "rb") as file:
      plan = json.load(file)
    if isinstance(plan, dict):
      return {name: x for name, x in plan.items() if is_number(x)}
  return {}


def _read_settings(path: str) -> tuple[dict[str, Any], Set[str]]:
  """Returns {macro: value}, and the names of macros left at their defaults."""
  settings: dict[str, Any] = {}
  with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
    settings |= _MACRO.findall(file.read().decode())
  # cli/gin_files.py appends a comment that says where the value was set.
  defaults = {x for x, text in settings.items() if text.endswith("# default")}
  for name, text in settings.items():
    # literal_eval skips comments, as in "3  # recipes/quickstart.gin:10".
    # Non-literals, such as @optimizer, stay text.
    with contextlib.suppress(ValueError, SyntaxError):
      settings[name] = ast.literal_eval(text)
  return settings, defaults
