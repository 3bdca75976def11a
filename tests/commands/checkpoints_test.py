# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf checkpoints` lists, verifies, compares and prunes."""

import dataclasses
import errno
import json
import os

import numpy as np
import pytest

from palm_mtf.checkpoints import manifest as manifest_module
from palm_mtf.checkpoints.writer import write_checkpoint
from palm_mtf.model_dir.lock import training_lock
from tests.checkpoint_files import (
  manifest,
  save_tensors,
  steps_of,
  text_writer,
  write,
)


@pytest.fixture
def results(palm_mtf):
  """Runs `palm_mtf checkpoints ... --json`; returns its results."""

  def run(*arguments, code=0):
    found, out, _ = palm_mtf("checkpoints", *arguments, "--json")
    assert found == code
    return [json.loads(line) for line in out.splitlines()]

  return run


@pytest.fixture
def model_dir(tmp_path):
  """Checkpoints of steps 1 to 4; a bit of step 3 is flipped."""
  for step in (1, 2, 3, 4):
    write(tmp_path, step)
  path = tmp_path / "checkpoints" / "step_00000003" / "weights.data"
  path.write_text("weight5")
  (tmp_path / "checkpoints" / "step_00000002.damaged").mkdir()
  (tmp_path / "metrics.jsonl").write_text(
    '{"step": 2, "loss": 2.5, "validation_loss": 3.5}\n{"step": 5, "lo'
  )
  return tmp_path


def test_list_shows_step_date_size_losses_and_state(
  model_dir, results, palm_mtf
):
  os.unlink(model_dir / "checkpoints" / "step_00000001" / "weights.data")
  rows = results("list", model_dir)
  assert [row["step"] for row in rows] == [1, 2, 3, 4, 2]
  assert rows[0]["state"].startswith("damaged: weights.data: No such file")
  assert rows[1]["bytes"] == 7
  assert (rows[1]["loss"], rows[1]["validation_loss"]) == (2.5, 3.5)
  assert "loss" not in rows[3]
  assert rows[4]["state"] == "set aside"
  _, out, _ = palm_mtf("checkpoints", "list", model_dir)
  head, first, second, *_ = out.splitlines()
  assert head.split()[:4] == ["step", "written", "megabytes", "loss"]
  assert first.split()[:2] == ["1", "-"]
  assert second.endswith("0.0  2.5000           3.5000  whole")


def test_list_names_the_weights_of_pods_that_exchange_seldom(
  tmp_path, results, palm_mtf
):
  settings = {**manifest(1).settings, "EXCHANGE": "diloco", "NUM_PODS": 2}
  made = dataclasses.replace(manifest(1), settings=settings)
  write_checkpoint(str(tmp_path), made, text_writer("weights"), keep=1)
  (row,) = results("list", tmp_path)
  assert (row["weights"], row["state"]) == ("outer", "whole")
  _, out, _ = palm_mtf("checkpoints", "list", tmp_path)
  assert out.splitlines()[1].endswith("whole, outer weights")


def test_verify_finds_a_flipped_bit_and_exits_with_two(
  model_dir, results, palm_mtf
):
  rows = results("verify", model_dir, code=2)
  assert [row["state"] for row in rows] == [
    "whole",
    "whole",
    "damaged: weights.data does not hold the bytes that were written",
    "whole",
  ]
  code, _, error = palm_mtf("checkpoints", "verify", model_dir)
  assert code == 2
  assert f"1 of 4 checkpoints in {model_dir} are damaged: step_0000" in error


def test_prune_keeps_the_newest_whole_ones_and_says_what_it_removed(
  model_dir, results, palm_mtf
):
  rows = results("prune", model_dir, "--keep=2")
  assert {os.path.basename(row["removed"]): row["reason"] for row in rows} == {
    "step_00000001": "old",
    "step_00000002.damaged": "set aside",
    "step_00000003": (
      "damaged: weights.data does not hold the bytes that were written"
    ),
  }
  assert steps_of(model_dir) == [2, 4]
  assert len(os.listdir(model_dir / "checkpoints")) == 2
  _, out, _ = palm_mtf("checkpoints", "prune", model_dir, "--keep=2")
  assert "nothing to remove" in out


