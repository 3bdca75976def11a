# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers write and read the checkpoints of a run; the client's hash is one."""

import pytest

from palm_mtf.checkpoints.manifest import find_checkpoints, read_whole
from tests import runs
from tests.cluster.served import Served

SETTINGS = {
  "TRAIN_STEPS": 4,
  "CHECKPOINT_STEPS": 2,
  "EVAL_STEPS": 1000,
  "PROMPTS": [],
}


def data_files(checkpoint):
  return sorted(name for name in checkpoint.files if ".data-" in name)


# Slow: those of one process are read so in manifest_test.py.
@pytest.mark.slow
def test_a_damaged_file_of_a_server_is_found_and_an_older_checkpoint_taken(
  corpus, tmp_path, capsys
):
  settings = {**SETTINGS, "NUM_PODS": 2, "PODS": "local_servers"}
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  before = runs.read_tensors(tmp_path, 4)
  first, newest = find_checkpoints(str(tmp_path))
  for checkpoint in (first, newest):
    assert data_files(checkpoint) == [
      "weights.data-00000-of-00002",
      "weights.data-00001-of-00002",
    ]
    read_whole(checkpoint.path)  # the servers' hashes are those of the files
  path = tmp_path / "checkpoints/step_00000004/weights.data-00001-of-00002"
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  error = capsys.readouterr().err
  assert (
    f"DAMAGED checkpoint {newest.path}: weights.data-00001-of-00002 does not "
    "hold the bytes that were written; it is not used"
  ) in error
  runs.assert_same(runs.read_tensors(tmp_path, 4), before)
  assert (tmp_path / "checkpoints/step_00000004.damaged").is_dir()


@pytest.mark.slow
def test_eight_hosts_write_a_file_each_of_the_same_tensors(corpus, tmp_path):
  settings = {**SETTINGS, "MESH_SHAPE": "data:2,model:2", "NUM_PODS": 2}
  settings["LAYOUT"] = "batch:data,heads:model,d_ff:model,vocab:model"
  here, there = tmp_path / "here", tmp_path / "there"
  assert runs.run("train", corpus, here, **settings) == 0
  with Served(8) as servers:
    pods = servers.addresses[:4], servers.addresses[4:]
    settings |= {"PODS": "cluster", "ISLANDS": [*map(list, pods)]}
    for steps in (2, 4):  # the second goes on from what servers have written
      settings["TRAIN_STEPS"] = steps
      runs.finish(runs.start("train", corpus, there, **settings))
  runs.assert_same_tensors(here, there, 4)
  for checkpoint in find_checkpoints(str(there)):
    names = data_files(checkpoint)
    assert len(names) == 8
    sizes = [checkpoint.files[name][0] for name in names]
    # The largest slice is one that all devices of a pod hold whole.
    assert max(sizes) < 2 * min(sizes)
    read_whole(checkpoint.path)
