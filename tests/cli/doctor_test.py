# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf doctor` reports this machine, and survives crashing libraries."""

import dataclasses
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from palm_mtf.cli import doctor
from palm_mtf.cli.doctor import Installation, find_faults, find_slowness

ROOT = Path(__file__).resolve().parent.parent.parent


def _run_doctor(*flags: str, **environment: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-m", "palm_mtf", "doctor", *flags],
    capture_output=True,
    check=False,
    cwd=ROOT,
    env={**os.environ, **environment},
    text=True,
  )


@pytest.mark.slow
def test_the_report_agrees_with_this_environment():
  result = _run_doctor("--json", "--measure")
  report = json.loads(result.stdout)
  assert result.returncode == (2 if report["problems"] else 0)
  # Only SeqIO's editdistance may be missing: it has no wheel for Python 3.13.
  for problem in report["problems"]:
    assert problem["what"] == "editdistance is not installed."
  assert report["packages"]["tensorflow"] == metadata.version("tensorflow")
  assert report["python"].startswith(sys.version.split()[0])
  assert report["cores"] == len(os.sched_getaffinity(0))
  assert "CPU:0" in report["devices"]
  assert '"auto" is ' in report["bfloat16"]
  names = ["bfloat16 products", "float32 products", "memory read"]
  rates = report.get("measured", {})  # only without problems
  assert sorted(rates) == ([] if report["problems"] else names)
  for text in rates.values():
    number, unit = text.replace(",", "").split()
    assert unit in ("GFLOP/s", "GB/s")
    assert 0.1 < float(number) < 1e6


def test_a_library_that_crashes_is_reported_and_the_rest_is_shown(tmp_path):
  # This module shadows TensorFlow, and crashes as a wheel for another CPU does.
  (tmp_path / "tensorflow.py").write_text(
    "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
  )
  result = _run_doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
  assert result.returncode == 2
  assert (
    "PROBLEM 1: import of tensorflow fails: killed by SIGILL\n"
    "  fix: use a CPU with AVX2" in result.stdout
  )
  assert "devices:                unknown: TensorFlow was not imported" in (
    result.stdout
  )
  assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize(
  ("why", "line"),
  [
    ("TypeError: not directly.\nIf this\ncall\n", "TypeError: not directly."),
    (
      "ImportError: Traceback (most recent call last):\n  File x\n"
      "ImportError: libx.so: undefined symbol: y\n\nFailed to load.\n",
      "ImportError: libx.so: undefined symbol: y",
    ),
    ("SystemExit: 3\n", "SystemExit: 3"),
  ],
)
def test_the_line_that_names_the_cause_is_reported(why, line):
  assert doctor._find_cause(why) == line


