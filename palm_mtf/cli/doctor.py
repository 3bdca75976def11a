# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf doctor`: versions, devices, and what to mend.

The libraries are imported in a separate process with a time limit, so that a
library that crashes is reported. `find_faults` and `find_slowness` are pure
functions of what was found.
"""

import dataclasses
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from json import dumps, loads
from pathlib import Path
from typing import NamedTuple

import palm_mtf
from palm_mtf.cli.gin_folder import find_gin_file
from palm_mtf.machine import processors as cores
from palm_mtf.machine.activation_dtype import native_bfloat16_here
from palm_mtf.machine.host_memory import memory_bytes
from palm_mtf.machine.processors import cpu_flags, cpu_name

_logger = logging.getLogger(__name__)

_SHOWN_PACKAGES = (
  *("tensorflow", "mesh-tensorflow", "gin-config", "sentencepiece", "seqio"),
  *("tensorflow-text", "tensorflow-datasets", "protobuf", "numpy", "rich"),
  *("jax", "t5", "tensorboard"),
)
_SHOWN_CPU_FLAGS = (
  *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
  *("amx_int8", "amx_bf16", "i8mm", "bf16"),
)
# Packages that write into the folder of the package that others require.
_SAME_FOLDER = {
  "tensorflow": (
    *("tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu"),
  ),
  "tensorflow-text": ("tensorflow-text-nightly",),
  "tensorflow-datasets": ("tfds-nightly",),
  "seqio": ("seqio-nightly",),
}
# The package to install again when a module fails to import.
_PACKAGE_OF_IMPORT = {
  "tensorflow": "tensorflow",
  "palm_mtf._tf": "mesh-tensorflow",
  "sentencepiece": "sentencepiece",
  # Generated code, the first to refuse a protobuf that is too old.
  "sentencepiece.sentencepiece_model_pb2": "sentencepiece",
  "seqio": "seqio",
}
_PACKAGE_OF_MODULE = {
  **{"absl": "absl-py", "gin": "gin-config"},
  **{"google": "protobuf", "tree": "dm-tree"},
}
_IMPORT_SECS = 180
_GIB = 2**30
_ROOT = Path(palm_mtf.__file__).parent.parent

# Prints one object per line as it imports: the module whose line lacks an
# outcome is the module that crashed.
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


class Problem(NamedTuple):
  """What is wrong, in one line, and the command or the act that mends it."""

  what: str
  fix: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Installation:
  """What is installed.

  Attributes:
    python: the interpreter, as a user types it.
    versions: version of every installed package, by its normalized name.
    requirements: requirements of palm_mtf, as its metadata states them; empty
      in a checkout that is not installed.
    import_errors: the line that says why, for each module that failed.
  """

  python: str
  versions: Mapping[str, str]
  requirements: Sequence[str] = ()
  import_errors: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def pip(self) -> str:
    """The pip that installs for this interpreter."""
    return f"{self.python} -m pip"

  @property
  def specifiers(self) -> dict[str, object]:
    """The versions of each package that palm_mtf requires here."""
    # A broken installation may lack even this; the other checks do without.
    if "packaging" not in self.versions:
      return {}
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    return {
      canonicalize_name(each.name): each.specifier
      for each in map(Requirement, self.requirements)
      if each.marker is None or each.marker.evaluate({"extra": ""})
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """What the machine has, and what the user's configuration asks of it.

  Attributes:
    native_bfloat16: CPU feature or GPUs that multiply bfloat16, "" for none.
    asked_dtype: ACTIVATION_DTYPE of the configuration.
    asked_where: the place that sets it, "file:line".
    cores: the cores that this process may use, by number.
    quota: the CPU quota of a container, in cores; None for no limit.
    threads: the threads that share a matrix product's work.
  """

  native_bfloat16: str
  asked_dtype: str = "auto"
  asked_where: str = ""
  cores: Sequence[int]
  quota: float | None = None
  threads: int


def main(
  gin_file: Sequence[str] = (), measure: bool = False, as_json: bool = False
) -> int:
  """Prints what this machine has and what to mend.

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
  machine = Machine(
    native_bfloat16=native_bfloat16_here(),
    asked_dtype=asked_dtype,
    asked_where=asked_where,
    cores=cores.visible_cores(),
    quota=cores.core_quota(),
    threads=cores.thread_count(os.environ),
  )
  _logger.info("importing the libraries ...")
  import_errors, devices = _try_imports()
  try:
    requirements = metadata.requires("palm_mtf") or []
  except metadata.PackageNotFoundError:
    requirements = []  # run from a checkout that is not installed
  installed = Installation(
    python=shlex.quote(sys.executable),
    versions={
      re.sub(r"[-_.]+", "-", each.name).lower(): each.version
      for each in metadata.distributions()
      if each.name
    },
    requirements=requirements,
    import_errors=import_errors,
  )
  found = _describe(installed.versions, devices, machine)
  problems = find_faults(installed)
  # Rates of a broken installation would mean nothing.
  if measure and not problems:
    found["measured"] = _measure_rates()
  problems += find_slowness(machine)
  if as_json:
    print(dumps({**found, "problems": [each._asdict() for each in problems]}))
  else:
    print(_report(found, problems))
  return 2 if problems else 0


