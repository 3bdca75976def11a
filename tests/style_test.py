# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files, functions and names follow the style of the project."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doc_pages import blocks_of
from tests.internals_page import apply_diff, read_spine
from tests.source_files import (
  EVERY,
  PACKAGE,
  ROOT,
  assert_none,
  nodes_of,
  nodes_of_text,
  python_files,
  text_of,
)

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 600, 80, 8


SAYS_NOTHING = {"common", "helpers", "misc", "util", "utils"}


HEADER = (
  "# Copyright 2026 The palm_mtf authors.\n"
  "# SPDX-License-Identifier: Apache-2.0\n"
)


# Tests of several modules. Those directly in tests/ are of the whole project.
NOT_MIRRORED = {
  "executors/xla/adapters_test.py",
  "executors/xla/distillation_test.py",
  "executors/xla/frozen_test.py",
  "executors/xla/hosts_test.py",
  "executors/xla/preference_test.py",
  "compression/pruning_peer_test.py",
  "training/preference_peer_test.py",
  "cli/main_run_test.py",
  "commands/data_cache_test.py",
  "commands/data_inspect_test.py",
  "commands/data_report_test.py",
  "commands/dtype_test.py",
  "commands/golden_test.py",
  "commands/imported_texts_test.py",
  "commands/passages_test.py",
  "export/rotary_scaling_test.py",
  "docs/readme_test.py",
  "foreign_models/example_test.py",
  "generation/serving/prompt_parts_test.py",
  "generation/serving/streams_test.py",
  "generation/inference/kept_space_test.py",
  "generation/inference/masked_lookup_test.py",
  "runtime/tracer/budgets_test.py",
  "runtime/tracer/example_test.py",
  "tasks/gin_run_test.py",
  "tasks/published_forms_test.py",
  "data/vocabulary/chat_renderer_test.py",
  "data/vocabulary/conversation_tokens_test.py",
  "export/gguf/header_test.py",
  "generation/serving/assertions_test.py",
  "generation/serving/conversation_test.py",
  "runtime/manager/streams_test.py",
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
    if "/" in name and name not in NOT_MIRRORED and not _is_mirror(name)
  )


def test_a_commit_runs_what_make_lint_runs():
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  recipe = re.search(r"^lint: .*\n((?:\t.*\n)+)", makefile, re.M)[1]
  lint = re.findall(r"^\t\$\(BIN\)/(.*)$", recipe, re.M)
  hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
  assert re.findall(r"entry: \.venv/bin/(.*)$", hooks, re.M) == lint
  assert lint[-1] == "mypy"


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


# A rate is written "tokens per second".
_COUNTED = (
  r"tokens|bytes|FLOPs|steps|sequences|examples|rows|requests|messages|numbers|"
  r"devices|[KMGT]i?B|[\d.]+ (?:s|ms)"
)
_COUNTED_IN = (
  r"second|minute|hour|day|step|token|row|batch|layer|device|chip|host|core|pod|"
  r"GPU|parameter|number|document|sequence|call|connection"
)
_POSSESSIVE = "(?:its|their|his|her|our|your)"
# With a noun, as in "one of its own flags", the words are plain.
_NOUN = r"(?!in |on |for |with |from |by |that |which |and |or |to |as |at )\w"
# (plain word, pattern of the words that it replaces, example of these).
PLAIN_WORDS = (
  ("only", "alone", "for this host alone"),
  ("after, beyond", "behind", "the tokens behind a prompt"),
  ("next to, besides, compared with", "beside", "a plot beside the table"),
  ("continues", "(?:go|goes|going|gone|went) on", "the run goes on"),
  ("again, from scratch", "anew", "compiled anew"),
  ("this CPU, this machine", "at hand", "the CPU at hand"),
  ("is reported", "(?:is|are|was|were|be|been) told", "the user is told so"),
  ("own", f"of {_POSSESSIVE} own(?! {_NOUN})", "a process of its own"),
  ("learned", "learnt", "what the model has learnt"),
  ("reads, validates, parses", "judge[sd]?", "a test judges it"),
  ("forever", "for ever", "it waits for ever"),
  ("per", f"(?:{_COUNTED}) an? (?:{_COUNTED_IN})", "100 tokens a second"),
)
_SPACE = r"(?:[ \t]+|[ \t]*\n[ \t]*)"  # a phrase may reach into the next line
_PATTERNS = {
  plain: re.compile(
    rf"(?<![-\w])(?:{odd})(?![-\w])".replace(" ", _SPACE), re.IGNORECASE
  )
  for plain, odd, _ in PLAIN_WORDS
}
# One search for all patterns rejects most texts.
_ANY = re.compile(
  "|".join(x.pattern for x in _PATTERNS.values()), re.IGNORECASE
)
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)


