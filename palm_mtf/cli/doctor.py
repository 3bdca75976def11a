# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf doctor`: versions, devices and what to mend.

The libraries are imported in a process of their own with a time limit, so that
one that crashes is reported, not fatal. What is wrong with what was found is
decided in diagnosis.py, and in slowness.py for the machine.
"""

import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from json import dumps, loads
from pathlib import Path

import palm_mtf
from palm_mtf.cli.diagnosis import IMPORTS, Environment, Problem, diagnose
from palm_mtf.cli.gin_folder import find_gin_file, gin_folder
from palm_mtf.cli.slowness import Machine, dtype_line, find_slowness
from palm_mtf.errors import UserError
from palm_mtf.machine import cores
from palm_mtf.machine.activation_dtype import native_bfloat16_here
from palm_mtf.machine.cpu import cpu_flags, cpu_name
from palm_mtf.machine.host_memory import memory_bytes

_logger = logging.getLogger(__name__)

_SHOWN_PACKAGES = (
  "tensorflow",
  "mesh-tensorflow",
  "gin-config",
  "sentencepiece",
  "seqio",
  "tensorflow-text",
  "tensorflow-datasets",
  "protobuf",
  "numpy",
  "rich",
  "jax",
  "t5",
  "tensorboard",
)
_SHOWN_CPU_FLAGS = (
  *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
  *("amx_int8", "amx_bf16", "i8mm", "bf16"),
)
_IMPORT_SECS = 180
_WATCH_SECS = 1.0  # how long the cores are watched
_GIB = 2**30

# Prints one object a line as it goes: the module whose line lacks an outcome
# is the one that crashed.
_IMPORT_PROGRAM = """
import importlib, json, sys, traceback
def say(**values):
  print("\\n" + json.dumps(values), flush=True)
sys.path.append(sys.argv[1])
for name in sys.argv[2:]:
  say(importing=name)
  try:
    importlib.import_module(name)
    say(imported=name)
  except BaseException as error:
    say(failed=name, why="".join(traceback.format_exception_only(error)))
if "tensorflow" in sys.modules:
  tf = sys.modules["tensorflow"]
  say(devices=[d.name for d in tf.config.list_physical_devices()])
