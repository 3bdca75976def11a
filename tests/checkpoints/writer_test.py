# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are whole or missing, written in the background, and few."""

import errno
import os
import shutil
import threading
import time
import types

import pytest

from palm_mtf.checkpoints import manifest as manifest_module
from palm_mtf.checkpoints import writer as module
from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.checkpoints.writer import (
  BackgroundWriter,
  check_space,
  quarantine_damaged,
  write_checkpoint,
)
from palm_mtf.errors import UserError
from tests.checkpoint_files import (
  SHAPES,
  manifest,
  steps_of,
  text_writer,
  write,
)


def run_config(**changes):
  """Returns the settings of a RunConfig that the writer reads."""
  settings = {
    "keep_checkpoints": 3,
    "keep_every_steps": None,
    "train_steps": 100,
    "checkpoint_steps": 1,
    "frozen": (),
  }
  return types.SimpleNamespace(**{**settings, **changes})


def fail_for_want_of_space(prefix):
  with open("/dev/full", "w") as file:
    file.write("x")


@pytest.mark.parametrize(
  ("every", "kept"), [(None, [18, 20]), (6, [6, 12, 18, 20])]
)
def test_the_newest_are_kept_and_for_good_one_every_so_many_steps(
  every, kept, tmp_path
):
  for step in range(2, 21, 2):
    write(tmp_path, step, keep=2, every=every)
  assert steps_of(tmp_path) == kept
  assert len(os.listdir(tmp_path / "checkpoints")) == len(kept)


@pytest.mark.parametrize("how", ["protected", "open elsewhere"])
def test_what_cannot_be_removed_is_said_and_the_run_goes_on(
  how, tmp_path, monkeypatch, capsys
):
  old = write(tmp_path, 1).path
  real = shutil.rmtree

  def refuse(path, ignore_errors=False):
    if "step_00000001_removed" in path and not ignore_errors:
      raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    real(path, ignore_errors=ignore_errors)

  if how == "protected":  # `chmod a-w`, which root disregards
    monkeypatch.setattr(module.os, "access", lambda path, mode: path != old)
  else:
    monkeypatch.setattr(module.shutil, "rmtree", refuse)
  assert write(tmp_path, 2, keep=1).manifest.step == 2
  (line,) = capsys.readouterr().err.splitlines()
  if how == "protected":
    assert f"warning: cannot remove {old}: it is write-protected; " in line
    assert steps_of(tmp_path) == [1, 2]
  else:
    hidden = f"{tmp_path}/checkpoints/.partial_step_00000001_removed"
    assert f"cannot remove {old}, of which {hidden} is left: Device or" in line
    assert steps_of(tmp_path) == [2]


def test_of_the_checkpoints_after_a_rewind_the_newest_goes_first(
  tmp_path, monkeypatch
):
  """If killed there, the run resumes from the newest, before the same spike."""
  for step in (1, 2, 3, 4):
    write(tmp_path, step)
  left, real = [], os.rename

  def note(source, target):
    real(source, target)
    left.append(steps_of(tmp_path))

  monkeypatch.setattr(os, "rename", note)
  module.remove_later(str(tmp_path), 2)
  assert left == [[1, 2, 3], [1, 2]]


def test_a_checkpoint_is_synced_before_it_has_its_name_and_the_name_then(
  tmp_path, monkeypatch
):
  synced, real = [], os.fsync

  def note(descriptor):
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    synced.append(
      (path, os.path.exists(tmp_path / "checkpoints/step_00000001"))
    )
    real(descriptor)

  monkeypatch.setattr(os, "fsync", note)
  write(tmp_path, 1)
  root = str(tmp_path / "checkpoints")
  *files, folder, parent = synced
  assert parent == (root, True)
  assert os.path.dirname(folder[0]) == root and not folder[1]
  assert sorted(files) == [
    (f"{folder[0]}/{name}", False) for name in ("manifest.json", "weights.data")
  ]


def test_a_damaged_checkpoint_is_set_aside_when_its_step_is_written_again(
  tmp_path, capsys
):
  for text in ("first", "second"):
    damaged = write(tmp_path, 1, text=text)
    with open(f"{damaged.path}/weights.data", "a") as file:
      file.write("!")
  write(tmp_path, 1)
  names = sorted(os.listdir(tmp_path / "checkpoints"))
  assert names == [
    "step_00000001",
    "step_00000001.damaged",
    "step_00000001.damaged_2",
  ]
  for name, text in zip(names, ("weights", "first!", "second!"), strict=True):
    path = tmp_path / "checkpoints" / name / "weights.data"
    assert path.read_text() == text
  assert f"is kept as {damaged.path}.damaged_2" in capsys.readouterr().err


def test_a_whole_checkpoint_makes_way_when_one_of_the_same_step_is_on_the_disk(
  tmp_path, monkeypatch
):
  old = write(tmp_path, 1, text="old").path
  there, real = [], os.fsync

  def note(descriptor):
    there.append(os.path.exists(old))
    real(descriptor)

  monkeypatch.setattr(os, "fsync", note)
  write(tmp_path, 1, text="new")
  assert there == [True] * 4  # the files, their folder, and the new name
  (path,) = (tmp_path / "checkpoints").rglob("weights.data")
  assert path.read_text() == "new"


