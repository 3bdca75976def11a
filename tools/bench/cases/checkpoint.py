# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures checkpoints that servers, or the client for them, write and read.

  python -m tools.bench checkpoint
  python -m tools.bench checkpoint --servers 1,8 --layers 8,32 --folder /mnt

Every server is a pod of one device. Servers and client take turns; times are
the best of --rounds. `client` is by how much the memory of this process rises
in the round in which it rises most.
"""

# Servers on one machine share its cores and its disk, so bytes per second grow
# with the number of servers only up to the number of cores. If each host has
# its own cores and disk, a checkpoint takes only as long as one host's share.

import argparse
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator

from palm_mtf.config import PodsConfig
from palm_mtf.config.pods import MAX_PODS
from palm_mtf.machine.host_memory import (
  free_garbage,
  largest_resident_bytes,
  resident_bytes,
)
from tools.bench import models, pairs
from tools.bench.command import Flag, numbers

HEAD = "servers  by       MB      MB/s    pause     write     restore   client"
FLAGS = {
  "--servers": Flag("1,2", f"numbers up to {MAX_PODS}", numbers),
  "--layers": Flag("8", "numbers of layers of the model", numbers),
  "--rounds": Flag(3, "checkpoints of each kind"),
  "--folder": Flag(None, "holds a temporary folder; else the system's"),
}


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields two records per number of layers and number of servers."""
  for num_layers in chosen.layers:
    for num_servers in chosen.servers:
      with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        yield from _records(folder, num_servers, num_layers, chosen.rounds)


def _records(
  folder: str, num_servers: int, num_layers: int, rounds: int
) -> Iterator[dict[str, float]]:
  """Yields the record of the servers' checkpoints, then of the client's."""
  pods = PodsConfig(num_pods=num_servers, pods="local_servers")
  config = dataclasses.replace(
    models.benchmark_config("float32"), num_layers=num_layers
  )
  with models.pod_cluster(pods, models.ONE_DEVICE) as cluster:
    from palm_mtf.checkpoints.variables import (
      CheckpointProcesses,
      CheckpointReader,
      WeightsCopier,
      find_checkpoint_processes,
    )
    from palm_mtf.programs.train_program import build_train_program
    from palm_mtf.runtime.processes import Process
    from palm_mtf.runtime.program import Program

    with cluster.client() as client, client.graph.as_default():
      program = build_train_program(
        config,
        models.ONE_DEVICE,
        models.PALM_OPTIMIZER,
        batch_size=num_servers,
        seed=0,
        pods=pods,
        devices=cluster.devices,
      )
      client.call(Program(operations=[program.initialize]))
      slices = [pod.slices for pod in program.pods]
      this = Process(cluster.devices.client)
      of_servers = find_checkpoint_processes(
        client, this, cluster.servers, folder
      )
      kinds = {"servers": of_servers, "client": CheckpointProcesses(this)}
      copiers = {
        kind: WeightsCopier(client, slices, hosts)
        for kind, hosts in kinds.items()
      }
      readers = {x: CheckpointReader(client, y) for x, y in kinds.items()}
      found = {kind: [] for kind in kinds}
      for _ in range(rounds):
        for kind in kinds:
          found[kind].append(
            _write_and_read(
              os.path.join(folder, "weights"),
              copiers[kind].copy,
              functools.partial(readers[kind].restore, slices),
            )
          )
  for kind, records in found.items():
    best = {name: min(x[name] for x in records) for name in records[0]}
    # Take the maximum: memory that this process keeps does not rise again.
    best["client_megabytes"] = max(x["client_megabytes"] for x in records)
    num_bytes = best.pop("bytes")
    yield {
      "servers": num_servers,
      "by": kind,
      "megabytes": round(num_bytes / 1e6),
      "megabytes_per_sec": round(num_bytes / 1e6 / best["write_secs"]),
      **{name: round(value, 3) for name, value in best.items()},
    }


def _write_and_read(path: str, copy, restore) -> dict[str, float]:
  free_garbage()
  with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
    file.write("5")  # resets the largest resident bytes to the current ones
  before = resident_bytes()
  writes = []
  copy_secs = pairs.time_call(lambda: writes.append(copy()))
  write_secs = pairs.time_call(lambda: writes[0](path))
  restore_secs = pairs.time_call(restore, path)
  num_bytes = 0
  for name in os.listdir(os.path.dirname(path)):
    file_path = os.path.join(os.path.dirname(path), name)
    num_bytes += os.path.getsize(file_path)
    os.unlink(file_path)
  return {
    "bytes": num_bytes,
    "copy_secs": copy_secs,
    "write_secs": write_secs,
    "restore_secs": restore_secs,
    "client_megabytes": (largest_resident_bytes() - before) / 1e6,
  }


def row(record: dict) -> str:
  """Returns a line of the table."""
  return (
    f"{record['servers']:<7}  {record['by']:<7}  {record['megabytes']:<6}  "
    f"{record['megabytes_per_sec']:<6}  {record['copy_secs']:6.3f} s  "
    f"{record['write_secs']:6.2f} s  {record['restore_secs']:6.2f} s  "
    f"{record['client_megabytes']:.0f} MB"
  )
