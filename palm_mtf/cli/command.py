# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A command of `palm_mtf`, and its flags."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Command(NamedTuple):
  """A command, its flags and its configuration."""

  summary: str  # one line for `palm_mtf --help`
  # Dotted path of the command's function, which takes only keyword arguments.
  # By default, the last word of the command's name names the function, and the
  # first word names its module in palm_mtf.commands.
  entry_point: str = ""
  # Name of a class in palm_mtf.config; "" for a command that has only flags.
  # The entry point takes `model_dir` and `config`, an object of this class,
  # whose fields gin's macros set. The command's help and defaults are in
  # gin/defaults/<name>.gin, with "_" for a space.
  config: str = ""
  # Name of a class in palm_mtf.config, or "". The command ignores the macros of
  # this class and does not save them in config.gin, so this part of `config`
  # keeps its defaults.
  leaves_out: str = ""
  # Whether the entry point takes `as_json`. If `as_json` is true, the entry
  # point prints results as JSON, one object per line.
  has_results: bool = True
  # Whether the command saves its configuration. If so, the entry point takes
  # `config_files`, a function that returns the gin files to save.
  keeps_config: bool = False
  # Whether the command works for the model of a MODEL_FUNCTION.
  takes_functions: bool = False
  # Whether the command trains several runs. If so, the entry point takes
  # `load_run`, a function that makes the settings of one run from the
  # command's gin files and flags, and from the macros that differ in this run.
  starts_runs: bool = False
  # Whether the command has --model_dir, a folder whose config.gin it reads.
  takes_model_dir: bool = False
  # {flag: keywords for argparse}; a flag without dashes is positional. The
  # entry point takes the value of each flag as a keyword.
  flags: Mapping[str, Mapping[str, Any]] = {}
  # {flag: (dotted path, help)}. Such a flag runs the function at the path
  # instead of the entry point, and ignores --gin_file. The function takes
  # `as_json`.
  standalone: Mapping[str, tuple[str, str]] = {}


def flag(
  metavar: str | None, description: str, **keywords: Any
) -> dict[str, Any]:
  """Returns the keywords for argparse of a flag with a text."""
  default = keywords.get("default")
  shown = f" (default: {default})" if default else ""
  return {"metavar": metavar, "help": description + shown, **keywords}


def number(metavar: str, description: str, **keywords: Any) -> dict[str, Any]:
  """Returns the keywords for argparse of a flag with a whole number."""
  return flag(metavar, description, type=int, **keywords)


def switch(description: str, **keywords: Any) -> dict[str, Any]:
  """Returns the keywords for argparse of a flag without a value."""
  return {"action": "store_true", "help": description, **keywords}
