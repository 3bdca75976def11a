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
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PURE = {
  "accounting",
  "batch_sizes",
  "config",
  "decode_config",
  "errors",
  "islands",
  "layout",
  "machine",
  "pods_config",
  "score_windows",
  "skips",
  "task_eval_config",
  "tpu_slices",
}
# What every other part of the graph layer stands on.
FOUNDATION = {"_tf", "lean_import", "ops", "variables", "whole_slice"}
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
  "machine": {"config", "layout"},
  "lean_import": set(),
  "_tf": {"lean_import"},
  "ops": {"_tf", "machine"},
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

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 80, 8
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
  "conftest_test.py",
  "data/imports_test.py",
  "evaluate_processes_test.py",
  "gin_test.py",
  "kill_test.py",
  "layouts_test.py",
  "lesser_cpus_test.py",
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


def _assert_none(breaches: Iterable[str]) -> None:
  """Fails with every breach of a rule: each begins with its file.

  One test for each file and rule would spend a minute in pytest alone.
  """
  found = list(breaches)
  assert not found, "\n".join(found)


@functools.cache
def _text(path: str) -> str:
  return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def _nodes(path: str) -> tuple[ast.AST, ...]:
  """Returns every node of a file's tree: the module itself is the first."""
  return tuple(ast.walk(ast.parse(_text(path), path)))


def _module_name(path: str) -> str:
  return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _part(path: str) -> str:
  """Returns the module or folder of palm_mtf that a file belongs to."""
  return path.split("/")[1].removesuffix(".py")


PARTS = {_part(path) for path in PACKAGE}


@functools.cache
def _imports(path: str) -> tuple[str, ...]:
  """Returns the full name of everything that a file imports, anywhere in it."""
  names = []
  for node in _nodes(path):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}:{node.lineno}: import by the full name"
      names += [f"{node.module}.{alias.name}" for alias in node.names]
  return tuple(names)


def _imported_parts(path: str) -> set[str]:
  names = [name.split(".") for name in _imports(path)]
  parts = {name[1] for name in names if name[0] == "palm_mtf" and name[1:]}
  return (parts & PARTS) - {_part(path), "__init__"}


