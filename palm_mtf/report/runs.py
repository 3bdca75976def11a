# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What runs left in their MODEL_DIRs, as far as it is there.

  metrics.jsonl      numbers by step, and what happened: lines with `event`
  config.gin         every setting
  rewinds.jsonl      spikes of the loss, and how far training went back
  samples.jsonl      continuations of PROMPTS by step
  eval/step_*/*.json what tasks measured of a checkpoint
  checkpoints/*/manifest.json   shapes of the parameters, versions

Only metrics.jsonl must be there.
"""

import ast
import dataclasses
import glob
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.model_dir.json_lines import read_json_lines
from palm_mtf.model_dir.layout import ModelDir

_MACRO = re.compile(r"^([A-Z][A-Z0-9_]*) = (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One run.

  Attributes:
    name: what tells it from the other runs of the page.
    path: its MODEL_DIR.
    lines: lines of metrics.jsonl that hold numbers, each with its `step` and,
      if they can be told, the `tokens` read until then.
    events: what happened, each with `event`, its name, and `step`.
    settings: values by macro.
    manifest: manifest of the newest checkpoint.
    samples: with `step`, `prompt` and `continuation` each.
    evaluations: what tasks gave, with `step`, `task`, `split`, `num_examples`
      and `metrics` each, in the order of steps.
  """

  name: str
  path: str
  lines: Sequence[Mapping[str, Any]]
  events: Sequence[Mapping[str, Any]] = ()
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  manifest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  samples: Sequence[Mapping[str, Any]] = ()
  evaluations: Sequence[Mapping[str, Any]] = ()

  @property
  def has_tokens(self) -> bool:
    """Whether the tokens of every line are known."""
    return all("tokens" in line for line in self.lines)

  @property
  def fields(self) -> list[str]:
    """The names of all numbers, in the order of their first line."""
    return list(
      dict.fromkeys(
        name for line in self.lines for name, x in line.items() if is_number(x)
      )
    )

  def values(self, field: str) -> list[float]:
    """Returns the numbers of `field`, without those that are not finite."""
    return [line[field] for line in self.lines if is_number(line.get(field))]

  def points(self, field: str, x_field: str) -> list[tuple[float, float]]:
    """Returns (x, y) of every line that has both numbers."""
    return [
      (line[x_field], line[field])
      for line in self.lines
      if is_number(line.get(field)) and is_number(line.get(x_field))
    ]

  @property
  def num_parameters(self) -> int | None:
    """How many numbers are trained, if a checkpoint says so."""
    shapes = self.manifest.get("shapes")
    if not isinstance(shapes, dict) or not shapes:
      return None
    return sum(math.prod(shape) for shape in shapes.values())


def is_number(value: object) -> bool:
  """Whether `value` can be drawn."""
  return (
    isinstance(value, (int, float))
    and not isinstance(value, bool)
    and math.isfinite(value)
  )


def read_runs(model_dirs: Sequence[str]) -> list[Run]:
  """Reads each run once, in the order given.

  Raises:
    UserError: a folder does not exist, or holds no readable metrics.jsonl.
  """
  paths = {os.path.realpath(_expanded(path)): path for path in model_dirs}
  given = list(paths.values())
  return [
    _read_run(_expanded(path), name)
    for path, name in zip(given, _short_names(given), strict=True)
  ]


def _expanded(path: str) -> str:
  return os.path.expanduser(path)


def _short_names(paths: Sequence[str]) -> list[str]:
  """Returns the fewest last parts of the paths that tell all of them apart."""
  parts = [os.path.abspath(_expanded(path)).split(os.sep) for path in paths]
  for count in range(1, max(map(len, parts)) + 1):
    names = ["/".join(each[-count:]) for each in parts]
    if len(set(names)) == len(names):
      break
  return names


