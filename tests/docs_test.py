# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every command and path in README.md and docs/ exists and is accepted.

The tests check that targets of `make` exist. They run training commands until
the configuration is checked, and tools until flags are parsed. tests/docs/ runs
the blocks of single pages.
"""

import argparse
import ast
import importlib
import pathlib
import re
import runpy
import shlex
import sys

import pytest

from palm_mtf.cli.command_table import COMMANDS as KNOWN
from palm_mtf.cli.command_table import split_name
from palm_mtf.cli.main import main
from tests.doc_pages import blocks_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
# Calls that an earlier commit has: "`python -m tools.x` at commit 45f2ee92".
_PAST = re.compile(r"`python -m (tools\.[^`]+)`\s+at\s+commit\s+(\w+)")
PROSE = _PAST.sub("", PROSE)


def _without_variables(words: list[str]) -> list[str]:
  """Returns a command without the environment variables set before it."""
  first = next(i for i, word in enumerate(words) if not re.match(r"\w+=", word))
  return words[first:]


COMMANDS = [
  _without_variables(command)
  for block in blocks_of(TEXT)
  if block.language == "sh"
  for command in block.commands
]
# Calls of programs within sentences.
CALLS = [
  shlex.split(call)
  for call in re.findall(r"`((?:palm_mtf|python -m tools\.)[^`]+)`", PROSE)
  if not call.endswith(("...", "tools.bench"))  # the second lists its cases
]
# Calls in the docstrings of tools and examples.
OWN_CALLS = [
  shlex.split(
    call.replace("\\\n", " ").replace(
      f" {path.name}", f" {path.relative_to(ROOT)}"
    )
  )
  for folder in ("tools", "examples")
  for path in sorted((ROOT / folder).rglob("*.py"))
  for call in re.findall(
    r"^  (python (?:.*\\\n)*.*?)(?:   .*)?$",
    ast.get_docstring(ast.parse(path.read_text("utf-8")), clean=False) or "",
    re.M,
  )
  if "tools.disturbed" not in call  # it passes its flags to palm_mtf
]


@pytest.mark.parametrize(
  "command", [c for c in COMMANDS if c[0].endswith("palm_mtf")], ids=" ".join
)
def test_palm_mtf_command_has_a_valid_configuration(
  command, tmp_path, monkeypatch, capsys
):
  # The reader's MODEL_DIRs at this point hold the config.gin of the quickstart.
  monkeypatch.chdir(tmp_path)
  name, flags = split_name(command[1:])
  known = KNOWN[name]
  if {*flags} & {*known.standalone}:  # has no configuration
    assert {*flags} <= {*known.standalone, "--json"}
    return
  if not known.config:
    assert {x for x in flags if x.startswith("--")} <= {*known.flags}
    return
  files = [x for x in command if x.startswith("--gin_file=runs/")]
  if "--model_dir" in command:
    files.append(f"{command[command.index('--model_dir') + 1]}/config.gin")
  for file in files:
    path = pathlib.Path(file.removeprefix("--gin_file="))
    path.parent.mkdir(parents=True)
    model_dir = f"--gin.MODEL_DIR={str(path.parent)!r}"
    recipe = "--gin_file=recipes/quickstart.gin"
    assert main(["train", recipe, model_dir, "--print_config"]) == 0
    path.write_text(capsys.readouterr().out)
  assert main([*command[1:], "--print_config"]) == 0


@pytest.mark.parametrize("target", [c[1] for c in COMMANDS if c[0] == "make"])
def test_make_target_exists(target):
  assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize(
  "call", [c for c in CALLS if c[0] == "palm_mtf"], ids=" ".join
)
def test_a_call_in_a_sentence_has_flags_of_its_command(call):
  words = [x for x in call[1:] if x != "..."]
  name, rest = split_name(words)
  flags = {x.partition("=")[0] for x in rest if x.startswith("--")}
  known = {*KNOWN[name].flags, *KNOWN[name].standalone}
  assert flags <= known | ({"--gin_file"} if KNOWN[name].config else set())


class _Parsed(BaseException):
  """argparse has read the flags of a tool."""


@pytest.fixture
def parse_only(monkeypatch):
  """Ends a tool with `_Parsed` before it begins its work."""
  parse_known = argparse.ArgumentParser.parse_known_args

  # parse_known_args is called by commands and benches, whose rest is gin flags.
  def parse_known_args(self, args=None):
    _, rest = parse_known(self, args)
    assert all(re.match(r"--gin\.\w+=", flag) for flag in rest), rest
    raise _Parsed

  def parse_args(self, args=None):
    _, rest = parse_known(self, args)
    assert not rest
    raise _Parsed

  monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
  monkeypatch.setattr(
    argparse.ArgumentParser, "parse_known_args", parse_known_args
  )


@pytest.mark.parametrize(
  "command",
  [c for c in COMMANDS + CALLS + OWN_CALLS if c[0].endswith("python")],
  ids=" ".join,
)
def test_a_tool_takes_the_flags_that_the_page_writes(
  command, parse_only, monkeypatch
):
  _, *words = command
  script, *flags = words[1:] if words[0] == "-m" else words
  script = script.replace("tools.bench", "tools.bench.command")
  path = script.replace(".", "/") + ".py" if words[0] == "-m" else script
  assert (ROOT / path).is_file()
  monkeypatch.setattr(sys, "argv", [path, *flags])
  with pytest.raises(_Parsed):
    if path.startswith("tools/"):
      importlib.import_module(path[: -len(".py")].replace("/", ".")).main()
    else:
      runpy.run_path(str(ROOT / path), run_name="__main__")


def test_every_path_that_is_named_exists():
  paths = re.findall(r"`((?:palm_mtf|tests|tools|gin|docs)/[\w/.]+)`", TEXT)
  assert len(paths) > 5
  for path in paths:
    assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
  for target in re.findall(r"\]\(([\w./]+)\)", page.read_text("utf-8")):
    assert (page.parent / target).is_file(), target


def _messages() -> list[str]:
  """Returns every string of the package, with "..." for its fields."""
  found = []
  for path in (ROOT / "palm_mtf").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.JoinedStr):
        parts = (
          x.value if isinstance(x, ast.Constant) else "..." for x in node.values
        )
        found.append("".join(parts))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(node.value)
  return found


def test_messages_of_the_index_of_errors_are_those_of_the_program():
  text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
  listed = re.findall(r"^\| `(.+?)` \|", text, re.M)
  assert len(listed) > 10
  messages = _messages()
  for message in listed:
    pieces = [re.escape(x) for x in message.split("...")]
    pattern = re.compile(".*".join(pieces), re.DOTALL)
    assert any(map(pattern.search, messages)), message
