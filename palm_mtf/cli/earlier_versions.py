# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What gin files of earlier versions say, and what that is today.

A run's config.gin names the modules and parameters of its time, and a run goes
on for months.
"""

_CONFIG = ("layout", "pods_config", "decode_config", "task_eval_config")
_COMMANDS = (
  "data_cache",
  "data_inspect",
  "data_statistics",
  "evaluate",
  "score",
  "train",
)
_MODULES = {
  **{f"palm_mtf.{x}": "palm_mtf.config" for x in _CONFIG},
  **{f"palm_mtf.{x}": f"palm_mtf.commands.{x}" for x in _COMMANDS},
  "palm_mtf.infer": "palm_mtf.commands.generate",
}
# Parameters of the commands that take a Config: the part of it.
_PARTS = {
  "model": "model",
  "mesh": "mesh_layout",
  "pods": "pods",
  "optimizer": "optimizer",
  "data": "data",
  "run": "run",
  "watch": "fault_tolerance",
  "tasks": "evaluation",
  "decode": "decode",
}
_WITH_CONFIG = {
  f"palm_mtf.commands.{x}.{x}"
  for x in ("evaluate", "generate", "score", "train")
}


def module_of_today(module: str) -> str:
  """Returns the dotted path that `module` has now."""
  return _MODULES.get(module, module)


def part_of_today(path: str, name: str) -> str:
  """Returns the part of `config.Config` that a parameter is now, or "".

  Args:
    path: dotted path of the configurable, in today's package.
    name: name of its parameter.
  """
  return _PARTS.get(name, "") if path in _WITH_CONFIG else ""
