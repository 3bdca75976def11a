# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A copy of the variables stays the same while steps change the variables."""

import dataclasses
import errno
import functools

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints import variables as variables_module
from palm_mtf.checkpoints.manifest import find_checkpoints, read_whole
from palm_mtf.checkpoints.named_weights import find_weights
from palm_mtf.checkpoints.variables import (
  CheckpointReader,
  WeightsCopier,
  find_checkpoint_processes,
)
from palm_mtf.errors import UserError
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.processes import Process
from tests import runs
from tests.cases import slow
from tests.mtf_testing import (
  LAYOUTS,
  PALM_OPTIMIZER,
  SINGLE,
  feed_of,
  mesh_layout,
  random_tokens,
  small_config,
)
from tests.runtime.served import Served
from tests.settings import step_config


@pytest.mark.slow
def test_a_copy_that_is_written_after_more_steps_is_that_of_its_own_step(
  tmp_path,
):
  config = small_config()
  early, late, after = (str(tmp_path / x) for x in "abc")
  with tf.Graph().as_default(), tf.Session() as session:
    program = build_train_program(
      step_config(config, SINGLE), batch_size=4, seed=8
    )
    copier = WeightsCopier(Client(session), [program.slices])
    session.run(program.initialize)

    def step(number):
      batch = random_tokens(config, 4, seed=number)
      session.run(program.update.operations, feed_of(program, batch, number))

    step(0)
    copier.copy()(early)
    write = copier.copy()
    for number in (1, 2, 3):
      step(number)
    write(late)
    copier.copy()(after)
  runs.assert_same(runs.load(late), runs.load(early))
  changed = runs.load(after)
  for name, value in runs.load(early).items():
    assert changed[name].tobytes() != value.tobytes(), name


QUICK = "PaLM's 2D"  # cuts rows and columns


@functools.lru_cache(maxsize=2)
def build(mesh, optimizer=PALM_OPTIMIZER):
  """Returns a program and its graph, for any number of sessions."""
  with tf.Graph().as_default() as graph:
    program = build_train_program(
      step_config(small_config(num_layers=1), mesh, optimizer),
      batch_size=4,
      seed=8,
    )
  return program, graph


def save_again(mesh, path, restore_from="", optimizer=PALM_OPTIMIZER):
  """Starts a program under `mesh`, restores if asked, and saves to `path`."""
  program, graph = build(mesh, optimizer)
  with (
    graph.as_default(),
    # The variables belong to this session and are uninitialized.
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    if restore_from:
      reader = CheckpointReader(Client(session))
      reader.restore([program.slices], restore_from)
    else:
      session.run(program.initialize)
    WeightsCopier(Client(session), [program.slices]).copy()(path)
  return runs.load(path)


@pytest.mark.slow
def test_damaged_weights_of_another_run_are_told_in_tensorflows_own_words(
  tmp_path,
):
  prefix = str(tmp_path / "model")
  save_again(SINGLE, prefix)
  data = tmp_path / "model.data-00000-of-00001"
  data.write_bytes(data.read_bytes()[:100])
  program, graph = build(SINGLE)
  with (
    pytest.raises(UserError) as error,
    graph.as_default(),
    tf.Session() as session,
  ):
    weights = find_weights("INIT_CHECKPOINT", prefix)
    reader = CheckpointReader(Client(session))
    reader.restore_weights([program.slices], weights)
  assert str(error.value) == (
    f"INIT_CHECKPOINT = {prefix!r}: TensorFlow cannot read it: Read less bytes "
    "than requested"
  )


@pytest.mark.parametrize("prefix", ["/dev/null/weights", "/proc/weights"])
def test_what_the_disk_refuses_is_an_os_error(prefix):
  with pytest.raises(OSError, match="weights"):
    save_again(SINGLE, prefix)


@pytest.mark.parametrize(
  "layout",
  [slow(name, unless=name == QUICK) for name in LAYOUTS],
)
def test_first_weights_and_checkpoints_are_the_same_bits_under_every_layout(
  layout, tmp_path
):
  mesh = mesh_layout(layout)
  single = save_again(SINGLE, str(tmp_path / "single"))
  split = save_again(mesh, str(tmp_path / "split"))
  to_split = save_again(mesh, str(tmp_path / "b"), str(tmp_path / "single"))
  to_single = save_again(SINGLE, str(tmp_path / "c"), str(tmp_path / "split"))
  for other in (split, to_split, to_single):
    runs.assert_same(single, other)
  assert single["embedding"].std() > 0.5


@pytest.mark.slow
def test_checkpoints_hold_the_slots_of_other_forms_in_their_dtypes(tmp_path):
  optimizer = dataclasses.replace(
    PALM_OPTIMIZER, second_moment="factored", momentum_dtype="bfloat16"
  )
  mesh, path = mesh_layout("all over data and model"), str(tmp_path / "a")
  split = save_again(mesh, path, optimizer=optimizer)
  single = save_again(SINGLE, str(tmp_path / "b"), path, optimizer)
  o = "layer_000/attention/o"
  assert {n: x.shape for n, x in split.items() if n.startswith(o)} == {
    o: (4, 10, 24),
    f"{o}/momentum": (4, 10, 24),
    f"{o}/second_moment_row": (4, 10),
    f"{o}/second_moment_column": (24,),
  }
  for name, value in split.items():
    kept = tf.bfloat16 if name.endswith("momentum") else tf.float32
    assert value.dtype == kept.as_numpy_dtype, name
  runs.assert_same(split, single)


SETTINGS = {
  "TRAIN_STEPS": 4,
  "CHECKPOINT_STEPS": 2,
  "EVAL_STEPS": 1000,
  "PROMPTS": [],
}


def data_files(checkpoint):
  return sorted(name for name in checkpoint.files if ".data-" in name)


# Slow; manifest_test.py reads damaged files of one process.
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
    read_whole(checkpoint.path)  # the servers' hashes match the files
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
  whole, _ = find_checkpoints(str(here))
  size_of_one_process = sum(whole.files[x][0] for x in data_files(whole))
  with Served(8) as servers:
    pods = servers.addresses[:4], servers.addresses[4:]
    settings |= {"PODS": "cluster", "ISLANDS": [*map(list, pods)]}
    for steps in (2, 4):  # the second resumes from the servers' checkpoint
      settings["TRAIN_STEPS"] = steps
      runs.finish(runs.start("train", corpus, there, **settings))
  runs.assert_same_tensors(here, there, 4)
  for checkpoint in find_checkpoints(str(there)):
    names = data_files(checkpoint)
    assert len(names) == 8
    sizes = [checkpoint.files[name][0] for name in names]
    # The largest slice is a whole variable that all devices of a pod hold.
    assert max(sizes) < 2 * min(sizes)
    assert sum(sizes) == size_of_one_process, "each number once"
    read_whole(checkpoint.path)


@pytest.mark.parametrize("sees", [True, False])
def test_servers_take_part_where_each_of_them_sees_the_folder(
  sees, tmp_path, monkeypatch, capsys
):
  client, servers = Process("/device:cpu:0"), [Process("/device:cpu:0")]

  def see_nothing(path):
    return np.int32(errno.ENOENT)

  if not sees:
    monkeypatch.setattr(variables_module, "make_empty_file", see_nothing)
  folder = tmp_path / "run" / "checkpoints"
  with tf.Graph().as_default(), tf.Session() as session:
    found = find_checkpoint_processes(
      Client(session), client, servers, str(folder)
    )
  assert found.all == (servers if sees else [client])
  assert found.client is client
  assert not list(folder.iterdir())
  assert ("does not share" in capsys.readouterr().err) != sees
