# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf doctor`: prints versions, devices, and problems with their fixes.

The libraries are imported in a separate process with a time limit, so that a
library that crashes is reported.
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
from palm_mtf.machine import processors
from palm_mtf.machine.activation_dtype import native_bfloat16
from palm_mtf.machine.host_memory import memory_bytes

_logger = logging.getLogger(__name__)

_SHOWN_PACKAGES = (
  *("tensorflow", "mesh-tensorflow", "gin-config", "sentencepiece", "seqio"),
  *("tensorflow-text", "tensorflow-datasets", "protobuf", "numpy", "rich"),
  *("jax", "libtpu", "t5", "tensorboard", "tokenizers"),
)
_SHOWN_CPU_FLAGS = (
  *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
  *("amx_int8", "amx_bf16", "i8mm", "bf16"),
)
# {package: packages that install the same folder, and so overwrite its files}
_SAME_FOLDER = {
  "tensorflow": (
    *("tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu"),
  ),
  "tensorflow-text": ("tensorflow-text-nightly",),
  "tensorflow-datasets": ("tfds-nightly",),
  "seqio": ("seqio-nightly",),
}
# Packages whose requirements doctor checks. tensorflow-text is included because
# it works with only one minor version of TensorFlow.
_REQUIRERS = ("palm_mtf", "seqio", "tensorflow-text")
# {module: package that installs the module}, only where the names differ.
_PACKAGE_OF_MODULE = {
  **{"absl": "absl-py", "gin": "gin-config"},
  **{"google": "protobuf", "tree": "dm-tree"},
}
_IMPORT_SECS = 180
_GIB = 2**30
_ROOT = Path(palm_mtf.__file__).parent.parent

# Prints each module's name before importing the module, so that the last name
# printed is that of the module that fails. At the end, prints the accelerators
# that JAX finds and TensorFlow's devices. sentencepiece_model_pb2 is imported
# to test whether protobuf is recent enough.
_IMPORT_PROGRAM = """
import importlib, sys
sys.path.append(sys.argv[1])
for name in ("tensorflow", "palm_mtf._tf", "sentencepiece",
             "sentencepiece.sentencepiece_model_pb2", "seqio", "jax"):
  print("\\n> importing", name, flush=True)
  importlib.import_module(name)
try:
  found = sys.modules["jax"].devices()
  kinds = [x.device_kind for x in found if x.platform != "cpu"]
  text = ", ".join(f"{kinds.count(x)} {x}" for x in dict.fromkeys(kinds))
except RuntimeError as error:
  text = "JAX cannot use them: " + " ".join(str(error).split())
print("\\n> accelerators", text or "none", flush=True)
devices = sys.modules["tensorflow"].config.list_physical_devices()
print("\\n> devices", ", ".join(x.name for x in devices), flush=True)
"""


class Problem(NamedTuple):
  """A problem, in one line, and a command or advice that fixes the problem."""

  what: str
  fix: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Installation:
  """The Python packages that are installed, and whether they work."""

  python: str  # path of the interpreter, quoted for a shell
  # {normalized name: version} of every installed package.
  versions: Mapping[str, str]
  # Requirements of the packages in _REQUIRERS, in the form of package metadata,
  # such as "numpy<3,>=2.1".
  requirements: Sequence[str] = ()
  # Which import failed and why; "" if none failed.
  import_error: str = ""

  @property
  def pip(self) -> str:
    """Shell command of the pip that installs for this interpreter."""
    return f"{self.python} -m pip"

  @property
  def specifiers(self) -> dict[str, object]:
    """{required package: specifier of the accepted versions}."""
    # If `packaging` is missing, return nothing, so that other checks still
    # work.
    if "packaging" not in self.versions:
      return {}
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = {}
    for each in map(Requirement, self.requirements):
      if each.marker is None or each.marker.evaluate({"extra": ""}):
        name = canonicalize_name(each.name)
        specifier = each.specifier
        found[name] = found[name] & specifier if name in found else specifier
    return found


def main(measure: bool = False, as_json: bool = False) -> int:
  """Prints a description of the machine and the installation, and problems.

  If `measure`, and the packages work, also prints this machine's measured
  FLOP/s of matrix products and bytes/s of memory. Returns the exit code: 2 if
  there are problems, otherwise 0.
  """
  _logger.info("importing the libraries ...")
  import_error, devices = _try_imports()
  installed = Installation(
    python=shlex.quote(sys.executable),
    versions={
      re.sub(r"[-_.]+", "-", each.name).lower(): each.version
      for each in metadata.distributions()
      if each.name
    },
    requirements=[x for name in _REQUIRERS for x in _requirements(name)],
    import_error=import_error,
  )
  found = _describe(installed.versions, devices)
  problems = find_faults(installed)
  if measure and not problems:
    found["measured"] = _measure_rates()
  problems += find_slowness(
    processors.visible_cores(),
    processors.core_quota(),
    processors.thread_count(os.environ),
  )
  if as_json:
    print(dumps({**found, "problems": [each._asdict() for each in problems]}))
  else:
    print(_report(found, problems))
  return 2 if problems else 0


def _report(found: Mapping[str, object], problems: list[Problem]) -> str:
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


def _measure_rates() -> dict[str, str]:
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


