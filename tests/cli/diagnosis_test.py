# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Each thing that can be wrong is named, with the command that mends it."""

import dataclasses

import pytest

from palm_mtf.cli.diagnosis import Environment, Problem, diagnose

SOUND = Environment(
  python="/env/bin/python",
  python_version=(3, 11),
  versions={
    "gin-config": "0.5.0",
    "packaging": "26.3",
    "seqio": "0.0.20",
    "tensorflow": "2.21.0",
    "tensorflow-datasets": "4.9.10",
    "tensorflow-text": "2.21.1",
  },
  requirements=[
    "gin-config<0.6,>=0.5.0",
    "seqio<0.1,>=0.0.20",
    "tensorflow<2.22,>=2.21",
    'nothing-here>=1; extra == "test"',
    'nor-here>=1; python_version < "3"',
  ],
)


def _with_versions(**changes: str | None) -> Environment:
  """SOUND with other versions; None takes a package away."""
  versions = {
    **SOUND.versions,
    **{name.replace("_", "-"): version for name, version in changes.items()},
  }
  return dataclasses.replace(
    SOUND, versions={name: v for name, v in versions.items() if v}
  )


def _with_imports(**errors: str) -> Environment:
  return dataclasses.replace(SOUND, import_errors=errors)


def _only(problems: list[Problem]) -> Problem:
  (problem,) = problems
  return problem


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (2, 7)])
def test_an_unsupported_python_is_named(version):
  found = dataclasses.replace(SOUND, python_version=version)
  assert _only(diagnose(found)) == (
    f"Python {version[0]}.{version[1]} is not supported: palm_mtf needs 3.11 "
    "to 3.13.",
    "make venv PYTHON=python3.13",
  )


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13)])
def test_a_sound_environment_has_no_problem_on_supported_pythons(version):
  assert diagnose(dataclasses.replace(SOUND, python_version=version)) == []


@pytest.mark.parametrize(
  ("wanted", "other"),
  [
    ("tensorflow", "tensorflow_cpu"),
    ("tensorflow", "tf_nightly"),
    ("tensorflow", "tensorflow_intel"),
    ("seqio", "seqio_nightly"),
    ("tensorflow_datasets", "tfds_nightly"),
  ],
)
def test_two_packages_in_one_folder_are_both_removed_and_one_comes_back(
  wanted, other
):
  wanted, name = wanted.replace("_", "-"), other.replace("_", "-")
  version = SOUND.versions[wanted]
  assert _only(diagnose(_with_versions(**{other: "9.9"}))) == (
    f"{wanted} {version} and {name} 9.9 write over each other's files.",
    f"/env/bin/python -m pip uninstall -y {wanted} {name} && "
    f"/env/bin/python -m pip install --no-deps {wanted}=={version}",
  )


def test_tensorflow_cpu_alone_is_replaced_and_not_reported_twice():
  found = _with_versions(
    tensorflow=None, tensorflow_cpu="2.21.0", tensorflow_text=None
  )
  assert _only(diagnose(found)) == (
    "tensorflow-cpu 2.21.0 stands in for tensorflow, which other packages ask "
    "for by name.",
    "/env/bin/python -m pip uninstall -y tensorflow-cpu && "
    '/env/bin/python -m pip install --no-deps "tensorflow<2.22,>=2.21"',
  )


def test_a_tensorflow_text_of_another_tensorflow_is_named():
  found = _with_versions(tensorflow_text="2.20.1")
  assert _only(diagnose(found)) == (
    "tensorflow-text 2.20.1 is compiled for TensorFlow 2.20 and cannot be "
    "loaded by tensorflow 2.21.0.",
    '/env/bin/python -m pip install --no-deps "tensorflow-text==2.21.*"',
  )


def test_a_package_has_any_spelling_of_its_name():
  """Distributions call it ml_dtypes and ml-dtypes."""
  asked = [*SOUND.requirements, "ml_dtypes>=0.5,<1"]
  found = dataclasses.replace(
    _with_versions(ml_dtypes="0.6.0"), requirements=asked
  )
  assert list(diagnose(found)) == []


