# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Three texts that a client and its servers exchange.

A server keeps them in TensorFlow variables that sessions share: its versions
and devices (info), which client uses it (claim), and which other servers of
that client's run do not answer it (silent peers).
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf import __version__
from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.machine.processors import BFLOAT16_FLAGS, bfloat16_flags

# Names of a server's string variables, which hold JSON: INFO a `ServerInfo`,
# CLAIM a `Claim` (or "" if no client uses the server), SILENT the silent peers.
INFO, CLAIM = "palm_mtf_server_facts", "palm_mtf_server_client"
SILENT = "palm_mtf_server_silent"
# A peer counts as silent after this share of POD_TIMEOUT_SECS. In the remaining
# time the client's heartbeat asks several times which peers are silent.
_LINK_SHARE = 0.6
NUM_PEERS = 3  # servers that a server probes all the time
# Timeout for asking whether the client that claimed a server still runs.
_CLIENT_SECS = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
  """Versions and devices of a server."""

  palm_mtf: str  # version
  tensorflow: str  # version
  num_devices: int
  num_threads: int  # per operation
  # {name of a function: token with which sessions call the function}; see
  # runtime/processes.py.
  functions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  has_native: bool = False  # whether the server has our operations in C++
  # CPU instruction sets that decide which kernels run, from `kernel_flags`.
  cpu_flags: Sequence[str] = ()
  # Versions and settings on which the last bits of results depend, from
  # `kernels_here`.
  kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """Says which client uses a server, so that others do not use that server."""

  client: str  # "host:port" of the client's own server
  incarnation: int  # random number that the client's server drew at its start
  # "host:port" of the next NUM_PEERS servers on a ring of the run's servers.
  peers: Sequence[str]
  link_secs: float  # time without an answer after which a peer is silent


class NoAnswerError(Exception):
  """A server did not answer; the message says why."""


class NotOursError(NoAnswerError):
  """A server answers but is not palm_mtf's, or has not published its info."""


def read_info(address: str, secs: float) -> ServerInfo:
  """Reads the info of the server at `address`, "host:port".

  Raises:
    NoAnswerError: the server does not answer within `secs` seconds, or has no
      info.
  """
  # The read waits for a free thread of the server. A training step may keep all
  # threads busy for long, above all the first step, which compiles.
  with _session(address, secs) as session:
    with session.graph.as_default():
      value = read_text(INFO)
    return ServerInfo(**json.loads(session.run(value)))


def read_silent_peers(address: str, secs: float) -> list[str]:
  """Asks the server at `address` which servers of its run are silent.

  Returns:
    "host:port" of each server that does not answer the asked server.

  Raises:
    NoAnswerError: the asked server does not answer within `secs` seconds.
  """
  with _session(address, secs) as session:
    with session.graph.as_default():
      values = [read_text(CLAIM), read_text(SILENT)]
    claim, silent = session.run(values)
  # Ignore the silent peers of an earlier claim, which was for another run.
  report = json.loads(silent) if silent else {"claim": None}
  return report["peers"] if report["claim"] == claim.decode() else []


def read_next_peer(address: str, secs: float) -> str:
  """Returns the next server on the ring of the run of a server.

  Raises:
    NoAnswerError: the server at `address` does not answer within `secs`
      seconds.
  """
  with _session(address, secs) as session:
    with session.graph.as_default():
      claim = parse_claim(session.run(read_text(CLAIM)))
  return claim.peers[0] if claim and claim.peers else address


