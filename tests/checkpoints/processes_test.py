# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every process writes its share of a checkpoint, where all see its folder."""

import collections
import errno
import functools

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints import processes as processes_module
from palm_mtf.checkpoints.processes import (
  CheckpointProcesses,
  assign_slices,
  find_checkpoint_processes,
)
from palm_mtf.config import PodsConfig
from palm_mtf.mesh.cpu_gpu import CpuGpuDevices
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.processes import Process
from tests.mtf_testing import PALM_OPTIMIZER, mesh_layout, small_config

CLIENT = Process("/job:client/task:0/device:cpu:0")


@functools.cache
def pods_on_hosts(layout, num_pods=2, devices_per_host=2):
  """Returns the slices of pods, and the CPU of each of their processes."""
  mesh = mesh_layout(layout)
  devices = [
    [
      f"/job:pod_{pod}/task:{i // devices_per_host}"
      f"/device:cpu:{i % devices_per_host}"
      for i in range(mesh.num_devices)
    ]
    for pod in range(num_pods)
  ]
  with tf.Graph().as_default():
    program = build_train_program(
      small_config(num_layers=1),
      mesh,
      PALM_OPTIMIZER,
      batch_size=8,
      seed=0,
      pods=PodsConfig(num_pods=num_pods),
      devices=CpuGpuDevices(CLIENT.device, devices),
    )
  processes = [
    f"/job:pod_{pod}/task:{task}/device:cpu:0"
    for pod in range(num_pods)
    for task in range(mesh.num_devices // devices_per_host)
  ]
  return [pod.slices for pod in program.pods], processes


def elements(part) -> tuple[slice, ...]:
  """Returns the place of a slice in its whole variable."""
  pairs = zip(part.begin, part.sizes, strict=True)
  return tuple(slice(begin, begin + size) for begin, size in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["PaLM's 2D", "fully sharded"])
def test_all_hosts_together_write_each_number_once_and_equally_many(layout):
  pods, devices = pods_on_hosts(layout)
  assert len(devices) > 2
  processes = CheckpointProcesses(CLIENT, {x: Process(x) for x in devices})
  shares = assign_slices(pods, processes)
  assert [process.device for process in shares] == devices
  times = collections.defaultdict(int)
  num_bytes = dict.fromkeys(devices, 0)
  largest = 0
  for process, parts in shares.items():
    for part in parts:
      # The slice is on the process's own device, so nothing is sent.
      task, _, _ = process.device.partition("/device:")
      assert part.variable.device.startswith(task)
      (name,) = part.names
      # The next variable's sizes, from "8 4 0,4:0,4"; "" is the whole.
      *sizes, _ = part.spec.split() or [*map(str, part.sizes), ""]
      written = np.zeros([int(x) for x in sizes], int)
      written[elements(part)] = 1
      times[name] = times[name] + written
      size = part.variable.dtype.base_dtype.size * written.sum()
      num_bytes[process.device] += size
      largest = max(largest, size)
  assert sorted(times) == sorted(pods[0])
  for name, written in times.items():
    assert (written == 1).all(), name
  assert max(num_bytes.values()) - min(num_bytes.values()) <= largest


@pytest.mark.slow
def test_the_client_alone_writes_what_the_first_pod_holds():
  pods, _ = pods_on_hosts("PaLM's 2D")
  ((process, parts),) = assign_slices(pods, CheckpointProcesses(CLIENT)).items()
  assert process is CLIENT
  assert all("/job:pod_0/" in part.variable.device for part in parts)


@pytest.mark.parametrize("sees", [True, False])
def test_servers_take_part_where_each_of_them_sees_the_folder(
  sees, tmp_path, monkeypatch, capsys
):
  client, servers = Process("/device:cpu:0"), [Process("/device:cpu:0")]

  def see_nothing(path):
    return np.int32(errno.ENOENT)

  if not sees:
    monkeypatch.setattr(processes_module, "make_empty_file", see_nothing)
  folder = tmp_path / "run" / "checkpoints"
  with tf.Graph().as_default(), tf.Session() as session:
    found = find_checkpoint_processes(
      Client(session), client, servers, str(folder)
    )
  assert found.all == (servers if sees else [client])
  assert found.client is client
  assert not list(folder.iterdir())
  assert ("does not share" in capsys.readouterr().err) != sees
