# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files, functions and names follow the style of the project."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.doc_pages import blocks_of
from tests.internals_page import apply_diff, read_spine
from tests.source_files import (
  EVERY,
  PACKAGE,
  ROOT,
  assert_none,
  nodes_of,
  python_files,
  text_of,
)

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 600, 80, 8


SAYS_NOTHING = {"common", "helpers", "misc", "util", "utils"}


HEADER = (
  "# Copyright 2026 The palm_mtf authors.\n"
  "# SPDX-License-Identifier: Apache-2.0\n"
)


# Tests of the whole project, or of several modules.
NOT_MIRRORED = {
  "architecture_test.py",
  "cli/main_run_test.py",
  "claims_test.py",
  "conftest_test.py",
  "evaluate_processes_test.py",
  "fuzz_test.py",
  "generation/inference/kept_space_test.py",
  "gin_test.py",
  "kill_test.py",
  "layouts_test.py",
  "objective_test.py",
  "lesser_cpus_test.py",
  "old_run_test.py",
  "oracle_test.py",
  "packaging_test.py",
  "foreign_models/example_test.py",
  "pages_test.py",
  "pod_faults_test.py",
  "same_bits_test.py",
  "docs/readme_test.py",
  "docs_test.py",
  "t5_test.py",
  "style_test.py",
  "tls_tunnel_test.py",
  "tasks/gin_run_test.py",
  "tasks/published_forms_test.py",
}


def _functions(path: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
  for node in nodes_of(path):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      yield node


def test_files_have_at_most_600_lines():
  assert_none(
    path for path in EVERY if len(text_of(path).splitlines()) > MAX_FILE_LINES
  )


def test_functions_have_at_most_80_lines():
  assert_none(
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
  assert_none(
    f"{path}:{function.lineno}: {function.name}"
    for path in PACKAGE
    if not path.startswith("palm_mtf/commands/")
    for function in _functions(path)
    if len(_parameters(function)) > MAX_PARAMETERS
  )


def test_files_begin_with_copyright_and_license():
  assert_none(path for path in EVERY if not text_of(path).startswith(HEADER))


def test_files_are_ascii():
  assert_none(path for path in EVERY if not text_of(path).isascii())


def test_file_names_say_what_is_in_the_file():
  assert_none(path for path in EVERY if Path(path).stem in SAYS_NOTHING)


def _arguments(docstring: str) -> Iterator[str]:
  """Yields the lines of Args and Attributes that begin an entry."""
  in_section = False
  for line in docstring.splitlines():
    if re.match(r" {2,}(Args|Attributes):$", line):
      in_section, indent = True, len(line) - len(line.lstrip()) + 2
    elif in_section and re.match(rf" {{{indent}}}\*{{0,2}}\w+: ", line):
      yield line.strip()
    elif in_section and line.strip() and not line.startswith(" " * indent):
      in_section = False


def test_a_line_of_arguments_names_the_thing_first():
  """An entry begins with neither "of" nor a comparison."""
  _documented = ast.Module | ast.ClassDef | ast.FunctionDef
  assert_none(
    f"{path}: {line}"
    for path in [*PACKAGE, *python_files("tasks", "tools")]
    for node in nodes_of(path)
    if isinstance(node, _documented)
    for line in _arguments(ast.get_docstring(node, clean=False) or "")
    if re.match(r"\*{0,2}\w+: (of|the same|as in)\b", line)
  )


def _is_mirror(name: str) -> bool:
  """Whether a test, named by its path below tests/, mirrors a module or page.

  tests/tools/x_test.py mirrors tools/x.py, tests/tasks/ mirrors tasks/,
  tests/docs/x_test.py mirrors docs/x.md, and tests/native/x_test.py mirrors
  native/x.h.
  """
  if name.startswith("docs/"):
    return (ROOT / name.replace("_test.py", ".md")).is_file()
  module = name.replace("_test.py", ".py")
  header = (ROOT / "palm_mtf" / module).with_suffix(".h")
  return (
    (ROOT / "palm_mtf" / module).is_file()
    or header.is_file()
    or (module.startswith(("tasks/", "tools/")) and (ROOT / module).is_file())
  )


def test_each_test_module_mirrors_a_module():
  """NOT_MIRRORED lists tests of several modules."""
  tests = [p for p in python_files("tests") if p.endswith("_test.py")]
  names = [path.removeprefix("tests/") for path in tests]
  assert_none(
    f"tests/{name}: no palm_mtf/{name.replace('_test.py', '.py')}"
    for name in names
    if name not in NOT_MIRRORED and not _is_mirror(name)
  )


def test_a_commit_runs_what_make_lint_runs():
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  recipe = re.search(r"^lint: .*\n((?:\t.*\n)+)", makefile, re.M)[1]
  lint = re.findall(r"^\t\$\(BIN\)/(.*)$", recipe, re.M)
  hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
  assert re.findall(r"entry: \.venv/bin/(.*)$", hooks, re.M) == lint
  assert lint[-1] == "mypy"


def test_contributing_says_what_make_and_these_tests_do():
  text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  targets = re.findall(r"^([a-z-]+): .*##", makefile, re.M)
  named = re.findall(r"\bmake (?:\w+=\S+ )*([a-z-]+)", text)
  assert {*named} <= {*targets} | {"venv"}
  assert {x for x in targets if x.startswith("test")} <= {*named}
  assert f"at most {MAX_FILE_LINES} lines" in text
  assert f"at most {MAX_FUNCTION_LINES}." in text
  for path in re.findall(r"`((?:palm_mtf|tests|tools|docs)/[\w/.]+)`", text):
    assert (ROOT / path).exists(), path


def test_internals_names_functions_that_exist_and_diffs_that_apply():
  """tests/docs/internals_test.py runs them, which takes a minute."""
  page = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
  for block in blocks_of(page):
    if block.language == "diff":
      assert list(apply_diff(block.text, ROOT))
      continue
    for functions, _ in read_spine(block.text):
      for function in functions:
        file, _, name = function.partition(": ")
        names = {x.name for x in _functions(f"palm_mtf/{file}")}
        assert name.rpartition(".")[2] in names, function
