# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures clients that share servers: throughput and shares of device time.

  python -m tools.bench tenants
  python -m tools.bench tenants --clients '' --weights 1:2:4:8

Each client is a process that keeps eight programs submitted. A program computes
on two servers and then adds up one number of each.

Throughput: programs per second of all clients, `scheduled` by a manager with
--policy shares and `unscheduled`, which alternate. Shares: the device time of
each client in five seconds, next to what its weight promises. If n programs run
on a server at the same time, each of them gets 1/n of that time. Numbers are
medians over rounds.
"""

# Figures 8 and 9 of Barham et al. 2022. All processes are on one machine, and
# its clock tells when a program ended, on a server or for a client. All are
# forks of this process, which has imported TensorFlow and started nothing.

import argparse
import collections
import contextlib
import functools
import itertools
import math
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from palm_mtf import runtime
from palm_mtf._tf import tf
from palm_mtf.commands.pods import join_manager
from palm_mtf.runtime.manager import service
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.server.start import start_server
from tools.bench.command import Flag, numbers

NUM_SERVERS = 2
NUM_SUBMITTED = 8  # programs that a client keeps submitted
# Clients start together after _START_SECS; _WARM_UP_SECS later, all are busy.
_START_SECS, _WARM_UP_SECS = 0.2, 0.5
_SIDE = 256  # rows and columns of a product, which takes about 0.4 ms
# Number of products in the program that is timed to choose the lengths of other
# programs: so many that the program takes much longer than its dispatch.
_TRIAL = 2000
BOUNDS = dict.fromkeys(("programs_per_sec", "ratio"), (0, math.inf))
HEAD = "ms     clients  what                  programs per second   ratio"


def _read_counts(name: str, text: str) -> list[int]:
  return numbers("1,4,8,16")(name, text) if text else []


def _read_weights(name: str, text: str) -> list[list[int]]:
  return [
    numbers("1,2,4,8")(name, x.replace(":", ",")) for x in text.split(",") if x
  ]


FLAGS = {
  "--clients": Flag("1,4,8,16", "numbers of clients", _read_counts),
  "--ms": Flag("20", "lengths of a program", numbers("2,20", float)),
  "--weights": Flag("1:1:1:1,1:2:4:8", "of clients", _read_weights),
  "--share_ms": Flag(5, "length of a program for the shares"),
  "--secs": Flag(5, "seconds of a measurement"),
  "--rounds": Flag(3, "turns of each kind"),
}


def _start(
  stack: contextlib.ExitStack, function: Callable[..., None], *arguments: Any
) -> Connection:
  """Runs `function(connection, *arguments)` in a fork of this process."""
  forks = multiprocessing.get_context("fork")
  near, far = forks.Pipe()
  process = forks.Process(target=function, args=(far, *arguments))
  process.start()
  stack.callback(process.join)
  stack.callback(process.kill)
  return near


def _start_pods(stack: contextlib.ExitStack) -> tuple[str, list[str]]:
  """Starts a manager and servers; returns their addresses."""
  folder = stack.enter_context(tempfile.TemporaryDirectory())
  manager = _start(stack, _manage, f"{folder}/state").recv()
  servers = [_start(stack, _serve, manager) for _ in range(NUM_SERVERS)]
  return manager, [x.recv() for x in servers]


def _manage(connection: Connection, state: str) -> None:
  with service.serve("127.0.0.1", 0, state, "", "shares") as port:
    connection.send(f"127.0.0.1:{port}")
    threading.Event().wait()


def _serve(connection: Connection, manager: str) -> None:
  address = start_server(1, 1).target.removeprefix("grpc://")
  join_manager(ManagerClient("--manager", manager), address, "main")
  connection.send(address)
  threading.Event().wait()


class _Clients:
  """Client processes, one per share."""

  def __init__(self, stack: contextlib.ExitStack, shares: Sequence[float]):
    pods = _start_pods(stack)
    self._clients = [_start(stack, _run_client, *pods, x) for x in shares]
    self._clients[0].send({"products": _TRIAL})
    self.products_per_ms = _TRIAL / self._clients[0].recv() / 1000

  def run(
    self,
    chosen: Sequence[int],
    products: int,
    secs: float,
    is_scheduled: bool = True,
    is_traced: bool = False,
  ) -> list[list[tuple[float, float]]]:
    """Lets clients run programs at the same time.

    Args:
      chosen: indices of the clients.
      products: number of products in a program.
      secs: seconds for which all clients are busy.
      is_scheduled: whether clients ask the manager for turns.
      is_traced: whether to ask a server when each program began and ended.

    Returns:
      For each client, begin and end of the programs that ended within `secs`,
      in seconds since all clients were busy. Only a traced program has a begin.
    """
    for i in chosen:
      self._clients[i].send({"products": products})
    for i in chosen:
      self._clients[i].recv()  # when it has built the program
    start = time.time() + _START_SECS
    first = start + _WARM_UP_SECS
    order = {
      "is_scheduled": is_scheduled,
      "is_traced": is_traced,
      "start": start,
      "end": first + secs + _WARM_UP_SECS,
    }
    for i in chosen:
      self._clients[i].send(order)
    found = [self._clients[i].recv() for i in chosen]
    return [
      [(x - first, y - first) for x, y in spans if first <= y < first + secs]
      for spans in found
    ]


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields the records of throughput, and then those of shares."""
  shares = [1] * max([0, *chosen.clients])
  groups = []
  for weights in chosen.weights:
    # Clients with equal weights measure throughput, too.
    begin = 0 if {*weights} == {1} else len(shares)
    shares[begin:begin] = [] if begin < len(shares) else weights
    groups.append(range(begin, begin + len(weights)))
  with contextlib.ExitStack() as stack:
    clients = _Clients(stack, shares)
    for ms in chosen.ms:
      for number in chosen.clients:
        yield from _measure_throughput(clients, ms, number, chosen)
    for weights, group in zip(chosen.weights, groups, strict=True):
      yield from _measure_shares(clients, weights, group, chosen)


