# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports point one way between the folders of palm_mtf.

pure   arithmetic and settings; imports without TensorFlow
graph  builds symbols; opens no session, reads no file
run    everything else: sessions, files, clocks
"""

import ast
import functools
import graphlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence

import pytest

from tests.source_files import PACKAGE, ROOT, assert_none, nodes_of

# In these folders each subfolder and module has a row, such as "export/gguf".
WINGS = {"data", "executors", "export", "generation", "runtime"}

# {folder of palm_mtf, or module in its root: rows that it imports}. A folder
# imports only itself and rows above its row.
IMPORTS = {
  "_old_names": "",
  "__init__": "_old_names",
  "errors": "",
  "user_text": "errors",
  "json_text": "",
  "console": "errors json_text",
  "user_code": "errors",
  "config": "errors",
  "machine": "__init__ errors config",
  "_tf": "machine",
  "architecture": "errors config",
  "adapters": "config architecture",
  "steps": "config",
  "accounting": "__init__ errors config architecture steps",
  "ops": "errors machine _tf",
  "native": "config architecture machine _tf",
  "runtime/host_functions": "",
  "runtime/program": "errors _tf",
  "runtime/processes": "_tf",
  "mesh": "errors config machine _tf ops native",
  "model": "config _tf architecture steps ops native",
  "optim": "config _tf architecture accounting ops",
  "runtime/addresses": "errors",
  "runtime/scheduler": "errors",
  "runtime/server_info": "__init__ errors json_text machine _tf "
  "runtime/processes",
  "runtime/server": "__init__ console json_text machine _tf native "
  "runtime/host_functions runtime/processes runtime/addresses "
  "runtime/server_info",
  "programs": "errors config _tf architecture steps ops runtime/program mesh "
  "model optim",
  "generation/decode": "errors config _tf architecture adapters ops "
  "native runtime/program mesh model",
  "unitransformer": "errors config _tf architecture ops model "
  "generation/decode",
  "runtime/manager": "__init__ errors json_text config runtime/addresses "
  "runtime/scheduler runtime/server",
  "runtime/client": "__init__ errors json_text config machine _tf mesh "
  "runtime/program runtime/processes runtime/addresses "
  "runtime/scheduler runtime/server_info runtime/server runtime/manager",
  "executors/executor": "config runtime/program runtime/processes mesh "
  "programs generation/decode runtime/client",
  "executors/host": "__init__ json_text config machine _tf accounting native "
  "runtime/program runtime/processes "
  "runtime/server_info mesh programs generation/decode runtime/client "
  "executors/executor",
  "executors/xla": "errors json_text config machine _tf architecture steps "
  "ops runtime/program runtime/host_functions runtime/processes mesh model "
  "optim runtime/addresses runtime/server runtime/server_info programs "
  "generation/decode runtime/client executors/executor",
  "executors/choose": "config machine executors/executor",
  "compilation": "errors json_text config steps architecture accounting model "
  "generation/decode executors/xla",
  "runtime/tracer": "errors user_code config machine _tf ops runtime/program "
  "mesh runtime/client executors/host",
  "rates": "console json_text config machine _tf accounting ops "
  "runtime/program mesh runtime/client programs",
  "model_dir": "errors json_text _tf",
  "retrieval": "errors user_text config model_dir",
  "report": "__init__ errors model_dir",
  "data/sources": "errors user_text console json_text user_code config _tf "
  "model_dir",
  "data/ngrams": "data/sources",
  "data/worker_pool": "errors console",
  "data/filters": "errors json_text user_code config model_dir data/sources "
  "data/ngrams data/worker_pool",
  "assertions": "errors json_text user_code config machine model_dir "
  "data/sources data/ngrams data/filters",
  "data/vocabulary": "errors console json_text config machine model_dir "
  "data/sources "
  "data/worker_pool data/filters",
  "data/tokens": "errors json_text config model_dir data/sources "
  "data/worker_pool data/filters data/vocabulary",
  "data/batches": "errors json_text config model_dir runtime/host_functions "
  "data/sources "
  "data/filters data/vocabulary data/tokens",
  "checkpoints": "errors json_text config machine _tf architecture accounting "
  "runtime/host_functions runtime/program runtime/processes mesh "
  "runtime/client model_dir data/vocabulary data/batches",
  "export/trained_model": "errors config data/vocabulary data/batches "
  "checkpoints model_dir",
  "export/huggingface": "errors json_text config architecture adapters "
  "model_dir "
  "data/vocabulary export/trained_model",
  "export/gguf": "errors config architecture native model_dir data/vocabulary "
  "export/trained_model export/huggingface",
  "export/saved_model": "errors config machine _tf architecture ops model "
  "generation/decode model_dir data/vocabulary export/trained_model",
  "export/npz": "json_text architecture export/trained_model",
  "compression": "errors user_text config _tf architecture accounting native "
  "runtime/program mesh model runtime/client programs data/vocabulary "
  "data/batches checkpoints",
  "generation/inference": "errors user_text json_text config machine _tf "
  "architecture adapters native runtime/program mesh generation/decode "
  "runtime/client executors/choose retrieval data/vocabulary data/batches "
  "checkpoints",
  "generation/serving": "errors json_text config machine _tf assertions "
  "data/vocabulary data/batches checkpoints runtime/addresses retrieval "
  "generation/inference",
  "evaluation": "errors user_text json_text user_code config _tf model_dir "
  "data/sources data/ngrams data/filters assertions data/vocabulary "
  "data/batches checkpoints retrieval generation/inference",
  "training": "__init__ errors json_text console user_code config machine _tf "
  "architecture adapters steps accounting ops native runtime/program "
  "runtime/processes mesh runtime/addresses runtime/client executors/choose "
  "executors/executor programs rates model_dir assertions data/vocabulary "
  "data/batches checkpoints compression generation/decode generation/inference "
  "evaluation",
  "learners": "__init__ errors json_text config machine _tf architecture "
  "accounting native runtime/addresses runtime/manager runtime/server "
  "runtime/program mesh optim runtime/client executors/choose programs "
  "model_dir data/batches checkpoints generation/inference training",
  "sweep": "errors console config machine architecture accounting model_dir",
  "commands": "__init__ errors user_text console json_text config machine _tf "
  "architecture adapters accounting native mesh executors/host "
  "executors/choose compilation "
  "rates model_dir retrieval report data/sources data/ngrams data/filters "
  "assertions data/vocabulary "
  "data/tokens data/batches checkpoints export/trained_model "
  "export/huggingface "
  "export/gguf export/saved_model export/npz runtime/host_functions "
  "runtime/addresses "
  "runtime/server_info runtime/server runtime/manager runtime/client "
  "compression generation/inference generation/serving evaluation training "
  "learners sweep",
  # Commands are imported by the names in the command table and in gin files.
  "cli": "__init__ errors user_text console user_code config machine _tf "
  "model_dir",
  "foreign_models": "errors user_code config machine _tf runtime/program mesh "
  "runtime/client executors/choose programs training cli",
  "lm_eval": "errors console config machine data/batches checkpoints "
  "generation/inference commands cli",
  "__main__": "cli",
}
PURE = {
  *("__init__", "_old_names", "accounting", "adapters", "architecture"),
  *("config", "errors"),
  *("json_text", "machine", "runtime/scheduler", "steps"),
}
GRAPH = {
  *("_tf", "ops", "native", "mesh", "model", "unitransformer", "optim"),
  *("programs", "generation/decode", "runtime/program"),
}

# {library: the modules that may import it, at the top or inside a function}
ONLY_IMPORTERS = {
  "gin": (
    "palm_mtf/cli/",
    "palm_mtf/foreign_models/",
    "palm_mtf/unitransformer/",
  ),
  "tensorflow": ("palm_mtf/_tf.py", "palm_mtf/_old_names.py"),
  "mesh_tensorflow": ("palm_mtf/_tf.py", "palm_mtf/unitransformer/"),
  "seqio": ("palm_mtf/data/sources/seqio_", "palm_mtf/evaluation/seqio_"),
  "lm_eval": "palm_mtf/lm_eval/",
  "matplotlib": "palm_mtf/report/",
  "scipy": "palm_mtf/sweep/scaling_law.py",
  "aiohttp": "palm_mtf/generation/serving/",
  "jinja2": "palm_mtf/data/vocabulary/chat_process.py",
  "bm25s": "palm_mtf/retrieval/passages.py",
  "faiss": "palm_mtf/retrieval/keys.py",
  "llguidance": "palm_mtf/generation/inference/grammar_process.py",
  "ml_dtypes": "palm_mtf/export/huggingface/tensor_files.py",
  "grpc": ("palm_mtf/runtime/manager/", "palm_mtf/learners/"),
  "grpc_health": "palm_mtf/runtime/manager/service.py",
  "safetensors": "palm_mtf/export/huggingface/tensor_files.py",
  "tokenizers": (
    "palm_mtf/data/vocabulary/byte_pair.py",
    "palm_mtf/data/vocabulary/chat.py",
  ),
}

# Only these modules may call Python's json.dumps, which writes NaN as NaN.
JSON_WRITERS = {
  "palm_mtf/json_text.py",  # which all other writers call
  "palm_mtf/user_text.py",  # shows the user's value in a message
  # The function of chat templates that transformers defines, and values for a
  # template, in which JSON of a request may have NaN.
  "palm_mtf/data/vocabulary/chat_process.py",
  "palm_mtf/machine/helper_process.py",
  "palm_mtf/data/vocabulary/chat.py",  # arguments, as that function writes them
  # Names, shapes and offsets, no floats.
  "palm_mtf/export/huggingface/tensor_files.py",
  "palm_mtf/model_dir/foreign_files.py",  # text that is hashed, never written
}

# These rows import without TensorFlow, because commands check all input before
# they import TensorFlow.
TENSORFLOW_FREE = PURE | {
  "__main__",
  "assertions",
  "cli",
  "commands",
  "console",
  "data",
  "executors/choose",
  "export/gguf",
  "export/huggingface",
  "export/npz",
  "export/trained_model",
  "report",
  "retrieval",
  "runtime/manager",
  "sweep",
  "user_code",
  "user_text",
}
# These modules start processes before TensorFlow is imported.
STARTERS = {
  f"palm_mtf/runtime/{name}.py"
  for name in (
    "addresses",
    "client/local_servers",
    "client/places",
    "server/process",
    "server/restricted_port",
  )
}
TENSORFLOW_FREE_FILES = (
  STARTERS
  | {"palm_mtf/export/saved_model/folder.py"}
  | {
    f"palm_mtf/learners/{name}.py"
    for name in ("client", "members", "protocol", "service")
  }
)
HEAVY = ("jax", "matplotlib", "mesh_tensorflow", "seqio", "tensorflow")

# Files in the root of palm_mtf.
ROOT_FILES = {
  *("__init__", "__main__", "_old_names", "_tf", "console"),
  *("errors", "json_text", "user_code", "user_text"),
}


def _module_name(path: str) -> str:
  return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _find_row(names: Sequence[str]) -> str:
  """Returns the row of a module or folder, named below palm_mtf."""
  folder, *below = names
  return f"{folder}/{below[0]}" if folder in WINGS and below else folder


def _find_part(path: str) -> str:
  """Returns the row of the table that a file belongs to."""
  return _find_row(_module_name(path).split(".")[1:] or ["__init__"])


def _is_in(part: str, rows: Collection[str]) -> bool:
  """Whether `part`, or its wing, is in `rows`."""
  return part in rows or part.split("/", maxsplit=1)[0] in rows


@functools.cache
def _find_imports(path: str) -> tuple[str, ...]:
  """Returns the full name of everything that a file imports, anywhere in it."""
  names = []
  for node in nodes_of(path):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}:{node.lineno}: import by the full name"
      names += [f"{node.module}.{alias.name}" for alias in node.names]
  return tuple(names)


def _find_imported_rows(path: str) -> set[str]:
  """Returns the rows of the table that a file imports."""
  names = [
    x.split(".")[1:] for x in _find_imports(path) if x.startswith("palm_mtf")
  ]
  is_there = {_find_part(x) for x in PACKAGE}
  # A name without a row, such as __version__, is in palm_mtf/__init__.py.
  rows = {_find_row(x) for x in names if x}
  return {x if x in is_there else "__init__" for x in rows}


def _draw_imports() -> dict[str, set[str]]:
  """Returns the other rows that each row of the table imports."""
  drawn: dict[str, set[str]] = {}
  for path in PACKAGE:
    part = _find_part(path)
    drawn.setdefault(part, set()).update(_find_imported_rows(path) - {part})
  return {x: found for x, found in drawn.items() if x not in WINGS}


def _compare(
  table: Mapping[str, str], drawn: Mapping[str, set[str]]
) -> Iterator[str]:
  for part in sorted({*table, *drawn}):
    allowed, found = set(table.get(part, "").split()), drawn.get(part, set())
    if part not in table or part not in drawn:
      yield f"{part}: is in the table or in the package alone"
    if found - allowed:
      yield f"{part}: imports {found - allowed}, which the table does not say"
    if allowed - found:
      yield f"{part}: imports no {allowed - found}, which the table says"


def test_folders_import_what_the_table_says_and_no_less():
  assert_none(_compare(IMPORTS, _draw_imports()))


def test_the_table_draws_no_circle():
  above = set()
  for part, imported in IMPORTS.items():
    assert set(imported.split()) <= above, part
    above.add(part)


def test_no_files_import_each_other_in_a_circle():
  """Imports inside functions and under TYPE_CHECKING are imports too."""
  modules = {_module_name(path): path for path in PACKAGE}
  graph = {
    path: {
      modules.get(name) or modules.get(name.rpartition(".")[0])
      for name in _find_imports(path)
    }
    - {None}
    for path in PACKAGE
  }
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    pytest.fail(" -> ".join(error.args[1]))


def test_no_layer_imports_a_later_one():
  for part in PURE:
    assert set(IMPORTS[part].split()) <= PURE, part
  for part in GRAPH:
    assert set(IMPORTS[part].split()) <= PURE | GRAPH, part


def test_the_root_of_the_package_holds_only_these_files():
  files = {x.stem for x in (ROOT / "palm_mtf").glob("*.py")}
  assert files == ROOT_FILES


def test_each_library_is_imported_in_its_one_place():
  assert_none(
    f"{path}: imports {name}, which only {place} does"
    for path in PACKAGE
    for library, place in ONLY_IMPORTERS.items()
    for name in _find_imports(path)
    if name.split(".")[0] == library and not path.startswith(place)
  )


def test_of_data_only_the_source_of_seqio_tasks_needs_tensorflow():
  found = {
    path
    for path in PACKAGE
    if _is_in(_find_part(path), {"data"}) and "_tf" in _find_imported_rows(path)
  }
  assert found == {"palm_mtf/data/sources/seqio_task.py"}


def test_the_package_imports_neither_tasks_nor_tools_nor_tests():
  assert_none(
    f"{path}: imports {name}"
    for path in PACKAGE
    for name in _find_imports(path)
    if name.split(".")[0] in ("tasks", "tests", "tools")
    or name.split(".")[:2] == ["palm_mtf", "tasks"]
  )


def _writes_json(node: ast.AST) -> bool:
  return (
    isinstance(node, ast.Attribute)
    and node.attr in ("dump", "dumps", "JSONEncoder")
    and ast.unparse(node.value) == "json"
  )


def test_whatever_writes_json_calls_json_text():
  found = {path for path in PACKAGE if any(map(_writes_json, nodes_of(path)))}
  # Each answer of `serve` has its own test.
  assert {
    x for x in found if _find_part(x) != "generation/serving"
  } == JSON_WRITERS


def _opens(node: ast.AST) -> bool:
  if isinstance(node, ast.Attribute):
    return "Session" in node.attr
  return (
    isinstance(node, ast.Call)
    and isinstance(node.func, ast.Name)
    and node.func.id == "open"
  )


# _tf.py is excepted, because it redirects TensorFlow's notices.
def test_the_graph_layer_opens_no_session_and_no_file():
  assert_none(
    f"{path}:{node.lineno}"
    for path in PACKAGE
    if _find_part(path) in GRAPH - {"_tf"}
    for node in nodes_of(path)
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
  _module_name(path)
  for path in PACKAGE
  if _is_in(_find_part(path), TENSORFLOW_FREE) or path in TENSORFLOW_FREE_FILES
  # The tests of this process need jinja2, and see that it has no TensorFlow.
  if path != "palm_mtf/data/vocabulary/chat_process.py"
)


def test_each_of_these_modules_imports_without_tensorflow():
  assert _imports_without_tensorflow(WITHOUT_TENSORFLOW) == {}