def _functions(path: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
  for node in _nodes(path):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      yield node


def _allowed_parts(part: str) -> set[str]:
  if part in MAY_IMPORT:
    return MAY_IMPORT[part]
  return PARTS - {ONLY_MAIN_IMPORTS, "__main__"}


def test_imports_within_the_package_follow_the_table():
  _assert_none(
    f"{path}: imports {part}"
    for path in PACKAGE
    for part in _imported_parts(path) - _allowed_parts(_part(path))
  )


def test_the_tables_name_parts_that_exist():
  assert set(MAY_IMPORT) | PURE | GRAPH | TENSORFLOW_FREE <= PARTS


def test_the_table_lets_no_layer_import_a_later_one():
  for part in PURE:
    assert MAY_IMPORT[part] <= PURE, part
  for part in GRAPH:
    assert MAY_IMPORT[part] <= PURE | GRAPH, part
  assert not FOUNDATION & {"mesh", "model", "optim"}
  for part in ("mesh", "model", "optim"):
    assert not MAY_IMPORT[part] & {"mesh", "model", "optim", "pods"}, part


def test_each_library_is_imported_in_its_one_place():
  _assert_none(
    f"{path}: imports {name}, which only {place} does"
    for path in PACKAGE
    for library, place in ONLY_IMPORTERS.items()
    for name in _imports(path)
    if name.split(".")[0] == library and not path.startswith(place)
  )


def test_of_data_only_the_source_of_seqio_tasks_needs_tensorflow():
  found = {
    path
    for path in PACKAGE
    if _part(path) == "data" and "_tf" in _imported_parts(path)
  }
  assert found <= {"palm_mtf/data/seqio_sources.py"}


def test_the_package_imports_neither_tasks_nor_tools_nor_tests():
  _assert_none(
    f"{path}: imports {name}"
    for path in PACKAGE
    for name in _imports(path)
    if name.split(".")[0] in ("tasks", "tests", "tools")
    or name.split(".")[:2] == ["palm_mtf", "tasks"]
  )


def _opens(node: ast.AST) -> bool:
  if isinstance(node, ast.Attribute):
    return "Session" in node.attr
  return (
    isinstance(node, ast.Call)
    and isinstance(node.func, ast.Name)
    and node.func.id == "open"
  )


# _tf.py holds back what TensorFlow writes while it is imported.
def test_the_graph_layer_opens_no_session_and_no_file():
  _assert_none(
    f"{path}:{node.lineno}"
    for path in PACKAGE
    if _part(path) in GRAPH - {"_tf"}
    for node in _nodes(path)
    if _opens(node)
  )


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


def test_each_of_these_modules_imports_without_tensorflow():
  assert _imports_without_tensorflow(WITHOUT_TENSORFLOW) == {}


def test_a_module_that_needs_tensorflow_would_be_found():
  failed = _imports_without_tensorflow(("palm_mtf._tf", "palm_mtf.errors"))
  assert set(failed) == {"palm_mtf._tf"}


def test_files_have_at_most_400_lines():
  _assert_none(
    path for path in EVERY if len(_text(path).splitlines()) > MAX_FILE_LINES
  )


def test_functions_have_at_most_80_lines():
  _assert_none(
    f"{path}:{function.lineno}: {function.name}"
    for path in EVERY
    for function in _functions(path)
    if function.end_lineno - function.lineno + 1 > MAX_FUNCTION_LINES
  )


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
  every = function.args
  arguments = (*every.posonlyargs, *every.args, *every.kwonlyargs)
  return [each.arg for each in arguments if each.arg not in ("self", "cls")]


def test_functions_but_entry_points_have_at_most_8_parameters():
  _assert_none(
    f"{path}:{function.lineno}: {function.name}"
    for path in PACKAGE
    if _part(path) not in ENTRY_POINTS
    for function in _functions(path)
    if len(_parameters(function)) > MAX_PARAMETERS
  )


def test_files_begin_with_copyright_and_license():
  _assert_none(path for path in EVERY if not _text(path).startswith(HEADER))


def test_files_are_ascii():
  _assert_none(path for path in EVERY if not _text(path).isascii())


def test_file_names_say_what_is_in_the_file():
  _assert_none(path for path in EVERY if Path(path).stem in SAYS_NOTHING)


def test_modules_have_a_docstring():
  _assert_none(
    path
    for path in EVERY
    if not path.startswith("tests/") and not ast.get_docstring(_nodes(path)[0])
  )


def test_public_functions_and_classes_have_docstrings():
  _assert_none(
    f"{path}:{node.lineno}: {node.name}"
    for path in PACKAGE
    for node in _nodes(path)[0].body
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
    and not node.name.startswith("_")
    and not ast.get_docstring(node)
  )


def _is_mirror(name: str) -> bool:
  """Says whether a test, named below tests/, mirrors a module.

  tests/tools/x_test.py mirrors tools/x.py, and tests/tasks/ mirrors tasks/.
  """
  module = name.replace("_test.py", ".py")
  return (ROOT / "palm_mtf" / module).is_file() or (
    module.startswith(("tasks/", "tools/")) and (ROOT / module).is_file()
  )


def test_each_test_module_mirrors_a_module():
  """Tests of several modules stand in NOT_MIRRORED."""
  tests = [p for p in _python_files("tests") if p.endswith("_test.py")]
  names = [path.removeprefix("tests/") for path in tests]
  _assert_none(
    f"tests/{name}: no palm_mtf/{name.replace('_test.py', '.py')}"
    for name in names
    if name not in NOT_MIRRORED and not _is_mirror(name)
  )