def _report(found: Mapping[str, object], problems: list[Problem]) -> str:
  """Returns the table and the problems as text."""
  lines = []
  for name, value in found.items():
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

  It is "auto" if no file sets it, or if the files are for TPUs, because this
  CPU says nothing about a TPU.
  """
  if not gin_files:
    return "auto", ""
  # It imports gin, which may be missing.
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


def _measure_rates() -> dict[str, str]:
  """Measures in a separate process, because it imports TensorFlow."""
  _logger.info("measuring ...")
  result = subprocess.run(
    [sys.executable, "-m", "palm_mtf.rates.measure"],
    capture_output=True,
    check=False,
    cwd=_ROOT,
    text=True,
  )
  if result.returncode:
    return {"failed": _find_cause(result.stderr)}
  return loads(result.stdout)


def _describe(
  versions: Mapping[str, str], devices: list[str], machine: Machine
) -> dict:
  """Returns the table that is printed, by row."""
  flags = cpu_flags()
  shown = [name for name in _SHOWN_CPU_FLAGS if name in flags]
  total, available = memory_bytes()
  free = shutil.disk_usage(".").free
  return {
    "palm_mtf": f"{palm_mtf.__version__} in {_ROOT / 'palm_mtf'}",
    "python": f"{platform.python_version()} ({sys.executable})",
    "platform": platform.platform(),
    "packages": {name: versions.get(name, "-") for name in _SHOWN_PACKAGES},
    "cpu": cpu_name(),
    "cores": len(machine.cores),
    "cpu features": " ".join(shown) or "none that matter",
    "bfloat16": f'native ({machine.native_bfloat16}): "auto" is "bfloat16"'
    if machine.native_bfloat16
    else 'not native: "auto" is "float32"',
    "memory": f"{total / _GIB:.1f} GiB, {available / _GIB:.1f} GiB available",
    "disk": f"{free / _GIB:.1f} GiB free in the current folder",
    "devices": ", ".join(devices) or "unknown: TensorFlow was not imported",
  }


def _try_imports() -> tuple[dict[str, str], list[str]]:
  """Returns why each module that fails does, and TensorFlow's devices."""
  try:
    result = subprocess.run(
      [sys.executable, "-c", _IMPORT_PROGRAM, _ROOT, *_PACKAGE_OF_IMPORT],
      capture_output=True,
      check=False,
      env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
      timeout=_IMPORT_SECS,
    )
  except subprocess.TimeoutExpired as error:
    output = error.stdout or b""
    end = f"no answer within {_IMPORT_SECS} seconds"
  else:
    output, code = result.stdout, result.returncode
    killed = code < 0 and signal.Signals(-code).name
    end = f"killed by {killed}" if killed else f"exit code {code}"
    if message := result.stderr.decode(errors="replace").strip():
      end += f": {message.splitlines()[-1].strip()}"
  return read_imports(output.decode(errors="replace"), end)