def _describe(versions: Mapping[str, str], devices: Mapping[str, str]) -> dict:
  flags, bfloat16 = processors.cpu_flags(), native_bfloat16()
  shown = [name for name in _SHOWN_CPU_FLAGS if name in flags]
  total, available = memory_bytes()
  free = shutil.disk_usage(".").free
  return {
    "palm_mtf": f"{palm_mtf.__version__} in {_ROOT / 'palm_mtf'}",
    "python": f"{platform.python_version()} ({sys.executable})",
    "platform": platform.platform(),
    "packages": {name: versions.get(name, "-") for name in _SHOWN_PACKAGES},
    "cpu": processors.cpu_name(),
    "cores": len(processors.visible_cores()),
    "cpu features": " ".join(shown) or "none that matter",
    **({"amx": amx} if (amx := processors.describe_amx()) else {}),
    "bfloat16": f'native ({bfloat16}): "auto" is "bfloat16"'
    if bfloat16
    else 'not native: "auto" is "float32"',
    "memory": f"{total / _GIB:.1f} GiB, {available / _GIB:.1f} GiB available",
    "disk": f"{free / _GIB:.1f} GiB free in the current folder",
    "devices": devices.get("devices", "unknown: TensorFlow was not imported"),
    "accelerators": devices.get("accelerators", "unknown"),
  }


def _requirements(package: str) -> list[str]:
  try:
    return metadata.requires(package) or []
  except metadata.PackageNotFoundError:  # a checkout that is not installed
    return []


def _try_imports() -> tuple[str, dict[str, str]]:
  """Returns the failure of an import ("" if none), and the devices found.

  Keys are "devices" for TensorFlow's devices, and "accelerators" for JAX's.
  """
  try:
    result = subprocess.run(
      [sys.executable, "-c", _IMPORT_PROGRAM, _ROOT],
      capture_output=True,
      check=False,
      env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
      timeout=_IMPORT_SECS,
    )
  except subprocess.TimeoutExpired as error:
    output, cause = error.stdout or b"", f"takes over {_IMPORT_SECS} seconds"
  else:
    output, code = result.stdout, result.returncode
    if code < 0:
      cause = f"killed by {signal.Signals(-code).name}"
    else:
      cause = _find_cause(result.stderr.decode(errors="replace"))
  said = re.findall(r"^> (\w+) (.*)$", output.decode(errors="replace"), re.M)
  what, names = said[-1] if said else ("importing", "the libraries")
  if what == "devices":
    return "", dict(said[-2:])
  return f"import of {names} fails: {cause}", {}


def _find_cause(why: str) -> str:
  """Returns the last exception, or else the last line, of a child's stderr."""
  lines = [line.strip() for line in why.splitlines() if line.strip()]
  named = [x for x in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", x)]
  return (named or lines or ["no reason given"])[-1]


def find_faults(found: Installation) -> list[Problem]:
  """Returns the problems of an installation, causes before consequences."""
  problems = [*_find_overwritten(found), *_find_unmet_requirements(found)]
  # Report a failed import only if there is no other problem, because the
  # failure is usually a consequence of another problem.
  if found.import_error and not problems:
    problems = [_explain_import(found)]
  return problems


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
    # Uninstall all these packages, because uninstalling only one would remove
    # files that the others need.
    yield Problem(
      f"{listed} {why}.",
      f"{found.pip} uninstall -y {' '.join(present)} && "
      f"{found.pip} install --no-deps {right}",
    )


def _find_unmet_requirements(found: Installation) -> Iterator[Problem]:
  # `pip check` would find the same faults, but suggests no commands.
  for name, specifier in found.specifiers.items():
    version = found.versions.get(name)
    fix = f'{found.pip} install "{name}{specifier}"'
    # If another package has installed the folder of the missing package,
    # `_find_overwritten` reports that instead.
    if version is None and not {*_SAME_FOLDER.get(name, ())} & {
      *found.versions
    }:
      yield Problem(f"{name} is not installed.", fix)
    elif version and not specifier.contains(version, prereleases=True):
      yield Problem(f"{name} {version} is installed, not {specifier}.", fix)


def _explain_import(found: Installation) -> Problem:
  error = found.import_error
  if match := re.search(r"No module named '([^'.]+)", error):
    package = _PACKAGE_OF_MODULE.get(match[1], match[1].replace("_", "-"))
    fix = f"{found.pip} install {package}"
  elif re.search("(?i)protobuf|Descriptors cannot be created", error):
    # The error says that protobuf is too old for another package's code.
    fix = f'{found.pip} install --upgrade "protobuf>=6.31.1,<8"'
  elif "SIGILL" in error:
    fix = "use a CPU with AVX2, for which TensorFlow's wheels are compiled"
  else:
    module = error.removeprefix("import of ").partition(" ")[0]
    package = "mesh-tensorflow" if module == "palm_mtf._tf" else module
    package = package.partition(".")[0]
    fix = f"{found.pip} install --force-reinstall --no-deps {package}"
  return Problem(error, fix)


def find_slowness(
  cores: Sequence[int], quota: float | None, threads: int
) -> list[Problem]:
  """Returns the problems that make a run slow.

  Args:
    cores: indices of the CPU cores that this process may use.
    quota: CPU quota of the container, in cores; None for no limit.
    threads: number of threads that compute one matrix product.
  """
  # A container may see more cores than its quota of CPU time lets it use.
  count = min(len(cores), max(1, int(quota or len(cores))))
  if threads <= count:
    return []
  return [
    Problem(
      f"{threads} threads would share {count} core{'s' if count > 1 else ''}, "
      "and wait for each other.",
      "unset TF_NUM_INTRAOP_THREADS OMP_NUM_THREADS, and begin the command "
      f"with taskset -c {','.join(map(str, cores[:count]))}",
    )
  ]
