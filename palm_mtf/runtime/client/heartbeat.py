# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Probes the servers of a run, and ends calls that wait for a lost server.

A server is lost if it has ended or restarted, is suspended or unreachable.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.mesh.session import SERVER_ERRORS
from palm_mtf.runtime.addresses import shut_down_connections
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.client.pod_hosts import Starter
from palm_mtf.runtime.program import Program
from palm_mtf.runtime.server.clients import find_silent_peers
from palm_mtf.runtime.server_info import (
  NoAnswerError,
  NotOursError,
  ServerInfo,
  call_function,
  difference,
  read_incarnation,
  read_info,
)

_logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_NUM_THREADS = 64  # to call servers; each call may wait for a timeout
# Fractions of POD_TIMEOUT_SECS: the pause between two probes of a server, the
# timeout for asking the server which of its links are silent, and the timeout
# of a probe. Two probes have to fail before a server counts as lost, because a
# single probe also fails if this process was suspended.
_PAUSE, _LINKS, _PROBE = 0.125, 0.125, 0.375
# Between shutdowns of connections to a lost server, whose kernel may accept new
# connections.
_SHUT_DOWN_SECS = 1.0
_CONNECT_SECS = 0.5  # between checks for lost servers during `connect`
_RETRY_SECS = 0.2  # between calls of a server that does not answer yet
_TASK = re.compile(r"/job:pod_(\d+)/replica:\d+/task:(\d+)")


class PodLostError(UserError):
  """A pod is lost; the message names the server and the phase of the run."""

  def __init__(self, pod: int, message: str, is_missing: bool = False):
    super().__init__(message)
    self.pod = pod
    # Whether the pod did not answer when the heartbeat began. If it has never
    # answered, the run does not drop it, because it may not be started yet.
    self.is_missing = is_missing