def read_imports(output: str, end: str) -> tuple[dict[str, str], list[str]]:
  """Reads what the importing process printed.

  Args:
    output: its stdout, with whatever else the libraries print.
    end: how it ended, which explains the module that it was importing then.

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
      errors[said["failed"]] = _find_cause(said["why"])
  if importing:  # the process ended before it said how that import went
    errors[importing] = end
  return errors, devices


def _find_cause(why: str) -> str:
  """Returns the last line that names an exception: the innermost cause."""
  lines = [line.strip() for line in why.splitlines() if line.strip()]
  named = [x for x in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", x)]
  return (named or lines or ["no reason given"])[-1]


def find_faults(found: Installation) -> list[Problem]:
  """Returns what is wrong with an installation, causes before consequences."""
  return [
    *_find_overwritten(found),
    *_find_wrong_tensorflow_text(found),
    *_find_unmet_requirements(found),
    *_find_failed_imports(found),
  ]


def _find_overwritten(found: Installation) -> Iterator[Problem]:
  for wanted, others in _SAME_FOLDER.items():
    present = [x for x in (wanted, *others) if x in found.versions]
    if present in ([], [wanted]):
      continue
    listed = " and ".join(f"{x} {found.versions[x]}" for x in present)
    why = (
      "write over each other's files"
      if len(present) > 1
      else f"stands in for {wanted}, which other packages ask for by name"
    )
    if wanted in found.versions:
      right = f"{wanted}=={found.versions[wanted]}"
    else:
      right = f'"{wanted}{found.specifiers.get(wanted, "")}"'
    # All go: uninstalling one package takes files of the other along.
    yield Problem(
      f"{listed} {why}.",
      f"{found.pip} uninstall -y {' '.join(present)} && "
      f"{found.pip} install --no-deps {right}",
    )


def _find_wrong_tensorflow_text(found: Installation) -> Iterator[Problem]:
  # Its operations are linked against one minor version's ABI.
  text = found.versions.get("tensorflow-text", "")
  tensorflow = found.versions.get("tensorflow", "")
  compiled_for, minor = (".".join(x.split(".")[:2]) for x in (text, tensorflow))
  if text and tensorflow and compiled_for != minor:
    yield Problem(
      f"tensorflow-text {text} is compiled for TensorFlow {compiled_for} and "
      f"cannot be loaded by tensorflow {tensorflow}.",
      f'{found.pip} install --no-deps "tensorflow-text=={minor}.*"',
    )


def _find_unmet_requirements(found: Installation) -> Iterator[Problem]:
  # `pip check` finds these too, but names no fix.
  for name, specifier in found.specifiers.items():
    version = found.versions.get(name)
    fix = f'{found.pip} install "{name}{specifier}"'
    # _find_overwritten reports a package with a stand-in.
    if version is None and not {*_SAME_FOLDER.get(name, ())} & {
      *found.versions
    }:
      yield Problem(f"{name} is not installed.", fix)
    elif version and not specifier.contains(version, prereleases=True):
      yield Problem(f"{name} {version} is installed, not {specifier}.", fix)


def _find_failed_imports(found: Installation) -> Iterator[Problem]:
  # One cause often breaks several imports: it is one problem.
  modules_of_error = {}
  for module, error in found.import_errors.items():
    modules_of_error.setdefault(error, []).append(module)
  for error, modules in modules_of_error.items():
    match = re.search(r"No module named '([^'.]+)", error)
    absent = match[1].replace("_", "-") if match else ""
    absent = _PACKAGE_OF_MODULE.get(absent, absent)
    if absent in found.versions:
      absent = ""
    if absent in found.specifiers:
      continue  # _find_unmet_requirements reports it
    package = _PACKAGE_OF_IMPORT[modules[0]]
    version = found.versions.get(package)
    pinned = f"{package}=={version}" if version else package
    if absent:
      fix = f"{found.pip} install {absent}"
    elif re.search("(?i)protobuf|Descriptors cannot be created", error):
      # Generated code is newer than the library that reads it.
      fix = f'{found.pip} install --upgrade "protobuf>=6.31.1,<8"'
    elif "SIGILL" in error:
      fix = "use a CPU with AVX2, for which TensorFlow's wheels are compiled"
    else:
      fix = f"{found.pip} install --force-reinstall --no-deps {pinned}"
    yield Problem(f"import of {', '.join(modules)} fails: {error}", fix)


def find_slowness(machine: Machine) -> list[Problem]:
  """Returns what will make a run slow, the most expensive first."""
  problems = []
  # With emulated bfloat16 a product is a float32 product and two passes of
  # rounding.
  if machine.asked_dtype == "bfloat16" and not machine.native_bfloat16:
    problems.append(
      Problem(
        f'ACTIVATION_DTYPE = "bfloat16" ({machine.asked_where}): this machine '
        "has no native bfloat16; it computes in float32 and rounds.",
        "--gin.ACTIVATION_DTYPE='\"auto\"'",
      )
    )
  count = len(machine.cores)
  # A container may see more cores than its quota of time pays for.
  if machine.quota is not None and machine.quota < count:
    count = max(1, int(machine.quota))
  if machine.threads > count:
    ours = ",".join(map(str, machine.cores[:count]))
    problems.append(
      Problem(
        f"{machine.threads} threads would share {count} "
        f"core{'s' if count > 1 else ''}, and wait for each other.",
        "unset TF_NUM_INTRAOP_THREADS OMP_NUM_THREADS, and begin the command "
        f"with taskset -c {ours}",
      )
    )
  return problems