def _comments(path: str, text: str) -> str:
  """Returns only the comments of a file, each on its own line."""
  if path.endswith(".py"):
    lines = [""] * (text.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
      if token.type == tokenize.COMMENT:
        lines[token.start[0] - 1] = token.string.lstrip("# ")
    return "\n".join(lines)
  mark = r"(?<!:)//" if path.endswith((".h", ".cc")) else "#"
  found = (re.search(rf"{mark}(.*)", line) for line in text.split("\n"))
  return "\n".join(match[1].strip() if match else "" for match in found)


def _prose(path: str, text: str) -> Iterator[tuple[int, str]]:
  """Yields each text of a file for people, and its first line.

  Strings of several words count as messages, except in tests.
  """
  if path.endswith(".md"):
    yield 1, text
    return
  yield 1, _comments(path, text)
  if path.endswith(".py"):
    nodes = nodes_of_text(text)
    docstrings = {id(x.value) for x in nodes if isinstance(x, ast.Expr)}
    for node in nodes:
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        is_message = " " in node.value and not path.startswith("tests/")
        if is_message or id(node) in docstrings:
          yield node.lineno, node.value


def _odd_words(path: str, text: str) -> Iterator[str]:
  for first, prose in _prose(path, text):
    if not _ANY.search(prose):
      continue
    page = _CODE.sub(lambda code: re.sub(r"\S", "_", code[0]), prose)
    for plain, pattern in _PATTERNS.items():
      for match in pattern.finditer(page):
        line = first + page.count("\n", 0, match.start())
        yield f"{path}:{line}: {' '.join(match[0].split())!r}; write {plain}"


def test_texts_for_people_use_plain_words():
  kinds = (".py", ".md", ".gin", ".h", ".cc", ".toml", "Makefile")
  kinds += (".sh", ".sbatch", ".service", ".yaml", "Dockerfile")
  globs = ("*", "docs/*", "tests/*", "gin/**/*", "examples/**/*")
  globs += ("palm_mtf/native/*",)
  paths = {str(p.relative_to(ROOT)) for glob in globs for p in ROOT.glob(glob)}
  texts = {path for path in paths | {*EVERY} if path.endswith(kinds)}
  assert_none(
    x for path in sorted(texts) for x in _odd_words(path, text_of(path))
  )


@pytest.mark.parametrize(("plain", "odd"), [x[::2] for x in PLAIN_WORDS])
def test_each_odd_word_is_found_in_each_kind_of_text(plain, odd):
  lines = odd.replace(" ", "\n")
  for path, text in (
    ("docs/a.md", lines),
    ("gin/a.gin", "# " + lines.replace("\n", "\n# ")),
    ("palm_mtf/native/a.h", "// " + lines.replace("\n", "\n// ")),
    ("tests/a_test.py", "# " + lines.replace("\n", "\n# ")),
    ("tests/a_test.py", f'"""{lines}"""'),
    ("palm_mtf/a.py", f'raise UserError("{odd}")'),
  ):
    (found,) = _odd_words(path, text)
    assert found.startswith(f"{path}:") and found.endswith(f"; write {plain}")
