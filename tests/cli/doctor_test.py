# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf doctor` reports what is here, and survives what crashes."""

import dataclasses
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from palm_mtf.cli import doctor
from palm_mtf.cli.doctor import (
  Installation,
  Machine,
  Problem,
  find_faults,
  find_slowness,
)

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


def test_the_report_agrees_with_this_environment():
  result = _run_doctor("--json")
  report = json.loads(result.stdout)
  assert result.returncode == (2 if report["problems"] else 0)
  # Only SeqIO may be missing a part: editdistance has no wheel for 3.13.
  for problem in report["problems"]:
    assert "No module named 'editdistance'" in problem["what"]
  assert report["packages"]["tensorflow"] == metadata.version("tensorflow")
  assert report["python"].startswith(sys.version.split()[0])
  assert report["cores"] == len(os.sched_getaffinity(0))
  assert "CPU:0" in report["devices"]
  assert '"auto" is ' in report["bfloat16"]


def test_measured_rates_are_those_a_machine_can_have():
  result = subprocess.run(
    [sys.executable, "-m", "palm_mtf.rates.measure"],
    capture_output=True,
    check=True,
    cwd=ROOT,
  )
  rates = json.loads(result.stdout)
  assert sorted(rates) == [
    "bfloat16 products",
    "float32 products",
    "memory read",
  ]
  for text in rates.values():
    number, unit = text.replace(",", "").split()
    assert unit in ("GFLOP/s", "GB/s")
    assert 0.1 < float(number) < 1e6


def test_a_configuration_that_asks_for_bfloat16_is_read(tmp_path):
  (tmp_path / "mine.gin").write_text(
    "include 'models/palm_tiny.gin'\nACTIVATION_DTYPE = 'bfloat16'\n"
  )
  dtype, where = doctor._asked_dtype([str(tmp_path / "mine.gin")])
  assert (dtype, where.endswith("mine.gin:2")) == ("bfloat16", True)
  assert doctor._asked_dtype(["recipes/quickstart.gin"])[0] == "auto"
  # A TPU multiplies it, whatever this CPU does.
  files = ["recipes/palm_8b.gin", "layouts/tpu_v3_32.gin"]
  assert doctor._asked_dtype(files)[0] == "auto"


def test_a_library_that_crashes_is_reported_and_the_rest_is_shown(tmp_path):
  # Found before the real one, and dies as a wheel for another CPU does.
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


def test_the_module_that_was_being_imported_is_blamed_for_the_end():
  output = "\n".join(
    [
      '{"importing": "tensorflow"}',
      "a library's own noise",
      '{"imported": "tensorflow"}',
      '{"importing": "seqio"}',
    ]
  )
  assert doctor.read_imports(output, "killed by SIGSEGV") == (
    {"seqio": "killed by SIGSEGV"},
    [],
  )


@pytest.mark.parametrize(
  ("why", "line"),
  [
    (
      "TypeError: Descriptors cannot be created directly.\nIf this call came "
      "from a _pb2.py file, regenerate it.\nhttps://example.org\n",
      "TypeError: Descriptors cannot be created directly.",
    ),
    (
      "ImportError: Traceback (most recent call last):\n  File x\n"
      "ImportError: libx.so: undefined symbol: y\n\nFailed to load.\n",
      "ImportError: libx.so: undefined symbol: y",
    ),
    ("SystemExit: 3\n", "SystemExit: 3"),
  ],
  ids=["first", "nested", "exit"],
)
def test_the_line_that_names_the_cause_is_reported(why, line):
  output = "\n".join(
    json.dumps(said)
    for said in (
      {"importing": "seqio"},
      {"failed": "seqio", "why": why},
      {"devices": ["/physical_device:CPU:0"]},
    )
  )
  assert doctor.read_imports(output, "exit code 0") == (
    {"seqio": line},
    ["/physical_device:CPU:0"],
  )


def test_problems_are_printed_with_their_fixes():
  report = doctor._report(
    {"cores": 2, "packages": {"numpy": "2.4.6"}},
    [Problem("seqio is not installed.", "pip install seqio")],
  )
  assert report == (
    "cores:                  2\n"
    "packages:\n"
    "  numpy                 2.4.6\n"
    "\n"
    "PROBLEM 1: seqio is not installed.\n"
    "  fix: pip install seqio"
  )


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
  """SOUND with other versions; None takes a package away."""
  versions = {
    **SOUND.versions,
    **{name.replace("_", "-"): version for name, version in changes.items()},
  }
  return dataclasses.replace(
    SOUND, versions={name: v for name, v in versions.items() if v}
  )


def _with_imports(**errors: str) -> Installation:
  return dataclasses.replace(SOUND, import_errors=errors)


def _only(problems: list[Problem]) -> Problem:
  (problem,) = problems
  return problem


@pytest.mark.parametrize(
  ("wanted", "other"),
  [
    ("tensorflow", "tensorflow_cpu"),
    ("tensorflow", "tf_nightly"),
    ("tensorflow", "tensorflow_rocm"),
    ("seqio", "seqio_nightly"),
    ("tensorflow_datasets", "tfds_nightly"),
  ],
)
def test_two_packages_in_one_folder_are_both_removed_and_one_comes_back(
  wanted, other
):
  wanted, name = wanted.replace("_", "-"), other.replace("_", "-")
  version = SOUND.versions[wanted]
  assert _only(find_faults(_with_versions(**{other: "9.9"}))) == (
    f"{wanted} {version} and {name} 9.9 write over each other's files.",
    f"/env/bin/python -m pip uninstall -y {wanted} {name} && "
    f"/env/bin/python -m pip install --no-deps {wanted}=={version}",
  )