def test_a_trainer_that_starts_clears_what_is_damaged_and_hashes_nothing_twice(
  tmp_path, monkeypatch
):
  for step in (1, 2, 3):
    write(tmp_path, step)
  root = tmp_path / "checkpoints"
  (root / "step_00000001" / "weights.data").unlink()  # older: not in the way
  (root / "step_00000003" / "weights.data").write_text("weight5")
  (root / ".partial_step_00000004_x").mkdir()
  hashed, real = [], manifest_module.hash_file
  monkeypatch.setattr(
    manifest_module, "hash_file", lambda path: hashed.append(path) or real(path)
  )
  quarantine_damaged(str(tmp_path), newest_whole(str(tmp_path)))
  assert sorted(os.listdir(root)) == [
    "step_00000001",
    "step_00000002",
    "step_00000003.damaged",
  ]
  assert [os.path.basename(os.path.dirname(path)) for path in hashed] == [
    "step_00000003",
    "step_00000002",
  ]


def interrupt(prefix):
  text_writer("half")(prefix)
  raise KeyboardInterrupt


@pytest.mark.parametrize(
  ("write_weights", "error", "message"),
  [
    (interrupt, KeyboardInterrupt, ""),
    (
      fail_for_want_of_space,
      UserError,
      "no disk space left for {}/checkpoints/step_00000003, which needs up to "
      "120 bytes; free some, or choose another folder.",
    ),
  ],
)
def test_a_write_that_ends_early_leaves_nothing_and_keeps_the_older(
  write_weights, error, message, tmp_path
):
  write(tmp_path, 1)
  with pytest.raises(error) as found:
    write_checkpoint(str(tmp_path), manifest(3), write_weights, keep=1)
  assert str(found.value) == message.format(tmp_path)
  assert os.listdir(tmp_path / "checkpoints") == ["step_00000001"]


def test_disk_without_room_for_the_checkpoints_is_refused_before_training(
  tmp_path,
):
  check_space(str(tmp_path / "not/there/yet"), SHAPES, run_config())
  half = shutil.disk_usage(tmp_path).free // 24
  shapes = {"embedding": (half,)}
  for changes, count in (
    ({}, 4),
    ({"keep_every_steps": 20}, 9),
    ({"train_steps": 2}, 3),  # no more than are written
  ):
    with pytest.raises(UserError) as error:
      check_space(str(tmp_path), shapes, run_config(**changes))
    needed = count * 12 * half
    assert f"room for {count} more, {needed:,} bytes, and" in str(error.value)
  # Three of the four exist, and the fourth fits.
  for step in (1, 2, 3):
    write(tmp_path, step)
  check_space(str(tmp_path), shapes, run_config())


def test_the_disk_that_checkpoints_link_to_is_asked(tmp_path, monkeypatch):
  model_dir, disk = tmp_path / "run", tmp_path / "disk"
  for folder in (model_dir, disk):
    folder.mkdir()
  asked, real = [], shutil.disk_usage
  monkeypatch.setattr(
    shutil, "disk_usage", lambda path: asked.append(path) or real(path)
  )
  check_space(str(model_dir), SHAPES, run_config())
  (model_dir / "checkpoints").symlink_to(disk)
  check_space(str(model_dir), SHAPES, run_config())
  assert asked == [str(model_dir), str(disk)]


def test_the_caller_goes_on_while_one_checkpoint_is_written(tmp_path):
  may_write, copies = threading.Event(), []

  def copy_weights():
    copies.append(time.monotonic())

    def write_weights(prefix):
      assert may_write.wait(10)
      text_writer("weights")(prefix)

    return write_weights

  with BackgroundWriter(str(tmp_path), run_config(), None) as writer:
    writer.write(manifest(1), copy_weights)
    writer.check()
    assert writer.step == 1
    assert not steps_of(tmp_path), "nothing is there before it is whole"
    second = threading.Thread(
      target=writer.write, args=(manifest(2), copy_weights)
    )
    second.start()
    time.sleep(0.05)
    assert len(copies) == 1, "one copy at a time"
    may_write.set()
    second.join()
    assert writer.take_wait_secs() >= 0.04
    assert writer.wait().manifest.step == 2
  assert steps_of(tmp_path) == [1, 2]


def test_each_checkpoint_names_its_parent_and_the_hash_of_that(tmp_path):
  resumed = write(tmp_path, 1)
  with BackgroundWriter(str(tmp_path), run_config(), resumed) as writer:
    writer.write(manifest(2), lambda: text_writer("two"))
    second = writer.wait()
    writer.write(manifest(3), lambda: text_writer("three"))
    third = writer.wait()
  for child, parent in ((second, resumed), (third, second)):
    assert child.manifest.parent == {
      "checkpoint": os.path.basename(parent.path),
      "blake2b": parent.blake2b,
    }
  assert resumed.manifest.parent is None


@pytest.mark.parametrize("how", ["check", "wait", "write"])
def test_a_write_that_fails_stops_the_run_and_names_the_last_good_one(
  how, tmp_path
):
  good = write(tmp_path, 1)
  with (
    pytest.raises(UserError) as error,
    BackgroundWriter(str(tmp_path), run_config(), good) as writer,
  ):
    writer.write(manifest(2), lambda: fail_for_want_of_space)
    if how == "check":
      while True:
        writer.check()
    elif how == "wait":
      writer.wait()
    else:
      writer.write(manifest(3), lambda: text_writer("three"))
  assert str(error.value).startswith("no disk space left for")
  assert str(error.value).endswith(f"The newest checkpoint is {good.path}.")
  assert steps_of(tmp_path) == [1]


def test_the_end_waits_for_the_checkpoint_that_is_being_written(tmp_path):
  def slowly(prefix):
    time.sleep(0.1)
    text_writer("weights")(prefix)

  with (
    pytest.raises(ValueError, match="training has diverged"),
    BackgroundWriter(str(tmp_path), run_config(), None) as writer,
  ):
    writer.write(manifest(1), lambda: slowly)
    raise ValueError("training has diverged")
  assert steps_of(tmp_path) == [1]
