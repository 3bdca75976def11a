# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an installation, and the command that mends it.

A pure function of what was found: doctor.py looks at the machine, imports the
libraries in a process of their own, and prints. What is wrong with the machine
is in slowness.py.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

# As in setup.py.
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)

# Packages that write into one folder: only the first of each may be installed.
_SAME_FOLDER = (
  (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-intel",
    "tensorflow-macos",
    "tensorflow-rocm",
    "tf-nightly",
    "tf-nightly-cpu",
  ),
  ("tensorflow-text", "tensorflow-text-nightly"),
  ("tensorflow-datasets", "tfds-nightly"),
  ("seqio", "seqio-nightly"),
)

# The packages to install again when a module fails to import.
IMPORTS = {
  "tensorflow": "tensorflow",
  "palm_mtf._tf": "mesh-tensorflow",
  "sentencepiece": "sentencepiece",
  # Generated code, the first to refuse a protobuf that is too old.
  "sentencepiece.sentencepiece_model_pb2": "sentencepiece",
  "seqio": "seqio",
}

_PACKAGE_OF_MODULE = {
  "absl": "absl-py",
  "gin": "gin-config",
  "google": "protobuf",
  "tree": "dm-tree",
}


class Problem(NamedTuple):
  """What is wrong, in one line, and the command or the act that mends it."""

  what: str
  fix: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
  """What was found.

  Attributes:
    python: the interpreter, as one types it.
    python_version: its major and minor number.
    versions: version of every installed package, by its normalized name.
    requirements: requirements of palm_mtf, as its metadata states them; empty
      in a checkout that is not installed.
    import_errors: the line that says why, for each of IMPORTS that failed.
    gin_error: why the gin folder was not found, or "".
  """

  python: str
  python_version: tuple[int, int]
  versions: Mapping[str, str]
  requirements: Sequence[str] = ()
  import_errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
  gin_error: str = ""

  @property
  def pip(self) -> str:
    """The pip that installs for this interpreter."""
    return f"{self.python} -m pip"


def diagnose(found: Environment) -> list[Problem]:
  """Returns every problem, causes before their consequences."""
  return [
    *_wrong_python(found),
    *_written_over(found),
    *_wrong_tensorflow_text(found),
    *_unmet_requirements(found),
    *_failed_imports(found),
    *_missing_gin_folder(found),
  ]


def _wrong_python(found: Environment) -> Iterator[Problem]:
  if not OLDEST_PYTHON <= found.python_version <= NEWEST_PYTHON:
    low, high = (f"{v[0]}.{v[1]}" for v in (OLDEST_PYTHON, NEWEST_PYTHON))
    here = "{}.{}".format(*found.python_version)
    yield Problem(
      f"Python {here} is not supported: palm_mtf needs {low} to {high}.",
      f"make venv PYTHON=python{high}",
    )


def _written_over(found: Environment) -> Iterator[Problem]:
  for wanted, *others in _SAME_FOLDER:
    present = [x for x in (wanted, *others) if x in found.versions]
    if not set(present) & set(others):
      continue
    listed = " and ".join(f"{x} {found.versions[x]}" for x in present)
    why = (
      "write over each other's files"
      if len(present) > 1
      else (f"stands in for {wanted}, which other packages ask for by name")
    )
    version = found.versions.get(wanted)
    pinned = f"{wanted}=={version}" if version else wanted
    # All go: uninstalling one takes files of the other along.
    yield Problem(
      f"{listed} {why}.",
      f"{found.pip} uninstall -y {' '.join(present)} && "
      f"{found.pip} install --no-deps {_specified(found, pinned)}",
    )


def _wrong_tensorflow_text(found: Environment) -> Iterator[Problem]:
  # Its operations are linked against one minor version's ABI.
  text = found.versions.get("tensorflow-text")
  tensorflow = found.versions.get("tensorflow")
  if not text or not tensorflow or _minor(text) == _minor(tensorflow):
    return
  yield Problem(
    f"tensorflow-text {text} is compiled for TensorFlow {_minor(text)} and "
    f"cannot be loaded by tensorflow {tensorflow}.",
    f'{found.pip} install --no-deps "tensorflow-text=={_minor(tensorflow)}.*"',
  )