def test_a_missing_package_is_named_once_with_the_versions_that_work():
  found = dataclasses.replace(
    _with_versions(gin_config=None),
    import_errors={
      "palm_mtf._tf": "ModuleNotFoundError: No module named 'gin'"
    },
  )
  assert _only(diagnose(found)) == (
    "gin-config is not installed.",
    '/env/bin/python -m pip install "gin-config<0.6,>=0.5.0"',
  )


def test_a_version_out_of_bounds_is_named_with_the_bounds():
  found = _with_versions(gin_config="0.4.1")
  assert _only(diagnose(found)) == (
    "gin-config 0.4.1 is installed, not <0.6,>=0.5.0.",
    '/env/bin/python -m pip install "gin-config<0.6,>=0.5.0"',
  )


def test_bounds_are_left_out_where_nothing_can_read_them():
  found = _with_versions(packaging=None, gin_config="0.4.1")
  assert diagnose(found) == []


@pytest.mark.parametrize(
  ("error", "bounds"),
  [
    (
      "google.protobuf.runtime_version.VersionError: Detected incompatible "
      "Protobuf Gencode/Runtime versions when loading x.proto: gencode 6.33.0 "
      "runtime 5.29.5.",
      ">=6.33.0,<8",
    ),
    ("TypeError: Descriptors cannot be created directly.", ">=6.31.1,<8"),
    (
      "ImportError: cannot import name 'runtime_version' from "
      "'google.protobuf'",
      ">=6.31.1,<8",
    ),
  ],
  ids=["gencode", "descriptors", "runtime_version"],
)
def test_a_protobuf_older_than_generated_code_is_upgraded(error, bounds):
  module = "sentencepiece.sentencepiece_model_pb2"
  problem = _only(diagnose(_with_imports(**{module: error})))
  assert problem.what == f"import of {module} fails: {error}"
  assert problem.fix.startswith("/env/bin/python -m pip install ")
  assert problem.fix.endswith(f'"protobuf{bounds}"')


def test_modules_that_fail_for_one_reason_are_one_problem():
  error = "ImportError: libx.so: undefined symbol: y"
  found = _with_imports(tensorflow=error, seqio=error)
  assert _only(diagnose(found)) == (
    f"import of tensorflow, seqio fails: {error}",
    "/env/bin/python -m pip install --force-reinstall --no-deps "
    "tensorflow==2.21.0",
  )


@pytest.mark.parametrize(
  ("python_version", "note"),
  [
    ((3, 12), ""),
    ((3, 13), " (it has no wheel for 3.13: needs a C++ compiler)"),
  ],
)
def test_a_missing_module_is_installed(python_version, note):
  found = dataclasses.replace(
    _with_imports(seqio="ModuleNotFoundError: No module named 'editdistance'"),
    python_version=python_version,
  )
  fix = f"/env/bin/python -m pip install editdistance{note}"
  assert _only(diagnose(found)).fix == fix


def test_a_crash_on_an_old_cpu_is_told_from_a_broken_installation():
  problem = _only(diagnose(_with_imports(tensorflow="killed by SIGILL")))
  assert problem == (
    "import of tensorflow fails: killed by SIGILL",
    "use a CPU with AVX2, for which TensorFlow's wheels are compiled",
  )


def test_a_missing_gin_folder_is_named():
  error = "the gin folder is missing from /x: install palm_mtf again."
  found = dataclasses.replace(SOUND, gin_error=error)
  problem = _only(diagnose(found))
  assert problem.what == error
  assert "install --force-reinstall --no-deps palm_mtf" in problem.fix


def test_causes_come_before_their_consequences():
  found = dataclasses.replace(
    _with_versions(tensorflow_cpu="2.21.0"),
    import_errors={"tensorflow": "killed by SIGSEGV"},
    gin_error="the gin folder is missing.",
  )
  written_over, failed, missing = diagnose(found)
  assert "write over" in written_over.what
  assert "SIGSEGV" in failed.what
  assert "gin folder" in missing.what
