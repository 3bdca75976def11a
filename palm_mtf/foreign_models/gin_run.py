# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains on pods, configured by gin files in gin's own syntax."""

import argparse
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import gin
import numpy as np

from palm_mtf.cli.gin_checks import find_reached, import_modules
from palm_mtf.cli.gin_folder import find_gin_file, gin_folder
from palm_mtf.cli.gin_statements import (
  Import,
  Macro,
  Reference,
  Setting,
  names_in,
  read_command_line,
  read_file,
)
from palm_mtf.cli.main import FlagParser, parse_flags, run_command
from palm_mtf.config import FORMERLY_OF_ADAFACTOR, OPTIMIZERS, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError, check_count, did_you_mean, shorten
from palm_mtf.foreign_models.training import ModelFunction, PodTraining
from palm_mtf.user_code import user_code

_MODULE = "palm_mtf.foreign_models"
# gin appends text that starts thus to an error; cut it off, to print one line.
_GINS_ADDITION = "\n  In call to configurable"
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _check_bindings(function: Callable[_P, _T]) -> Callable[_P, _T]:
  """Wraps a function so that a UserError names a missing gin binding."""
  name, signature = function.__name__, inspect.signature(function)

  @functools.wraps(function, updated=())
  def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
    given = signature.bind_partial(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
      if parameter.default is parameter.empty and parameter.name not in given:
        raise UserError(
          f"{name}.{parameter.name} is not set; set it in a gin file, or pass "
          f"--gin.{name}.{parameter.name}=..."
        )
    return function(*args, **kwargs)

  return call


# Only gin files call the wrapped constructors; the classes stay unchanged.
for _class in (*OPTIMIZERS.values(), DeviceMesh, PodsConfig):
  gin.external_configurable(_check_bindings(_class), module=_MODULE)


@gin.configurable("PodTraining", module=_MODULE)
@_check_bindings
@functools.wraps(PodTraining, updated=())
def _make_training(*, function: ModelFunction, **settings: Any) -> PodTraining:
  """Makes a PodTraining; any error in the user's function is a UserError."""
  return PodTraining(user_code("PodTraining.function")(function), **settings)


@gin.configurable(module=_MODULE)
@_check_bindings
def train_on_pods(
  training: PodTraining,
  batches: Callable[[int], Mapping[str, np.ndarray]],
  num_steps: int,
  save_path: str | None = None,
) -> None:
  """Trains, prints each step's loss, and compares the pods' final variables.

  Args:
    training: the model, its optimizer, mesh and pods.
    batches: maps a step, counted from 0, to a batch: {feature: values},
      [GLOBAL_BATCH_SIZE, ...] each.
    num_steps: number of steps.
    save_path: npz file to write parameters and moments to; None for no file.

  Raises:
    UserError: a setting, a batch or the model does not fit, the loss is not
      finite, a pod is lost, or pods differ.
  """
  if not isinstance(training, PodTraining):
    raise UserError(
      f"train_on_pods.training = {shorten(training)}: give a PodTraining; in a "
      "gin file, @PodTraining()."
    )
  check_count("train_on_pods.num_steps", num_steps)
  if not isinstance(save_path, str | None) or (
    save_path and not os.path.isdir(os.path.dirname(save_path) or ".")
  ):
    raise UserError(
      f"train_on_pods.save_path = {shorten(save_path)}: give None, or a file "
      "in a folder that exists."
    )
  with training:
    for step in range(num_steps):
      with user_code(f"train_on_pods.batches, step {step}"):
        batch = batches(step)
      metrics = training.step(batch)
      print(f"step {step + 1}  loss {metrics['loss']:.4f}", flush=True)
    training.check_pods()
    print(f"after {training.num_steps} steps all pods hold the same bits")
    if save_path:
      arrays: Mapping[str, Any] = training.variables()
      np.savez(save_path, **arrays)


def main(
  gin_files: Sequence[str] = (), arguments: Sequence[str] | None = None
) -> int:
  """Calls `train_on_pods` as gin files and the command line configure it.

  The command line takes --gin_file=FILE and --gin.NAME=VALUE, like the commands
  of palm_mtf. For a wrong binding, one line is printed on stderr.

  Args:
    gin_files: gin files, read before the files of the command line.
    arguments: the command line; None for the command line of the process.

  Returns:
    The exit code: 0, or 2 if the user's input cannot work.
  """
  given = sys.argv[1:] if arguments is None else list(arguments)
  return run_command(lambda: _run(gin_files, given))


def _run(gin_files: Sequence[str], arguments: Sequence[str]) -> int:
  parser = FlagParser(
    description="Trains a Mesh TensorFlow model on pods, as gin files say.",
    usage="%(prog)s [--gin_file=FILE ...] [--gin.NAME=VALUE ...]",
    allow_abbrev=False,
  )
  parser.add_argument(
    "--gin_file", action="append", default=[], help=argparse.SUPPRESS
  )
  bindings = [x for x in arguments if x.startswith("--gin.")]
  flags = parse_flags(parser, [x for x in arguments if x not in bindings])
  settings = parse_gin(
    [*gin_files, *flags.gin_file], [x.removeprefix("--gin.") for x in bindings]
  )
  try:
    with user_code("train_on_pods"):
      bound = gin.get_bindings(train_on_pods)
    train_on_pods(**bound)
  except UserError as error:
    message = str(error).partition(_GINS_ADDITION)[0]
    raise UserError(_locate(message, settings)) from error
  return 0


def parse_gin(
  gin_files: Iterable[str], bindings: Iterable[str] = ()
) -> list[Setting]:
  """Reads gin files into gin's configuration, and checks every name in them.

  Args:
    gin_files: names of files, which are searched for like --gin_file; later
      files override earlier files.
    bindings: "NAME=VALUE" strings, which override all files.

  Returns:
    The settings, in the order read.

  Raises:
    UserError: a file, an import, a name or a value is wrong; the message names
      the line, and the most similar name that exists.
  """
  files = [find_gin_file(x) for x in gin_files]
  statements = [x for file in files for x in read_file(file)]
  import_modules([x for x in statements if isinstance(x, Import)])
  settings = [x for x in statements if isinstance(x, Setting)]
  settings += read_command_line(bindings)
  settings = [x for x in settings if not _is_of_an_earlier_version(x)]
  for each in settings:
    _check_names(each)
  macros = {x.name: x for x in settings if not x.selector}
  bound = [x for x in settings if x.selector]
  _check_used(macros, find_reached(bound, macros))
  for each in settings:
    with user_code(each.cited):
      gin.parse_config(str(each))
  return settings


def _is_of_an_earlier_version(setting: Setting) -> bool:
  """Returns whether a setting had to be 0 in earlier versions, and is."""
  is_old = setting.name in FORMERLY_OF_ADAFACTOR
  if not is_old or not setting.selector.endswith("AdafactorConfig"):
    return False
  if setting.value != 0:
    raise UserError(
      f"{setting.cited}: a model function has its own loss; remove this line."
    )
  return True


def _check_names(setting: Setting) -> None:
  if setting.selector:
    wrapped = _find_configurable(setting, setting.selector)
    parameters = inspect.signature(wrapped).parameters
    if setting.name not in parameters and not any(
      x.kind is x.VAR_KEYWORD for x in parameters.values()
    ):
      raise UserError(
        f'{setting.cited}: {setting.selector} has no parameter "{setting.name}"'
        f"{did_you_mean(setting.name, parameters)}."
      )
  for name in names_in(setting.value):
    if isinstance(name, Reference):
      _find_configurable(setting, name.selector)


def _find_configurable(setting: Setting, selector: str) -> Callable[..., Any]:
  """Returns the function or class that gin finds for a selector."""
  registry = gin.config._REGISTRY  # gin has no public list of its names
  found = registry.matching_selectors(selector)
  if len(found) == 1:
    wrapped: Callable[..., Any] = registry[found[0]].wrapped
    return wrapped
  if found:
    raise UserError(
      f"{setting.cited}: {selector} may be {' or '.join(sorted(found))}; write "
      "more of the name."
    )
  # A selector may omit the first parts of a name: "c" or "b.c" for "a.b.c".
  num_parts = selector.count(".") + 1
  known = {
    ".".join(name.split(".")[-num_parts:]) for name, _ in registry.items()
  }
  raise UserError(
    f'{setting.cited}: gin knows no "{selector}"'
    f"{did_you_mean(selector, sorted(known))}; import its module, and decorate "
    "it with gin.configurable."
  )


def _check_used(
  macros: Mapping[str, Setting], used: Mapping[str, Setting]
) -> None:
  """Raises UserError for a macro that nothing uses, as it may be misspelt.

  Files of palm_mtf, such as gin/models/palm_8b.gin, may set unused macros.
  """
  for name, setting in macros.items():
    file = setting.origin.rpartition(":")[0]
    if name not in used and not (file and (gin_folder() / file).is_file()):
      raise UserError(
        f"{setting.cited}: nothing refers to {name}"
        f"{did_you_mean(name, sorted(used))}; remove it."
      )


def _locate(message: str, settings: Sequence[Setting]) -> str:
  """Ends a message "NAME = ..." with the gin file or flag that sets NAME."""
  name = message.partition(" = ")[0]
  last = {x.name: x for x in settings if not x.selector}
  for each in reversed(settings):
    if each.selector and name in (each.name.upper(), each.key):
      while isinstance(each.value, Macro) and each.value.name in last:
        each = last[each.value.name]
      return f"{message} ({each.key} is set {each.place})"
  return message