SOUND = Installation(
  python="/env/bin/python",
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


def _with_versions(**changes: str | None) -> Installation:
  """Returns SOUND with other versions; None removes a package."""
  versions = {
    **SOUND.versions,
    **{name.replace("_", "-"): version for name, version in changes.items()},
  }
  return dataclasses.replace(
    SOUND, versions={name: v for name, v in versions.items() if v}
  )


def _asking(requirement: str, found: Installation) -> Installation:
  return dataclasses.replace(
    found, requirements=[*found.requirements, requirement]
  )


PIP = "/env/bin/python -m pip"
GIN = f'{PIP} install "gin-config<0.6,>=0.5.0"'
NO_GIN = "import of palm_mtf._tf fails: No module named 'gin'"


@pytest.mark.parametrize(
  ("found", "problems"),
  [
    *(
      (
        _with_versions(**{other: "9.9"}),
        [
          (
            f"{wanted} {SOUND.versions[wanted]} and {other} 9.9 write over "
            "each other's files.",
            f"{PIP} uninstall -y {wanted} {other} && {PIP} install --no-deps "
            f"{wanted}=={SOUND.versions[wanted]}",
          )
        ],
      )
      for wanted, other in (
        ("tensorflow", "tensorflow-cpu"),
        ("tensorflow", "tf-nightly"),
        ("tensorflow", "tensorflow-rocm"),
        ("seqio", "seqio-nightly"),
        ("tensorflow-datasets", "tfds-nightly"),
      )
    ),
    (
      _with_versions(
        tensorflow=None, tensorflow_cpu="2.21.0", tensorflow_text=None
      ),
      [
        (
          "tensorflow-cpu 2.21.0 stands in for tensorflow, which other "
          "packages ask for by name.",
          f"{PIP} uninstall -y tensorflow-cpu && {PIP} install --no-deps "
          '"tensorflow<2.22,>=2.21"',
        )
      ],
    ),
    (  # as a version of tensorflow-text asks
      _asking(
        "tensorflow<2.21,>=2.20.1", _with_versions(tensorflow_text="2.20.1")
      ),
      [
        (
          "tensorflow 2.21.0 is installed, not <2.21,<2.22,>=2.20.1,>=2.21.",
          f'{PIP} install "tensorflow<2.21,<2.22,>=2.20.1,>=2.21"',
        )
      ],
    ),
    (  # distributions call it ml_dtypes and ml-dtypes
      _asking("ml_dtypes>=0.5,<1", _with_versions(ml_dtypes="0.6.0")),
      [],
    ),
    (
      dataclasses.replace(_with_versions(gin_config=None), import_error=NO_GIN),
      [("gin-config is not installed.", GIN)],
    ),
    (
      _with_versions(gin_config="0.4.1"),
      [("gin-config 0.4.1 is installed, not <0.6,>=0.5.0.", GIN)],
    ),
    # Nothing can read bounds.
    (_with_versions(packaging=None, gin_config="0.4.1"), []),
  ],
)
def test_each_wrong_package_is_named_once_with_its_fix(found, problems):
  assert list(find_faults(found)) == problems


OLD_PROTOBUF = f'{PIP} install --upgrade "protobuf>=6.31.1,<8"'
PROTOBUF_IMPORT = "import of sentencepiece.sentencepiece_model_pb2 fails: "


@pytest.mark.parametrize(
  ("error", "fix"),
  [
    (
      f"{PROTOBUF_IMPORT}google.protobuf.runtime_version.VersionError: Detected"
      " incompatible Protobuf Gencode/Runtime versions when loading x.proto: "
      "gencode 6.33.0 runtime 5.29.5.",
      OLD_PROTOBUF,
    ),
    (
      f"{PROTOBUF_IMPORT}TypeError: Descriptors cannot be created directly.",
      OLD_PROTOBUF,
    ),
    (
      f"{PROTOBUF_IMPORT}ImportError: cannot import name 'runtime_version' from"
      " 'google.protobuf'",
      OLD_PROTOBUF,
    ),
    (
      "import of seqio fails: ModuleNotFoundError: No module named 'clu'",
      f"{PIP} install clu",
    ),
    (
      "import of tensorflow fails: No module named 'google.protobuf'",
      f"{PIP} install protobuf",
    ),
    (
      "import of palm_mtf._tf fails: ImportError: libx.so: undefined symbol: y",
      f"{PIP} install --force-reinstall --no-deps mesh-tensorflow",
    ),
    (
      "import of tensorflow fails: killed by SIGILL",
      "use a CPU with AVX2, for which TensorFlow's wheels are compiled",
    ),
  ],
)
def test_an_import_that_fails_has_a_fix(error, fix):
  (problem,) = find_faults(dataclasses.replace(SOUND, import_error=error))
  assert problem == (error, fix)


@pytest.mark.parametrize(
  ("quota", "threads", "what", "cores"),
  [
    (None, 8, "8 threads would share 4 cores", "0,1,2,3"),
    (2.5, 4, "4 threads would share 2 cores", "0,1"),
    (0.5, 4, "4 threads would share 1 core,", "0"),
  ],
)
def test_fewer_cores_than_threads_are_a_problem(quota, threads, what, cores):
  (problem,) = find_slowness([0, 1, 2, 3], quota, threads)
  assert problem.what.startswith(what)
  assert problem.fix.endswith(f"begin the command with taskset -c {cores}")
  assert find_slowness([0, 1, 2, 3], None, 4) == []