def test_tensorflow_cpu_alone_is_replaced_and_not_reported_twice():
  found = _with_versions(
    tensorflow=None, tensorflow_cpu="2.21.0", tensorflow_text=None
  )
  assert _only(find_faults(found)) == (
    "tensorflow-cpu 2.21.0 stands in for tensorflow, which other packages ask "
    "for by name.",
    "/env/bin/python -m pip uninstall -y tensorflow-cpu && "
    '/env/bin/python -m pip install --no-deps "tensorflow<2.22,>=2.21"',
  )


def test_a_tensorflow_text_of_another_tensorflow_is_named():
  found = _with_versions(tensorflow_text="2.20.1")
  assert _only(find_faults(found)) == (
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
  assert list(find_faults(found)) == []


def test_a_missing_package_is_named_once_with_the_versions_that_work():
  found = dataclasses.replace(
    _with_versions(gin_config=None),
    import_errors={
      "palm_mtf._tf": "ModuleNotFoundError: No module named 'gin'"
    },
  )
  assert _only(find_faults(found)) == (
    "gin-config is not installed.",
    '/env/bin/python -m pip install "gin-config<0.6,>=0.5.0"',
  )


def test_a_version_out_of_bounds_is_named_with_the_bounds():
  found = _with_versions(gin_config="0.4.1")
  assert _only(find_faults(found)) == (
    "gin-config 0.4.1 is installed, not <0.6,>=0.5.0.",
    '/env/bin/python -m pip install "gin-config<0.6,>=0.5.0"',
  )


def test_bounds_are_left_out_where_nothing_can_read_them():
  found = _with_versions(packaging=None, gin_config="0.4.1")
  assert find_faults(found) == []


@pytest.mark.parametrize(
  "error",
  [
    (
      "google.protobuf.runtime_version.VersionError: Detected incompatible "
      "Protobuf Gencode/Runtime versions when loading x.proto: gencode 6.33.0 "
      "runtime 5.29.5."
    ),
    "TypeError: Descriptors cannot be created directly.",
    "ImportError: cannot import name 'runtime_version' from 'google.protobuf'",
  ],
  ids=["gencode", "descriptors", "runtime_version"],
)
def test_a_protobuf_older_than_generated_code_is_upgraded(error):
  module = "sentencepiece.sentencepiece_model_pb2"
  problem = _only(find_faults(_with_imports(**{module: error})))
  assert problem.what == f"import of {module} fails: {error}"
  assert problem.fix == (
    '/env/bin/python -m pip install --upgrade "protobuf>=6.31.1,<8"'
  )


def test_a_missing_module_is_installed():
  error = "ModuleNotFoundError: No module named 'editdistance'"
  problem = _only(find_faults(_with_imports(seqio=error)))
  assert problem.fix == "/env/bin/python -m pip install editdistance"


def test_modules_that_fail_for_one_reason_are_one_problem():
  error = "ImportError: libx.so: undefined symbol: y"
  found = _with_imports(tensorflow=error, seqio=error)
  assert _only(find_faults(found)) == (
    f"import of tensorflow, seqio fails: {error}",
    "/env/bin/python -m pip install --force-reinstall --no-deps "
    "tensorflow==2.21.0",
  )


def test_a_crash_on_an_old_cpu_is_told_from_a_broken_installation():
  problem = _only(find_faults(_with_imports(tensorflow="killed by SIGILL")))
  assert problem == (
    "import of tensorflow fails: killed by SIGILL",
    "use a CPU with AVX2, for which TensorFlow's wheels are compiled",
  )


FAST = Machine(
  native_bfloat16="avx512_bf16",
  asked_dtype="bfloat16",
  asked_where="mine.gin:3",
  cores=[0, 1, 2, 3],
  threads=4,
)


def _only_slowness(**changes):
  (problem,) = find_slowness(dataclasses.replace(FAST, **changes))
  return problem


def test_a_fast_machine_has_no_problem():
  assert find_slowness(FAST) == []


def test_bfloat16_that_is_asked_for_and_not_native_is_one():
  problem = _only_slowness(native_bfloat16="")
  assert problem.what == (
    'ACTIVATION_DTYPE = "bfloat16" (mine.gin:3): this machine has no native '
    "bfloat16; it computes in float32 and rounds."
  )
  assert problem.fix == "--gin.ACTIVATION_DTYPE='\"auto\"'"


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_machine_without_bfloat16_suits_what_does_not_ask_for_it(dtype):
  slow = dataclasses.replace(FAST, native_bfloat16="", asked_dtype=dtype)
  assert find_slowness(slow) == []


@pytest.mark.parametrize(
  ("changes", "what", "cores"),
  [
    ({"threads": 8}, "8 threads would share 4 cores", "0,1,2,3"),
    ({"quota": 2.5}, "4 threads would share 2 cores", "0,1"),
    ({"quota": 0.5}, "4 threads would share 1 core,", "0"),
  ],
)
def test_fewer_cores_than_threads_are_one(changes, what, cores):
  problem = _only_slowness(**changes)
  assert problem.what.startswith(what)
  assert problem.fix.endswith(f"begin the command with taskset -c {cores}")
