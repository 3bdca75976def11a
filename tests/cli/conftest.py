# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Installs a copy of palm_mtf whose commands run without TensorFlow.

The copy has the layout of a wheel, with the gin folder inside the package. Its
entry points print their arguments instead of training.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

ENTRY_POINTS = """
import json, os, sys
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
    "modules": sorted(sys.modules),
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


@pytest.fixture
def palm_mtf(site, tmp_path, monkeypatch):
  """Runs the command in an empty folder; returns code, stdout and stderr."""
  monkeypatch.chdir(tmp_path)
  return functools.partial(_run, site)


def _run(
  site: Path, *arguments: str, python: tuple[str, ...] = (), **keywords
) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, *python, "-m", "palm_mtf", *arguments],
    env={**os.environ, "PYTHONPATH": str(site)},
    text=True,
    check=False,
    **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keywords},
  )