def claim_server(
  address: str, client: str, peers: Sequence[str], secs: float
) -> str:
  """Gives a server to a client, unless another running client holds it.

  Args:
    address: "host:port" of the server.
    client: "host:port" of the client's own server.
    peers: "host:port" of the servers that the server should probe; see `Claim`.
    secs: POD_TIMEOUT_SECS, the timeout in seconds.

  Returns:
    The address of the other client that holds the server; "" if `client` holds
    the server now.

  Raises:
    NoAnswerError: the server or the client's own server does not answer.
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
  """Reads the incarnation, a random number that a server draws at its start.

  A number that differs from an earlier read shows that the server was
  restarted.

  Raises:
    NoAnswerError: the server does not answer within `secs` seconds.
  """
  # Listing the devices needs no thread of the server's pool for computing, so
  # even a busy server answers at once.
  with _session(address, secs) as session:
    with session.graph.as_default():
      tf.no_op()
    session._extend_graph()  # begins the session; without it TensorFlow warns
    return session.list_devices()[0].incarnation


@contextlib.contextmanager
def _session(address: str, secs: float) -> Iterator[tf.Session]:
  """Opens a session; turns errors and timeouts of calls into NoAnswerError."""
  config = tf.ConfigProto(operation_timeout_in_ms=max(1, int(1000 * secs)))
  try:
    session = tf.Session(f"grpc://{address}", graph=tf.Graph(), config=config)
    yield session
    session.close()  # after an error the server has no session to close
  except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError):
    raise NoAnswerError(f"has not answered for {secs:g} seconds") from None
  except (tf.errors.OpError, ValueError, TypeError):
    raise NotOursError("is not a server of palm_mtf") from None


def difference(info: ServerInfo, first: ServerInfo) -> str:
  """Returns why a server cannot work with this client; "" if it can.

  Servers of a run must compute the same bits. Therefore `info` is also compared
  with `first`, the info of the run's first server.
  """
  for name, theirs, ours in (
    ("palm_mtf", info.palm_mtf, __version__),
    ("TensorFlow", info.tensorflow, tf.__version__),
  ):
    if theirs != ours:
      return f"has {name} {theirs} and this client {ours}"
  # The last bits of a sum depend on the number of threads that compute it.
  if info.num_threads != first.num_threads:
    return (
      f"computes with {info.num_threads} threads and pod 0's first with "
      f"{first.num_threads}, whose bits would differ (--threads)"
    )
  if info.cpu_flags != first.cpu_flags:
    return (
      "has another kind of CPU than pod 0's first "
      f"({_describe_changes(info.cpu_flags, first.cpu_flags)}): its kernels "
      "may compute other bits, and the comparison of the pods "
      "(FINGERPRINT_STEPS) would stop the run; use servers with one kind of CPU"
    )
  return ""


def check_bfloat16(infos: Mapping[str, ServerInfo], dtype: str) -> None:
  """Raises UserError if the graph needs bfloat16 products that a CPU lacks.

  `dtype` is the ACTIVATION_DTYPE of a run on CPUs.
  """
  # If the client's CPU multiplies bfloat16 numbers, so does the graph that the
  # client builds. On a CPU that cannot, oneDNN would end the process.
  if dtype != "bfloat16" or not bfloat16_flags():
    return
  for address, info in infos.items():
    if not BFLOAT16_FLAGS.intersection(info.cpu_flags):
      raise UserError(
        f'ACTIVATION_DTYPE = "bfloat16": the CPU of the server {address} does '
        "not multiply bfloat16 numbers, but this client's CPU does; start the "
        'client on the same kind of CPU as the servers, or give "float32".'
      )


def _describe_changes(flags: Sequence[str], others: Sequence[str]) -> str:
  sides = (
    ("with", set(flags) - set(others)),
    ("without", set(others) - set(flags)),
  )
  return "; ".join(
    f"{word} {', '.join(sorted(found))}" for word, found in sides if found
  )


def read_text(name: str) -> tf.Tensor:
  """Builds an operation that reads one of the server's string variables."""
  return tf.raw_ops.ReadVariableOp(resource=_handle(name), dtype=tf.string)


def assign_text(name: str, text: str | tf.Tensor) -> tf.Operation:
  """Builds an operation that sets one of the server's string variables."""
  value = tf.convert_to_tensor(text)
  return tf.raw_ops.AssignVariableOp(resource=_handle(name), value=value)


def parse_claim(text: bytes) -> Claim | None:
  """Parses the variable CLAIM; returns None if no client claims the server."""
  return Claim(**json.loads(text)) if text else None


def _handle(name: str) -> tf.Tensor:
  return tf.raw_ops.VarHandleOp(
    dtype=tf.string, shape=[], container="", shared_name=name
  )
