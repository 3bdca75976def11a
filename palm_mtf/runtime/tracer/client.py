# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients of traced programs: slices, programs and buffers.

A call of a program returns at once. Its results are buffers, which later calls
may read before they exist: such a call is sent to its devices while the earlier
call runs, and waits there.
"""

import collections
import contextlib
import contextvars
import itertools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError, check_choice, check_count
from palm_mtf.executors.host.starter import HostStarter
from palm_mtf.machine.host_memory import memory_bytes
from palm_mtf.mesh.session import SERVER_ERRORS
from palm_mtf.runtime.client.client import Call, Client
from palm_mtf.runtime.client.connect import Cluster
from palm_mtf.runtime.client.connect import connect as connect_devices
from palm_mtf.runtime.client.heartbeat import Heartbeat
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.client.turns import OwnTurns
from palm_mtf.runtime.program import Program, state_of
from palm_mtf.runtime.tracer.functions import Function
from palm_mtf.runtime.tracer.shards import (
  Sharding,
  Tickets,
  VirtualSlice,
  build_removal,
)
from palm_mtf.runtime.tracer.trace import (
  Lowered,
  Trace,
  Value,
  current_trace,
  fuse,
  lower,
  to_array,
)

# Limit of calls that have not ended, each with a thread of this process.
_MAX_CALLS = 256
# Remove up to _GROUP unused buffers at a time, because a removal takes one to
# two milliseconds. Remove fewer if no buffer follows for _GROUP_SECS seconds.
_GROUP, _GROUP_SECS = 16, 0.03
# A call is sent to the servers before its inputs exist only if the program that
# makes them took less than this at its last call. Such a call waits in a server
# for less than WAIT_SECS, even with 16 calls, the limit, on a device.
_SHORT_SECS = 0.25
_CLOSE_SECS = 2.0

# Programs whose blocks run in this thread: a block may not call itself.
_RUNNING: contextvars.ContextVar = contextvars.ContextVar("running", default=())


class Buffer:
  """An array on the devices of `slice`; the array may not exist yet.

  `shape` is the shape of the whole array, and `held` says which region of the
  array each device holds. The buffer ends with its `owner`, the client whose
  program makes the buffer; `handle` is a number that is unique per owner.
  """

  def __init__(
    self, owner: "RuntimeClient", held: Sharding, source: Lowered, made: Future
  ):
    self.owner, self.held, self.handle = owner, held, next(owner.numbers)
    self.slice, self.shape, self.dtype = held.slice, held.shape, held.dtype
    # The program that makes the buffer; `made` is done when the program's call
    # ends, and `begun` when it begins.
    self.source, self.made = source, made
    self.begun: Future = Future()
    self.end = 0.0  # when its call ended (time.monotonic), to time later calls
    self.is_signal_taken = False  # whether a caller has the buffer's signal

  def __del__(self) -> None:
    # Take no lock: garbage collection may run in a thread that holds a lock.
    self.owner.dropped.put((self.held, self.take_signal(), self.made))

  def take_signal(self) -> list[int]:
    """Returns [buffer's key, number of a signal], for a call or removal.

    The signal tells a call in the servers that the buffer exists (shards.py).
    Only the first caller gets the buffer's signal, because waiting for a signal
    uses it up. Later callers get a number that no other call uses.
    """
    is_taken, self.is_signal_taken = self.is_signal_taken, True
    return [self.handle, next(self.owner.numbers) if is_taken else self.handle]

  def wait(self) -> None:
    """Waits until the buffer exists; raises the error of its program."""
    self.owner.check_open()
    self.made.result()

  def fetch(self) -> np.ndarray:
    """Returns the whole array; raises the error of the buffer's program."""
    self.wait()
    return self.owner.fetch(self)


class TracedProgram:
  """A Python block as a program; call it with arrays and buffers.

  A call returns buffers, nested as the block nests its results. The block is
  traced once per shapes, dtypes and slices of its inputs; with dispatch =
  "op_by_op" the block runs at every call.
  """

  def __init__(
    self, owner: "RuntimeClient", block: Callable[..., Any], dispatch: str
  ):
    check_choice("dispatch", dispatch, ("chained", "op_by_op", "fused"))
    self._name = block.__name__
    self._owner, self._block, self._dispatch = owner, block, dispatch
    self._traced: dict[tuple, tuple[Lowered, Any, Sequence]] = {}

  def __call__(self, *inputs: Any) -> Any:
    """Starts the program; UserError if its block or an input is wrong."""
    if current_trace() or self._dispatch == "op_by_op":
      with self._run_once():
        return self._block(*inputs)
    self._owner.check_open()
    given = [self._check(i, x) for i, x in enumerate(inputs)]
    kinds = tuple(getattr(x, "held", (x.shape, x.dtype)) for x in given)
    with self._owner.programs.building:
      if kinds not in self._traced:
        self._traced[kinds] = self._trace(given)
    lowered, indices, constants = self._traced[kinds]
    buffers = self._owner.start(lowered, [*given, *constants])
    return tf.nest.map_structure(buffers.__getitem__, indices)

  def _check(self, index: int, given: object) -> "Buffer | np.ndarray":
    if not isinstance(given, Buffer):
      return to_array(given, f"input {index} of {self._name}")
    given.owner.check_open()
    if given.owner is not self._owner:
      raise UserError(
        f"input {index} of {self._name} is a buffer of another client; fetch "
        "it, and pass the array."
      )
    return given

  @contextlib.contextmanager
  def _run_once(self) -> Iterator[None]:
    running = _RUNNING.get()
    if self in running:
      raise UserError(
        f"{self._name} calls itself, so that its results would be its own "
        "inputs; a program is a graph without cycles."
      )
    token = _RUNNING.set((*running, self))
    try:
      yield
    finally:
      _RUNNING.reset(token)

  def _trace(self, given: Sequence[Any]) -> tuple[Lowered, Any, Sequence]:
    trace = Trace(self._name, self._owner)
    inputs = [
      Value(trace, x.shape, tf.as_dtype(x.dtype), getattr(x, "held", None))
      for x in given
    ]
    with self._run_once():
      nested = trace.run(self._block, inputs)
    nodes, results = trace.nodes, [*dict.fromkeys(tf.nest.flatten(nested))]
    if self._dispatch == "fused":
      nodes = [*fuse(nodes, results)]
    with self._owner.programs.graph.as_default():
      lowered = lower([*inputs, *trace.constants], nodes, results)
      # Build the programs that remove results now, under the lock `building`,
      # so that the thread that removes buffers need not wait for that lock.
      for x in {*lowered.outputs} - self._owner.removals.keys():
        self._owner.removals[x] = build_removal(x)
    self._owner.initialize(lowered.variables)
    indices = tf.nest.map_structure(results.index, nested)
    return lowered, indices, [*trace.constants.values()]


class RuntimeClient:
  """Virtual slices and traced programs on the devices of a client.

  The client (client/client.py), `programs`, runs them in its session, and may
  run other programs too, such as training steps.
  """

  def __init__(
    self,
    programs: Client,
    groups: Sequence[Sequence[str]],
    heartbeat: Heartbeat,
  ):
    # `groups` has TensorFlow's names of devices: a group per slice of the
    # manager, else one group. A virtual slice stays in one group, because the
    # servers of different groups may have no fast network between them.
    self.programs, self._groups = programs, sorted(groups, key=len)
    self.devices = [x for group in groups for x in group]
    self._heartbeat, self._is_open = heartbeat, True
    self._num_slices = collections.Counter(dict.fromkeys(self.devices, 0))
    self.numbers = itertools.count(1)  # for new buffers, signals and calls
    self._lock = threading.Lock()
    self._permits = threading.Semaphore(_MAX_CALLS)
    self._places: dict[str, tuple] = {}  # {variable: its devices and layout}
    self._functions: dict[tuple[Function, VirtualSlice], TracedProgram] = {}
    self._fetches: dict[Sharding, Program] = {}
    self.removals: dict[Sharding, Program] = {}
    # Unused buffers; None ends the queue.
    self.dropped: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
    self._remover = threading.Thread(target=self._remove_dropped, daemon=True)
    self._remover.start()

  def slices(self, *shapes: str) -> tuple[VirtualSlice, ...]:
    """Returns a slice per shape, on devices that have the fewest slices.

    A shape is "4", "2x2" (axes x, y, z), or has named axes, "data:2,model:2".
    Raises UserError if a slice needs more devices than the client has or, with
    a manager, than the largest of the slices that the manager has bound.
    """
    made = []
    for shape in shapes:
      if re.fullmatch(r"\d+(x\d+){0,2}", str(shape)):
        sizes = zip("xyz", str(shape).split("x"), strict=False)
        shape = ",".join(f"{axis}:{size}" for axis, size in sizes)
      n = DeviceMesh(mesh_shape=shape, layout="").num_devices
      most, load = len(self._groups[-1]), self._num_slices.__getitem__
      if n > most:
        raise UserError(
          f'slice "{shape}" has {n} devices, and the client has room for '
          f"{most}; give a slice of at most {most}."
        )
      fits = [sorted(x, key=load)[:n] for x in self._groups if len(x) >= n]
      # Of equally loaded groups of devices, take the first, the smallest.
      chosen = min(fits, key=lambda x: sum(map(load, x)))
      self._num_slices.update(chosen)
      chosen.sort(key=self.devices.index)
      made.append(VirtualSlice(shape, self, chosen))
    return tuple(made)

  def program(
    self, block: Callable[..., Any] | None = None, *, dispatch: str = "chained"
  ) -> Any:
    """Decorates a Python block that calls functions on slices.

    As `dispatch`, "chained" runs all functions in one call; "op_by_op" runs
    each function in a separate call; "fused" is like "chained", but XLA
    compiles consecutive functions of a slice as one, which may change last
    bits.
    """
    if block is None:
      return lambda block: TracedProgram(self, block, dispatch)
    return TracedProgram(self, block, dispatch)

  def call(self, function: Function, slice_: VirtualSlice, *inputs: Any) -> Any:
    """Calls a function on a slice: in a traced block, or as its own program."""
    if trace := current_trace():
      return trace.call(function, slice_, inputs)
    if (function, slice_) not in self._functions:
      block = lambda *given: self.call(function, slice_, *given)  # noqa: E731
      block.__name__ = function.name
      self._functions[function, slice_] = self.program(block)
    return self._functions[function, slice_](*inputs)

  def close(self) -> None:
    """Makes later uses of buffers and programs fail; removes unused buffers."""
    self._is_open = False
    self.dropped.put(None)
    self._remover.join(_CLOSE_SECS)  # a limit, as a lost server never answers

  def check_open(self) -> None:
    """Raises UserError if the client is closed."""
    if not self._is_open:
      raise UserError(
        "the client is closed, and its buffers ended with it: connect again, "
        "and run the programs that make them."
      )

  def keep_place(self, name: str, *place: Any) -> None:
    """Notes a variable's place; UserError if another place was noted before."""
    if self._places.setdefault(name, place) != place:
      raise UserError(
        f'variable "{name}" is on other devices, or in another layout, in an '
        "earlier function; give it another name, or the same slice and layout."
      )

  def initialize(self, variables: Sequence[tf.Variable]) -> None:
    """Gives variables that have no value their initial values."""
    if variables:
      with self.programs.graph.as_default():
        asked = Program(outputs=[x.is_initialized() for x in variables])
      found = zip(variables, self.programs.call(asked), strict=True)
      missing = [x for x, has_value in found if not has_value]
      initializers = [x.initializer for x in missing]
      self.programs.call(
        Program(operations=initializers, writes=state_of(missing))
      )

  def start(self, lowered: Lowered, inputs: Sequence[Any]) -> list[Buffer]:
    """Starts a call of a program; returns the buffers that it makes."""
    self._permits.acquire()
    program, made, asked = lowered.program, Future(), time.monotonic()
    buffers = [inputs[i] for i in lowered.buffers]
    outputs = [Buffer(self, x, lowered, made) for x in lowered.outputs]
    used = [*buffers, *outputs]  # keeps the buffers alive until the call ends
    rows, before, awaited = [], [], []
    with self._lock:
      for x in buffers:
        # Send the call before the buffer exists only if the buffer is due soon,
        # no other call uses its signal, and the call can be repeated, because
        # it reads no variables. Otherwise wait here until the buffer exists.
        waits = not (x.made.done() or x.is_signal_taken or program.reads)
        waits &= x.source.secs < _SHORT_SECS
        before += [x.begun] if waits else [x.made, x.begun]
        awaited += [x.made] * waits
        key, signal = x.take_signal()
        rows.append([key, signal if waits else -signal])
    rows += [[x.handle, x.handle] for x in outputs]
    fed = {
      name: inputs[i][region].copy()
      for name, (i, region) in lowered.feeds.items()
    }

    def run(rows: list, after: list, end: Callable[[Future], None]) -> Call:
      numbers = np.array([*rows, [0, next(self.numbers)]])
      tickets = {x: numbers for x in program.inputs if x not in fed}
      call = self.programs.run(program, {**fed, **tickets}, after=after)
      call.add_done_callback(end)
      return call

    def end_or_repeat(call: Future) -> None:
      if isinstance(call.exception(), tf.errors.DeadlineExceededError):
        # The servers ended the call, whose inputs took too long. Repeat it once
        # its inputs exist. Number its signals differently, because the first
        # try may have given some of the old signals.
        again = [[key, -next(self.numbers)] for key, _ in rows]
        run(again, awaited, end)
      else:
        end(call)

    def end(call: Future) -> None:
      now = time.monotonic()
      lowered.secs = now - max([asked, *(x.end for x in used)])
      for x in used:
        x.end = x.end or now
      self._settle(made, call.exception())
      used.clear()
      self._permits.release()

    for each in awaited:
      each.add_done_callback(
        lambda x: x.exception() and self._settle(made, x.exception())
      )
    call = run(rows, before, end_or_repeat if awaited else end)
    for x in outputs:
      x.begun = call.begun
    return outputs

  def _settle(self, made: Future, error: BaseException | None) -> None:
    if isinstance(error, SERVER_ERRORS):
      try:
        with self._heartbeat.during("while a program ran"):
          raise error
      except (UserError, tf.errors.OpError) as found:
        error = found
    with contextlib.suppress(InvalidStateError):  # an input has failed before
      made.set_exception(error) if error else made.set_result(None)

  def fetch(self, buffer: Buffer) -> np.ndarray:
    """Returns a buffer's array; callers must wait for the buffer first."""
    held = buffer.held
    with self.programs.building, self.programs.graph.as_default():
      if held not in self._fetches:
        tickets = Tickets([held])
        # If several devices have equal regions, fetch only from the last one.
        shards = dict(zip(held.begins, tickets.peek(0), strict=True))
        self._fetches[held] = Program(tickets.placeholders, shards)
    rows = [[buffer.handle, 0], [0, 0]]
    shards = self._call(self._fetches[held], rows)
    whole = np.empty(held.shape, held.dtype.as_numpy_dtype)
    for begin, region in zip(held.begins, held.regions, strict=True):
      whole[region] = shards[begin]
    return whole

  def _remove_dropped(self) -> None:
    """Removes the shards of buffers that nothing uses, until `close`."""
    group: list[tuple | None] = [()]
    while group[-1] is not None:
      group = [self.dropped.get()]
      with contextlib.suppress(queue.Empty):
        while group[-1] and len(group) < _GROUP:
          group.append(self.dropped.get(timeout=_GROUP_SECS))
      unused = collections.defaultdict(list)
      for held, *rest in filter(None, group):
        unused[held].append(rest)
      for held, some in unused.items():
        self._remove(held, some)

  def _remove(self, held: Sharding, group: Sequence[tuple]) -> None:
    """Removes the shards of buffers, and frees their bytes."""
    rows = [row for row, _ in group]
    with contextlib.suppress(UserError, tf.errors.OpError):  # server is lost
      self._call(self.removals[held], rows)
      num_kept = sum(not made.exception() for _, made in group)
      self.programs.free(held.count_bytes(num_kept))

  def _call(self, program: Program, rows: Sequence) -> Any:
    # The program computes nothing, so it needs no turn.
    inputs = dict.fromkeys(program.inputs, np.array(rows))
    return self.programs.call(program, inputs, has_turn=True)


@contextlib.contextmanager
def connect(
  servers: Sequence[str] | int = (),
  *,
  devices: int = 8,
  budget: int = 0,
  client_address: str = "127.0.0.1",
  timeout_secs: float = 60.0,
) -> Iterator[RuntimeClient]:
  """Connects to devices of this process or of servers.

  Args:
    servers: "host:port" of each server of `palm_mtf pods serve`; or the number
      of server processes to start on this machine.
    devices: devices of this process, or of each server to start.
    budget: bytes of buffers that a device may hold; 0 for its equal share of
      the memory that is free.
    client_address: address of this host where servers reach the client.
    timeout_secs: a server that is silent for so long is lost.

  Yields a RuntimeClient, whose buffers end with it. Raises UserError if a
  server cannot be used.
  """
  check_count("budget", budget, minimum=0)
  num_local, addresses = 0, servers
  if isinstance(servers, int):
    num_local, addresses = servers, ()
    check_count("servers", num_local, minimum=0)
  kind = "local_servers" if num_local else "in_process"
  pods = PodsConfig(
    num_pods=num_local or 1,
    pods="cluster" if addresses else kind,
    islands=[addresses] if addresses else (),
    client_address=client_address,
    pod_timeout_secs=timeout_secs,
  )
  # Only the servers know how many devices they have. Name one device per
  # address until they have answered.
  mesh = DeviceMesh(mesh_shape=f"x:{len(addresses) or devices}", layout="")
  with PodServers(pods, mesh) as started:
    places = started.places()
    heartbeat = Heartbeat(started, places, timeout_secs)
    infos = heartbeat.infos
    if addresses:
      of_each = {x.address: infos[x.address].num_devices for x in places[0]}
      places = [[Place(x, i) for x, n in of_each.items() for i in range(n)]]
    cluster = connect_devices(HostStarter(), pods, mesh, places, infos)
    names = [x for pod in cluster.devices.pods for x in pod]
    _, available = memory_bytes()
    budgets = dict.fromkeys(names, budget or available // len(names))
    if addresses and not budget:
      pairs = zip(names, places[0], strict=True)
      budgets = {x: infos[y.address].device_bytes for x, y in pairs}
    turns = OwnTurns(budgets)
    with _open_client(cluster, [names], heartbeat) as client:
      client.programs.take_turn, client.programs.free = turns.take, turns.free
      yield client


@contextlib.contextmanager
def connect_managed(
  manager: str,
  slices: Sequence[str],
  *,
  device_bytes: int = 0,
  islands: str = "auto",
  share: float = 1.0,
  manager_tls: str = "",
  client_address: str = "127.0.0.1",
  timeout_secs: float = 60.0,
) -> Iterator[RuntimeClient]:
  """Connects to slices that a manager binds to servers.

  Args:
    manager: "host:port" of `palm_mtf pods manage`.
    slices: shape of each slice, such as "2x2". The client's virtual slices use
      the devices of these slices.
    device_bytes: memory in bytes that each device needs.
    islands: "auto", on any islands; "same", all slices on one island; or
      "apart", each slice on a different island.
    share: the client's share of the devices' time (`pods manage --policy`).
    manager_tls: PREFIX of the manager's key and certificate, or "".
    client_address: address of this host where servers reach the client.
    timeout_secs: a server that is silent for so long is lost.

  Yields a RuntimeClient, whose buffers and slices end with it. Raises UserError
  if no island can hold a slice, or a server cannot be used.
  """
  pods = PodsConfig(
    pods="cluster",
    islands=islands,
    manager=manager,
    manager_tls=manager_tls,
    device_bytes=device_bytes,
    share=share,
    client_address=client_address,
    pod_timeout_secs=timeout_secs,
  )
  mesh = DeviceMesh(mesh_shape="", layout="")
  with PodServers(pods, mesh) as started:
    places = started.managed.bind(slices)
    heartbeat = Heartbeat(started, places, timeout_secs)
    infos, stream = heartbeat.infos, started.stream
    starter = HostStarter()
    cluster = connect_devices(starter, pods, mesh, places, infos, stream)
    with _open_client(cluster, cluster.devices.pods, heartbeat) as client:
      yield client


@contextlib.contextmanager
def _open_client(
  cluster: Cluster, slices: Sequence[Sequence[str]], heartbeat: Heartbeat
) -> Iterator[RuntimeClient]:
  """Opens a client whose virtual slices use the devices of `slices`."""
  with heartbeat, cluster.client() as programs:
    with heartbeat.during("at the start"):
      heartbeat.connect(programs)
    client = RuntimeClient(programs, slices, heartbeat)
    try:
      yield client
    finally:
      client.close()