def _unmet_requirements(found: Environment) -> Iterator[Problem]:
  # Each requirement with its fix; `pip check` names no fix, and does
  # not know of packages that write into one folder.
  for name, specifier in _requirements(found).items():
    version = found.versions.get(name)
    fix = f'{found.pip} install "{name}{specifier}"'
    if version is None and not _has_stand_in(found, name):
      yield Problem(f"{name} is not installed.", fix)
    elif version and not specifier.contains(version, prereleases=True):
      yield Problem(f"{name} {version} is installed, not {specifier}.", fix)


def _failed_imports(found: Environment) -> Iterator[Problem]:
  # One cause often breaks several imports: it is one problem.
  modules_of_error = {}
  for module, error in found.import_errors.items():
    modules_of_error.setdefault(error, []).append(module)
  for error, modules in modules_of_error.items():
    absent = _absent_package(found, error)
    if absent and absent in _requirements(found):
      continue  # said already
    yield Problem(
      f"import of {', '.join(modules)} fails: {error}",
      _import_fix(found, error, IMPORTS[modules[0]], absent),
    )


def _import_fix(
  found: Environment, error: str, package: str, absent: str
) -> str:
  if absent:
    compiler = absent == "editdistance" and found.python_version >= (3, 13)
    note = " (it has no wheel for 3.13: needs a C++ compiler)"
    return f"{found.pip} install {absent}{note if compiler else ''}"
  generated = re.search(r"gencode (?:version )?(\d+)(\.\d+\.\d+)", error)
  if generated:
    # A runtime serves generated code of its own and the previous major version.
    major = int(generated[1])
    bounds = f">={major}{generated[2]},<{major + 2}"
    return f'{found.pip} install "protobuf{bounds}"'
  # Protobuf's other refusals do not say which version would do.
  if "protobuf" in error or "Descriptors cannot be created" in error:
    return f'{found.pip} install --upgrade "protobuf>=6.31.1,<8"'
  # An illegal instruction: the wheel is compiled for a newer CPU.
  if "SIGILL" in error:
    return "use a CPU with AVX2, for which TensorFlow's wheels are compiled"
  version = found.versions.get(package)
  pinned = f"{package}=={version}" if version else package
  return f"{found.pip} install --force-reinstall --no-deps {pinned}"


def _missing_gin_folder(found: Environment) -> Iterator[Problem]:
  if found.gin_error:
    yield Problem(
      found.gin_error,
      f"{found.pip} install --force-reinstall --no-deps palm_mtf, or, in a "
      "checkout, git checkout gin",
    )


def _requirements(found: Environment) -> dict[str, object]:
  """Returns the specifier of each package that palm_mtf asks for here."""
  # A broken installation may lack even this; the other checks do without.
  if "packaging" not in found.versions:
    return {}
  from packaging.requirements import Requirement
  from packaging.utils import canonicalize_name

  parsed = map(Requirement, found.requirements)
  return {
    canonicalize_name(each.name): each.specifier
    for each in parsed
    if each.marker is None or each.marker.evaluate({"extra": ""})
  }


def _specified(found: Environment, pinned: str) -> str:
  """Adds to a bare package name the versions that palm_mtf asks for."""
  specifier = _requirements(found).get(pinned)
  return f'"{pinned}{specifier}"' if specifier else pinned


def _has_stand_in(found: Environment, name: str) -> bool:
  """Whether `_written_over` has said already what to do about `name`."""
  return any(
    name == wanted and set(others) & set(found.versions)
    for wanted, *others in _SAME_FOLDER
  )


def _absent_package(found: Environment, error: str) -> str:
  """Returns the package whose absence `error` names, or ""."""
  match = re.search(r"No module named '([^'.]+)", error)
  if not match:
    return ""
  package = _PACKAGE_OF_MODULE.get(match[1], match[1].replace("_", "-"))
  return "" if package in found.versions else package


def _minor(version: str) -> str:
  return ".".join(version.split(".")[:2])
