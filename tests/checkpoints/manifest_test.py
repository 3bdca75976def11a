# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints are found, named and skipped; foreign ones refused."""

import errno
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest

from palm_mtf.checkpoints import manifest as manifest_module
from palm_mtf.checkpoints.manifest import (
  DamagedCheckpointError,
  OpenWeights,
  find_checkpoints,
  newest_whole,
  read_whole,
)
from palm_mtf.checkpoints.weights_to_load import newest_checkpoint
from palm_mtf.errors import UserError
from palm_mtf.model_dir.foreign_files import seal
from tests import runs
from tests.checkpoint_files import (
  SHAPES,
  manifest,
  save_tensors,
  steps_of,
  write,
)
from tests.refusals import message_of


def flip_bit(path: pathlib.Path, place: int) -> None:
  content = bytearray(path.read_bytes())
  content[place] ^= 4
  path.write_bytes(content)


def test_newest_is_the_last_by_number_not_by_name(tmp_path):
  steps = [5, 99_999_999, 100_000_000]
  for step in reversed(steps):
    write(tmp_path, step)
  assert steps_of(tmp_path) == steps
  newest = newest_checkpoint(str(tmp_path), SHAPES)
  assert newest.manifest.step == 100_000_000


@pytest.mark.parametrize(
  "damage, reason",
  [
    (lambda d: (d / "weights.data").write_text("wei"), "has 3 of 7 bytes"),
    (lambda d: flip_bit(d / "weights.data", 3), "does not hold the bytes"),
    (lambda d: (d / "weights.data").unlink(), "weights.data: No such file"),
    (lambda d: (d / "manifest.json").unlink(), "manifest.json: No such file"),
    *[
      (
        lambda d, text=text: (d / "manifest.json").write_text(text),
        "manifest.json does not say what was written",
      )
      for text in ("", "{", "{}", "[]", '{"blake2b": null}')
    ],
  ],
)
def test_damaged_checkpoint_is_named_and_the_older_one_used(
  damage, reason, tmp_path, capsys
):
  write(tmp_path, 1)
  damaged = write(tmp_path, 2)
  damage(pathlib.Path(damaged.path))
  newest = newest_checkpoint(str(tmp_path), SHAPES)
  assert newest.manifest.step == 1
  said = capsys.readouterr().err
  assert f"DAMAGED checkpoint {damaged.path}: " in said
  assert reason in said


def test_what_cannot_be_read_just_now_is_not_called_damaged(
  tmp_path, monkeypatch, capsys
):
  write(tmp_path, 1)
  newest = write(tmp_path, 2).path

  def fail(path):
    raise OSError(errno.EIO, os.strerror(errno.EIO))

  monkeypatch.setattr(manifest_module, "hash_file", fail)
  assert message_of(newest_whole, str(tmp_path)) == (
    f"cannot read {newest}/weights.data: Input/output error; mend that, or "
    f"move {newest} away."
  )
  assert not capsys.readouterr().err


def _seal_as_empty(path: pathlib.Path, name: str) -> None:
  content = json.loads((path / "manifest.json").read_text())
  content.pop("blake2b")
  content["files"][name][0] = 0
  (path / "manifest.json").write_text(json.dumps(seal(content, "blake2b")))


@pytest.mark.parametrize("name", ["manifest.json", "weights.data"])
@pytest.mark.parametrize(
  "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")]
)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
  name, make, tmp_path
):
  path = pathlib.Path(write(tmp_path, 1).path)
  if name == "weights.data":  # a FIFO has the size 0
    _seal_as_empty(path, name)
  (path / name).unlink()
  make(path / name)
  with pytest.raises(UserError, match=f"cannot read {path}/{name}: is a "):
    newest_whole(str(tmp_path))


def test_what_a_later_version_wrote_is_not_called_damaged(tmp_path, capsys):
  write(tmp_path, 1)
  newest = write(tmp_path, 2).path
  content = json.loads(open(f"{newest}/manifest.json").read())
  del content["blake2b"]
  with open(f"{newest}/manifest.json", "w") as file:
    json.dump(seal({**content, "later": 1}, "blake2b"), file)
  assert message_of(newest_whole, str(tmp_path)).startswith(
    f"{newest} is of another version of palm"
  )
  assert not capsys.readouterr().err


