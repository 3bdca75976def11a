# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Readers read any file, or say in one line what is wrong with it.

  pytest tests/fuzz_test.py -m slow

changes every kind of file at random, 10,000 times in all. A failure names its
kind and seed; `pytest tests/fuzz_test.py -k KIND` repeats the same seeds.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from palm_mtf.errors import UserError
from palm_mtf.training import job
from tests import processes, runs
from tests.fuzzed_files import IN_CHILD, KINDS, TextWouldBeReadError, seal_again
from tests.mutations import mutate

SHARE, SLOW_SHARE = 20, 770  # cases per kind of file: 300 and 10,000 in all


@pytest.fixture
def up_to_text(monkeypatch, tmp_path):
  """Ends training before it reads text; relative paths are in tmp_path."""

  def end(*unused: object, **keywords: object) -> None:
    raise TextWouldBeReadError

  monkeypatch.setattr(job, "load_vocabulary", end)
  monkeypatch.chdir(tmp_path)


def _cases(kind: str, count: int, work: Path) -> Iterator[tuple[int, Path]]:
  """Yields seeds, and folders in which one file has been changed."""
  make, pattern, read, *_ = KINDS[kind]
  pristine, folder = work / "pristine", work / "case"
  pristine.mkdir()
  make(pristine)
  shutil.copytree(pristine, folder)
  read(folder)  # the unchanged files are read without an error
  for seed in range(count):
    rng = random.Random(f"{kind} {seed}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(pristine, folder)
    paths = sorted(x for x in folder.glob(pattern) if x.is_file())
    path = rng.choice(paths)
    path.write_bytes(mutate(path.read_bytes(), rng))
    if kind == "sealed":
      seal_again(path)
    yield seed, folder


def _why_wrong(
  read: Callable, folder: Path, understood: tuple[type[Exception], ...]
) -> str:
  """Returns what is wrong with the way in which a folder is read, or ''."""
  before = runs.read_files(folder)
  try:
    read(folder)
    return ""
  except (UserError, *understood) as error:
    if "\n" in str(error) and not isinstance(error, UserError):
      return f"not one line: {error}"
  except Exception as error:
    return f"{type(error).__name__}: {str(error)[:200]}"
  after = runs.read_files(folder)
  changed = [name for name, bits in before.items() if after.get(name) != bits]
  return f"refused, but wrote {changed}" if changed else ""


def fuzz(kind: str, count: int, work: Path) -> None:
  """Raises AssertionError with the seeds of the files that are read wrong."""
  _, _, read, *understood = KINDS[kind]
  wrong = [
    f"{kind} {seed}: {why}"
    for seed, folder in _cases(kind, count, work)
    if (why := _why_wrong(read, folder, tuple(understood)))
  ]
  assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_any_file_is_read_right_or_refused_in_one_line(
  kind, tmp_path, up_to_text
):
  fuzz(kind, SHARE, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_files_are_read_right_or_refused_in_one_line(
  kind, tmp_path, up_to_text
):
  if kind not in IN_CHILD:
    fuzz(kind, SLOW_SHARE, tmp_path)
    return
  call = f"fuzz({kind!r}, {SLOW_SHARE}, pathlib.Path({str(tmp_path)!r}))"
  program = f"import pathlib; from tests.fuzz_test import fuzz; {call}"
  done = processes.python("-c", program, cwd=processes.ROOT)
  # The last file stays in tmp_path / "case".
  assert done.returncode == 0, done.stderr[-5000:]