def _read_run(path: str, name: str) -> Run:
  model_dir = ModelDir(path)
  if not os.path.isfile(model_dir.metrics):
    raise UserError(_no_metrics(path))
  entries = list(read_json_lines(model_dir.metrics))
  numbers = [x for x in entries if is_number(x.get("step")) and _is_log(x)]
  if not numbers:
    raise UserError(
      f"{model_dir.metrics}: has no line with numbers yet; wait for the run's "
      "LOG_STEPS."
    )
  rewinds = read_json_lines(model_dir.rewinds)
  return Run(
    name=name,
    path=path,
    lines=list(_with_tokens(numbers)),
    events=[
      *(x for x in entries if "event" in x),
      *({"event": "rewind", **x} for x in rewinds),
    ],
    settings=_settings(model_dir.config),
    manifest=_newest_manifest(model_dir),
    samples=[
      x
      for x in read_json_lines(model_dir.samples)
      if isinstance(x.get("continuation"), str) and is_number(x.get("step"))
    ],
    evaluations=_evaluations(model_dir),
  )


def _is_log(line: Mapping[str, Any]) -> bool:
  return "event" not in line and any(
    is_number(value) for name, value in line.items() if name != "step"
  )


def _no_metrics(path: str) -> str:
  """Returns why `path` is no run, and what is meant perhaps."""
  what = f"MODEL_DIR = {path!r}"
  if not os.path.exists(path):
    folder, name = os.path.split(os.path.abspath(path))
    names = os.listdir(folder) if os.path.isdir(folder) else []
    guess = did_you_mean(name, names)
    return f"{what}: there is no such folder{guess}; give that of a run."
  if not os.path.isdir(path):
    return f"{what}: is a file; give the folder of a run."
  metrics = os.path.basename(ModelDir(path).metrics)
  within = sorted(glob.glob(f"{glob.escape(path)}/*/{metrics}"))
  if within:
    return (
      f"{what}: holds no {metrics}, but folders of runs; give one, such "
      f"as {os.path.dirname(within[0])!r}."
    )
  return (
    f"{what}: holds no {metrics}; give the MODEL_DIR of a run that has "
    "logged a step."
  )


def _with_tokens(lines: Sequence[Mapping]) -> Iterator[dict[str, Any]]:
  """Yields the lines, each with the tokens of all steps until it.

  Where a line does not say, they are those of the line before, and of the steps
  since at this line's batch size.
  """
  tokens, step = 0, 0
  for line in lines:
    batch = line.get("global_batch_tokens")
    if is_number(line.get("tokens")):
      tokens = line["tokens"]
    elif is_number(batch):
      tokens += batch * (line["step"] - step)
    else:
      yield dict(line)
      continue
    step = line["step"]
    yield {**line, "tokens": tokens}


def _settings(path: str) -> dict[str, Any]:
  """Returns the macros of config.gin whose values are plain."""
  settings = {}
  try:
    with open(path, encoding="utf-8") as file:
      text = file.read()
  except (OSError, ValueError):
    return {}
  for name, value in _MACRO.findall(text):
    try:
      settings[name] = ast.literal_eval(value)  # a comment may follow
    except (ValueError, SyntaxError):
      settings[name] = value
  return settings


def _newest_manifest(model_dir: ModelDir) -> dict[str, Any]:
  folder = glob.escape(model_dir.checkpoints)
  manifests = (
    _json_object(path)
    for path in sorted(
      glob.glob(f"{folder}/step_*/manifest.json"), reverse=True
    )
  )
  return next((each for each in manifests if each), {})


def _evaluations(model_dir: ModelDir) -> list[dict[str, Any]]:
  folder = glob.escape(model_dir.evaluations)
  found = map(_json_object, sorted(glob.glob(f"{folder}/step_*/*.json")))
  return [
    each
    for each in found
    if is_number(each.get("step")) and isinstance(each.get("metrics"), dict)
  ]


def _json_object(path: str) -> dict[str, Any]:
  """Returns what is in a file, {} where that is no object."""
  try:
    with open(path, encoding="utf-8") as file:
      value = json.load(file)
  except (OSError, ValueError):
    return {}
  return value if isinstance(value, dict) else {}
