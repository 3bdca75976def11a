# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports point run -> graph -> pure, and files keep to the project's shape.

  pure   arithmetic; imports without TensorFlow
  graph  builds symbols; opens no session, reads no file
  run    everything else: sessions, files, clocks

A part is a module or a folder of palm_mtf; one that no table names is of the
run layer.
"""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PURE = {
  "accounting",
  "batch_sizes",
  "config",
  "decode_config",
  "errors",
  "islands",
  "layout",
  "pods_config",
  "score_windows",
  "skips",
  "task_eval_config",
  "tpu_slices",
}
# What every other part of the graph layer stands on.
FOUNDATION = {"_tf", "variables", "whole_slice"}
GRAPH = {*FOUNDATION, "mesh", "model", "optim", "pods"}

# Parts that may import less than their layer allows. A part may always import
# itself.
MAY_IMPORT = {
  "errors": set(),
  "batch_sizes": {"errors"},
  "skips": {"batch_sizes", "errors"},
  "config": {"batch_sizes", "errors", "skips"},
  "decode_config": {"errors"},
  "tpu_slices": {"errors", "pods_config"},
  "layout": {"config", "errors", "tpu_slices"},
  "pods_config": {"errors"},
  "score_windows": set(),
  "task_eval_config": {"errors"},
  "islands": {"errors", "layout", "pods_config"},
  "accounting": PURE,
  "_tf": set(),
  "variables": PURE | {"_tf"},
  "whole_slice": PURE | {"_tf"},
  # These three never import each other; they meet in pods.
  "model": PURE | FOUNDATION,
  "optim": PURE | FOUNDATION,
  "mesh": PURE | FOUNDATION,
  "pods": PURE | GRAPH,
  "data": PURE | {"_tf", "console", "disk"},
  "report": {"disk", "errors"},  # reads files alone
  # Entry points are reached by the names that gin files give.
  "cli": PURE,
  "__main__": {"cli"},
}
ONLY_MAIN_IMPORTS = "cli"

# Where a library may be imported, at the top or inside a function.
ONLY_IMPORTERS = {
  "gin": "palm_mtf/cli/",
  "tensorflow": "palm_mtf/_tf.py",
  "mesh_tensorflow": "palm_mtf/_tf.py",
  "seqio": (
    "palm_mtf/data/seqio_sources.py",
    "palm_mtf/eval_tasks.py",
    "palm_mtf/few_shot.py",
  ),
  "matplotlib": "palm_mtf/report/",
}

# Import without TensorFlow. The entry points check all input before they
# import it.
ENTRY_POINTS = {
  "checkpoint_commands",
  "data_cache",
  "data_inspect",
  "data_statistics",
  "evaluate",
  "infer",
  "pod_serve",
  "report",
  "score",
  "train",
  "vocab",
}
# Processes that start others first.
STARTERS = {"addresses", "pod_server", "pod_servers", "sockets"}
TENSORFLOW_FREE = PURE | ENTRY_POINTS | STARTERS | {"__main__", "cli", "data"}
HEAVY = ("jax", "matplotlib", "mesh_tensorflow", "seqio", "tensorflow")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
SAYS_NOTHING = {"common", "helpers", "misc", "util", "utils"}
HEADER = (
  "# Copyright 2026 The palm_mtf authors.\n"
  "# SPDX-License-Identifier: Apache-2.0\n"
)

# Tests of the project, or of several modules at once.
NOT_MIRRORED = {
  "architecture_test.py",
  "bench_train_test.py",
  "cli/main_run_test.py",
  "data/imports_test.py",
  "gin_test.py",
  "kill_test.py",
  "layouts_test.py",
  "oracle_test.py",
  "packaging_test.py",
  "pod_faults_test.py",
  "readme_test.py",
  "tasks/gin_run_test.py",
}


def _python_files(*folders: str) -> list[str]:
  return sorted(
    str(path.relative_to(ROOT))
    for folder in folders
    for path in (ROOT / folder).rglob("*.py")
  )


PACKAGE = _python_files("palm_mtf")
EVERY = [*_python_files("palm_mtf", "tasks", "tests", "tools"), "setup.py"]
each_module = pytest.mark.parametrize("path", PACKAGE)
each_file = pytest.mark.parametrize("path", EVERY)


@functools.cache
def _tree(path: str) -> ast.Module:
  return ast.parse((ROOT / path).read_text(encoding="utf-8"), path)


def _module_name(path: str) -> str:
  return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _part(path: str) -> str:
  """Returns the module or folder of palm_mtf that a file belongs to."""
  return Path(path).parts[1].removesuffix(".py")


def _imports(path: str) -> Iterator[str]:
  """Yields the full name of everything that a file imports, anywhere in it."""
  for node in ast.walk(_tree(path)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}:{node.lineno}: import by the full name"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _imported_parts(path: str) -> set[str]:
  names = [name.split(".") for name in _imports(path)]
  parts = {name[1] for name in names if name[0] == "palm_mtf" and name[1:]}
  existing = {_part(each) for each in PACKAGE}
  return (parts & existing) - {_part(path), "__init__"}


def _functions(path: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
  for node in ast.walk(_tree(path)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      yield node


def _allowed_parts(part: str) -> set[str]:
  if part in MAY_IMPORT:
    return MAY_IMPORT[part]
  return {_part(path) for path in PACKAGE} - {ONLY_MAIN_IMPORTS, "__main__"}


@each_module
def test_imports_within_the_package_follow_the_table(path):
  assert _imported_parts(path) <= _allowed_parts(_part(path))


def test_the_tables_name_parts_that_exist():
  parts = {_part(path) for path in PACKAGE}
  assert set(MAY_IMPORT) | PURE | GRAPH | TENSORFLOW_FREE <= parts


def test_the_table_lets_no_layer_import_a_later_one():
  for part in PURE:
    assert MAY_IMPORT[part] <= PURE, part
  for part in GRAPH:
    assert MAY_IMPORT[part] <= PURE | GRAPH, part
  assert not FOUNDATION & {"mesh", "model", "optim"}
  for part in ("mesh", "model", "optim"):
    assert not MAY_IMPORT[part] & {"mesh", "model", "optim", "pods"}, part


@each_module
def test_each_library_is_imported_in_its_one_place(path):
  for library, place in ONLY_IMPORTERS.items():
    if not path.startswith(place):
      imported = [n for n in _imports(path) if n.split(".")[0] == library]
      assert not imported, f"only {place} imports {library}"


@pytest.mark.parametrize("path", [p for p in PACKAGE if _part(p) == "data"])
def test_of_data_only_the_source_of_seqio_tasks_needs_tensorflow(path):
  if path != "palm_mtf/data/seqio_sources.py":
    assert "_tf" not in _imported_parts(path)


@each_module
def test_the_package_imports_neither_tasks_nor_tools_nor_tests(path):
  names = [name.split(".") for name in _imports(path)]
  assert not {name[0] for name in names} & {"tasks", "tests", "tools"}
  assert ["palm_mtf", "tasks"] not in [name[:2] for name in names]


# _tf.py holds back what TensorFlow writes while it is imported.
@pytest.mark.parametrize(
  "path", [p for p in PACKAGE if _part(p) in GRAPH - {"_tf"}]
)
def test_the_graph_layer_opens_no_session_and_no_file(path):
  for node in ast.walk(_tree(path)):
    if isinstance(node, ast.Attribute):
      assert "Session" not in node.attr, f"{path}:{node.lineno}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      assert node.func.id != "open", f"{path}:{node.lineno}"


@functools.cache
def _imports_without_tensorflow(modules: tuple[str, ...]) -> dict[str, str]:
  """Returns why each module that fails to import without HEAVY does."""
  program = f"""