def test_a_reader_next_to_a_trainer_looks_again_and_keeps_what_it_found(
  tmp_path, capsys
):
  """The trainer keeps one checkpoint, and writes the next at once."""
  end = threading.Event()

  def train():
    for step in itertools.count(1):
      write(tmp_path, step, keep=1, text=f"{step:9}")
      if end.is_set():
        return

  write(tmp_path, 0, text=f"{0:9}")
  trainer = threading.Thread(target=train)
  trainer.start()
  seen = set()
  stop = time.monotonic() + 60
  try:
    while len(seen) < 50:
      assert time.monotonic() < stop
      newest = newest_checkpoint(str(tmp_path), SHAPES)
      found = newest.manifest.step
      assert len(steps_of(tmp_path)) <= 2
      assert open(f"{newest.prefix}.data").read() == f"{found:9}"
      seen.add(found)
  finally:
    end.set()
    trainer.join()
  assert not capsys.readouterr().err


def test_any_flipped_bit_of_any_file_is_found(tmp_path):
  written = pathlib.Path(write(tmp_path, 2).path)
  for path in written.iterdir():
    content = path.read_bytes()
    for place in range(len(content)):
      if content[place : place + 1].isspace():
        continue  # white space in the manifest
      flip_bit(path, place)
      with pytest.raises(DamagedCheckpointError):
        read_whole(str(written))
      path.write_bytes(content)
  read_whole(str(written))


def test_without_any_whole_checkpoint_nothing_starts_again(tmp_path, capsys):
  assert newest_whole(str(tmp_path)) is None
  for step in (1, 2):
    os.unlink(f"{write(tmp_path, step).path}/weights.data")
  with pytest.raises(UserError, match="none of its 2 checkpoints is whole"):
    newest_whole(str(tmp_path))
  assert capsys.readouterr().err.count("DAMAGED") == 2


def test_a_manifest_is_read_as_it_was_written_with_the_hashes_of_the_files(
  tmp_path,
):
  written = write(tmp_path, 7)
  (found,) = find_checkpoints(str(tmp_path))
  assert found == written == read_whole(written.path)
  assert found.manifest == manifest(7)
  assert [size for size, _ in found.files.values()] == [7]
  content = json.loads(open(f"{found.path}/manifest.json").read())
  seal = content.pop("blake2b")
  text = json.dumps(content, sort_keys=True).encode()
  assert seal == hashlib.blake2b(text, digest_size=16).hexdigest()
  assert seal == found.blake2b
  digest = hashlib.blake2b(b"weights", digest_size=16).hexdigest()
  assert content["files"] == {"weights.data": [7, digest]}


WEIGHTS = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize("name", ["plain", "lr[0.01]", "a*?", "{a,b} c\\d"])
def test_files_of_any_name_are_read_when_their_folder_is_gone(name, tmp_path):
  folder = tmp_path / name
  save_tensors(folder / "weights", x=WEIGHTS)
  files = OpenWeights(str(folder / "weights"))
  shutil.rmtree(folder)
  assert (runs.load(files.prefix)["x"] == WEIGHTS).all()
  links = os.path.dirname(files.prefix)
  assert os.listdir(links)
  del files
  assert not os.path.exists(links)


OPEN_AND_DIE = """
import os, signal, sys
from palm_mtf.checkpoints.manifest import OpenWeights
files = OpenWeights(sys.argv[1])
print(files.prefix, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_links_of_a_killed_process_are_removed_by_the_next(
  tmp_path, monkeypatch
):
  temporary = tmp_path / "temporary"
  temporary.mkdir()
  monkeypatch.setenv("TMPDIR", str(temporary))
  monkeypatch.setattr(tempfile, "tempdir", None)
  (tmp_path / "weights.index").touch()
  prefix = str(tmp_path / "weights")
  running = OpenWeights(prefix)
  killed = subprocess.run(
    [sys.executable, "-c", OPEN_AND_DIE, prefix], stdout=subprocess.PIPE
  )
  assert killed.returncode == -signal.SIGKILL
  left = pathlib.Path(os.fsdecode(killed.stdout).strip()).parent
  kept = pathlib.Path(running.prefix).parent
  assert {*temporary.iterdir()} == {left, kept}
  files = OpenWeights(prefix)
  assert {*temporary.iterdir()} == {kept, pathlib.Path(files.prefix).parent}
  assert os.listdir(kept) == ["weights.index"]
  files.close()
  running.close()
  assert not any(temporary.iterdir())


def test_without_a_temporary_folder_files_are_read_at_their_own_path(
  tmp_path, monkeypatch
):
  save_tensors(tmp_path / "weights", x=WEIGHTS)

  def refuse(**unused):
    raise FileNotFoundError("No usable temporary directory found")

  monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
  files = OpenWeights(str(tmp_path / "weights"))
  assert files.prefix == str(tmp_path / "weights")
  with pytest.raises(FileNotFoundError):
    files.path("weights.other")
