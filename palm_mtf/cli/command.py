# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A row of the table of commands."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Command(NamedTuple):
  """What one command is called with.

  Attributes:
    summary: one line for `palm_mtf --help`.
    entry_point: dotted path of the function that runs it, by keywords.
    config: class in palm_mtf.config that gin's macros fill, "" for a command
      that has flags alone. The entry point takes `model_dir` and `config`; its
      help and its own defaults are in gin/defaults/<name>.gin, where "_" stands
      for a space.
    leaves_out: parts of the class that keep their defaults.
    has_results: whether the entry point takes `as_json`, bool: print results as
      JSON, one object a line.
    keeps_config: whether the entry point takes `config_files`, a function of
      the macros that it resolved that returns {file name: text}, to be written
      into MODEL_DIR.
    starts_runs: whether the entry point takes `load_run`, which makes the
      settings of a run (run_settings.loader_of_runs).
    takes_model_dir: whether --model_dir stands for the config.gin in that
      folder.
    flags: {flag: keywords of argparse}; one without dashes is positional. The
      entry point takes each as a keyword.
    alone: {flag: (dotted path, help)} of flags that need no configuration. The
      function takes `hardware_of`, which returns the rates of a CHIP, and
      `as_json`.
  """

  summary: str
  entry_point: str
  config: str = ""
  leaves_out: Sequence[str] = ()
  has_results: bool = False
  keeps_config: bool = False
  starts_runs: bool = False
  takes_model_dir: bool = False
  flags: Mapping[str, Mapping[str, Any]] = {}
  alone: Mapping[str, tuple[str, str]] = {}