"""


def main(
  gin_file: Sequence[str] = (), measure: bool = False, as_json: bool = False
) -> int:
  """Prints what is here and what to mend.

  Args:
    gin_file: the files of a configuration that the machine has to suit.
    measure: measure the rates of the machine too.
    as_json: print one JSON object instead of text.

  Returns:
    The exit code: 0, or 2 when there are problems.

  Raises:
    UserError: a gin file is missing, or cannot be read.
  """
  asked_dtype, asked_where = _asked_dtype(gin_file)
  here = Machine(
    native_bfloat16=native_bfloat16_here(),
    asked_dtype=asked_dtype,
    asked_where=asked_where,
    cores=cores.visible_cores(),
    quota=cores.core_quota(),
    threads=cores.thread_count(os.environ),
    busy=cores.busy_shares(_WATCH_SECS),
  )
  _logger.info("importing the libraries ...")
  # In another process: a library that crashes must not take this one along.
  import_errors, devices = _try_imports()
  found = Environment(
    python=shlex.quote(sys.executable),
    python_version=sys.version_info[:2],
    versions=_installed_versions(),
    requirements=_own_requirements(),
    import_errors=import_errors,
    gin_error=_gin_error(),
  )
  machine = _machine(found.versions, devices, here)
  problems = diagnose(found)
  # Rates of a broken installation would mean nothing.
  if measure and not problems:
    machine["measured"] = _measured_rates()
  problems += find_slowness(here)
  if as_json:
    problems_as_json = [problem._asdict() for problem in problems]
    print(dumps({**machine, "problems": problems_as_json}))
  else:
    print(_report(machine, problems))
  return 2 if problems else 0


def _report(machine: Mapping[str, object], problems: list[Problem]) -> str:
  """Returns the table and the problems as text."""
  lines = []
  for name, value in machine.items():
    if isinstance(value, Mapping):
      lines.append(f"{name}:")
      lines += [f"  {key:<21} {text}" for key, text in value.items()]
    else:
      lines.append(f"{name + ':':<23} {value}")
  lines.append("")
  for number, problem in enumerate(problems, start=1):
    lines += [f"PROBLEM {number}: {problem.what}", f"  fix: {problem.fix}"]
  return "\n".join(lines if problems else [*lines, "No problems."])


def _asked_dtype(gin_files: Sequence[str]) -> tuple[str, str]:
  """Returns the ACTIVATION_DTYPE of gin files, and the place that sets it.

  That is "auto" without one, and for TPUs, which this CPU says nothing of.
  """
  from palm_mtf.cli.gin_statements import Setting, read_file

  macros = {
    each.name: each
    for name in gin_files
    for each in read_file(find_gin_file(name))
    if isinstance(each, Setting) and not each.selector
  }
  dtype = macros.get("ACTIVATION_DTYPE")
  if dtype is None or ("TPU" in macros and macros["TPU"].value):
    return "auto", ""
  return dtype.value, dtype.origin


def _measured_rates() -> dict[str, str]:
  """Measures in a process of its own, which may import TensorFlow."""
  _logger.info("measuring ...")
  package_folder = Path(palm_mtf.__file__).parent.parent
  result = subprocess.run(
    [sys.executable, "-m", "palm_mtf.rates.measure"],
    capture_output=True,
    check=False,
    cwd=package_folder,
    text=True,
  )
  if result.returncode:
    return {"failed": _telling_line(result.stderr)}
  return loads(result.stdout)


def _machine(
  versions: Mapping[str, str], devices: list[str], here: Machine
) -> dict:
  flags = cpu_flags()
  shown = [name for name in _SHOWN_CPU_FLAGS if name in flags]
  total, available = memory_bytes()
  free = shutil.disk_usage(".").free
  return {
    "palm_mtf": f"{palm_mtf.__version__} in {Path(palm_mtf.__file__).parent}",
    "python": f"{platform.python_version()} ({sys.executable})",
    "platform": platform.platform(),
    "packages": {name: versions.get(name, "-") for name in _SHOWN_PACKAGES},
    "cpu": cpu_name(),
    "cores": len(here.cores),
    "cpu features": " ".join(shown) or "none that matter",
    "bfloat16": dtype_line(here),
    "memory": f"{total / _GIB:.1f} GiB, {available / _GIB:.1f} GiB available",
    "disk": f"{free / _GIB:.1f} GiB free in the current folder",
    "devices": ", ".join(devices) or "unknown: TensorFlow was not imported",
  }


def _try_imports() -> tuple[dict[str, str], list[str]]:
  """Returns why each module that fails does, and TensorFlow's devices."""
  package_folder = Path(palm_mtf.__file__).parent.parent
  command = [sys.executable, "-c", _IMPORT_PROGRAM, str(package_folder)]
  try:
    result = subprocess.run(
      [*command, *IMPORTS],
      capture_output=True,
      check=False,
      env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
      timeout=_IMPORT_SECS,
    )
    output, end = result.stdout, _ending(result)
  except subprocess.TimeoutExpired as error:
    output = error.stdout or b""
    end = f"no answer within {_IMPORT_SECS} seconds"
  return read_imports(output.decode(errors="replace"), end)


def read_imports(output: str, end: str) -> tuple[dict[str, str], list[str]]:
  """Reads what the importing process said.

  Args:
    output: its stdout, with whatever else the libraries print.
    end: how it ended, said of the module that it was importing then.

  Returns:
    {module: why it fails}, and the names of TensorFlow's devices.
  """
  errors, devices, importing = {}, [], ""
  for line in output.splitlines():
    if not line.startswith('{"'):  # what libraries print themselves
      continue
    said = loads(line)
    importing = said.get("importing", "")
    devices = said.get("devices", devices)
    if "failed" in said:
      errors[said["failed"]] = _telling_line(said["why"])
  if importing:  # the process ended before it said how that import went
    errors[importing] = end
  return errors, devices


def _telling_line(why: str) -> str:
  """Returns the last line that names an exception: the innermost cause."""
  lines = [line.strip() for line in why.splitlines() if line.strip()]
  named = [x for x in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", x)]
  return (named or lines or ["no reason given"])[-1]


def _ending(result: subprocess.CompletedProcess) -> str:
  lines = result.stderr.decode(errors="replace").split("\n")
  last = next((x.strip() for x in reversed(lines) if x.strip()), "")
  if result.returncode < 0:
    name = signal.Signals(-result.returncode).name
    return f"killed by {name}" + (f": {last}" if last else "")
  return f"exit code {result.returncode}" + (f": {last}" if last else "")


def _installed_versions() -> dict[str, str]:
  return {
    re.sub(r"[-_.]+", "-", each.name).lower(): each.version
    for each in metadata.distributions()
    if each.name
  }


def _own_requirements() -> list[str]:
  try:
    return metadata.requires("palm_mtf") or []
  except metadata.PackageNotFoundError:
    return []  # run from a checkout that is not installed


def _gin_error() -> str:
  try:
    gin_folder()
  except UserError as error:
    return str(error)
  return ""