import importlib, json, sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules.update(dict.fromkeys({HEAVY!r}))
failed = {{}}
for name in {modules!r}:
  try:
    importlib.import_module(name)
  except ImportError as error:
    failed[name] = str(error)
print(json.dumps(failed))
"""
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, check=False, text=True
  )
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout)


WITHOUT_TENSORFLOW = tuple(
  _module_name(path) for path in PACKAGE if _part(path) in TENSORFLOW_FREE
)


@pytest.mark.parametrize("module", WITHOUT_TENSORFLOW)
def test_the_module_imports_without_tensorflow(module):
  assert module not in _imports_without_tensorflow(WITHOUT_TENSORFLOW)


def test_a_module_that_needs_tensorflow_would_be_found():
  failed = _imports_without_tensorflow(("palm_mtf._tf", "palm_mtf.errors"))
  assert set(failed) == {"palm_mtf._tf"}


@each_file
def test_the_file_has_at_most_400_lines(path):
  lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
  assert len(lines) <= MAX_FILE_LINES


@each_file
def test_functions_have_at_most_80_lines(path):
  for function in _functions(path):
    lines = function.end_lineno - function.lineno + 1
    assert lines <= MAX_FUNCTION_LINES, f"{path}:{function.lineno}"


@each_module
def test_functions_but_entry_points_have_at_most_8_parameters(path):
  if _part(path) in ENTRY_POINTS:
    return
  for function in _functions(path):
    arguments = function.args
    names = [
      each.arg
      for each in (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
      )
      if each.arg not in ("self", "cls")
    ]
    assert len(names) <= MAX_PARAMETERS, f"{path}:{function.lineno}"


@each_file
def test_the_file_begins_with_copyright_and_license(path):
  assert (ROOT / path).read_text(encoding="utf-8").startswith(HEADER)


@each_file
def test_the_file_is_ascii(path):
  (ROOT / path).read_text(encoding="ascii")


@each_file
def test_the_file_name_says_what_is_in_it(path):
  assert Path(path).stem not in SAYS_NOTHING


@pytest.mark.parametrize("path", [p for p in EVERY if p[:6] != "tests/"])
def test_the_module_has_a_docstring(path):
  assert ast.get_docstring(_tree(path))


@each_module
def test_public_functions_and_classes_have_docstrings(path):
  for node in _tree(path).body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      if not node.name.startswith("_"):
        assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name}"


@pytest.mark.parametrize(
  "path", [p for p in _python_files("tests") if p.endswith("_test.py")]
)
def test_each_test_module_mirrors_a_module(path):
  name = path.removeprefix("tests/")
  module = name.replace("_test.py", ".py")
  # tests/tools/x_test.py mirrors tools/x.py, and tests/tasks/ mirrors tasks/.
  mirrored = (ROOT / "palm_mtf" / module).is_file() or (
    module.startswith(("tasks/", "tools/")) and (ROOT / module).is_file()
  )
  assert mirrored or name in NOT_MIRRORED, (
    f"no palm_mtf/{module}; tests of several modules stand in NOT_MIRRORED"
  )