class Heartbeat:
  """Probes every server of a run, each in a thread; a context manager.

  If server A reports that it gets no answer from server B, but B answers the
  client, A's pod counts as lost.
  """

  def __init__(
    self,
    servers: PodServers,
    places: Sequence[Sequence[Place]],
    secs: float,
    starter: Starter | None = None,
  ):
    """Asks each server for its versions and devices, and checks that they fit.

    `places` has each pod's devices on servers; it is empty if this process has
    all pods. `secs` is POD_TIMEOUT_SECS. `starter` describes failures of calls.

    Raises PodLostError if a server does not answer. Raises UserError if a
    server differs from this client or from the first server, for example in its
    versions, or has too few devices.
    """
    self._servers, self._secs, self._starter = servers, secs, starter
    # {address of a server: index of the server's pod}
    self._pods = {
      place.address: pod
      for pod, devices in enumerate(places)
      for place in devices
    }
    self._peers = _choose_peers(self._pods)
    # {address of a lost server: why it counts as lost, for messages}
    self._lost: dict[str, str] = {}
    self._end = threading.Event()
    self._threads: dict[str, threading.Thread] = {}
    # {address: random number from the server's start}, to notice restarts.
    self._incarnations: dict[str, int] = {}
    self.infos: dict[str, ServerInfo] = {}  # by the server's address
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as threads:
      asked = {x: threads.submit(self._first_answer, x) for x in self._pods}
    for address, answer in asked.items():
      try:
        self._incarnations[address], info = answer.result()
      except NoAnswerError as error:
        raise PodLostError(
          self._pods[address],
          self._message(address, str(error), "at the start"),
          is_missing=True,
        ) from None
      self.infos[address] = info
      how = difference(info, next(iter(self.infos.values())))
      most = max(x.device for y in places for x in y if x.address == address)
      if most >= info.num_devices:
        how = how or (
          f"serves {info.num_devices} devices, but the run needs its device "
          f"{most}, counted from 0 (--devices)"
        )
      if how:
        raise UserError(self._message(address, how, "at the start") + ".")

  def __enter__(self) -> "Heartbeat":
    for address in self._pods:
      thread = threading.Thread(target=self._watch, args=[address], daemon=True)
      thread.start()
      self._threads[address] = thread
    return self

  def __exit__(self, *unused: object) -> None:
    self._end.set()
    # Join the threads: a thread that returned from a TensorFlow call while the
    # Python interpreter exits would abort the process.
    end = time.monotonic() + self._secs
    for address, thread in self._threads.items():
      thread.join(_SHUT_DOWN_SECS)
      while thread.is_alive() and time.monotonic() < end:
        shut_down_connections(address)  # ends a probe that waits for an answer
        thread.join(_SHUT_DOWN_SECS)

  def check_links(self) -> None:
    """Asks servers once for silent servers; PodLostError if there are any."""
    for address, pod in self._pods.items():
      self._probe_links(address)
      if how := self._lost.get(address):
        raise PodLostError(pod, self._message(address, how, "ever since"))

  def connect(self, client: Client) -> None:
    """Connects a client to all servers; raises OpError if a server is lost."""
    # A session never stops trying to connect. Therefore connect it in a new
    # thread, and stop waiting here once the heartbeat finds a lost server.
    with client.graph.as_default():
      nothing = Program(operations=[tf.no_op()])
    connected = client.run(nothing)
    while not connected.done():
      concurrent.futures.wait([connected], _CONNECT_SECS)
      if self._lost:
        raise tf.errors.UnavailableError(None, None, "a server is lost")
    connected.result()

  @contextlib.contextmanager
  def during(self, phase: str) -> Iterator[None]:
    """Raises PodLostError if the body fails because a pod is lost.

    Raises UserError if the executor describes the failure. The message names
    `phase`, such as "in step 8".
    """
    try:
      yield
    except tf.errors.OpError as error:
      lost = self._find_lost() or self._find_broken_off(error)
      if not lost:
        describe = self._starter and self._starter.describe_failure
        failure = describe and describe(error.message, phase)
        if not failure:
          raise
        address = self._find_named(error)
        where = self._name(address, ": its") if address else "this machine"
        raise UserError(f"{where}: {failure}") from None
      address, how = lost
      message = self._message(address, how, phase)
      raise PodLostError(self._pods[address], message) from None

  def _find_lost(self) -> tuple[str, str] | None:
    """Returns the address of a lost server and why it is lost; or None."""
    if ended := self._servers.find_ended():
      return ended
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as threads:
      list(threads.map(self._probe, self._pods.keys() - self._lost.keys()))
      list(threads.map(self._probe_links, self._pods))
    return next(iter(self._lost.items()), None)

  def _find_broken_off(
    self, error: tf.errors.OpError
  ) -> tuple[str, str] | None:
    """Returns the server that `error` names as unavailable, and why; or None.

    Such a server may still answer probes, but no longer works for this run.
    """
    address = self._find_named(error)
    if not address or not isinstance(error, SERVER_ERRORS):
      return None
    return address, (
      "answers, but has broken off (it had no answer from this client for "
      f"{self._secs:g} seconds, or its connection to another pod has ended)"
    )

  def _find_named(self, error: tf.errors.OpError) -> str | None:
    """Returns the address of the server that `error` names; or None."""
    named = _TASK.findall(error.message)
    if not named:
      return None
    pod, task = map(int, named[-1])  # an error of a link names its far end last
    return [x for x, of in self._pods.items() if of == pod][task]

  def _message(self, address: str, how: str, phase: str) -> str:
    return f"{self._name(address, ': its')} {how}, {phase}"

  def _name(self, address: str, whose: str = "'s") -> str:
    pod = self._pods[address]
    return f"pod {pod}{whose} server {self._servers.name(address)}"

  def _watch(self, address: str) -> None:
    while not self._end.wait(self._secs * _PAUSE):
      self._probe(address)
      self._probe_links(address)
      # A call that waits for a lost server fails when its connection is shut
      # down. Repeat the shutdown, because the kernel accepts new connections
      # even for a suspended server.
      while address in self._lost:
        shut_down_connections(address)
        if self._end.wait(_SHUT_DOWN_SECS):
          return

  def _probe(self, address: str) -> None:
    """Marks a server as lost if it does not answer or was restarted."""
    try:
      incarnation = self._retry(read_incarnation, address)
      if incarnation != self._incarnations[address]:
        self._lost[address] = "has been started again"
    except NoAnswerError as error:
      self._lost[address] = str(error)

  def _probe_links(self, address: str) -> None:
    """Marks a server as lost if its link to another server is silent."""
    if address in self._lost:
      return
    asked = json_text({"peers": self._peers[address], "secs": self._secs})
    info, secs = self.infos[address], self._secs * _LINKS
    # Ignore NoAnswerError: a server that computes may answer late. A server
    # that only waits for a silent peer answers in time.
    with contextlib.suppress(NoAnswerError):
      silent = call_function(address, info, find_silent_peers, asked, secs)
      for far in json.loads(silent):
        # If the server at the far end is itself lost, report that server.
        if far not in self._lost:
          self._probe(far)
        if far not in self._lost:
          self._lost[address] = (
            f"answers, but its link to {self._name(far)} is silent"
          )

  def _first_answer(self, address: str) -> tuple[int, ServerInfo]:
    while True:
      # Read the incarnation first: if the server starts again between the
      # reads, the next probe finds another incarnation.
      incarnation = self._retry(read_incarnation, address)
      try:
        return incarnation, self._retry(read_info, address)
      except NotOursError:
        raise
      except NoAnswerError:
        _logger.info(f"{address} is busy with other clients; waiting for it")

  def _retry(
    self, read: Callable[[str, float], _Answer], address: str
  ) -> _Answer:
    """Calls `read` until it succeeds; NoAnswerError after two timeouts."""
    start, num_failed = time.monotonic(), 0
    secs = self._secs * _PROBE
    while True:
      try:
        return read(address, secs)
      except NoAnswerError as error:
        num_failed += 1
        is_late = time.monotonic() - start >= 2 * secs and num_failed >= 2
        if is_late or self._end.is_set():
          if isinstance(error, NotOursError):
            raise
          raise NoAnswerError(
            f"has not answered for {self._secs:g} seconds"
          ) from error
      time.sleep(_RETRY_SECS)


def _choose_peers(pods: Mapping[str, int]) -> dict[str, list[str]]:
  """Returns {server: the servers that it probes}, at most three for each.

  `pods` is {address of a server: index of the server's pod}.
  """
  # Links between pods come first, because a step uses the links between servers
  # with the same number in their pods. In a ring in this order, each server
  # probes both of its neighbors and the server after the next one.
  numbers: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)
  order = {x: (next(numbers[pod]), pod) for x, pod in pods.items()}
  ring = sorted(pods, key=order.__getitem__)
  return {
    x: sorted({ring[(i + k) % len(ring)] for k in (1, -1, 2)} - {x})
    for i, x in enumerate(ring)
  }
