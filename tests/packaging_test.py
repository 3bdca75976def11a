# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The package, its gin folder and tasks are installed, and nothing else."""

import email
import email.message
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.cases import needs_t5

ROOT = Path(__file__).resolve().parent.parent
GIN_FILES = sorted(
  str(path.relative_to(ROOT))
  for ending in ("gin", "py")  # folders of gin files are packages
  for path in (ROOT / "gin").rglob(f"*.{ending}")
)
TASKS = sorted((ROOT / "tasks").glob("*.py"))
LOCKED_EXTRAS = [
  f'extra == "{x}"' for x in ("gguf", "report", "serve", "t5", "test")
]
LOCKS = ["requirements.lock", "requirements-test.lock", "requirements-tpu.lock"]


def _run(*command: str, **keywords) -> str:
  """Returns stdout; on failure shows the command's output."""
  result = subprocess.run(
    command, capture_output=True, text=True, check=False, **keywords
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
  """A copy of the files to install, because a build writes into the folder."""
  folder = tmp_path_factory.mktemp("source")
  for name in ("palm_mtf", "gin", "tests", "tools", "tasks"):
    if (ROOT / name).is_dir():
      shutil.copytree(
        ROOT / name,
        folder / name,
        symlinks=True,  # palm_mtf/gin, as in a checkout
        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
      )
  for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, folder / name)
  return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
  return _build_wheel(source, tmp_path_factory.mktemp("wheel"))


def _build_wheel(source: Path, target: Path) -> Path:
  """Calls what `pip wheel` calls, without the start of pip."""
  program = (
    "import sys; from setuptools import build_meta; "
    "build_meta.build_wheel(sys.argv[1])"
  )
  _run(sys.executable, "-c", program, str(target), cwd=source)
  (path,) = target.glob("palm_mtf-*.whl")
  return path