def test_prune_keeps_every_so_many_steps(tmp_path, results):
  for step in range(1, 8):
    write(tmp_path, step)
  flags = [tmp_path, "--keep=1", "--keep_every_steps=3"]
  assert len(results("prune", *flags)) == 4
  assert steps_of(tmp_path) == [3, 6, 7]


def test_prune_removes_nothing_where_none_is_whole_or_a_trainer_runs(
  model_dir, fails
):
  flags = ["checkpoints", "prune", model_dir, "--keep=1"]
  with training_lock(str(model_dir)):
    assert f"process {os.getpid()} on" in fails(*flags)
  assert fails(*flags[:-1], "--keep=0").startswith("--keep = 0: ")
  for path in model_dir.rglob("manifest.json"):
    path.unlink()
  assert "none of its 4 checkpoints is whole" in fails(*flags)
  assert len(os.listdir(model_dir / "checkpoints")) == 5


def test_what_cannot_be_read_is_shown_and_never_pruned(
  model_dir, results, fails, monkeypatch
):
  """For example without rights, or while a file system is unavailable."""
  path = str(model_dir / "checkpoints" / "step_00000004" / "weights.data")
  real = manifest_module.hash_file

  def fail(asked):
    if asked == path:
      raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return real(asked)

  monkeypatch.setattr(manifest_module, "hash_file", fail)
  before = sorted(os.listdir(model_dir / "checkpoints"))
  flags = ["checkpoints", "prune", model_dir, "--keep=1"]
  assert fails(*flags).startswith(f"cannot read {path}: Permission denied; ")
  assert sorted(os.listdir(model_dir / "checkpoints")) == before


def test_compare_tells_names_shapes_and_numbers_apart(
  tmp_path, results, palm_mtf
):
  ones = np.ones([3], np.float32)
  close, zero = ones.copy(), np.zeros([2], np.float32)
  close[1] += 0.5
  save_tensors(tmp_path / "a", same=ones, near=ones, shape=ones, a=ones, z=zero)
  save_tensors(
    tmp_path / "b", same=ones, near=close, shape=ones[:2], b=ones, z=-zero
  )
  a, b = str(tmp_path / "a"), str(tmp_path / "b")
  (found,) = results("compare", a, b)
  assert found == {
    "first": a,
    "second": b,
    "tensors": 4,
    "only_in_first": ["a"],
    "only_in_second": ["b"],
    "other_shapes": {"shape": [[3], [2]]},
    "max_difference": {"near": 0.5, "z": 0.0},  # -0 and 0 differ in their bits
    "other_settings": {},
    "bitwise_equal": False,
  }
  (found,) = results("compare", a, a)
  assert found["bitwise_equal"]
  _, out, _ = palm_mtf("checkpoints", "compare", a, b)
  assert "max difference  near 0.5000" in out


def test_compare_takes_an_absent_setting_for_the_value_that_it_had(
  tmp_path, results
):
  """A checkpoint of an earlier version lacks settings with implied values."""
  old = {"D_FF": 64}
  same = {"BRANCH_NORM": False, "FROZEN": [], "OPTIMIZER": "adafactor", **old}
  # Versions without LOGITS_DTYPE implied "activation".
  other = {"LOGITS_DTYPE": "float32", "QK_NORM": "rms_norm"}
  paths = []
  for i, settings in enumerate([old, same, other]):
    path = write_checkpoint(
      str(tmp_path / f"{i}"),
      dataclasses.replace(manifest(1), settings=settings),
      lambda prefix: save_tensors(prefix, w=np.ones([1], np.float32)),
      keep=1,
      keep_every_steps=None,
    ).path
    paths.append(path)
  assert results("compare", *paths[:2])[0]["other_settings"] == {}
  assert results("compare", *paths[1:])[0]["other_settings"] == {
    "D_FF": [64, None],  # which has no default
    "LOGITS_DTYPE": ["activation", "float32"],
    "QK_NORM": ["none", "rms_norm"],
  }


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["list", "nowhere"], "there is no such folder"),
    (["verify", "."], "holds no checkpoint"),
    (["compare", "a"], "the following arguments are required: B"),
    (["compare", "a", "b"], "A = 'a': there is no checkpoint"),
    ([], "give one of checkpoints list, checkpoints verify"),
  ],
)
def test_what_cannot_work_is_one_line(
  arguments, message, tmp_path, monkeypatch, fails
):
  monkeypatch.chdir(tmp_path)
  assert message in fails("checkpoints", *arguments)
