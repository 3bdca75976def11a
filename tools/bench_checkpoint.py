# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures checkpoints that servers write and read, or the client for them.

  python tools/bench_checkpoint.py
  python tools/bench_checkpoint.py --servers 1,8 --layers 8,32 --folder /mnt

Every server is a pod of one device. Times are the best of --rounds, in which
servers and client take turns. `client` is what the memory of this process rises
by meanwhile. Results are on stdout.
"""

# Servers of one machine share its cores and its disk: that bytes a second grow
# with hosts shows as far as there are cores. Where each host has its own, a
# checkpoint takes as long as the share of one.

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator

from bench_command import one_line_errors, seconds_of
from bench_peers import PALM_OPTIMIZER, benchmark_config

from palm_mtf.cluster.client.local_servers import PodServers
from palm_mtf.config import MeshLayout
from palm_mtf.config.pods import MAX_PODS, PodsConfig
from palm_mtf.errors import UserError, check_count
from palm_mtf.machine.host_memory import (
  free_garbage,
  largest_resident_bytes,
  resident_bytes,
)

MESH = MeshLayout(mesh_shape="", layout="")


def measure(
  folder: str, num_servers: int, num_layers: int, rounds: int
) -> Iterator[dict[str, float]]:
  """Yields a record of the servers' checkpoints, then one of the client's."""
  pods = PodsConfig(num_pods=num_servers, pods="local_servers")
  config = dataclasses.replace(
    benchmark_config("float32"), num_layers=num_layers
  )
  with PodServers(pods, MESH) as servers:
    from palm_mtf._tf import tf
    from palm_mtf.checkpoints.hosts import find_checkpoint_hosts
    from palm_mtf.checkpoints.variables import WeightsCopier, restore
    from palm_mtf.cluster.client.connect import connect
    from palm_mtf.cluster.server_info import read_info
    from palm_mtf.mesh.processes import Process
    from palm_mtf.programs.train_program import build_train_program

    places = servers.places()
    infos = {
      place.address: read_info(place.address, 60.0) for (place,) in places
    }
    cluster = connect(pods, MESH, places, infos)
    with tf.Graph().as_default(), cluster.session() as session:
      program = build_train_program(
        config,
        MESH,
        PALM_OPTIMIZER,
        batch_size=num_servers,
        seed=0,
        pods=pods,
        devices=cluster.devices,
      )
      session.run(program.initialize)
      slices = [pod.slices for pod in program.pods]
      client = Process(cluster.devices.client)
      of_servers = find_checkpoint_hosts(
        session, client, cluster.servers, folder
      )
      kinds = {"servers": of_servers, "client": of_servers.client_only}
      copiers = {
        kind: WeightsCopier(session, slices, hosts)
        for kind, hosts in kinds.items()
      }
      found = {kind: [] for kind in kinds}
      for _ in range(rounds):
        for kind, hosts in kinds.items():
          found[kind].append(
            _round(
              os.path.join(folder, "weights"),
              copiers[kind].copy,
              lambda path, hosts=hosts: restore(session, slices, path, hosts),
            )
          )
  for kind, records in found.items():
    best = {name: min(x[name] for x in records) for name in records[0]}
    num_bytes = best.pop("bytes")
    yield {
      "servers": num_servers,
      "by": kind,
      "megabytes": round(num_bytes / 1e6),
      "megabytes_per_sec": round(num_bytes / 1e6 / best["write_secs"]),
      **{name: round(value, 3) for name, value in best.items()},
    }


def _round(path: str, copy, restore) -> dict[str, float]:
  free_garbage()
  with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
    file.write("5")  # the largest resident bytes are those of now
  before = resident_bytes()
  writes = []
  copy_secs = seconds_of(lambda: writes.append(copy()))
  write_secs = seconds_of(lambda: writes[0](path))
  restore_secs = seconds_of(restore, path)
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


def _numbers(flag: str, text: str) -> list[int]:
  try:
    numbers = [int(x) for x in text.split(",")]
  except ValueError:
    raise UserError(f"{flag} = {text}: give numbers, as in 1,2,4.") from None
  for number in numbers:
    check_count(flag, number)
  return numbers


@one_line_errors
def main() -> None:
  """Measures every number of servers with every number of layers."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--servers", default="1,2", help=f"numbers of them, up to {MAX_PODS}")
  add("--layers", default="8", help="numbers of layers of the model")
  add("--rounds", type=int, default=3, help="checkpoints of each kind")
  add("--folder", help="folder for a temporary one; by default the system's")
  add("--json", action="store_true", help="print one object a line")
  chosen = parser.parse_args()
  check_count("--rounds", chosen.rounds)
  servers = _numbers("--servers", chosen.servers)
  layers = _numbers("--layers", chosen.layers)
  if not chosen.json:
    print(
      "servers  by       MB      MB/s    pause     write     restore   client"
    )
  for num_layers in layers:
    for number in servers:
      with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for record in measure(folder, number, num_layers, chosen.rounds):
          print(_line(record, chosen.json), flush=True)


def _line(record: dict[str, float], as_json: bool) -> str:
  if as_json:
    return json.dumps(record)
  return (
    f"{record['servers']:<7}  {record['by']:<7}  {record['megabytes']:<6}  "
    f"{record['megabytes_per_sec']:<6}  {record['copy_secs']:6.3f} s  "
    f"{record['write_secs']:6.2f} s  {record['restore_secs']:6.2f} s  "
    f"{record['client_megabytes']:.0f} MB"
  )


if __name__ == "__main__":
  sys.exit(main())
