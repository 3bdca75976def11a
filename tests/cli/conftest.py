# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Installs a copy of palm_mtf whose commands run without TensorFlow.

The copy has the layout of a wheel, with the gin folder inside the package. Its
entry points print their arguments instead of training.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

ENTRY_POINTS = """
import json, os
from dataclasses import asdict, is_dataclass
from palm_mtf.errors import UserError

def {name}(
  *, model_dir, config=None, config_files=dict, as_json=None, **settings
):
  settings |= vars(config) if config else {{}}
  model_dir, _, mood = model_dir.partition("!")
  if mood == "crash":
    raise RuntimeError("ours")
  if mood == "user":
    raise UserError("SEED = 7: the moon is wrong.")
  if mood == "interrupt":
    raise KeyboardInterrupt
  if mood == "pipe":
    raise BrokenPipeError("a socket, not stdout")
  for file_name, text in config_files().items():
    os.makedirs(model_dir, exist_ok=True)
    with open(os.path.join(model_dir, file_name), "w") as file:
      file.write(text)
  print(json.dumps({{
    "as_json": as_json,
    "kinds": {{name: type(each).__name__ for name, each in settings.items()}},
    "settings": {{
      name: asdict(each) if is_dataclass(each) else each
      for name, each in settings.items()
    }},
  }}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
  """An installed palm_mtf whose entry points print their arguments."""
  folder = tmp_path_factory.mktemp("site")
  shutil.copytree(ROOT / "gin", folder / "palm_mtf" / "gin")
  package = folder / "palm_mtf"
  for name in ("cli", "config", "machine", "model_dir"):
    shutil.copytree(ROOT / "palm_mtf" / name, package / name)
  for path in (ROOT / "palm_mtf").glob("*.py"):
    shutil.copy(path, package)
  commands = package / "commands"
  commands.mkdir()
  (commands / "__init__.py").touch()
  for name in ("train", "evaluate", "generate", "score"):
    (commands / f"{name}.py").write_text(ENTRY_POINTS.format(name=name))
  inspect = ENTRY_POINTS.format(name="data_inspect")
  (commands / "data.py").write_text(inspect)
  (commands / "vocab.py").write_text(
    "def vocab(**flags):\n  print('vocab', flags)\n"
    "def inspect(**flags):\n  print('inspect', flags)\n"
  )
  (package / "cli" / "doctor.py").write_text(
    "def main(**flags):\n  print('doctor', flags)\n  return 0\n"
  )
  return folder


# Runs each command in a fork, because a new process takes ten times as long to
# start Python and to import the command line. A fork has no modules of another.
# It ends without Python's cleanup, which would take most of its time.
FORKS = """
import importlib, json, os, sys, traceback
from palm_mtf.cli.main import main
importlib.import_module(sys.argv[1])

for line in sys.stdin:
  folder, arguments = json.loads(line)
  child = os.fork()
  if not child:
    break
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
  sys.exit()
for number, name in enumerate(("stdin", "stdout", "stderr")):
  os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
modules = open("modules", "w")
os.chdir(folder)
try:
  code = main(arguments)
except SystemExit as exit:
  code = exit.code or 0
except BaseException:
  traceback.print_exc()
  code = 1
json.dump(sorted(sys.modules), modules)
for file in modules, sys.stdout, sys.stderr:
  file.flush()
os._exit(code)
"""


@dataclasses.dataclass(frozen=True)
class Done:
  """A command that has ended."""

  returncode: int
  stdout: str
  stderr: str
  modules: frozenset[str]  # that the process had imported at its end


@pytest.fixture(scope="module")
def run_in(request, site, tmp_path_factory) -> Iterator[Callable[..., Done]]:
  """Runs the command in a folder, in a fork of one process.

  A test file names in IMPORTED a module that its commands need not import.
  """
  outputs = tmp_path_factory.mktemp("outputs")
  imported = getattr(request.module, "IMPORTED", "palm_mtf.cli.main")
  with subprocess.Popen(
    [sys.executable, "-c", FORKS, imported],
    cwd=outputs,
    env={**os.environ, "PYTHONPATH": str(site)},
    text=True,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as process:

    def run(folder: Path, *arguments: str) -> Done:
      request = json.dumps([str(folder), arguments])
      print(request, file=process.stdin, flush=True)
      code = int(process.stdout.readline())
      out, err, modules = (
        (outputs / name).read_text() for name in ("stdout", "stderr", "modules")
      )
      return Done(code, out, err, frozenset(json.loads(modules)))

    yield run
    process.stdin.close()


@pytest.fixture
def palm_mtf(run_in, tmp_path, monkeypatch):
  """Runs the command in an empty folder; returns a `Done`."""
  monkeypatch.chdir(tmp_path)
  return functools.partial(run_in, tmp_path)


@pytest.fixture
def palm_mtf_process(site, tmp_path):
  """Runs the command in a new process; returns its CompletedProcess."""

  def run(*arguments: str, **keywords) -> subprocess.CompletedProcess:
    return subprocess.run(
      [sys.executable, "-m", "palm_mtf", *arguments],
      env={**os.environ, "PYTHONPATH": str(site)},
      cwd=tmp_path,
      text=True,
      check=False,
      stderr=subprocess.PIPE,
      **keywords,
    )

  return run
