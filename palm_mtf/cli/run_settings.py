# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings of training runs, for commands that read or start runs."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

from palm_mtf.cli import gin_files
from palm_mtf.cli.gin_folder import find_gin_file
from palm_mtf.cli.gin_statements import Setting
from palm_mtf.config import Config
from palm_mtf.errors import UserError
from palm_mtf.machine.activation_dtype import resolved
from palm_mtf.model_dir.layout import ModelDir


def settings_of(model_dir: str) -> tuple[str, list[str]]:
  """Returns the gin file of a run and the bindings that replace the run's.

  Raises:
    UserError: it is no run.
  """
  file = ModelDir(model_dir).config
  if not os.path.isfile(file):
    raise UserError(
      f"--model_dir = {model_dir!r}: there is no config.gin in it; give the "
      "MODEL_DIR of a training run."
    )
  # The folder may have moved; the prompts were for the end of training.
  return file, [f"MODEL_DIR={model_dir!r}", "PROMPTS=[]"]


def load_run(
  command: str,
  model_dir: str,
  macros: Mapping[str, object],
  trust_config: bool = False,
) -> tuple[str, Config]:
  """Returns MODEL_DIR and the settings of a command with --model_dir.

  ACTIVATION_DTYPE = "auto" is resolved for this machine.

  Args:
    command: name of the command.
    model_dir: MODEL_DIR of a training run.
    macros: values over those of the run, by macro.
    trust_config: whether the run's config.gin may run code.

  Raises:
    UserError: the first thing that is wrong, in one line.
  """
  file, bindings = settings_of(model_dir)
  bindings += [f"{name}={value!r}" for name, value in macros.items()]
  configuration = gin_files.load(
    command,
    [file] if trust_config else [],
    bindings,
    run_config=None if trust_config else file,
  )
  model_dir, config = configuration.build()
  model = resolved(config.model, config.mesh_layout)
  return model_dir, dataclasses.replace(config, model=model)


def loader_of_runs(
  files: Sequence[str], bindings: Sequence[str]
) -> Callable[[str, Mapping[str, object]], tuple[Config, str]]:
  """Returns what makes the settings of one run of a sweep.

  Args:
    files: gin files of the sweep, later over earlier.
    bindings: "NAME=VALUE" texts over all files.

  Returns:
    A function of where macros were set, for messages, and of {macro: value}
    over those of the sweep. It returns the settings of a training run, and a
    gin file that gives them again; UserError where they do not fit together.

  Raises:
    UserError: a file is a pipe, which only one of the runs could read.
  """
  for name in files:
    if not os.path.isfile(find_gin_file(name)):
      raise UserError(
        f"--gin_file={name}: is a pipe, and a sweep reads its gin files for "
        "every run; write it to a file."
      )

  def load(origin: str, macros: Mapping[str, object]) -> tuple[Config, str]:
    over = [
      Setting(name=name, value=value, origin=origin)
      for name, value in macros.items()
    ]
    configuration = gin_files.load("train", files, bindings, over=over)
    try:
      _, config = configuration.build()
    except UserError as error:
      raise UserError(configuration.located(str(error))) from error
    return config, configuration.values_text()

  return load