def _names(wheel: Path) -> list[str]:
  return sorted(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
  """A folder outside the checkout into which the wheel is installed."""
  folder = tmp_path_factory.mktemp("installed")
  _run(
    sys.executable,
    *("-m", "pip", "install", "--no-deps", "--no-index"),
    *("--target", str(folder), str(wheel)),
  )
  return folder


def _python(installed: Path, *arguments: str, folder: Path) -> str:
  environment = {**os.environ, "PYTHONPATH": str(installed)}
  return _run(sys.executable, *arguments, cwd=folder, env=environment)


def test_the_wheel_holds_the_package_its_gin_folder_and_tasks_and_no_more(
  wheel,
):
  modules = chain(
    *map((ROOT / "palm_mtf").rglob, ("*.py", "*.cc", "*.h", "*.css"))
  )
  expected = {str(path.relative_to(ROOT)) for path in modules}
  expected |= {f"palm_mtf/tasks/{path.name}" for path in TASKS}
  expected |= {f"palm_mtf/{name}" for name in GIN_FILES}
  found = {name for name in _names(wheel) if ".dist-info/" not in name}
  assert found == expected


def test_the_wheel_carries_license_command_and_a_model_type_of_a_harness(wheel):
  names = _names(wheel)
  assert any(name.endswith("/LICENSE") for name in names)
  (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
  text = zipfile.ZipFile(wheel).read(entry_points).decode()
  assert "palm_mtf = palm_mtf.cli.main:main" in text
  assert "[lm_eval.models]\npalm_mtf = palm_mtf.lm_eval.model:PalmMtf" in text


def test_a_wheel_made_from_the_source_distribution_is_the_same(
  source, wheel, tmp_path
):
  _run(
    sys.executable,
    *("setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)),
    cwd=source,
  )
  (archive,) = tmp_path.glob("palm_mtf-*.tar.gz")
  shutil.unpack_archive(archive, tmp_path)
  (folder,) = (x for x in tmp_path.iterdir() if x.is_dir())
  assert _names(_build_wheel(folder, tmp_path)) == _names(wheel)


def test_the_installed_package_answers_and_finds_its_gin_folder(
  installed, tmp_path
):
  text = _python(installed, "-m", "palm_mtf", "--help", folder=tmp_path)
  assert text.startswith("usage: palm_mtf")
  program = (
    "import gin, palm_mtf.cli.gin_folder as f; "
    "print(f.gin_folder()); print(gin.__file__)"
  )
  folder, library = _python(
    installed, "-c", program, folder=tmp_path
  ).splitlines()
  assert Path(folder) == installed / "palm_mtf" / "gin"
  assert (Path(folder) / "recipes" / "quickstart.gin").is_file()
  assert Path(library).name == "__init__.py"
  assert installed not in Path(library).parents


# A program with plain gin, without our commands.
PLAIN_GIN = """
import gin, palm_mtf
gin.parse_config('include "palm_mtf/gin/models/palm_8b.gin"')
gin.add_config_file_search_path(palm_mtf.gin_path())
gin.parse_config('include "recipes/palm_62b.gin"')
print(gin.query_parameter("%NUM_LAYERS"), palm_mtf.gin_path())
"""
LAYERS = """
gin.parse_config('include "palm_mtf/gin/mesh_tensorflow/palm.gin"')
from mesh_tensorflow.transformer.transformer import Unitransformer
print(len(Unitransformer().layer_stack.layers))
"""


@pytest.mark.slow
def test_plain_gin_includes_files_of_the_installed_package(installed, tmp_path):
  found = _python(installed, "-c", PLAIN_GIN + LAYERS, folder=tmp_path)
  assert found.split() == ["64", str(installed / "palm_mtf" / "gin"), "64"]


def test_plain_gin_includes_files_of_a_checkout(source, tmp_path):
  for folder in (source, tmp_path):
    found = _python(source, "-c", PLAIN_GIN, folder=folder)
    assert found.split() == ["64", str(source / "palm_mtf" / "gin")]


@pytest.fixture
def own_project(tmp_path) -> Path:
  """A copy of examples/own_project outside the checkout."""
  folder = tmp_path / "own_project"
  shutil.copytree(ROOT / "examples" / "own_project", folder)
  return folder


def test_a_project_of_ones_own_includes_files_of_the_installed_package(
  installed, own_project
):
  command = ("-m", "palm_mtf", "train", "--gin_file=own.gin", "--print_config")
  text = _python(installed, *command, "--gin.MODEL_DIR='x'", folder=own_project)
  assert "import own_tasks" in text
  assert re.search(r"^D_MODEL = 64 +# own.gin:\d+$", text, re.M)
  assert re.search(r"^D_KV = 32 +# models/palm_tiny.gin:\d+$", text, re.M)
  assert re.search(r"^MESH_SHAPE = .* +# own_layout.gin:\d+$", text, re.M)


@pytest.mark.slow
def test_a_project_of_ones_own_trains_evaluates_generates_and_exports(
  installed, own_project
):
  def palm_mtf(*arguments: str) -> str:
    return _python(installed, "-m", "palm_mtf", *arguments, folder=own_project)

  palm_mtf("train", "--gin_file=own.gin", "--gin.MODEL_DIR='run'")
  config = "--gin_file=run/config.gin"
  assert "own_sums" in palm_mtf("evaluate", config)
  prompt = ("--prompt", "1 plus 2 is ", "--json")
  assert '"prompt": "1 plus 2 is "' in palm_mtf("generate", config, *prompt)
  palm_mtf("export", config, "--output", "exported")
  exported = own_project / "exported"
  assert (exported / "model.safetensors").is_file()


def test_an_editable_install_finds_package_and_gin_in_the_checkout(
  source, tmp_path
):
  site = tmp_path / "site"
  _run(
    sys.executable,
    *("-m", "pip", "install", "--no-deps", "--no-index"),
    *("--no-build-isolation", "--target", str(site), "--editable", str(source)),
  )
  program = (
    f"import site, sys; site.addsitedir({str(site)!r})\n"
    f"sys.path.append({sysconfig.get_path('purelib')!r})\n"
    "import importlib.util as u, gin, palm_mtf.cli.gin_folder as f\n"
    "print(f.gin_folder()); print(gin.__file__); print(u.find_spec('tools'))\n"
    "print(u.find_spec('palm_mtf.tasks').origin)\n"
    "gin.parse_config('include \"palm_mtf/gin/models/palm_8b.gin\"')\n"
    "print(gin.query_parameter('%NUM_LAYERS'))"
  )
  # -I and -S exclude the current folder and editable installs in the
  # environment that runs the tests.
  folder, library, tools, tasks, layers = _run(
    sys.executable, "-I", "-S", "-c", program, cwd=tmp_path
  ).splitlines()
  assert Path(folder) == source / "gin"
  assert Path(library).name == "__init__.py"
  assert source not in Path(library).parents
  assert tools == "None"
  assert Path(tasks) == source / "tasks" / "__init__.py"
  assert layers == "32"


@pytest.fixture(scope="module")
def package_metadata(wheel) -> email.message.Message:
  (name,) = (n for n in _names(wheel) if n.endswith(".dist-info/METADATA"))
  return email.message_from_bytes(zipfile.ZipFile(wheel).read(name))


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_names_each_package_once_with_an_exact_version_and_hashes(
  lock,
):
  requirements = _requirements(lock)
  assert len(_read_locked_versions(lock)) == len(requirements)
  for requirement in requirements:
    assert re.fullmatch(r"==[0-9.]+", str(requirement.specifier)), requirement
  text = (ROOT / lock).read_text(encoding="utf-8")
  entry = r"[\w.-]+(?:\[\w+\])?==.+?(?: \\\n {4}--hash=sha256:[0-9a-f]{64})+"
  assert len(re.findall(rf"^{entry}$", text, re.M)) == len(requirements)


def test_make_installs_the_locks_only_by_their_hashes():
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  locked = [x for x in makefile.splitlines() if re.match(r"\t@\$\(PIP", x)]
  editable = [x for x in locked if "$(PIP_INSTALL_LOCKED)" not in x]
  assert [x.split()[-1] for x in editable] == ["."], "the checkout itself"
  assert len(locked) == 5
  assert "PIP_INSTALL_LOCKED := $(PIP_INSTALL) --require-hashes" in makefile


def test_the_locks_share_no_package():
  names = [x for lock in LOCKS for x in _read_locked_versions(lock)]
  assert len(names) == len(set(names))


def test_the_lock_meets_every_requirement_of_the_package(package_metadata):
  locked = {}
  for lock in LOCKS:
    locked |= _read_locked_versions(lock)
  for line in package_metadata.get_all("Requires-Dist"):
    requirement = Requirement(line)
    marker = str(requirement.marker or "")
    if marker and marker not in LOCKED_EXTRAS:
      continue
    version = locked[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version), f"{line} but {version}"


# Packages that overwrite files of packages that palm_mtf requires.
OVERLAYS = {"seqio-nightly", "tfds-nightly"}
# Only t5.models imports transformers, and it does not work (docs/t5.md).
OF_MODELS = {"transformers"}


def _read_required(lines: list[str], extra: str = "") -> set[str]:
  return {
    canonicalize_name(each.name)
    for each in map(Requirement, lines)
    if each.marker is None or each.marker.evaluate({"extra": extra})
  }


def test_no_extra_brings_a_package_that_writes_over_another(package_metadata):
  for extra in package_metadata.get_all("Provides-Extra"):
    names = _read_required(package_metadata.get_all("Requires-Dist"), extra)
    # t5 requires both of these packages.
    assert not names & (OVERLAYS | {"t5"}), extra


@needs_t5  # without its import, which takes a gigabyte
def test_the_extra_t5_has_all_else_that_t5_asks_for(package_metadata):
  of_t5 = _read_required(importlib.metadata.requires("t5"))
  assert of_t5 >= OVERLAYS, "pip could install t5 by itself"
  ours = _read_required(package_metadata.get_all("Requires-Dist"), "t5")
  assert of_t5 - OVERLAYS - OF_MODELS <= ours


@pytest.mark.slow
def test_pip_installs_the_extra_and_t5_with_one_owner_of_each_file(
  wheel, tmp_path
):
  """Needs a package index, 3 GB of disk and minutes."""
  _run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
  python = str(tmp_path / "venv" / "bin" / "python")
  pip = (python, "-m", "pip", "install", "-q")
  try:
    _run(*pip, f"{wheel}[t5]")
  except AssertionError as error:
    if re.search("No matching distribution|Connection", str(error)):
      pytest.skip("there is no package index")
    raise
  _run(*pip, "--no-deps", "t5>=0.9.4,<0.10")
  program = (
    "import collections, importlib.metadata as m\n"
    "count = collections.Counter(str(f) for d in m.distributions()\n"
    "  for f in set(d.files or ()) if 'dist-info' not in str(f))\n"
    "print([f for f, n in count.items() if n > 1])\n"
    "import palm_mtf, t5.data.tasks, t5.evaluation.metrics, seqio\n"
    "print('glue_cola_v002' in seqio.TaskRegistry.names())"
  )
  found = _run(python, "-I", "-c", program, cwd=tmp_path)
  assert found.split() == ["[]", "True"]


def test_the_makefile_accepts_the_pythons_that_the_package_accepts(
  package_metadata,
):
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  low, high = re.search(
    r"\(3, (\d+)\) <= sys.version_info\[:2\] <= \(3, (\d+)\)", makefile
  ).groups()
  accepted = SpecifierSet(package_metadata["Requires-Python"])
  assert [m for m in range(8, 20) if accepted.contains(f"3.{m}.5")] == list(
    range(int(low), int(high) + 1)
  )


def _requirements(lock: str) -> list[Requirement]:
  lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
  return [
    Requirement(line.removesuffix("\\"))
    for line in lines
    if line and line[0] not in "# "
  ]


def _read_locked_versions(lock: str) -> dict[str, str]:
  return {
    canonicalize_name(requirement.name): specifier.version
    for requirement in _requirements(lock)
    for specifier in requirement.specifier
  }
