# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Info of a pod's server: versions, devices, liveness, client and links."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf import __version__
from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.machine.processors import BFLOAT16_FLAGS, bfloat16_flags

# Variables that a server keeps beside those of sessions, JSON each: its info,
# the claim of the client that works with it, and that claim's silent peers.
INFO, CLAIM = "palm_mtf_server_facts", "palm_mtf_server_client"
SILENT = "palm_mtf_server_silent"
# Share of POD_TIMEOUT_SECS after which a peer is silent: the rest is for the
# client, whose heartbeat asks four times in it.
_LINK_SHARE = 0.6
# A client that has ended does not answer; one that works does so at once.
_CLIENT_SECS = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
  """Versions and devices of a server."""

  palm_mtf: str  # version
  tensorflow: str  # version
  num_devices: int
  num_threads: int  # of an operation
  # Tokens of the functions that sessions call there (mesh/processes.py).
  functions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  has_native: bool = False  # whether it has the operations of `native`
  # Instructions by which its kernels are chosen (machine/processors.py).
  cpu_flags: Sequence[str] = ()
  # What computes there (machine/kernels.py).
  kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """A client's claim of a server."""

  client: str  # "host:port" of the client's own server
  incarnation: int  # of that server
  peers: Sequence[str]  # "host:port" of the run's other servers
  link_secs: float  # a peer that gives this server no answer so long is silent


class NoAnswerError(Exception):
  """A server did not answer; says why."""


class NotOursError(NoAnswerError):
  """A server that answers is not of palm_mtf, or has not published its info."""


def read_info(address: str, secs: float) -> ServerInfo:
  """Reads the info of a server; raises NoAnswerError.

  Args:
    address: "host:port" of the server.
    secs: timeout in seconds.
  """
  # Needs a free thread of the server: a step that computes, or a first one that
  # compiles, may keep all of them busy for long.
  with _session(address, secs) as session:
    with session.graph.as_default():
      value = read_text(INFO)
    return ServerInfo(**json.loads(session.run(value)))


def read_silent_peers(address: str, secs: float) -> list[str]:
  """Reads which of its peers do not answer a server; raises NoAnswerError.

  Args:
    address: "host:port" of the server.
    secs: timeout in seconds.

  Returns:
    Their addresses, "host:port".
  """
  with _session(address, secs) as session:
    with session.graph.as_default():
      values = [read_text(CLAIM), read_text(SILENT)]
    claim, silent = session.run(values)
  # What was said of another client's run may be true no longer.
  told = json.loads(silent) if silent else {"claim": None}
  return told["peers"] if told["claim"] == claim.decode() else []


def claim_server(
  address: str, client: str, peers: Sequence[str], secs: float
) -> str:
  """Gives a server to a client, unless another one still works with it.

  Args:
    address: "host:port" of the server.
    client: "host:port" of the client's own server.
    peers: "host:port" of the run's other servers.
    secs: POD_TIMEOUT_SECS, the timeout in seconds.

  Returns:
    Address of the client that has the server; "" if it is this one now.

  Raises:
    NoAnswerError: one of the two servers does not answer.
  """
  mine = Claim(
    client=client,
    incarnation=read_incarnation(client, secs),
    peers=list(peers),
    link_secs=secs * _LINK_SHARE,
  )
  with _session(address, secs) as session:
    with session.graph.as_default():
      held = read_text(CLAIM)
      assign = assign_text(CLAIM, json_text(dataclasses.asdict(mine)))
    other = parse_claim(session.run(held))
    if other and other.incarnation != mine.incarnation:
      with contextlib.suppress(NoAnswerError):
        found = read_incarnation(other.client, _CLIENT_SECS)
        if found == other.incarnation:
          return other.client
    session.run(assign)
  return ""