def _measure_throughput(
  clients: _Clients, ms: float, number: int, chosen: argparse.Namespace
) -> Iterator[dict]:
  products = round(ms * clients.products_per_ms)
  rates: dict[bool, list[float]] = {True: [], False: []}
  for _ in range(chosen.rounds):
    for is_scheduled, rate in rates.items():
      found = clients.run(range(number), products, chosen.secs, is_scheduled)
      rate.append(sum(map(len, found)) / chosen.secs)
  ratio = statistics.median(
    x / y for x, y in zip(rates[True], rates[False], strict=True)
  )
  for is_scheduled, found in rates.items():
    yield {
      "figure": 8,
      "ms": ms,
      "clients": number,
      "kind": "scheduled" if is_scheduled else "unscheduled",
      "programs_per_sec": statistics.median(found),
      "ratio": ratio if is_scheduled else 1.0,
    }


def _measure_shares(
  clients: _Clients,
  weights: Sequence[int],
  group: Sequence[int],
  chosen: argparse.Namespace,
) -> Iterator[dict]:
  products = round(chosen.share_ms * clients.products_per_ms)
  rounds = [
    clients.run(group, products, chosen.secs, is_traced=True)
    for _ in range(chosen.rounds)
  ]
  times = [find_device_times(spans) for spans in rounds]
  for i, weight in enumerate(weights):
    of_rounds = [spans[i] for spans in rounds]
    promised = weight / sum(weights)
    yield {
      "figure": 9,
      "ms": chosen.share_ms,
      "clients": len(weights),
      "kind": f"{weight} of {':'.join(map(str, weights))}",
      "programs_per_sec": statistics.median(map(len, of_rounds)) / chosen.secs,
      "ratio": statistics.median(x[i] / sum(x) / promised for x in times),
    }


def find_device_times(
  spans: Sequence[Sequence[tuple[float, float]]],
) -> list[float]:
  """Returns the device time of each client, in seconds.

  Args:
    spans: for each client, begin and end of its programs on a server. Time
      before 0 does not count.
  """
  events = sorted(
    (max(0.0, when), change, client)
    for client, own in enumerate(spans)
    for begin, end in own
    for when, change in ((begin, 1), (end, -1))
  )
  times, running = [0.0] * len(spans), [0] * len(spans)
  for (when, change, client), (until, *_) in itertools.pairwise(events):
    running[client] += change
    for i, own in enumerate(running):
      if own:
        times[i] += (until - when) * own / sum(running)
  return times


def row(record: dict) -> str:
  """Returns a line of the table.

  The ratio of a throughput is to the unscheduled throughput, and the ratio of a
  share of device time is to what the weight promises.
  """
  return (
    f"{record['ms']:<7g}{record['clients']:<9}{record['kind']:<22}"
    f"{record['programs_per_sec']:19.1f}{record['ratio']:8.3f}"
  )


def _compute(products: int, x: tf.Tensor) -> tf.Tensor:
  """Computes products; returns when each device began and ended."""
  begin = tf.timestamp()
  with tf.control_dependencies([begin]):
    matrix = tf.fill([_SIDE, _SIDE], tf.reduce_sum(x) / _SIDE)
  _, y = tf.while_loop(
    lambda i, _: i < products,
    lambda i, y: (i + 1, tf.linalg.matmul(y, y)),
    [0, matrix],
    parallel_iterations=1,
  )
  total = runtime.all_sum(y[:1, 0])
  with tf.control_dependencies([total]):
    return tf.stack([[begin, tf.timestamp()]])


@functools.cache
def _make_function(products: int) -> Any:
  return runtime.function(functools.partial(_compute, products), "compute")


def _run_client(
  connection: Connection, manager: str, servers: list[str], share: float
) -> None:
  """Runs the programs that messages ask for; sends begin and end of each."""
  with (
    runtime.connect_managed(manager, [str(NUM_SERVERS)], share=share) as one,
    runtime.connect(servers) as other,
  ):
    slices = {
      is_scheduled: client.slices(str(NUM_SERVERS))[0]
      for is_scheduled, client in ((True, one), (False, other))
    }
    ones = np.ones(NUM_SERVERS, np.float32)
    while True:
      order = connection.recv()
      if "products" in order:
        compute = _make_function(order["products"])
        for each in slices.values():
          compute.on(each)(ones).wait()
          start = time.monotonic()
          compute.on(each)(ones).wait()
        connection.send(time.monotonic() - start)  # without turns
        continue
      submit = compute.on(slices[order["is_scheduled"]])
      time.sleep(max(0.0, order["start"] - time.time()))
      submitted: collections.deque = collections.deque()
      ended = []
      while time.time() < order["end"]:
        while len(submitted) < NUM_SUBMITTED:
          submitted.append(submit(ones))
        submitted[0].wait()
        ended.append((submitted.popleft(), time.time()))
      for buffer in submitted:
        buffer.wait()
      connection.send(
        [x.fetch()[0].tolist() for x, _ in ended]
        if order["is_traced"]
        else [[end, end] for _, end in ended]
      )