def read_incarnation(address: str, secs: float) -> int:
  """Reads the random number that a server drew at its start: its liveness.

  Args:
    address: "host:port" of the server.
    secs: timeout in seconds.
  """
  # A list of devices needs none of the threads that compute: a server that is
  # busy answers at once.
  with _session(address, secs) as session:
    with session.graph.as_default():
      tf.no_op()
    session._extend_graph()  # begins the session; without it TensorFlow warns
    return session.list_devices()[0].incarnation


@contextlib.contextmanager
def _session(address: str, secs: float) -> Iterator[tf.Session]:
  """Opens a session with a timeout; raises NoAnswerError where it fails."""
  config = tf.ConfigProto(operation_timeout_in_ms=max(1, int(1000 * secs)))
  try:
    session = tf.Session(f"grpc://{address}", graph=tf.Graph(), config=config)
    yield session
    session.close()  # after an error the server has none to close
  except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError):
    raise NoAnswerError(f"has not answered for {secs:g} seconds") from None
  except (tf.errors.OpError, ValueError, TypeError):
    raise NotOursError("is not one of palm_mtf") from None


def difference(info: ServerInfo, first: ServerInfo) -> str:
  """Returns why a server cannot work with this client; "" if it can.

  Args:
    info: info of the server.
    first: info of the run's first server.
  """
  for name, theirs, ours in (
    ("palm_mtf", info.palm_mtf, __version__),
    ("TensorFlow", info.tensorflow, tf.__version__),
  ):
    if theirs != ours:
      return f"has {name} {theirs} and this client {ours}"
  # Threads divide a sum, and the division decides its last bit.
  if info.num_threads != first.num_threads:
    return (
      f"computes with {info.num_threads} threads and pod 0's first with "
      f"{first.num_threads}, whose bits would differ (--threads)"
    )
  if info.cpu_flags != first.cpu_flags:
    return (
      "has another kind of CPU than pod 0's first "
      f"({_changes(info.cpu_flags, first.cpu_flags)}): its kernels may compute "
      "other bits, and the comparison of the pods (FINGERPRINT_STEPS) would "
      "stop the run; use servers with one kind of CPU"
    )
  return ""


def check_bfloat16(infos: Mapping[str, ServerInfo], dtype: str) -> None:
  """Raises UserError if a server lacks the products that this client builds.

  Args:
    infos: info of each server, by its address.
    dtype: ACTIVATION_DTYPE of a run on CPUs.
  """
  # The client's CPU decides in the graph how bfloat16 numbers are multiplied.
  # oneDNN ends a server that has no such product.
  if dtype != "bfloat16" or not bfloat16_flags():
    return
  for address, info in infos.items():
    if not BFLOAT16_FLAGS.intersection(info.cpu_flags):
      raise UserError(
        f'ACTIVATION_DTYPE = "bfloat16": the CPU of the server {address} does '
        "not multiply bfloat16 numbers and that of this client does; start the "
        'client on a CPU of the kind of the servers, or give "float32".'
      )


def _changes(flags: Sequence[str], others: Sequence[str]) -> str:
  """Returns instructions that one list has and the other does not."""
  sides = (
    ("with", set(flags) - set(others)),
    ("without", set(others) - set(flags)),
  )
  return "; ".join(
    f"{word} {', '.join(sorted(found))}" for word, found in sides if found
  )


def read_text(name: str) -> tf.Tensor:
  """Builds the read of one of a server's variables."""
  return tf.raw_ops.ReadVariableOp(resource=_handle(name), dtype=tf.string)


def assign_text(name: str, text: str | tf.Tensor) -> tf.Operation:
  """Builds the assignment of a text to one of a server's variables."""
  value = tf.convert_to_tensor(text)
  return tf.raw_ops.AssignVariableOp(resource=_handle(name), value=value)


def parse_claim(text: bytes) -> Claim | None:
  """Returns the claim that CLAIM holds; None if no client claims the server."""
  return Claim(**json.loads(text)) if text else None


def _handle(name: str) -> tf.Tensor:
  return tf.raw_ops.VarHandleOp(
    dtype=tf.string, shape=[], container="", shared_name=name
  )
